"""Embedding shards that die in the middle of a push, on real Ray."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import ray

from ray_pipe.cluster import StageActors, nodes
from ray_pipe.config import RunConfig
from ray_pipe.ctr_pipeline import CtrPipeline
from ray_pipe.ctr_workload import click_task, ctr_arms
from ray_pipe.shards import Shards
from stages.embedding.embedding_spec import ShardMishap
from stages.mishap import Mishap

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STEPS = 16


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
    # A step that all stages must run again is pushed again: at most one for each failure.
    assert all(STEPS <= book["version"] <= STEPS + 2 for book in books)
    assert all(book["open"] == 0 for book in books)
    assert all(book["staleness_max"] <= 2 for book in books)
