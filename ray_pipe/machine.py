"""The machine that the driver runs on: what it is, and how much memory it still has."""

from __future__ import annotations

import os
import platform
from typing import Any

from compressors import kernels
from ray_pipe.doctor_probe import free_memory_nbytes


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
    return free_memory_nbytes() or 1 << 62  # where nothing says so, there is no limit
