"""Click runs whose shards are stopped, or killed at the worst moments, on real Ray."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_pipe import ctr_run
from ray_pipe.checkpoint import Saver
from ray_pipe.cluster import nodes
from ray_pipe.config import RunConfig
from ray_pipe.ctr_pipeline import CtrPipeline
from ray_pipe.ctr_workload import CtrArm, click_task, ctr_arms
from ray_pipe.sections import CheckpointConfig
from ray_pipe.shards import Shards
from ray_pipe.stage_actors import StageActors
from ray_pipe.trainer import Silent
from stages.embedding.embedding_spec import ShardMishap
from stages.mishap import Mishap

pytestmark = [pytest.mark.chaos, pytest.mark.ray]
STEPS = 16


class Told(Silent):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


def config(tau: int) -> RunConfig:
    return RunConfig.from_dict(
        {
            "task": "ctr",
            "data.num_samples": 2000,
            "pipeline.micro_batch_size": 64,
            "embedding.baseline": False,
            "embedding.capacity": "64MiB",
            "embedding.staleness": str(tau),
            "network.bandwidth": "unlimited",
            "network.latency": "5ms",
            "steps": STEPS,
        }
    )


@contextmanager
def changed_arms(change: Callable[[CtrArm], CtrArm]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plain = ctr_run.ctr_arms
        patch.setattr(ctr_run, "ctr_arms", lambda *args: [change(arm) for arm in plain(*args)])
        yield


def mishaps(*those: ShardMishap) -> AbstractContextManager[None]:
    """Arms whose shards end themselves."""
    return changed_arms(lambda arm: replace(arm, embedding=replace(arm.embedding, mishaps=those)))


def stage_mishaps(*those: Mishap) -> AbstractContextManager[None]:
    """Arms whose stage 0 ends itself."""
    return changed_arms(lambda arm: replace(arm, mishaps=tuple((0, one) for one in those)))


@pytest.mark.parametrize("tau", [0, 2])
def test_a_shard_that_was_stopped_is_found_first_and_replaced_in_seconds(
    cluster: None, tau: int
) -> None:
    """Not the dense stage that waits for it, and not after the deadlines of the stages."""
    run = config(tau)
    (arm,) = ctr_arms(run, click_task(run))
    with (
        StageActors(2, label="stopped-shard") as actors,
        Shards(2, label="stopped-shard", nodes=nodes(), num_stages=2) as shards,
    ):
        pipeline = CtrPipeline(actors, arm, shards=shards, epoch_s=time.time())
        pid = ray.get(shards.handles[1].ping.remote())
        steps, stopped_s = [], 0.0
        for records in pipeline.train():
            steps.append(records[0].step)
            if records[0].step == 5:
                stopped_s = time.monotonic()
                os.kill(pid, signal.SIGSTOP)
            elif records[0].step == 9:
                waited_s = time.monotonic() - stopped_s
        numbers = pipeline.settle_embeddings()
        shards.settle()
        (failure,) = pipeline.failures

    assert steps == list(range(STEPS))
    assert failure.kind == "hung"
    assert failure.replaced == (2 + 1,)  # the second shard, behind two stages
    assert "embedding shard 1 did not answer" in failure.cause
    assert "its process was stopped" in failure.cause
    assert waited_s < 30  # mostly the start of a process; it was 120 s and more
    assert numbers["in_use"] == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_shard_that_dies_at_a_checkpoint_costs_that_checkpoint_and_nothing_else(
    cluster: None, tmp_path: Path
) -> None:
    own = replace(config(0), out=str(tmp_path), checkpoint=CheckpointConfig(every=4))
    observer = Told()
    with mishaps(ShardMishap(shard=1, point="keep", version=8)):
        outcome = ctr_run.run(own, observer)

    (arm,) = outcome.results["arms"]
    warnings = "\n".join(observer.warnings)
    assert "the checkpoint of step 8 could not be written" in warnings
    assert "rows of the last checkpoint" in warnings
    assert len(arm["losses"]) == STEPS
    assert arm["lost_pushes"] == 0
    assert arm["lost_versions"] == 4  # from step 8 back to the checkpoint of step 4
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.step == STEPS


def test_a_first_stage_that_dies_at_the_last_checkpoint_is_replaced_and_it_is_written(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the shards have their order to copy: the driver waited ten minutes for them."""
    own = replace(config(0), out=str(tmp_path), checkpoint=CheckpointConfig(every=STEPS))
    start_save, finish, tried = CtrPipeline.start_save, Saver.finish, []

    class Deaf:
        """Stage 0, which dies before it hears that it is to copy its state."""

        def __init__(self, handle: Any) -> None:
            self._handle = handle
            self.keep_state = SimpleNamespace(remote=lambda *order: None)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._handle, name)

    def unheard(self: CtrPipeline, *args: Any) -> Any:
        tried.append(time.monotonic())
        handles = self.handles
        self.handles = [Deaf(handles[0]) if len(tried) == 1 else handles[0], *handles[1:]]
        try:
            return start_save(self, *args)
        finally:
            self.handles = handles

    def dying(self: Any) -> None:
        ray.kill(self._pipeline.handles[0])
        finish(self)

    monkeypatch.setattr(CtrPipeline, "start_save", unheard)
    monkeypatch.setattr(Saver, "finish", dying)
    observer = Told()
    outcome = ctr_run.run(own, observer)

    assert "stage 0 died" in "\n".join(observer.warnings)
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.step == STEPS
    assert len(outcome.results["arms"][0]["losses"]) == STEPS
    assert time.monotonic() - tried[0] < 300


