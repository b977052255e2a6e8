"""Every stage must run what the driver runs, or bits would differ; who does not is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_pipe.cluster import nodes
from ray_pipe.errors import ClusterError
from stages.digest import software

DOCTOR = "`python -m ray_pipe.doctor --address auto` shows every node's version"
CHECKS = {
    "source": (
        "digest ",
        "other source than the driver (digest {own} here)",
        f"install the same version of ray_pipe on every node and start the job again; {DOCTOR}",
    ),
    "core": (
        "",
        "another core than the driver ({own} here)",
        "install the same wheel everywhere, or set RAY_PIPE_CORE=torch on all nodes",
    ),
    "native": (
        "built from ",
        "a native core of other C++ source than the driver's (built from {own} here)",
        "build it again on every node from the same source (`pip install . --no-deps`, or "
        "`ray up`), or set RAY_PIPE_CORE=torch on all nodes",
    ),
    "torch": (
        "torch ",
        "another torch than the driver ({own} here), whose sums may end in other bits",
        "`pip install torch=={own}` on every node, or that of the nodes here",
    ),
    "numpy": (
        "numpy ",
        "another numpy than the driver ({own} here), whose shuffles may come in another order",
        "`pip install numpy=={own}` on every node, or that of the nodes here",
    ),
}
"""By name in `software()`: what to write before a stage's own, what is wrong, and the way out."""


def refuse_other_source(infos: Sequence[dict[str, Any]]) -> None:
    """Raise `ClusterError` with the stages and nodes that differ from the driver, and in what.

    `infos` is what each stage said of itself when it was set up, in stage order.
    """
    here = software()
    for name, (what, trouble, way_out) in CHECKS.items():
        own = here[name] or "an unknown one"
        strangers = {i: info for i, info in enumerate(infos) if info[name] != here[name]}
        if strangers:
            raise ClusterError(
                f"{_who(strangers, name, what)} run {trouble.format(own=own)}; "
                f"{way_out.format(own=own)}"
            )


def other_hardware(infos: Sequence[dict[str, Any]]) -> str:
    """What to tell of stages that compute on unlike processors; empty if all are alike."""
    kinds: dict[str, list[int]] = {}
    for index, info in enumerate(infos):
        kinds.setdefault(kind_of(info["hardware"]), []).append(index)
    if len(kinds) < 2:
        return ""
    listed = "; ".join(f"{kind}: stage {', '.join(map(str, own))}" for kind, own in kinds.items())
    return (
        f"stages compute on unlike processors ({listed}): a stage that has to move to another kind "
        "may go on in other last bits; ATEN_CPU_CAPABILITY=avx2 on every node makes torch's own "
        "kernels alike"
    )


def kind_of(hardware: Mapping[str, str]) -> str:
    """`cpu AVX512`: what kernels are chosen by."""
    return f"{hardware['device']} {hardware['capability']}"


def _who(infos: dict[int, dict[str, Any]], name: str, what: str) -> str:
    """`stage 1 on node 10.0.0.11 (digest 0af3), stage 2 ...`."""
    addresses = {node.id: node.ip for node in nodes()}
    return ", ".join(
        f"stage {index} on node {addresses.get(info['node'], str(info['node'])[:8])} "
        f"({what}{info[name] or 'an unknown one'})"
        for index, info in infos.items()
    )
