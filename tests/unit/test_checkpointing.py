"""A run's checkpoints from the driver's side: failures are remembered, a disk fills up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saved_runs import SavedRun

from ray_pipe.checkpoint_files import CheckpointError
from ray_pipe.checkpointing import RunCheckpoints
from ray_pipe.metrics import ArmMeter
from ray_pipe.recovery import Failure, verdict

DIED = Failure(kind="died", stage=1, step=3, cause="killed", arm="acsgd", replaced=(1,))


def find(run: SavedRun, warnings: list[str]) -> RunCheckpoints:
    return RunCheckpoints.find(
        run.config, [run.arm], on_warning=warnings.append, on_phase=warnings.append
    )


def begin(checkpoints: RunCheckpoints, run: SavedRun) -> Any:
    """An arm that begins, with stages that see every folder."""
    one: Any = SimpleNamespace(
        arm=run.arm, meter=ArmMeter("acsgd"), prediction=None, eval_losses=[], saver=None,
        extra=dict, restore_extra=lambda saved: None,
    )  # fmt: skip
    pipeline: Any = SimpleNamespace(infos=[], see=lambda *words: True)
    checkpoints.begin(pipeline, one)
    return one


def test_a_resumed_run_remembers_what_failed_before(tmp_path: Path) -> None:
    first = find(SavedRun(path=tmp_path / "demo"), [])
    first.open(SavedRun(path=tmp_path / "demo").config, tmp_path / "demo")
    first.failures.append(DIED)
    noted = first._numbers(begin(first, SavedRun(path=tmp_path / "demo")))["failures"]
    run = SavedRun(path=tmp_path / "demo", settings={"checkpoint__resume": "auto"}).train()
    numbers = run.store.finished("acsgd")
    assert numbers is not None
    run.store.finish("acsgd", {**numbers, "failures": noted})

    again = find(run, [])

    assert again.failures == [DIED]
    assert "failure 2 of this run" in verdict(DIED, again.failures, max_failures=1)


def test_a_checkpoint_of_before_that_has_no_failures_in_it_is_read(tmp_path: Path) -> None:
    run = SavedRun(path=tmp_path / "demo", settings={"checkpoint__resume": "auto"}).train()

    assert find(run, []).failures == []


def test_a_folder_that_cannot_be_written_ends_the_run_only_before_its_first_arm(
    tmp_path: Path,
) -> None:
    run = SavedRun(path=tmp_path / "demo")
    warnings: list[str] = []
    checkpoints = find(run, warnings)
    checkpoints.open(run.config, run.path)
    run.path.parent.joinpath("demo").write_text("in the way")
    with pytest.raises(CheckpointError, match="checkpoints cannot be written"):
        begin(checkpoints, run)
    run.path.unlink()
    begin(checkpoints, run)
    (run.path / "checkpoints" / "acsgd").rmdir()
    (run.path / "checkpoints" / "acsgd").write_text("in the way")

    begin(checkpoints, run)

    assert "training goes on, and the next one tries again" in warnings[-1]


@pytest.mark.parametrize(
    ("settings", "saves"),
    [
        ({}, True),
        ({"checkpoint__automatic": "0s"}, False),
        ({"sync__replicas": 2, "sync__name": "allreduce"}, False),
    ],
    ids=["by default", "off", "replicas"],
)
def test_by_default_a_run_saves_by_time(
    tmp_path: Path, settings: dict[str, Any], saves: bool
) -> None:
    run = SavedRun(path=tmp_path / "demo", every=None, settings=settings)
    checkpoints = find(run, [])
    checkpoints.open(run.config, run.path)

    assert (checkpoints._store is not None) == saves
    assert run.config.checkpoint.automatic_s == (
        0.0 if "checkpoint__automatic" in settings else 300
    )
    assert not run.path.exists()


@pytest.mark.parametrize("every", [2, None])
def test_only_a_checkpoint_that_was_asked_for_can_fail_the_run(
    tmp_path: Path, every: int | None
) -> None:
    run = SavedRun(path=tmp_path / "demo", every=every)
    checkpoints = find(run, [])
    checkpoints.open(run.config, run.path)
    one = begin(checkpoints, run)
    one.saver.lost = one.saver.newest = "the disk is full"
    one.saver.finish = lambda: None

    checkpoints.end_steps(SimpleNamespace(), one)  # type: ignore[arg-type]
    checkpoints.end(one)

    assert checkpoints.results() == (
        {} if every is None else {"lost_checkpoints": {"acsgd": "the disk is full"}}
    )
    assert run.store.finished("acsgd") is None  # whoever resumes trains it on
