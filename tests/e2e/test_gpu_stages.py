"""Stages that hold a GPU each: whoever dies is replaced, though Ray has no GPU left to give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def drill(name: str) -> dict[str, Any]:
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.gpu_drill", name],
        cwd=tests.parent,
        env=os.environ | {"PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_a_stage_dies_on_a_node_whose_only_gpu_its_run_holds_then_a_node_then_a_stage_again() -> (
    None
):
    said = drill("nodes")
    right = said["right"]

    for name, replaced in {"stage": [[0]], "node": [[1]], "again": [[0]]}.items():
        assert said[name]["losses"] == right["losses"], name
        assert said[name]["replaced"] == replaced, name
    assert said["stage"]["nodes"] == right["nodes"]
    assert said["node"]["nodes"][1] not in right["nodes"]  # the head's GPU, which was free
    assert said["again"]["nodes"] == said["node"]["nodes"]
    assert said["stage"]["spares"] == [[]]  # a spare would need a GPU of its own


def test_a_spare_takes_the_place_and_the_next_spare_gets_the_gpu_of_the_dead() -> None:
    said = drill("spares")

    for name in ("first", "second"):
        assert said[name]["losses"] == said["right"]["losses"], name
        assert said[name]["spares"] == [[1]], name
