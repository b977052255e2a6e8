"""The links that the doctor measured, as a topology file for `--topology` and the simulator."""

from __future__ import annotations

import math
from pathlib import Path

import yaml

from netsim.topology import LinkSpec, Topology
from ray_pipe.doctor_reports import Checkup
from ray_pipe.errors import ConfigError


def topology_of(checkup: Checkup) -> Topology:
    """The measured links, in the form that `--topology` and the simulator read.

    A node's uplink is the fastest of what it sent; slower links keep their own rate. Three digits:
    no measurement is better. Raises `ConfigError` where a link was not measured.
    """
    nodes = [node.index for node in checkup.stage_nodes]
    if len(nodes) < 2:
        raise ConfigError(
            f"--topology-out: {len(nodes)} node has no links; connect to a cluster of two or more "
            "with --address."
        )
    measured = {
        (stage, other): checkup.link(a, b)
        for stage, a in enumerate(nodes)
        for other, b in enumerate(nodes)
        if a != b
    }
    missing = [
        f"{nodes[stage]}->{nodes[other]}"
        for (stage, other), link in measured.items()
        if link is None or not link.is_measured
    ]
    if missing:
        raise ConfigError(
            f"--topology-out: {len(missing)} links have no measured bandwidth "
            f"({', '.join(missing[:6])}{', ...' if len(missing) > 6 else ''}); mend them, and "
            "leave out --quick and --neighbours."
        )
    links = {
        pair: LinkSpec(
            bandwidth_bps=_digits(link.bandwidth_bps or math.inf),
            latency_s=_digits(link.latency_s or 0.0),
        )
        for pair, link in measured.items()
        if link is not None
    }
    uplinks = tuple(
        max(spec.bandwidth_bps for (source, _), spec in links.items() if source == stage)
        for stage in range(len(nodes))
    )
    return Topology(num_nodes=len(nodes), uplinks_bps=uplinks, links=links)


def _digits(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")


def write_topology(checkup: Checkup, path: str | Path, *, when: str) -> None:
    """Write the file, with a word on who is who. Raises `ConfigError` if that cannot be done."""
    topology = topology_of(checkup)
    lines = [
        f"# Links as `python -m ray_pipe.doctor` measured them, {when}: payload through Ray, one",
        "# way, one link at a time. The stages and their nodes:",
        *(
            f"#   {stage}: {node.address} {node.host}".rstrip()
            for stage, node in enumerate(checkup.stage_nodes)
        ),
        f"# python -m ray_pipe.run --stages {topology.num_nodes} --topology {path}",
    ]
    text = yaml.safe_dump(topology.as_dict(), sort_keys=False, default_flow_style=None)
    try:
        Path(path).write_text("\n".join([*lines, text]), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--topology-out {path}: cannot be written: {error.strerror}.") from None