def test_a_shard_that_dies_while_it_is_filled_is_filled_again(
    cluster: None, tmp_path: Path
) -> None:
    own = replace(config(0), out=str(tmp_path), checkpoint=CheckpointConfig(every=8))
    first = ctr_run.run(replace(own, steps=8), Told())
    assert first.checkpoint is not None
    again = replace(own, checkpoint=replace(own.checkpoint, resume=str(first.path)))
    observer = Told()
    with mishaps(ShardMishap(shard=0, point="fill", version=0)):
        outcome = ctr_run.run(again, observer)

    whole = ctr_run.run(replace(own, out=str(tmp_path / "whole")), Told())
    (arm,), (right,) = outcome.results["arms"], whole.results["arms"]
    (text,) = [warning for warning in observer.warnings if "embedding shard 0 died" in warning]
    assert re.search(r"begins with [\d,]+ rows of the last checkpoint", text)
    # Nothing was under way: to the bit, but for the times.
    assert [loss for _, _, loss in arm["losses"]] == [loss for _, _, loss in right["losses"]]
    assert arm["auc"] == right["auc"]


def test_a_shard_that_dies_in_an_evaluation_is_asked_again(cluster: None, tmp_path: Path) -> None:
    own = replace(config(0), out=str(tmp_path), checkpoint=CheckpointConfig(every=4))
    observer = Told()
    with mishaps(ShardMishap(shard=1, point="read", version=STEPS)):
        outcome = ctr_run.run(own, observer)

    (arm,) = outcome.results["arms"]
    assert arm["auc"] is not None
    assert len(arm["losses"]) == STEPS
    assert [failure["kind"] for failure in outcome.results["failures"]] == ["died"]


def test_a_stage_that_dies_in_an_evaluation_counts_no_sample_twice(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage lives and has scored some of it when the evaluation is run again."""
    own = replace(config(0), data=replace(config(0).data, num_samples=8000))
    counted: list[int] = []
    score = CtrPipeline.score

    def watched(self: CtrPipeline, step: int) -> Any:
        found = score(self, step)
        counted.append(len(found[0]))
        return found

    monkeypatch.setattr(CtrPipeline, "score", watched)
    arms = []
    for name, those in (("whole", ()), ("broken", (Mishap(point="F11", step=STEPS - 1),))):
        with stage_mishaps(*those):
            outcome = ctr_run.run(replace(own, out=str(tmp_path / name)), Told())
        arms += outcome.results["arms"]

    whole, broken = arms
    assert [failure["kind"] for failure in outcome.results["failures"]] == ["died"]
    assert counted == [whole["num_test"]] * 2
    assert broken["auc"] == whole["auc"]
    assert broken["log_loss"] == whole["log_loss"]
