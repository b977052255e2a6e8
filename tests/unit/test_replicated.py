"""Tables of few ids, beside the dense network."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.embedding.replicated import Replicated
from stages.embedding.row_rules import Sgd, Uniform
from stages.embedding.shard import Shard
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import FEW_IDS, Table


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


def numbered() -> Replicated:
    rule = Sgd(lr=0.1)
    own = Table(name="city", dim=4, optimizer=rule, init=Uniform(0.3), placement="replicated")
    return Replicated((own,), seed=7, core="twin")


def test_ids_that_nobody_counted_are_numbered_as_training_sees_them() -> None:
    here = numbered()
    shard = Shard(
        (Table(name="city", dim=4, optimizer=Sgd(lr=0.1), init=Uniform(0.3)),),
        tau=0, seed=7, capacity="8MiB", slab="64KiB", pages="4k", core="twin",
    )  # fmt: skip
    wanted = np.array([-(2**63), -5, 0, 2**40], np.int64)
    there = shard.pull(1, {"city": IdSet(ids=wanted)}).tables["city"].weights
    first = here({"city": torch.tensor([[2**40, -5], [-5, 0]])})["city"]
    rest = here({"city": torch.from_numpy(wanted)})["city"]

    assert torch.equal(rest.detach(), torch.from_numpy(there))
    assert torch.equal(first.detach(), torch.from_numpy(there[[[3, 1], [1, 2]]]))
    (table,) = here.tables.values()
    assert table.known[:4].tolist() == [2**40, -5, 0, -(2**63)]
    torch.autograd.backward(first.sum())
    assert table.weight.grad[:4, 0].tolist() == [1.0, 2.0, 1.0, 0.0]


def test_unknown_ids_read_as_zeros_in_evaluation_and_get_no_number() -> None:
    here = numbered()
    here({"city": torch.tensor([3])})
    here.eval()
    rows = here({"city": torch.tensor([3, 4])})["city"]
    with torch.no_grad():
        here.train()
        again = here({"city": torch.tensor([3, 4])})["city"]

    assert rows[0].any()
    assert not rows[1].any()
    assert torch.equal(rows, again)
    other = numbered()
    other.load_state_dict(here.state_dict())
    other.eval()
    assert torch.equal(other({"city": torch.tensor([3, 4])})["city"], rows)


def test_more_ids_than_there_is_room_for_are_refused_with_a_way_out() -> None:
    here = numbered()
    here({"city": torch.arange(FEW_IDS)})
    with pytest.raises(ValueError, match=r"'city' .* has met 4097 ids, room is for 4096; shard it"):
        here({"city": torch.tensor([-1])})
