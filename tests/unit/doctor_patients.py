"""Checkups made by hand: a healthy cluster, and one thing wrong at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray_pipe.doctor_reports import Checkup, Disk, LinkReport, NodeReport, Software

VERSIONS = {
    "python": "3.11.7",
    "ray": "2.60.0",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "ray_pipe": "0.1.0",
}
SOFTWARE = Software(
    versions=VERSIONS, source="5eed", core="native", native="c0de", instructions="avx2"
)
DISK = Disk(path="/tmp/ray", free_nbytes=80 * 10**9, total_nbytes=200 * 10**9)


def healthy_node(index: int) -> NodeReport:
    return NodeReport(
        index=index,
        node_id=f"{index:02x}" * 28,
        address=f"10.0.0.1{index}",
        is_head=index == 0,
        host=f"host{index}",
        software=SOFTWARE,
        num_cores=4,
        load=0.5,
        free_memory_nbytes=16 << 30,
        shm_nbytes=8 << 30,
        disks=(DISK,),
        ray_cpus=4.0,
        object_store_nbytes=2 << 30,
        clock_offset_s=0.0001,
        clock_error_s=0.0004,
        call_s=0.001,
        metrics=f"10.0.0.1{index}:8090",
    )


def healthy_link(source: int, target: int) -> LinkReport:
    return LinkReport(
        source=source,
        target=target,
        ports_open=True,
        handshake_s=0.04,
        call_s=0.042,
        bandwidth_bps=94_812_345.0 + source,
        nbytes=12_000_000,
        seconds=1.01,
    )


def healthy(num_nodes: int = 3, address: str | None = "10.0.0.10:6379") -> Checkup:
    nodes = range(num_nodes)
    return Checkup(
        address=address,
        here=SOFTWARE,
        disks=(replace(DISK, path="runs"),),
        nodes=tuple(healthy_node(index) for index in nodes),
        links=tuple(healthy_link(a, b) for a in nodes for b in nodes if a != b),
        dashboard="http://10.0.0.10:8265",
    )


def with_node(checkup: Checkup, index: int, **changes: Any) -> Checkup:
    """The same with one node changed."""
    nodes = [replace(node, **changes) if node.index == index else node for node in checkup.nodes]
    return replace(checkup, nodes=tuple(nodes))


def with_link(checkup: Checkup, source: int, target: int, **changes: Any) -> Checkup:
    """The same with one link changed."""
    links = [
        replace(link, **changes) if (link.source, link.target) == (source, target) else link
        for link in checkup.links
    ]
    return replace(checkup, links=tuple(links))


def without_bandwidth(checkup: Checkup) -> Checkup:
    links = [replace(link, bandwidth_bps=None, nbytes=0) for link in checkup.links]
    return replace(checkup, links=tuple(links))
