"""Every stage must run the driver's code and core, or bits would differ; who does not is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compressors import kernels
from ray_pipe.cluster import nodes
from ray_pipe.errors import ClusterError
from stages.digest import source_digest


def refuse_other_source(infos: Sequence[dict[str, Any]]) -> None:
    """Raise `ClusterError` with the stages, nodes and digests that differ from the driver's.

    `infos` is what each stage said of itself when it was set up, in stage order.
    """
    own, core = source_digest(), kernels.core()
    strangers = {index: info for index, info in enumerate(infos) if info["source"] != own}
    if strangers:
        raise ClusterError(
            f"{_who(strangers, 'source')} run other source than the driver (digest {own} here); "
            "install the same version of ray_pipe on every node and start the job again; "
            "`python -m ray_pipe.doctor --address auto` shows every node's version"
        )
    slow = {index: info for index, info in enumerate(infos) if info["core"] != core}
    if slow:
        raise ClusterError(
            f"{_who(slow, 'core')} run another core than the driver ({core} here); install the "
            "same wheel everywhere, or set RAY_PIPE_CORE=torch on all nodes"
        )


def _who(infos: dict[int, dict[str, Any]], key: str) -> str:
    """`stage 1 on node 10.0.0.11 (digest 0af3), stage 2 ...`."""
    addresses = {node.id: node.ip for node in nodes()}
    what = "digest " if key == "source" else ""
    return ", ".join(
        f"stage {index} on node {addresses.get(info['node'], str(info['node'])[:8])} "
        f"({what}{info[key]})"
        for index, info in infos.items()
    )
