"""How many threads a stage computes with: one unless it is asked for, and where it computes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray.cloudpickle
import torch
from torch import Tensor, nn

from ray_pipe.config import RunConfig
from ray_pipe.pipeline import Pipeline
from ray_pipe.plans import arms_of
from ray_pipe.stage_actors import StageActors
from ray_pipe.workload import blocks_workload, gpt_workload
from stages.loss import cross_entropy

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

STAGES = 2


@pytest.fixture(scope="module")
def actors(cluster: None) -> Iterator[StageActors]:
    with StageActors(STAGES) as pool:
        yield pool


class Counts(nn.Module):
    """Computes only with the number of threads that it expects, in the thread that computes."""

    def __init__(self, expected: int) -> None:
        super().__init__()
        self.expected = expected
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, value: Tensor) -> Tensor:
        found = torch.get_num_threads()
        assert found == self.expected, f"{found} threads, not {self.expected}"
        return value @ self.weight if value.shape[-1] == 4 else value @ self.weight.T


class Points:
    digest = "points"

    def __len__(self) -> int:
        return 8

    def batch(self, ids: Any) -> Any:
        from ray_pipe.data import Batch

        return Batch(inputs=torch.ones(len(ids), 4), targets=torch.zeros(len(ids)).long())


@pytest.mark.parametrize(
    ("threads", "expected"),
    [("1", 1), ("3", 3), ("auto", max(1, len(os.sched_getaffinity(0)) // STAGES))],
)
def test_each_stage_computes_with_so_many_threads(
    actors: StageActors, threads: str, expected: int
) -> None:
    config = RunConfig.from_dict(
        {
            "compare": [],
            "codec.name": "fp32",
            "steps": 2,
            "pipeline.stages": STAGES,
            "pipeline.threads": threads,
            "pipeline.micro_batches": 2,
            "pipeline.micro_batch_size": 2,
            "network.bandwidth_bps": "unlimited",
        }
    )
    samples: Any = Points()
    blocks = [Counts(expected), Counts(expected)]
    work = blocks_workload(lambda: blocks, loss=cross_entropy, samples=samples, seed=0)
    pipeline = Pipeline(actors, arms_of(config, work)[0], epoch_s=time.time())

    assert len(list(pipeline.train())) == 2
    assert [info["threads"] for info in pipeline.infos] == [expected] * STAGES


def test_the_default_is_one_thread() -> None:
    config = RunConfig()

    assert config.pipeline.num_threads == 1
    assert all(
        spec.threads == 1 for arm in arms_of(config, gpt_workload(config)) for spec in arm.specs()
    )
