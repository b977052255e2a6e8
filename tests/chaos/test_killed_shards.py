"""Embedding shards that die in the middle of a push, on real Ray."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_pipe import ctr_run
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

pytestmark = [pytest.mark.ray, pytest.mark.slow]
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


@pytest.mark.parametrize(
    ("point", "applied_before"),
    [("push", 5), ("applied", 6)],
    ids=["before it was applied", "before it was acknowledged"],
)
def test_training_goes_on_lost_pushes_are_counted_and_none_is_applied_twice(
    cluster: None, point: str, applied_before: int
) -> None:
    tau, version = 2, applied_before
    run = config(tau)
    (arm,) = ctr_arms(run, click_task(run))
    mishap = ShardMishap(shard=1, point=point, version=version)
    arm = replace(arm, embedding=replace(arm.embedding, mishaps=(mishap,)))
    told = []
    with (
        StageActors(2, label="killed-shards") as actors,
        Shards(2, label="killed-shards", nodes=nodes(), num_stages=2) as shards,
    ):
        pipeline = CtrPipeline(actors, arm, shards=shards, epoch_s=time.time())
        pipeline.on_failure = told.append
        first = shards.handles[1]
        losses = [records[-1].loss for records in pipeline.train()]
        numbers = pipeline.settle_embeddings()
        shards.settle()
        survivor, newcomer = ray.get([handle.books.remote() for handle in shards.handles])
        assert shards.handles[1] is not first

    assert len(losses) == STEPS
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
    assert len(told) == 1
    assert "embedding shard 1 died" in str(told[0])
    assert "begins with no rows" in str(told[0])
    # Each step is one version: applied by the old process, by the new one, or lost; never two.
    lost = numbers["lost_pushes"]
    assert survivor["version"] == STEPS
    assert newcomer["lost_pushes"] == lost
    assert 1 <= lost <= tau + 1
    assert newcomer["version"] + lost == STEPS - (applied_before - (point == "applied"))
    assert newcomer["staleness_max"] <= tau
    assert numbers["in_use"] == 0


def test_a_shard_that_dies_comes_back_with_the_rows_of_the_last_checkpoint(
    cluster: None, tmp_path: Path
) -> None:
    """Through the run itself: the saver's files, the watch, the report's words."""
    own = replace(config(0), out=str(tmp_path), checkpoint=CheckpointConfig(every=4))
    mishap = ShardMishap(shard=1, point="applied", version=9)
    observer = Told()
    with pytest.MonkeyPatch.context() as patch:
        plain = ctr_run.ctr_arms

        def with_mishap(*args: Any) -> list[CtrArm]:
            return [
                replace(arm, embedding=replace(arm.embedding, mishaps=(mishap,)))
                for arm in plain(*args)
            ]

        patch.setattr(ctr_run, "ctr_arms", with_mishap)
        outcome = ctr_run.run(own, observer)

    (arm,) = outcome.results["arms"]
    (text,) = [warning for warning in observer.warnings if "embedding shard" in warning]
    (rows,) = re.findall(r"begins with ([\d,]+) rows of the last checkpoint", text)
    assert 0 < int(rows.replace(",", "")) < arm["rows"]
    assert arm["lost_pushes"] == 1  # the one that was applied, but not acknowledged
    assert arm["lost_versions"] in (0, 4)  # that of step 8, or before if it was being written
    assert arm["staleness_max"] == 0
    assert len(arm["losses"]) == STEPS
    assert arm["auc"] is not None
    assert [failure["source"] for failure in outcome.results["failures"]] == ["checkpoint"]


def test_a_dense_stage_that_dies_leaves_the_rows_and_the_run_goes_on(cluster: None) -> None:
    run = config(2)
    (arm,) = ctr_arms(run, click_task(run))
    arm = replace(
        arm, mishaps=((0, Mishap(point="B1", step=6)), (1, Mishap(point="F0", step=11, attempt=1)))
    )
    with (
        StageActors(2, label="killed-stage") as actors,
        Shards(2, label="killed-stage", nodes=nodes(), num_stages=2) as shards,
    ):
        pipeline = CtrPipeline(actors, arm, shards=shards, epoch_s=time.time())
        steps = [records[0].step for records in pipeline.train()]
        numbers = pipeline.settle_embeddings()
        shards.settle()
        books = ray.get([handle.books.remote() for handle in shards.handles])

    assert steps == list(range(STEPS))
    assert [failure.kind for failure in pipeline.failures] == ["died", "died"]
    assert numbers["in_use"] == 0
    # A step that all stages must run again is pushed again, and applied once.
    assert [book["version"] for book in books] == [STEPS] * 2
    assert all(book["open"] == 0 for book in books)
    assert all(book["staleness_max"] <= 2 for book in books)
