"""What the doctor's findings mean: pure functions from a checkup to a verdict.

A fault is what a run would fail or go wrong by, a warning what it would be slow or strange by.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from netsim.units import show_bandwidth, show_size
from ray_pipe.doctor_reports import (
    Checkup,
    Disk,
    Finding,
    LinkReport,
    NextCommand,
    NodeReport,
    Software,
    Verdict,
)

MIN_STAGES = 2
DEFAULT_BLOCKS = 4
"""Of the default model; more stages need more layers."""

FULL_DISK_SHARE = 0.95
"""Ray itself stops writing objects to a disk that is fuller."""

LOW_DISK_NBYTES = 2_000_000_000
LOW_MEMORY_NBYTES = 1 << 30
MIN_SHM_NBYTES = 128 << 20
"""Containers get 64 MB if nobody asks for more."""

MAX_CLOCK_OFFSET_S = 0.1
SLOW_LINK_BPS = 1e6
BUSY = 1.5
"""Runnable threads per core."""

MUST_AGREE = ("ray", "torch", "numpy")
"""Ray talks to its own version only; a run refuses a mixture of the others (`same_source`)."""

INSTALL = "pip install ray_pipe's wheel, or `pip install .` in the source, on every node"


def judge(checkup: Checkup, *, topology_path: str | None = None) -> Verdict:
    """All findings, faults first, and the commands to run next."""
    findings = sorted(_findings(checkup), key=lambda finding: finding.level != "fault")
    has_faults = any(finding.level == "fault" for finding in findings)
    return Verdict(
        findings=tuple(findings),
        next_commands=tuple(_next(checkup, has_faults=has_faults, topology_path=topology_path)),
    )


def _findings(checkup: Checkup) -> Iterator[Finding]:
    yield from _judge_here(checkup.here)
    for disk in checkup.disks:
        yield from _judge_disk("here", disk)
    if checkup.error is not None:
        what, _, way_out = checkup.error.partition("; ")
        where = checkup.address or "this machine"
        what = what.removeprefix(f"--address {checkup.address}: ")
        yield _fault("cluster", where, what, way_out or "see docs/troubleshooting.md")
        return
    for node in checkup.nodes:
        yield from _judge_node(node)
    seen = [node for node in checkup.nodes if node.error is None]
    yield from _judge_sources(checkup.here, seen)
    yield from _judge_versions(checkup.here, seen)
    yield from _judge_links(checkup)
    yield from _judge_load(seen)
    if checkup.address is not None and len(checkup.nodes) == 1:
        yield _warning(
            "one-node",
            checkup.nodes[0].label,
            "it is the cluster's only node, so all stages would share it and no link is real",
            "start Ray on the others: `ray start --address=HEAD:6379` there, or `ray up`",
        )


# --- software -------------------------------------------------------------------------------------


def _judge_here(here: Software) -> Iterator[Finding]:
    missing = sorted(name for name, version in here.versions.items() if version is None)
    if missing:
        yield _fault(
            "not-installed", "here", f"{', '.join(missing)} not installed", "`pip install .`"
        )
    if here.source_error is not None:
        yield _fault("broken", "here", f"our source cannot be loaded: {here.source_error}", INSTALL)
    if here.core == "torch":
        yield _warning(
            "core",
            "here",
            "the native core is not in use, so quantising is 6 to 30 times slower",
            "build it: `pip install .` with a C++ compiler, and leave RAY_PIPE_CORE unset",
        )


def _judge_sources(here: Software, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    absent = [node for node in nodes if node.software.source is None]
    for node in absent:
        yield _fault(
            "not-installed",
            node.label,
            f"ray_pipe cannot be loaded there: {node.software.source_error or 'no reason given'}",
            INSTALL,
        )
    other = [node for node in nodes if node not in absent and node.software.source != here.source]
    if other:
        digests = ", ".join(f"{node.label} has {node.software.source}" for node in other)
        yield _fault(
            "source",
            _labels(other),
            f"other source than here: {digests}, here is {here.source}",
            f"install the same version everywhere: {INSTALL}; then start the nodes' Ray again",
        )
    cores = [
        node for node in nodes if node.software.core is not None and node.software.core != here.core
    ]
    if cores:
        found = ", ".join(f"{node.label} has {node.software.core}" for node in cores)
        yield _fault(
            "core",
            _labels(cores),
            f"another core than here: {found}, here is {here.core}",
            "install the same wheel everywhere, or set RAY_PIPE_CORE=torch on all nodes",
        )
    builds = [
        node
        for node in nodes
        if node.software.core == here.core == "native" and node.software.native != here.native
    ]
    if builds:
        found = ", ".join(f"{node.label} has {node.software.native}" for node in builds)
        yield _fault(
            "core",
            _labels(builds),
            f"a native core of other C++ source than here: {found}, here is {here.native}",
            "build it again on every node from the same source (`pip install . --no-deps`, or "
            "`ray up`), or set RAY_PIPE_CORE=torch on all nodes",
        )


def _judge_versions(here: Software, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    for name in ("python", "ray", "torch", "numpy"):
        mine = here.versions.get(name)
        other = [node for node in nodes if _plain(node.software.versions.get(name)) != _plain(mine)]
        if not other or mine is None:
            continue
        found = ", ".join(
            f"{node.label} has {node.software.versions.get(name) or 'none'}" for node in other
        )
        what = f"another {name} than here: {found}, here is {mine}"
        is_missing = any(node.software.versions.get(name) is None for node in other)
        if name in MUST_AGREE or is_missing:
            yield _fault("versions", _labels(other), what, f"install {name} {mine} on every node")
        else:
            yield _warning(
                "versions",
                _labels(other),
                f"{what}; training works, but not to the same bits",
                f"install {name} {mine} on every node",
            )


# --- nodes ----------------------------------------------------------------------------------------


def _judge_node(node: NodeReport) -> Iterator[Finding]:
    if node.error is not None:
        yield _fault(
            "no-probe",
            node.label,
            f"nothing could be started there: {node.error}",
            "look at `ray status` and at /tmp/ray/session_latest/logs on that node; is its Ray "
            "healthy, and do its ports reach this machine?",
        )
        return
    for disk in node.disks:
        yield from _judge_disk(node.label, disk)
    if node.free_memory_nbytes < LOW_MEMORY_NBYTES:
        yield _warning(
            "memory",
            node.label,
            f"{_size(node.free_memory_nbytes)} of memory left, a stage needs "
            f"{_size(LOW_MEMORY_NBYTES)} and more",
            "end other programs there, or give the container more memory",
        )
    if node.shm_nbytes is not None and node.shm_nbytes < MIN_SHM_NBYTES:
        yield _warning(
            "shm",
            node.label,
            f"/dev/shm has only {_size(node.shm_nbytes)}, so Ray keeps its objects on disk",
            "start the container with --shm-size=2g",
        )
    if node.shm_goes_at_logout:
        yield _warning(
            "logout",
            node.label,
            "once Ray has ended there and nobody is logged in, systemd removes what this account "
            "has in /dev/shm, black boxes of a run that was killed among it",
            "`loginctl enable-linger` there, once; or RemoveIPC=no in /etc/systemd/logind.conf, or "
            "--set faults.black_box=FOLDER",
        )
    yield from _judge_gpus(node)
    offset = node.clock_offset_s
    if offset is not None and abs(offset) - node.clock_error_s > MAX_CLOCK_OFFSET_S:
        yield _warning(
            "clock",
            node.label,
            f"its clock is {abs(offset):.2f} s {'ahead' if offset > 0 else 'behind'}, so its part "
            "of traces and logs is shifted",
            "let chrony or systemd-timesyncd set it (`timedatectl set-ntp true`)",
        )


def _judge_load(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    busy = [node for node in nodes if node.num_cores and node.load > BUSY * node.num_cores]
    if busy:
        loads = ", ".join(f"{node.load:.1f} on {node.num_cores}" for node in busy)
        yield _warning(
            "busy",
            _labels(busy),
            f"more threads want to run than there are cores ({loads}), so what is measured now is "
            "worse than it could be",
            "end other programs there, then look again",
        )


def _judge_disk(where: str, disk: Disk) -> Iterator[Finding]:
    if disk.error is not None:
        yield _fault(
            "disk",
            where,
            f"nothing can be written to {disk.path}: {disk.error}",
            "mend its rights, or choose another folder (--out, codec.spill_dir, ray's --temp-dir)",
        )
    elif disk.used_share > FULL_DISK_SHARE:
        yield _fault(
            "disk",
            where,
            f"the disk of {disk.path} is {100 * disk.used_share:.0f} % full; Ray stops at "
            f"{100 * FULL_DISK_SHARE:.0f} %",
            "free some room, or start Ray with --temp-dir on another disk",
        )
    elif disk.free_nbytes < LOW_DISK_NBYTES:
        yield _warning(
            "disk",
            where,
            f"{_size(disk.free_nbytes)} left for {disk.path}; checkpoints and remembered "
            "activations may need more",
            "free some room, or choose another folder (--out, codec.spill_dir)",
        )


def _judge_gpus(node: NodeReport) -> Iterator[Finding]:
    if len(node.gpus) > node.ray_gpus:
        yield _warning(
            "gpu",
            node.label,
            f"it has {len(node.gpus)} GPUs, Ray was told of {node.ray_gpus:g}",
            f"start its Ray with --num-gpus={len(node.gpus)}",
        )
    torch = node.software.versions.get("torch") or ""
    if node.gpus and torch.endswith("+cpu"):
        yield _warning(
            "gpu",
            node.label,
            f"it has GPUs, but torch {torch} is built for CPUs",
            "install torch's CUDA build on every node",
        )


# --- links ----------------------------------------------------------------------------------------


def _judge_links(checkup: Checkup) -> Iterator[Finding]:
    for link in checkup.links:
        if link.error is not None:
            yield _judge_broken(checkup, link)
        elif link.bandwidth_bps is not None and link.bandwidth_bps < SLOW_LINK_BPS:
            yield _warning(
                "slow-link",
                _way(checkup, link),
                f"{_rate(link.bandwidth_bps)}: slower than 1 Mbps, a step takes minutes",
                "few bits (--codec acsgd --fw-bits 2 --bw-bits 4), larger micro-batches, or a "
                "pipeline that does not cross it",
            )


def _judge_broken(checkup: Checkup, link: LinkReport) -> Finding:
    back = checkup.link(link.target, link.source)
    one_way = "; the other way works" if back is not None and back.error is None else ""
    address = checkup.nodes[link.target].address
    if link.ports_open is False:
        way_out = (
            f"let {checkup.nodes[link.source].address} connect to {address}: open Ray's ports "
            "there, fixed by --node-manager-port and --object-manager-port of `ray start`"
        )
    else:
        way_out = (
            f"open the ports of Ray's workers on {address}: `ray start --min-worker-port=10002 "
            "--max-worker-port=19999` fixes their range"
        )
    return _fault("unreachable", _way(checkup, link), f"{link.error}{one_way}", way_out)


# --- what to do next ------------------------------------------------------------------------------


def _next(
    checkup: Checkup, *, has_faults: bool, topology_path: str | None
) -> Iterator[NextCommand]:
    given = [] if checkup.address is None else ["--address", checkup.address]
    run = ["python", "-m", "ray_pipe.run"]
    if has_faults:
        again = ["python", "-m", "ray_pipe.doctor", *given]
        yield NextCommand(command=shlex.join(again), why="look again")
        return
    if checkup.address is None:
        yield NextCommand(
            command=shlex.join([*run, "--bandwidth", "100Mbps"]),
            why="train here, in four stages joined by emulated 100 Mbps links",
        )
        return
    stages = max(MIN_STAGES, len(checkup.stage_nodes))
    shape = ["--stages", str(stages)]
    if stages > DEFAULT_BLOCKS:
        shape += ["--set", f"model.layers={stages}"]
    yield NextCommand(
        command=shlex.join([*run, *given, *shape, "--bandwidth", "unlimited"]),
        why="train on this cluster, on its links as they are",
    )
    if topology_path is not None:
        yield NextCommand(
            command=shlex.join([*run, *shape, "--topology", topology_path]),
            why="rehearse it on one machine, over the links as they were measured",
        )


# --- words ----------------------------------------------------------------------------------------


def _fault(code: str, where: str, what: str, way_out: str) -> Finding:
    return Finding(level="fault", code=code, where=where, what=what, way_out=way_out)


def _warning(code: str, where: str, what: str, way_out: str) -> Finding:
    return Finding(level="warning", code=code, where=where, what=what, way_out=way_out)


def _labels(nodes: Sequence[NodeReport]) -> str:
    return ", ".join(node.label for node in nodes)


def _way(checkup: Checkup, link: LinkReport) -> str:
    return f"{checkup.nodes[link.source].label} -> {checkup.nodes[link.target].label}"


def _plain(version: str | None) -> str | None:
    """Without `+cpu` or `+cu128`: that says for which machines it was built."""
    return None if version is None else version.partition("+")[0]


def _size(nbytes: int) -> str:
    return show_size(nbytes, digits=3)


def _rate(bandwidth_bps: float) -> str:
    return show_bandwidth(bandwidth_bps, digits=3)
