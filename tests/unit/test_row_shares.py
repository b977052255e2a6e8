"""LRU tables of one store: who came first does not keep all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stages.embedding import row_store
from stages.embedding.row_errors import StoreFullError
from stages.embedding.row_rules import RowAdagrad, Sgd, Uniform
from stages.embedding.row_store import RowStore
from stages.embedding.row_table import RowTable
from stages.embedding.shard import Shard
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import Table

CORES = ["native", "twin"]


def ids(start: int, num: int) -> Any:
    return np.arange(start, start + num, dtype=np.int64)


def tables(core: str, *dims: int, capacity: str = "2MiB") -> tuple[RowStore, list[RowTable]]:
    store = RowStore(capacity=capacity, slab="16KiB", pages="4k", core=core)
    made = [
        store.table(f"t{i}", dim=dim, optimizer=Sgd(lr=0.1), init=Uniform(0.1), evict="lru")
        for i, dim in enumerate(dims)
    ]
    return store, made


def filled(table: RowTable) -> int:
    """Rows until the table turns over its own."""
    start = 0
    while not table.evicted:
        table.lookup(ids(start, 500))
        start += 500
    return start


def turn_over(table: RowTable) -> None:
    for step in range(60):
        table.lookup(ids(300 * step, 300))


def nbytes(table: RowTable) -> int:
    stats = table.stats()
    return stats["rows"] * stats["row_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("dims", [(8, 64), (32, 24)])
def test_a_table_that_comes_later_gets_room_from_the_one_that_filled_the_store(
    core: str, dims: tuple[int, int]
) -> None:
    store, (first, second) = tables(core, *dims)
    filled(first)
    newest = np.sort(np.concatenate([part.keys for part in first.scan()]))[-500:]

    for step in range(40):
        weights, seen = second.lookup(ids(300 * step, 300))
        assert seen.all()
        assert np.array_equal(weights, second.initial(ids(300 * step, 300)))
    assert nbytes(second) > nbytes(first) / 3
    assert first.stats()["rows"] > 500
    assert first.multi_get(newest)[1].all()  # those that were used longest ago went
    assert store.stats()["used_bytes"] < 1.05 * store.capacity  # queues ask nobody
    for table in (first, second):
        assert table.inserted - table.evicted == table.stats()["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("core", CORES)
def test_tables_that_take_turns_settle_with_fair_parts(core: str) -> None:
    """Three of one size and the same use: none below half of another, and few rows are moved."""
    store, group = tables(core, 16, 16, 16)
    filled(group[0])

    random = np.random.default_rng(0)
    for _ in range(80):
        for table in group:
            table.lookup(np.unique(random.integers(0, 6000, 200)))
    parts = sorted(nbytes(table) for table in group)
    assert 2.5 * parts[0] > parts[-1]
    takes: list[str] = []
    compact = store.compact
    store.compact = lambda: (takes.append("compact"), compact())[1]  # type: ignore[method-assign]
    for _ in range(80):
        for table in group:
            table.lookup(np.unique(random.integers(0, 6000, 200)))
    assert len(takes) < 20


@pytest.mark.quick(1)
@pytest.mark.parametrize("core", CORES)
def test_mutant_a_table_that_evicts_only_its_own_finds_no_room(
    core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "take_room", lambda *_, **__: False)
    _, (first, second) = tables(core, 8, 64)
    filled(first)

    with pytest.raises(StoreFullError, match="Raise them, or send fewer") as error:
        turn_over(second)
    assert "lru" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("core", CORES)
def test_a_call_that_fits_nowhere_is_refused_and_half_of_the_others_is_left(core: str) -> None:
    _, (first, second) = tables(core, 64, 64, capacity="1MiB")
    filled(first)
    with pytest.raises(StoreFullError, match="found no room"):
        second.lookup(ids(0, 4500))

    assert first.stats()["rows"] > 0
    second.lookup(ids(6000, 20))
    first.lookup(ids(0, 20))


@pytest.mark.quick(1)
@pytest.mark.parametrize("core", CORES)
def test_tables_without_lru_keep_what_they_have(core: str) -> None:
    store, (first,) = tables(core, 8)
    kept = store.table("kept", dim=8, optimizer=Sgd(lr=0.1))
    kept.lookup(ids(0, 2000))
    filled(first)

    with pytest.raises(StoreFullError, match='use evict="lru"'):
        kept.lookup(ids(2000, 3000))
    assert kept.multi_get(ids(0, 2000))[1].all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("core", CORES)
def test_a_shard_with_a_capacity_and_no_disk_trains_every_table(core: str) -> None:
    """As `--capacity` without `--spill` builds them: no push of a step loses a row."""
    names = ("a", "b", "c")
    made = tuple(
        Table(name, dim=dim, optimizer=RowAdagrad(lr=0.1), evict="lru")
        for name, dim in zip(names, (8, 16, 16), strict=True)
    )
    shard = Shard(made, tau=0, capacity="2MiB", slab="16KiB", pages="4k", core=core)
    for ticket in range(1, 31):
        counts = (900 if ticket < 15 else 100, 300, 300)
        wanted = {
            name: IdSet(ids=ids(ticket * num, num)) for name, num in zip(names, counts, strict=True)
        }
        v_read = shard.pull(ticket, wanted).version
        gradients = {
            table.name: np.ones((len(wanted[table.name].ids), table.dim), np.float32)
            for table in made
        }
        (settled,) = shard.push(ticket, v_read, gradients)
        assert settled.outcome == "applied"

    assert shard.stats()["dropped_rows"] == 0
    assert shard.stats()["evictions"] > 1000
    sizes = [nbytes(shard.store[name]) for name in names]
    assert 4 * min(sizes) > max(sizes)
