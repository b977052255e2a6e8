"""What this process runs, so that driver and workers can tell whether they agree."""

from __future__ import annotations

import hashlib
import importlib.util
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
