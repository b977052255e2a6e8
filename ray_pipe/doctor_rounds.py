"""The doctor's rounds: a probe on every node, then link after link. Speaks Ray; judges nothing.

Links are measured one at a time, so that none shares a wire with another measurement.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_pipe import doctor_probe
from ray_pipe.cluster import connect, nodes
from ray_pipe.doctor_reports import Checkup, Disk, LinkReport, NodeReport, Software
from ray_pipe.errors import ClusterError
from ray_pipe.planner.placement import by_address

START_TIMEOUT_S = 60.0
REACH_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 180.0
NUM_CLOCK_SAMPLES = 9
OVERHEAD = 1.2
"""A measurement of `seconds` takes about this many times as long, its growing included."""


class Watcher(Protocol):
    """Whom the rounds tell how they go."""

    def on_phase(self, text: str) -> None:
        """Something that takes a while begins."""

    def on_links(self, num_links: int, seconds: float) -> None:
        """The measuring begins: how many links, and about how long it will take."""

    def on_link(self, link: LinkReport) -> None:
        """A link was measured."""


def examine(
    address: str | None,
    watcher: Watcher,
    *,
    out: str = "runs",
    folders: Sequence[str] = (),
    bandwidth: bool = True,
    neighbours_only: bool = False,
    seconds: float = 2.0,
    limit_nbytes: int = 256 << 20,
) -> Checkup:
    """Look at every node and link. A cluster that cannot be reached is a `Checkup` with `error`.

    `out` is looked at here, where the driver writes; `folders` on every node.
    """
    here = Software(**doctor_probe.software())
    disks = (Disk(**doctor_probe.disk(out)),)
    try:
        watcher.on_phase("starting Ray" if address is None else f"connecting to {address}")
        with connect(address) as dashboard:
            reports, probes = _look_at_nodes(watcher, folders)
            links = _reach_all(reports, probes, watcher)
            if bandwidth:
                chosen = [x for x in links if x.error is None]
                if neighbours_only:
                    chosen = [x for x in chosen if abs(x.source - x.target) == 1]
                measured = _measure(chosen, probes, watcher, seconds, limit_nbytes)
                links = [measured.get((x.source, x.target), x) for x in links]
            for probe in probes.values():
                ray.kill(probe)
    except ClusterError as error:
        return Checkup(address=address, here=here, disks=disks, error=str(error))
    except RayError as error:
        why = f"the cluster was lost while it was looked at: {_first_line(error)}; look once more"
        return Checkup(address=address, here=here, disks=disks, error=why)
    return Checkup(
        address=address,
        here=here,
        disks=disks,
        nodes=tuple(reports),
        links=tuple(links),
        dashboard=dashboard,
    )


def _look_at_nodes(
    watcher: Watcher, folders: Sequence[str]
) -> tuple[list[NodeReport], dict[int, Any]]:
    """Nodes in the order in which stages are placed on them, so that numbers mean the same."""
    by_id = {info["NodeID"]: info for info in _listed()}
    known = [node for node in nodes() if node.id in by_id]  # one may have come just now
    infos = [by_id[node.id] for node in sorted(known, key=by_address)]
    watcher.on_phase(f"looking at {len(infos)} node{'s' if len(infos) > 1 else ''}")
    # By value: the nodes need not have our source, and if they have other source it is not used.
    pickler: Any = cloudpickle  # untyped in ray
    pickler.register_pickle_by_value(doctor_probe)
    try:
        probes = {index: _start(info) for index, info in enumerate(infos)}
        calls = {index: probe.describe.remote(list(folders)) for index, probe in probes.items()}
    finally:
        pickler.unregister_pickle_by_value(doctor_probe)
    end = time.monotonic() + START_TIMEOUT_S
    reports = []
    for index, info in enumerate(infos):
        report = _basics(index, info)
        try:
            found = ray.get(calls[index], timeout=max(1.0, end - time.monotonic()))
            clock = _clock(probes[index])  # a node may die in between, too
        except GetTimeoutError:
            why = f"no worker process on it answered within {START_TIMEOUT_S:.0f} s"
            reports.append(replace(report, error=why))
            ray.kill(probes.pop(index))
            continue
        except RayError as error:
            reports.append(replace(report, error=_first_line(error)))
            probes.pop(index)
            continue
        found["software"] = Software(**found["software"])
        found["disks"] = tuple(Disk(**disk) for disk in found["disks"])
        found["gpus"] = tuple(found["gpus"])
        reports.append(replace(report, **found, **clock))
    return reports, probes


def _listed() -> list[dict[str, Any]]:
    listed: Any = ray.nodes  # untyped in ray
    found: list[dict[str, Any]] = listed()
    return found


def _start(info: dict[str, Any]) -> Any:
    decorate: Any = ray.remote  # its stubs do not know the options of actors
    place = NodeAffinitySchedulingStrategy(info["NodeID"], soft=False)
    actor = decorate(num_cpus=0, max_restarts=0)(doctor_probe.Probe)
    return actor.options(scheduling_strategy=place).remote()


def _basics(index: int, info: dict[str, Any]) -> NodeReport:
    resources = info.get("Resources", {})
    port = info.get("MetricsExportPort") or 0
    return NodeReport(
        index=index,
        node_id=info["NodeID"],
        address=_address(info),
        host=info.get("NodeManagerHostname", ""),
        is_head=_is_head(info),
        ray_cpus=resources.get("CPU", 0.0),
        ray_gpus=resources.get("GPU", 0.0),
        object_store_nbytes=int(resources.get("object_store_memory", 0)),
        metrics=f"{_address(info)}:{port}" if port else None,
    )


def _clock(probe: Any) -> dict[str, Any]:
    """Offset by the midpoint of the shortest round trip, and how sure it is."""
    samples = []
    for _ in range(NUM_CLOCK_SAMPLES):
        before, start = time.time(), time.monotonic()
        there = ray.get(probe.now.remote(), timeout=REACH_TIMEOUT_S)
        took = time.monotonic() - start
        samples.append((took, there - (before + took / 2)))
    shortest, offset = min(samples)
    return {
        "clock_offset_s": offset,
        "clock_error_s": shortest / 2,
        "call_s": median(took for took, _ in samples),
    }


def _reach_all(
    reports: Sequence[NodeReport], probes: dict[int, Any], watcher: Watcher
) -> list[LinkReport]:
    pairs = [(a, b) for a in probes for b in probes if a != b]
    if pairs:
        watcher.on_phase(f"reaching from node to node, {len(pairs)} ways")
    ports = {
        info["NodeID"]: [info["NodeManagerPort"], info["ObjectManagerPort"]] for info in _listed()
    }
    links = []
    for a, b in pairs:
        target = reports[b]
        call = probes[a].reach.remote(probes[b], target.address, ports[target.node_id])
        found = _answer(call, REACH_TIMEOUT_S)
        links.append(LinkReport(source=a, target=b, **found))
    return links


def _measure(
    links: Sequence[LinkReport],
    probes: dict[int, Any],
    watcher: Watcher,
    seconds: float,
    limit_nbytes: int,
) -> dict[tuple[int, int], LinkReport]:
    measured = {}
    if links:
        watcher.on_links(len(links), len(links) * seconds * OVERHEAD)
    for link in links:
        call = probes[link.source].send.remote(
            probes[link.target], link.call_s or 0.0, seconds, limit_nbytes
        )
        result = replace(link, **_answer(call, SEND_TIMEOUT_S))
        measured[link.source, link.target] = result
        watcher.on_link(result)
    return measured


def _answer(call: Any, timeout_s: float) -> dict[str, Any]:
    try:
        found: dict[str, Any] = ray.get(call, timeout=timeout_s)
    except GetTimeoutError:
        return {"error": f"its probe did not answer for {timeout_s:.0f} s"}
    except RayError as error:
        return {"error": _first_line(error)}
    return found


def _address(info: dict[str, Any]) -> str:
    return str(info["NodeManagerAddress"])


def _is_head(info: dict[str, Any]) -> bool:
    return "node:__internal_head__" in info.get("Resources", {})


def _first_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
