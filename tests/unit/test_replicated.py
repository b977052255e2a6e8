"""Tables of few ids, beside the dense network."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.embedding.replicated import Replicated
from stages.embedding.row_rules import Sgd, Uniform
from stages.embedding.shard import Shard
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import Table


def tables(placement: str) -> tuple[Table, ...]:
    rule = Sgd(lr=0.1)
    few = Table(
        name="hour", dim=4, optimizer=rule, init=Uniform(0.3), placement=placement, num_ids=24
    )
    return (few, Table(name="user", dim=4, optimizer=rule))


def test_rows_begin_as_they_would_on_a_shard_and_are_dense_parameters() -> None:
    here = Replicated(tables("replicated"), seed=7, core="twin")
    shard = Shard(
        tables("sharded"), tau=0, seed=7, capacity="8MiB", slab="64KiB", pages="4k", core="twin"
    )
    there = shard.pull(1, {"hour": IdSet(ids=np.arange(24, dtype=np.int64))}).tables["hour"]

    rows = here({"hour": torch.arange(24).reshape(2, 12)})["hour"]

    assert rows.shape == (2, 12, 4)
    assert rows.detach().reshape(24, 4).numpy().tobytes() == there.weights.tobytes()
    assert [tuple(parameter.shape) for parameter in here.parameters()] == [(24, 4)]


def test_a_shard_leaves_replicated_tables_alone() -> None:
    shard = Shard(
        tables("replicated"), tau=0, capacity="8MiB", slab="64KiB", pages="4k", core="twin"
    )

    assert sorted(shard.tables) == ["user"]


def test_ids_beyond_the_table_and_unknown_tables_are_refused() -> None:
    here = Replicated(tables("replicated"), core="twin")

    with pytest.raises(ValueError, match="ids 0 to 23, got 3 to 24; raise its `num_ids`"):
        here({"hour": torch.tensor([3, 24])})
    with pytest.raises(ValueError, match=r"replicated tables are \['hour'\], got 'user'"):
        here({"user": torch.tensor([3])})
