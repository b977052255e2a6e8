"""Installing where nothing compiles: the twins, and nobody is left in doubt."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = (
    "import sys; from scikit_build_core.build import build_wheel; print(build_wheel(sys.argv[1]))"
)
USE = """
import sys
sys.modules["ray_pipe_native"] = None  # whatever this machine has
# An editable install answers imports before the path does, and with another tree.
sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__.startswith("_frozen")]
sys.path.insert(0, sys.argv[1])
from compressors import native
from stages.embedding.row_store import RowStore
import stages
print(stages.__file__, native.core(), RowStore(capacity="1MiB", slab="16KiB").native)
"""


def run(code: str, *args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_without_a_compiler_the_twins_are_installed_and_say_so(tmp_path: Path) -> None:
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("no scikit-build-core: pip install -e '.[dev]'")
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    wheels.mkdir()
    for part in ("native", "ray_pipe", "stages", "compressors", "netsim"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    built = run(BUILD, str(wheels), cwd=source, CXX="/bin/false", CC="/bin/false")

    assert built.returncode == 0, built.stdout + built.stderr
    assert "installed WITHOUT its native core" in built.stdout + built.stderr
    (wheel,) = wheels.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    used = run(USE, str(wheel), cwd=tmp_path)
    assert used.stdout.split() == [f"{wheel}/stages/__init__.py", "torch", "False"]
    assert "native core not in use" in used.stderr
    assert "the row store runs as its Python twin" in used.stderr
    refused = run(USE, str(wheel), cwd=tmp_path, RAY_PIPE_CORE="native")
    assert refused.returncode != 0
    assert "ImportError" in refused.stderr
