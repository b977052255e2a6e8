"""40 steps in one go against 20, kill -9 of the driver, and 20 more: equal to the last bit.

Each chain of processes trains several codecs one after another; the driver kills itself once in
every arm, after its checkpoint of step 20, and the next process resumes. So every arm is stopped
and resumed, and arms that were done are not trained again.
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

from ray_pipe.config import RunConfig
from ray_pipe.driver import run
from ray_pipe.trainer import Silent

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS, STOP = 40, 20
TIMES = {
    "tokens_per_s", "step_s", "predicted_step_s", "prediction_error", "speedup", "wall_s",
    "time_to_target_s", "time_to_target_speedup", "time_share", "stages",
}  # fmt: skip
LOOSE = ("resident_bytes", "spilled_bytes")
"""They tell how far the disk has come."""

GROUPS: dict[str, dict[str, Any]] = {
    "gpipe, in memory": {
        "compare": ["fp32", "directq", "acsgd", "acsgd+zstd", "topk+ef"],
        "codec.rounding": "stochastic",
    },
    "1f1b, spilled and evicting": {
        "compare": ["acsgd", "directq"],
        "pipeline.schedule": "1f1b",
        "codec.memory_cap": 14 * 1024,
        "codec.spill_ram": 4 * 1024,
        "eval": True,
    },
    "1f1b, in memory and evicting": {
        "compare": ["fp32", "acsgd", "acsgd+zstd"],
        "pipeline.schedule": "1f1b",
        "codec.memory_cap": 14 * 1024,
    },
    "gpipe, spilled": {
        "compare": ["acsgd"],
        "codec.spill_ram": 4 * 1024,
    },
}  # fmt: skip
SMALL = {
    "steps": STEPS,
    "checkpoint.every": STOP,
    "faults.black_box": "off",  # newer, they would win: tests/chaos/test_taken_up.py
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
}


def config_of(group: str, out: Path, name: str, **more: Any) -> RunConfig:
    settings = {**SMALL, **GROUPS[group], "out": str(out), "name": name, **more}
    if "codec.spill_ram" in settings:
        settings["codec.spill_dir"] = str(out / "rows")
    return RunConfig.from_dict(settings)


class KillsItself(Silent):
    """Ends its process by SIGKILL as soon as the arm has its checkpoint of step 20, not before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun: set[str] = set()

    def on_step(self, arm: str, row: Mapping[str, Any]) -> None:
        if row["step"] < STOP:
            self._begun.add(arm)
        saved = self._folder / "checkpoints" / arm / f"checkpoint_{STOP:06d}" / "manifest.json"
        if arm in self._begun and saved.exists():
            os.kill(os.getpid(), signal.SIGKILL)


def drive(settings: dict[str, Any], folder: str) -> None:
    """In a process of its own: resume what is there, and die in the next arm."""
    run(RunConfig.from_dict(settings), KillsItself(Path(folder)))


