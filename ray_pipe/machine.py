"""The machine that the driver runs on."""

from __future__ import annotations

import os
import platform
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
