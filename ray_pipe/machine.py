"""The machine that the driver runs on: what it is, and how much memory it still has."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

from compressors import kernels


def environment() -> dict[str, Any]:
    """What the numbers depend on besides the configuration."""
    import ray
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "core": kernels.core(),
        "machine": platform.machine(),
    }


def available_bytes() -> int:
    """Memory that can still be had on this machine, within the limits of its container."""
    found = []
    with contextlib.suppress(OSError, IndexError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")
        found.append(int(limit) - int(used))
    return min(found, default=1 << 62)