@pytest.fixture(scope="module")
def processes(cluster: None) -> Any:
    """Makes processes that have torch and ray loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ray_pipe.driver"])
    return context


def without_times(results: dict[str, Any]) -> dict[str, Any]:
    """What must be equal: losses, bytes, codec numbers, settings."""
    arms = []
    for arm in results["arms"]:
        kept = {key: value for key, value in arm.items() if key not in TIMES}
        for key in ("losses", "eval_losses"):
            kept[key] = [[step, loss] for _, step, loss in arm.get(key, [])]
        kept["codec"] = {
            edge: {name: number for name, number in numbers.items() if name not in LOOSE}
            for edge, numbers in arm["codec"].items()
        }
        arms.append(kept)
    config = {k: v for k, v in results["config"].items() if k not in ("name", "address")}
    return {"arms": arms, "config": config}


@pytest.mark.parametrize("group", GROUPS)
def test_killed_in_every_arm_and_resumed_it_ends_with_the_same_bits(
    group: str, processes: Any, tmp_path: Path
) -> None:
    whole = run(config_of(group, tmp_path, "whole"), Silent())
    address = ray.get_runtime_context().gcs_address
    chain = config_of(group, tmp_path, "chain", **{"checkpoint.resume": "auto"})
    for _ in chain.arms:
        process = processes.Process(
            target=drive, args=({**chain.to_dict(), "address": address}, str(tmp_path / "chain"))
        )
        process.start()
        process.join(300)  # seconds on an idle machine, a minute on one with a load of 40
        assert process.exitcode == -signal.SIGKILL
    again = run(chain, Silent())
    resumed_at = again.results["resumed"]

    assert without_times(again.results) == without_times(whole.results)
    names = [arm.name for arm in chain.arms]
    assert resumed_at == dict.fromkeys(names[:-1], STEPS) | {names[-1]: STOP}
    for name in names:
        place = Path("checkpoints") / name / f"checkpoint_{STEPS:06d}"
        for stage in ("stage_0.safetensors", "stage_1.safetensors"):
            ours, theirs = (tmp_path / run / place / stage for run in ("chain", "whole"))
            assert ours.read_bytes() == theirs.read_bytes(), f"{name}: {stage}"
    rows = [
        [(row["arm"], row["step"], row["loss"], row["bytes"]) for row in map(json.loads, lines)]
        for lines in (
            (tmp_path / run / "metrics.jsonl").read_text().splitlines()
            for run in ("chain", "whole")
        )
    ]
    assert rows[0] == rows[1]
    for arm in whole.results["arms"]:
        numbers = arm["codec"]["0->1"]
        if arm["name"].startswith("acsgd"):
            assert (numbers["evictions"] > 0) == ("codec.memory_cap" in GROUPS[group])
            assert (numbers["spilled_bytes"] > 0) == ("codec.spill_ram" in GROUPS[group])
    shutil.rmtree(tmp_path)


CLICKS = {
    "task": "ctr",
    "steps": STEPS,
    "checkpoint.every": STOP,
    "data.num_samples": 3000,
    "pipeline.micro_batch_size": 64,
    "network.bandwidth_bps": "unlimited",
    "embedding.staleness": "0",
    "embedding.dim": 32,
}
"""Two arms, fp32 and scaled halves on the wire; both are scored after 21 steps."""

OF_CLICKS = (
    "auc", "log_loss", "rows", "staleness_histogram", "prunes", "lost_pushes", "dropped_gradients",
)  # fmt: skip


@pytest.mark.parametrize("how", ["pruned", "spilled"])
def test_a_click_run_killed_in_every_arm_and_resumed_ends_with_the_same_bits(
    processes: Any, tmp_path: Path, how: str
) -> None:
    """Of the dense network and of the rows; boxes do not hold rows, so the checkpoint serves."""
    clicks: dict[str, Any] = {**CLICKS, "out": str(tmp_path)}
    if how == "pruned":
        clicks |= {"embedding.capacity": "64MiB", "embedding.prune": 0.3}
    else:
        clicks |= {"embedding.capacity": "2MiB", "embedding.spill": str(tmp_path / "rows")}
    whole = run(RunConfig.from_dict({**clicks, "name": "whole"}), Silent())
    address = ray.get_runtime_context().gcs_address
    chain = {**clicks, "name": "chain", "checkpoint.resume": "auto"}
    for _ in ("fp32", "sync"):
        own = RunConfig.from_dict({**chain, "address": address})
        process = processes.Process(target=drive, args=(own.to_dict(), str(tmp_path / "chain")))
        process.start()
        process.join(300)
        assert process.exitcode == -signal.SIGKILL
    again = run(RunConfig.from_dict(chain), Silent())

    assert again.results["resumed"] == {"fp32": STEPS, "sync": STOP}
    for ours, theirs in zip(again.results["arms"], whole.results["arms"], strict=True):
        assert [one[1:] for one in ours["losses"]] == [one[1:] for one in theirs["losses"]]
        evaluations = [[one[1:] for one in arm["evaluations"]] for arm in (ours, theirs)]
        assert [step for step, _, _ in evaluations[0]] == [20, STEPS - 1]
        assert evaluations[0] == evaluations[1]
        assert [ours[key] for key in OF_CLICKS] == [theirs[key] for key in OF_CLICKS]
        assert ours["prunes" if how == "pruned" else "recalled_rows"] > 0
        if how == "pruned":  # else of the rows that happen to be in memory
            assert ours["row_bytes"] == theirs["row_bytes"]
        place = Path("checkpoints") / ours["name"] / f"checkpoint_{STEPS:06d}"
        for stage in ("stage_0.safetensors", "stage_1.safetensors"):
            one, other = (tmp_path / run / place / stage for run in ("chain", "whole"))
            assert one.read_bytes() == other.read_bytes(), f"{ours['name']}: {stage}"
