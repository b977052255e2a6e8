"""The contract of embeddings.md 7.2 over ten thousand batches, and checkpoints in their midst."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.embedding.row_rules import Sgd, Uniform
from stages.embedding.shard import Shard
from stages.embedding.shard_files import fill_shard
from stages.embedding.shard_folders import save_shards, saved_shards
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import Table

STORE: dict[str, Any] = {"capacity": "4MiB", "slab": "64KiB", "pages": "4k"}


def shard(tau: int, kind: type[Shard] = Shard) -> Shard:
    table = Table("user", dim=2, optimizer=Sgd(lr=0.1), init=Uniform(0.5))
    return kind((table,), tau=tau, seed=7, **STORE)


def ids(*keys: int) -> dict[str, IdSet]:
    return {"user": IdSet(ids=np.array(sorted(keys), np.int64))}


def gradient(value: float = 1.0) -> dict[str, Any]:
    return {"user": np.full((2, 2), value, np.float32)}


def ten_thousand(one: Shard, *, pools: list[int], seed: int = 0, steps: int = 10_000) -> list[str]:
    """Workers that pull when their pool has a permit and push after a random delay, in any order.

    `pools` holds the permits of each pool; two workers share one pool, or have one each.
    """
    dice = random.Random(seed)
    free = list(pools)
    under_way: list[tuple[int, int, int]] = []  # ticket, version read, pool
    waiting: dict[int, int] = {}  # pushed and not yet settled: the pool of a ticket
    outcomes: list[str] = []
    ticket = 0
    while len(outcomes) < steps:
        may_pull = [pool for pool in range(len(free)) if free[pool]]
        if may_pull and (not under_way or dice.random() < 0.5):
            pool = dice.choice(may_pull)
            free[pool] -= 1
            ticket += 1
            pulled = one.pull(ticket, ids(ticket % 7, 50 + ticket % 5))
            under_way.append((ticket, pulled.version, pool))
            continue
        if not under_way:
            raise AssertionError("every permit waits for a push that is held: a deadlock")
        done, v_read, pool = under_way.pop(dice.randrange(len(under_way)))
        waiting[done] = pool
        for settled in one.push(done, v_read, gradient()):
            outcomes.append(settled.outcome)
            free[waiting.pop(settled.ticket)] += 1
    return outcomes


@pytest.mark.quick(1)
@pytest.mark.parametrize("tau", [0, 1, 4, 8])
def test_in_ten_thousand_batches_nothing_is_older_than_tau_and_the_bound_is_reached(
    tau: int,
) -> None:
    one = shard(tau)

    outcomes = ten_thousand(one, pools=[tau + 1])
    assert set(outcomes) == {"applied"}
    assert max(one.counts.staleness) == tau
    assert one.version == sum(one.counts.staleness.values()) == len(outcomes)
    assert one.counts.max_held <= tau


def test_mutant_a_pool_for_each_of_two_workers_is_refused_by_the_shard() -> None:
    one = shard(4)

    outcomes = ten_thousand(one, pools=[5, 5], steps=1000)
    assert "refused" in outcomes
    assert max(one.counts.staleness) == 4  # what was applied kept the bound nevertheless


def test_mutant_applying_pushes_as_they_come_breaks_the_bound() -> None:
    class Hasty(Shard):
        def push(self, ticket: int, v_read: int, gradients: Any, number: Any = None) -> Any:
            self._open.move_to_end(ticket, last=False)
            return super().push(ticket, v_read, gradients, number)

    outcomes = ten_thousand(shard(4, Hasty), pools=[5], steps=1000)
    assert "refused" in outcomes


def test_a_checkpoint_between_pushes_is_one_version_and_holds_nothing_under_way(
    tmp_path: Path,
) -> None:
    """tau = 8, five steps applied, three under way, one of them pushed early and held."""
    one, plain = shard(8), shard(8)
    for ticket in range(1, 9):
        one.pull(ticket, ids(1, 2))
    for ticket in (1, 2, 3, 4, 5, 7):
        one.push(ticket, 0, gradient(float(ticket)))
    for ticket in range(1, 6):
        plain.pull(ticket, ids(1, 2))
        plain.push(ticket, ticket - 1, gradient(float(ticket)))

    save_shards([one], tmp_path)
    loaded = shard(8)
    fill_shard(loaded, (part.read() for part in saved_shards(tmp_path)), num_shards=1)
    assert (one.version, loaded.version) == (5, 5)
    wanted = {"user": np.array([1, 2], np.int64)}
    assert (loaded.read(wanted)["user"].weights == plain.read(wanted)["user"].weights).all()
    assert loaded.num_open == 0
