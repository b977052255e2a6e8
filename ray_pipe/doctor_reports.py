"""What the doctor found, as data: nodes, links, findings, a verdict. Knows no Ray and no screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1
PACKAGES = ("ray", "torch", "numpy", "ray_pipe")
Level = Literal["fault", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A folder that a run writes to."""

    path: str
    free_nbytes: int = 0
    total_nbytes: int = 0
    error: str | None = None
    """Why nothing can be written there."""

    @property
    def used_share(self) -> float:
        return 1 - self.free_nbytes / self.total_nbytes if self.total_nbytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What would run, in one process."""

    versions: Mapping[str, str | None] = field(default_factory=dict)
    """python and `PACKAGES`; None where one is missing."""

    source: str | None = None
    """Digest of our own source; None where it cannot be imported."""

    source_error: str | None = None
    core: str | None = None
    """native or torch."""

    native: str | None = None
    """Digest of the C++ source that the native core was built from."""

    instructions: str | None = None
    """The instruction set that the native core uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One machine of the cluster."""

    index: int
    node_id: str
    address: str
    is_head: bool = False
    error: str | None = None
    """Why it could not be looked at; the rest is then empty."""

    host: str = ""
    software: Software = field(default_factory=Software)
    num_cores: int = 0
    load: float = 0.0
    """Runnable threads, mean of the last minute."""

    free_memory_nbytes: int = 0
    shm_nbytes: int | None = None
    """Size of /dev/shm, where Ray keeps its objects."""

    shm_goes_at_logout: bool = False
    """Whether the system empties it of this account's files when nobody is logged in as it."""

    disks: tuple[Disk, ...] = ()
    gpus: tuple[str, ...] = ()
    """Graphics cards that the machine has."""

    ray_cpus: float = 0.0
    ray_gpus: float = 0.0
    """What Ray was told it may give away."""

    object_store_nbytes: int = 0
    clock_offset_s: float | None = None
    """How far its clock is ahead of the one where the doctor runs."""

    clock_error_s: float = 0.0
    """The offset is known up to this: half of the shortest round trip."""

    call_s: float | None = None
    """A round trip of an empty Ray call from the doctor."""

    metrics: str | None = None
    """Where Prometheus can read its metrics."""

    @property
    def takes_stages(self) -> bool:
        """As `planner.placement` chooses: a node with no CPUs and no GPUs is kept free."""
        return self.ray_cpus > 0 or self.ray_gpus >= 1

    @property
    def label(self) -> str:
        return f"node {self.index} ({self.address})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """One direction between two nodes."""

    source: int
    target: int
    error: str | None = None
    """Why the target cannot be reached."""

    ports_open: bool | None = None
    """Whether the target's Ray ports accept connections: tells a firewall from a dead worker."""

    handshake_s: float | None = None
    """Round trip of the network alone, as TCP sees it; median."""

    call_s: float | None = None
    """Round trip of an empty Ray call; median."""

    bandwidth_bps: float | None = None
    """Payload per second through Ray; None where it was not measured."""

    nbytes: int = 0
    seconds: float = 0.0
    """What the bandwidth was measured with."""

    @property
    def latency_s(self) -> float | None:
        """One way. The network's if it is known: what Ray adds is CPU time, not distance."""
        round_trip_s = self.handshake_s if self.handshake_s is not None else self.call_s
        return None if round_trip_s is None else round_trip_s / 2

    @property
    def is_measured(self) -> bool:
        return self.error is None and self.bandwidth_bps is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to know or to mend."""

    level: Level
    code: str
    """A word that programs can look for."""

    where: str
    what: str
    way_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """Everything that was looked at."""

    address: str | None
    """As the user gave it; None: this machine alone."""

    here: Software
    disks: tuple[Disk, ...] = ()
    """Where the driver writes, on this machine."""

    nodes: tuple[NodeReport, ...] = ()
    links: tuple[LinkReport, ...] = ()
    dashboard: str | None = None
    error: str | None = None
    """Why there is no cluster to look at."""

    @property
    def stage_nodes(self) -> tuple[NodeReport, ...]:
        """Nodes that take a stage each, as `planner.placement` chooses: those with GPUs where
        several have them, else all but those that Ray was told to keep free of work."""
        with_gpus = tuple(node for node in self.nodes if node.ray_gpus >= 1)
        if len(with_gpus) > 1:
            return with_gpus
        return tuple(node for node in self.nodes if node.takes_stages) or self.nodes

    def link(self, source: int, target: int) -> LinkReport | None:
        return next((x for x in self.links if (x.source, x.target) == (source, target)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommand:
    """A line to copy into the shell."""

    command: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What it means, and what to do next."""

    findings: tuple[Finding, ...]
    next_commands: tuple[NextCommand, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "fault")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "warning")

    @property
    def state(self) -> Literal["ok", "warnings", "faults"]:
        if self.faults:
            return "faults"
        return "warnings" if self.warnings else "ok"

    @property
    def exit_code(self) -> int:
        return 1 if self.faults else 0


def as_dict(checkup: Checkup, verdict: Verdict) -> dict[str, Any]:
    """The object that `--json` prints."""
    links = [asdict(link) | {"latency_s": link.latency_s} for link in checkup.links]
    return {
        "schema": SCHEMA,
        "verdict": verdict.state,
        "findings": [asdict(finding) for finding in verdict.findings],
        "next_commands": [step.command for step in verdict.next_commands],
        "address": checkup.address,
        "dashboard": checkup.dashboard,
        "here": asdict(checkup.here) | {"disks": [asdict(disk) for disk in checkup.disks]},
        "nodes": [asdict(node) for node in checkup.nodes],
        "links": links,
    }
