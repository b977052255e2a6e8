"""Checkpoints on a store that cannot rename: written by stages, replaced, resumed from.

The store is a kind of address that fsspec learns of by an entry point, as it does of s3fs: in every
process of the run, the stages' too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TINY = [
    *("--codec", "acsgd", "--steps", "6", "--stages", "2", "--bandwidth", "unlimited"),
    *("--model", "gpt-nano", "--micro-batches", "2", "--micro-batch-size", "2"),
    *("--set", "data.num_samples=8", "--set", "model.layers=2", "--set", "model.width=32"),
    *("--checkpoint-every", "2"),
]
SHELF = '''
from fsspec.implementations.local import LocalFileSystem

class Shelf(LocalFileSystem):
    """Folders of this machine that behave like a store: what is there cannot be renamed."""

    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("shelf://"))

    def mv(self, *args, **kwargs):
        raise NotImplementedError("a store has no rename")
'''


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose fsspec reads `shelf://`."""
    place = tmp_path_factory.mktemp("site")
    (place / "shelf_store.py").write_text(SHELF, encoding="utf-8")
    info = place / "shelf_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf_store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fsspec.specs]\nshelf = shelf_store:Shelf\n")
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}


def command(env: dict[str, str], module: str, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *words], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]


def results_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def test_a_run_saves_to_a_store_and_is_resumed_from_it_to_the_same_losses(
    env: dict[str, str], tmp_path: Path
) -> None:
    uri = f"shelf://{tmp_path}/store"
    words = (*TINY, "--out", str(tmp_path / "runs"), "--checkpoint-dir", uri)
    command(env, "ray_pipe.run", *words, "--name", "whole")
    place = tmp_path / "store" / "acsgd" / "checkpoint_000004"
    manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))

    written = sorted(path.name for path in (place / manifest["within"]).iterdir())
    assert written == ["progress.json.zst", "stage_0.safetensors", "stage_1.safetensors"]
    assert sorted(path.name for path in place.iterdir()) == [manifest["within"], "manifest.json"]

    # From step 4 on once more: the checkpoint of step 6 is there, and is replaced.
    resume = ("--resume", f"{uri}/acsgd/checkpoint_000004")
    command(env, "ray_pipe.run", *words, "--name", "again", *resume)
    again, whole = (results_of(tmp_path / "runs" / name) for name in ("again", "whole"))

    losses = [[loss for _, _, loss in one["arms"][0]["losses"]] for one in (again, whole)]
    assert losses[0] == losses[1]
    assert again["resumed"] == {"acsgd": 4}
    last = tmp_path / "store" / "acsgd" / "checkpoint_000006"
    assert len(list(last.glob("attempt-*"))) == 1

    command(env, "ray_pipe.export", f"{uri}/acsgd/checkpoint_000006", str(tmp_path / "m.pt"))
    assert (tmp_path / "m.pt").read_bytes()[:2] == b"PK"  # torch's own format is a zip file
