"""What this process runs, so that driver and workers can tell whether they agree."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from functools import cache
from pathlib import Path

PACKAGES = ("ray_pipe", "stages", "compressors", "netsim")


@cache
def source_digest() -> str:
    """Hash over every Python file of the four packages, as this process imports them."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            root = Path(folder)
            for path in sorted(root.rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(root)}".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def software() -> dict[str, str]:
    """All that the bits of a result depend on, beside the settings and the kind of machine.

    `native` is the C++ source that the core in use was built from: each node may have compiled its
    own, so their files need not be the same. Empty where torch does the work.
    """
    import numpy
    import torch

    from compressors import kernels

    core = kernels.core()
    return {
        "source": source_digest(),
        "core": core,
        "native": kernels.build_info().get("source", "") if core == "native" else "",
        "torch": torch.__version__.partition("+")[0],  # what follows says for which GPUs
        "numpy": numpy.__version__,
    }


def hardware(device: str) -> dict[str, str]:
    """What else the last bits depend on: whoever computes on `device` here.

    Torch and its libraries choose their kernels by the processor, and kernels of other widths add
    in another order.
    """
    import torch

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
    }


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
