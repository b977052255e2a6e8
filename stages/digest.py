"""A fingerprint of our own source, so that driver and workers can tell whether they agree."""

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
