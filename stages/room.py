"""What a node has left for a stage: memory, and disk where rows go. Each stage asks for itself, as
the driver may be on another machine.

`free_memory_nbytes` is that of `ray_pipe.doctor_probe`, which may import nothing of ours; a test
keeps the two alike.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are memory."""


def room_for(*, spill: str | None, log: Path | None) -> dict[str, Any]:
    """Free memory; free disk in the folder that rows are spilled to; and where the log of the
    black box lies: `memory`, `spill` (on the disk of that folder), or anywhere else."""
    log_in = ""
    if log is not None:
        if file_system(log) in IN_MEMORY:
            log_in = "memory"
        elif spill is not None and above(log).stat().st_dev == above(Path(spill)).stat().st_dev:
            log_in = "spill"
    return {
        "memory_nbytes": free_memory_nbytes() or 1 << 62,  # where nothing says so, no limit
        "spill_nbytes": None if spill is None else shutil.disk_usage(above(Path(spill))).free,
        "log_in": log_in,
    }


def free_memory_nbytes() -> int:
    """Memory that can still be had, within the limits of the container."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")
        found.append(int(limit) - int(used))
    return min(found, default=0)


def file_system(path: Path, *, mounts: str | None = None) -> str:
    """The kind of file system that a path is on; empty where the system does not tell."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, place, name, *_ = line.split(" ")
        home = Path(place.replace("\\040", " "))
        # Of two mounts in one place the later one counts.
        if path.absolute().is_relative_to(home) and len(home.parts) >= best:
            best, kind = len(home.parts), name
    return kind


def above(folder: Path) -> Path:
    """The folder, or what it will be made in."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
