"""kill -9 of the driver in every arm, no checkpoint ever: the next one goes on from black boxes.

The Ray is one that others started, so it outlives the driver; `test_driver_faults.py` does the same
with the whole command and its own Ray. The first group runs in `make test`, too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from ray_pipe.config import RunConfig
from ray_pipe.driver import run
from ray_pipe.trainer import Silent
from ray_pipe.unfinished import FILE
from stages.box_places import candidates

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS, STOP = 24, 11
LOOSE = ("resident_bytes", "spilled_bytes")
"""They tell how far the disk has come."""

GROUPS: dict[str, dict[str, Any]] = {
    "1f1b, spilled and evicting, with evaluations": {
        "compare": ["fp32", "acsgd"],
        "pipeline.schedule": "1f1b",
        "codec.memory_cap": 14 * 1024,
        "codec.spill_ram": 4 * 1024,
        "codec.rounding": "stochastic",
        "eval": True,
    },
    "gpipe, in memory": {
        "compare": ["directq", "acsgd+zstd", "topk+ef"],
        "codec.rounding": "stochastic",
    },
    "the refs transport": {
        "compare": ["acsgd"],
        "pipeline.transport": "refs",
    },
}
SMALL = {
    "steps": STEPS,
    "model.name": "gpt-nano",
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "model.context": 16,
    "data.num_samples": 24,
    "pipeline.stages": 2,
    "pipeline.micro_batches": 2,
    "pipeline.micro_batch_size": 4,
    "network.bandwidth_bps": "unlimited",
    "checkpoint.automatic_s": 0.0,
}


def config_of(group: str, out: Path, name: str, **more: Any) -> RunConfig:
    settings = {**SMALL, **GROUPS[group], "out": str(out), "name": name, **more}
    if "codec.spill_ram" in settings:
        settings["codec.spill_dir"] = str(out / "rows")
    return RunConfig.from_dict(settings)


class KillsItself(Silent):
    """Ends its process by SIGKILL at step 11 of an arm that it has trained from before that."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def on_step(self, arm: str, row: Mapping[str, Any]) -> None:
        if row["step"] < STOP:
            self._begun.add(arm)
        elif arm in self._begun:
            os.kill(os.getpid(), signal.SIGKILL)


def drive(settings: dict[str, Any]) -> None:
    """In a process of its own: take up what is there, and die in the next arm."""
    run(RunConfig.from_dict(settings), KillsItself())


@pytest.fixture(scope="module")
def processes(cluster: None) -> Any:
    """Makes processes that have torch and ray loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ray_pipe.driver"])
    return context


def bits(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What must be equal: losses, bytes and codec numbers of each arm."""
    return [
        {
            "name": arm["name"],
            "losses": [(step, loss) for _, step, loss in arm["losses"]],
            "evaluations": [(step, loss) for _, step, loss in arm.get("eval_losses", [])],
            "final_loss": arm["final_loss"],
            "links": arm["links"],
            "steps": (arm["steps"], arm["num_tokens"]),
            "codec": {
                edge: {name: number for name, number in own.items() if name not in LOOSE}
                for edge, own in arm["codec"].items()
            },
        }
        for arm in results["arms"]
    ]


def lines(path: Path) -> list[tuple[Any, ...]]:
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [(row["arm"], row["step"], row["loss"], row["bytes"]) for row in rows]


@pytest.mark.parametrize(
    "group",
    [
        name if place == 0 else pytest.param(name, marks=pytest.mark.chaos)
        for place, name in enumerate(GROUPS)
    ],
)
def test_killed_in_every_arm_without_a_checkpoint_it_ends_with_the_same_bits(
    group: str, processes: Any, tmp_path: Path
) -> None:
    whole = run(config_of(group, tmp_path, "whole"), Silent(), want_states=True)
    address = ray.get_runtime_context().gcs_address
    chain = config_of(group, tmp_path, "chain", **{"checkpoint.resume": "auto"})
    for _ in chain.arms:
        process = processes.Process(target=drive, args=({**chain.to_dict(), "address": address},))
        process.start()
        process.join(300)
        assert process.exitcode == -signal.SIGKILL
    left = json.loads((tmp_path / "chain" / FILE).read_text())
    again = run(chain, Silent(), want_states=True)

    assert bits(again.results) == bits(whole.results)
    assert lines(tmp_path / "chain") == lines(tmp_path / "whole")
    for ours, theirs in zip(again.states, whole.states, strict=True):
        for name, tensor in theirs["module"].items():
            assert torch.equal(ours["module"][name], tensor), name
    failures = again.results["failures"]
    assert [(f["kind"], f["source"], f["arm"]) for f in failures] == [
        ("driver", "box", arm.name) for arm in chain.arms
    ]
    for failure in failures:
        assert STOP - 1 <= failure["resumed_from"] <= STOP + 2  # never further back than a step
        assert failure["replayed_steps"] == max(0, STOP - failure["resumed_from"])
    last = chain.arms[-1].name
    assert again.results["resumed"][last] == failures[-1]["resumed_from"] + 1
    walls = [wall for wall, _, _ in again.results["arms"][-1]["losses"]]
    assert walls == sorted(walls)
    assert not (tmp_path / "chain" / FILE).exists()
    assert not (tmp_path / "chain" / "checkpoints").exists()
    labels = [arm["run"] for arm in left["arms"].values() if arm["run"]]
    boxes = [place / label for place in candidates("auto") for label in labels]
    assert not any(box.exists() for box in boxes)
    shutil.rmtree(tmp_path)
