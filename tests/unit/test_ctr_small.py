"""Tables of few ids in the dense network: numbered ids, rows as parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ray_pipe.config import RunConfig
from ray_pipe.ctr_small import SmallRows
from ray_pipe.ctr_workload import click_task
from ray_pipe.errors import ConfigError
from stages.embedding.row_rules import Uniform


def config(**changes: Any) -> RunConfig:
    return RunConfig.from_dict({"task": "ctr", "data.num_samples": 2000, **changes})


def test_numbers_become_rows_and_everything_else_passes_by() -> None:
    block = SmallRows(
        num_dense=1, names=("a", "b"), num_ids=(3, 2), dim=2, init=Uniform(0.5), seed=7
    )
    x = torch.tensor([[9.0, 0.0, 1.0, 5.0, 6.0], [8.0, 3.0, 2.0, 7.0, 4.0]], requires_grad=True)

    y = block(x)
    y.sum().backward()

    weights = {name: e.weight for name, e in block.replicated.tables.items()}
    assert y[:, :3].tolist() == [[9.0, 5.0, 6.0], [8.0, 7.0, 4.0]]
    assert torch.equal(y[0, 3:5], weights["a"][0])
    assert torch.equal(y[0, 5:7], weights["b"][1])
    assert y[1, 3:].tolist() == [0.0] * 4  # ids that training never saw
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 0.0, 0.0, 1.0, 1.0]] * 2
    assert weights["a"].grad is not None
    assert weights["a"].grad[0].tolist() == [1.0, 1.0]


def test_small_tables_leave_the_shards_and_the_same_clicks_are_seen() -> None:
    plain, small = click_task(config()), click_task(config(**{"embedding.replicate": 200}))
    samples: Any = small.workload.samples
    whole: Any = plain.workload.samples
    batch, before = samples.clicks(range(50)), whole.clicks(range(50))

    assert [table.name for table in plain.tables] == ["id0", "id1", "id2", "id3", "id4"]
    assert [table.name for table in small.tables] == ["id0", "id1", "id2"]
    assert small.workload.num_blocks == plain.workload.num_blocks + 1
    assert batch.dense.shape == (50, 4 + 2)
    assert torch.equal(batch.dense[:, :4], before.dense)
    numbers, ids = batch.dense[:, 5].numpy(), before.bags[4].ids.numpy()
    assert len(set(zip(numbers.tolist(), ids.tolist()))) == len(np.unique(ids))
    model = small.workload.build(0, small.workload.num_blocks)
    assert model(torch.cat([batch.dense, torch.zeros(50, 3 * 16)], dim=1)).shape == (50,)


def test_a_run_without_any_sharded_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replicate=100000.*lower it"):
        click_task(config(**{"embedding.replicate": 100_000}))
