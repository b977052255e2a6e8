"""What a run leaves in its folder when the folder will not take it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ray_pipe.config import NetworkConfig, RunConfig
from ray_pipe.data import DatasetSamples
from ray_pipe.errors import TrainingError
from ray_pipe.metrics import ArmMeter
from ray_pipe.planner.cost import Prediction
from ray_pipe.plans import arms_of
from ray_pipe.report import render_report
from ray_pipe.results import command_of, results_of, write_all
from ray_pipe.trained import Trained
from ray_pipe.trainer import Silent
from ray_pipe.workload import blocks_workload, gpt_workload
from stages.loss import cross_entropy


class Told(Silent):
    """Remembers warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(self: Path, *args: Any, **kwargs: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)


def test_results_are_there_as_a_whole(tmp_path: Path) -> None:
    write_all(tmp_path, {"name": "x"}, [], Silent())

    assert json.loads((tmp_path / "results.json").read_text()) == {"name": "x"}
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_full_disk_ends_a_good_run_by_name(tmp_path: Path, full: None) -> None:
    with pytest.raises(TrainingError, match=r"results.json could not be written: no space left"):
        write_all(tmp_path, {"name": "x"}, [], Told())

    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_hide_why_the_run_failed(tmp_path: Path, full: None) -> None:
    observer = Told()

    def run() -> None:
        try:
            raise TrainingError("stage 1 died")
        finally:
            write_all(tmp_path, {"name": "x"}, [], observer)

    with pytest.raises(TrainingError, match="stage 1 died"):
        run()

    (text,) = observer.warnings
    assert "results.json could not be written: no space left on device; free space" in text


@pytest.mark.parametrize("why", [KeyboardInterrupt(), TrainingError("stage 1 died")])
def test_the_folder_of_a_run_that_was_stopped_is_told(tmp_path: Path, why: BaseException) -> None:
    stopped, done = Told(), Told()

    def run() -> None:
        try:
            raise why
        finally:
            write_all(tmp_path, {"name": "x"}, [], stopped)

    with pytest.raises(type(why)):
        run()
    write_all(tmp_path, {"name": "x"}, [], done)

    assert stopped.notes == [f"what was done until then is in {tmp_path}"]
    assert done.notes == []


class Waves(list[Any]):
    """A dataset of one's own."""


class Net(nn.Sequential):
    """A model of one's own."""


def test_an_own_model_is_described_by_its_classes_and_never_as_the_default() -> None:
    samples = DatasetSamples(Waves([(torch.ones(4), torch.tensor(0))] * 8))
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()]
    own = blocks_workload(blocks, loss=cross_entropy, samples=samples, seed=0)
    whole = blocks_workload(Net(*blocks), loss=cross_entropy, samples=samples, seed=0)

    results = results_of(RunConfig(), [], [], own=own)
    text = json.dumps(results) + render_report(results)

    assert results["own"] == {
        "model": "Linear, Tanh", "num_blocks": 3, "dataset": "Waves", "num_samples": 8,
    }  # fmt: skip
    assert whole.name == "Net"
    assert "Linear, Tanh on Waves" in text
    assert "gpt-tiny" not in text
    assert "pydoc" not in text


def trained(config: RunConfig) -> list[Trained]:
    """Arms that were predicted and evaluated, and took no step."""
    found = []
    for arm in arms_of(config, gpt_workload(config)):
        prediction = Prediction(
            step_s=2.0, compute_step_s=0.5, link_step_s=1.8, costs=(), cut_shapes=(), num_cores=2.0,
            is_shaped=config.network.bandwidth_bps < math.inf, link_to_compute=4.9,
        )  # fmt: skip
        one = Trained(arm=arm, prediction=prediction, meter=ArmMeter(arm.name))
        one.eval_losses = [(1.0, 3, 2.5), (2.0, 7, 2.25)]
        found.append(one)
    return found


@pytest.mark.parametrize(
    ("bandwidth_bps", "limits"), [(1e8, [None, 4.0, 4.0]), (math.inf, [None, None, None])]
)
def test_the_limit_of_a_gain_and_the_held_out_loss_stand_beside_what_was_measured(
    bandwidth_bps: float, limits: list[float | None]
) -> None:
    config = RunConfig(network=NetworkConfig(bandwidth_bps=bandwidth_bps), eval=True)
    arms = trained(config)

    results = results_of(config, [one.summary() for one in arms], arms)

    assert [arm.get("speedup_limit") for arm in results["arms"]] == limits
    assert [arm["eval_loss"] for arm in results["arms"]] == [2.25] * 3
    page = render_report(results)
    assert "held-out loss" in page
    assert ("possible speed-up" in page) == (bandwidth_bps < math.inf)


def test_the_command_is_told_only_where_there_was_one() -> None:
    again = "python -m ray_pipe.run --steps 2 --name 'a b'"

    assert command_of(["/x/ray_pipe/run.py", "--steps", "2", "--name", "a b"]) == again
    assert command_of(["/x/bin/ray-pipe", "--steps", "2", "--name", "a b"]) == again
    assert command_of(["train.py", "--steps", "2"]) is None
    assert "command" not in results_of(RunConfig(), [], [])  # pytest's, and no command of ours
