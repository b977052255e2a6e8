"""The row store, native and twin under one contract: rows, recency, capacity, snapshots, misuse."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from stages.embedding import row_core, row_store_twin, row_twin_rows
from stages.embedding.row_answers import Status
from stages.embedding.row_errors import (
    ConflictError,
    NonFiniteGradientError,
    SnapshotExpiredError,
    StoreForkedError,
    StoreFullError,
)
from stages.embedding.row_rules import Adagrad, Adam, Constant, Normal, RowAdagrad, Sgd, Uniform
from stages.embedding.row_store import RowStore, RowTable

CORES = ["native", "twin"]
both = pytest.mark.parametrize("core", CORES)
STORES: weakref.WeakKeyDictionary[RowTable, RowStore] = weakref.WeakKeyDictionary()
EXTREME = [0, -1, 2**63 - 1, -(2**63), 2**56 - 1, 2**56]


def make(core: str, capacity: int | str = "8MiB", **options: Any) -> RowStore:
    return RowStore(capacity=capacity, slab="64KiB", pages="4k", core=core, **options)


def table(core: str = "native", capacity: int | str = "8MiB", **options: Any) -> RowTable:
    options = {"dim": 8, "optimizer": Sgd(lr=0.5), "init": Uniform(0.1), "seed": 7} | options
    store = make(core, capacity)
    rows = store.table("user", **options)
    STORES[rows] = store
    return rows


def store_of(rows: RowTable) -> RowStore:
    return STORES[rows]


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def everything(rows: RowTable) -> dict[int, bytes]:
    """Every row to the bit, by key."""
    return {
        key: raw.tobytes()
        for part in rows.scan(limit=37)
        for key, raw in zip(part.keys.tolist(), part.raw, strict=True)
    }


def oldest_first(rows: RowTable) -> list[int]:
    found = [
        (r, k)
        for part in rows.scan(limit=100_000)
        for r, k in zip(part.recency.tolist(), part.keys.tolist(), strict=True)
    ]
    return [key for _, key in sorted(found)]


# --- rows -----------------------------------------------------------------------------------------


@both
def test_training_inserts_and_evaluation_does_not(core: str) -> None:
    rows = table(core)

    zeros, found = rows.lookup(ids(1, 2), train=False)
    assert not zeros.any()
    assert found.tolist() == [0, 0]
    assert rows.stats()["rows"] == 0

    first, found = rows.lookup(ids(1, 2, 1))
    assert found.tolist() == [1, 1, 1]
    assert rows.stats()["rows"] == 2
    assert (first[0] == first[2]).all()
    assert (rows.lookup(ids(1, 2), train=False)[0] == first[:2]).all()


@both
def test_extreme_ids_are_distinct_rows(core: str) -> None:
    rows = table(core)

    weights, _ = rows.lookup(ids(*EXTREME))

    assert rows.stats()["rows"] == len(EXTREME)
    assert len({row.tobytes() for row in weights}) == len(EXTREME)


@pytest.mark.parametrize("init", [Uniform(0.1), Normal(0.02, mean=1.0), Constant(0.5)])
def test_a_row_begins_as_seed_table_and_id_say_on_either_core(init: Any) -> None:
    keys = ids(*EXTREME, *range(50))
    one, other = (table(core, init=init, dim=5) for core in CORES)

    assert one.initial(keys).tobytes() == other.initial(keys).tobytes()
    assert one.lookup(keys[::-1].copy())[0][::-1].tobytes() == other.lookup(keys)[0].tobytes()


def test_another_seed_or_table_gives_other_rows() -> None:
    store = make("native")
    a = store.table("a", dim=4, init=Uniform(1.0), seed=1).initial(ids(5))
    b = store.table("b", dim=4, init=Uniform(1.0), seed=1).initial(ids(5))
    c = store.table("c", dim=4, init=Uniform(1.0), seed=2).initial(ids(5))

    assert len({x.tobytes() for x in (a, b, c)}) == 3


def test_uniform_rows_fill_their_range_and_normal_rows_their_deviation() -> None:
    keys = np.arange(20_000, dtype=np.int64)
    uniform = table(init=Uniform(0.1)).initial(keys)
    normal = table(init=Normal(0.02)).initial(keys)

    assert -0.1 <= uniform.min() < -0.0999
    assert 0.0999 < uniform.max() <= 0.1
    assert abs(uniform.mean()) < 1e-3
    assert normal.std() == pytest.approx(0.02, rel=0.01)


def test_two_tables_share_ids_but_no_row() -> None:
    store = make("native")
    a = store.table("a", dim=2)
    b = store.table("b", dim=2)
    one = ids(*EXTREME)

    a.run("put", np.arange(7, dtype=np.int64), one, np.ones((6, 2), np.float32))

    assert b.lookup(one, train=False)[1].tolist() == [0] * 6
    assert a.lookup(one, train=False)[1].tolist() == [1] * 6


# --- training -------------------------------------------------------------------------------------


@both
def test_an_evicted_id_loses_its_gradient_and_its_neighbours_keep_theirs(core: str) -> None:
    rows = table(core)
    before, _ = rows.lookup(ids(1, 2, 3))
    rows.remove(ids(2))

    result = rows.apply(ids(1, 2, 3), np.arange(24, dtype=np.float32).reshape(3, 8))

    assert (result.applied, result.dropped) == (2, 1)
    after, found = rows.lookup(ids(1, 2, 3), train=False)
    assert found.tolist() == [1, 0, 1]
    assert (after[0] == before[0] - 0.5 * np.arange(8, dtype=np.float32)).all()
    assert (after[2] == before[2] - 0.5 * np.arange(16, 24, dtype=np.float32)).all()


@both
def test_a_gradient_that_is_not_finite_is_refused_by_id_and_nothing_is_applied(core: str) -> None:
    rows = table(core)
    before, _ = rows.lookup(ids(1, 2, 3))
    gradients = np.ones((3, 8), np.float32)
    gradients[1, 3] = np.inf

    with pytest.raises(NonFiniteGradientError, match=r"1 of 3 ids are not finite \(2\)"):
        rows.apply(ids(1, 2, 3), gradients)

    assert rows.version == 0
    assert (rows.lookup(ids(1, 2, 3), train=False)[0] == before).all()
    status = rows.run("optimize", ids(0, 1, 2), ids(1, 2), gradients[:2]).statuses.tolist()
    assert status == [Status.OK, Status.NONFINITE]


@both
def test_staleness_counts_the_steps_between_reading_and_applying(core: str) -> None:
    rows = table(core)
    rows.lookup(ids(1))
    read = rows.version
    one = np.ones((1, 8), np.float32)
    rows.apply(ids(1), one)
    rows.apply(ids(1), one)

    assert rows.apply(ids(1), one, v_read=read).staleness == 2


# --- recency and capacity -------------------------------------------------------------------------


class Model:
    """What `lookup` promises of recency: present rows in call order, then new ones."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows, self.rows = max_rows, OrderedDict[int, None]()

    def lookup(self, keys: list[int]) -> None:
        for key in keys:
            if key in self.rows:
                self.rows.move_to_end(key)
        for key in keys:
            if key not in self.rows:
                if len(self.rows) == self.max_rows:
                    self.rows.popitem(last=False)
                self.rows[key] = None


def test_recency_is_exact_over_a_hundred_thousand_lookups() -> None:
    rows, model = table(max_rows=700, evict="lru", dim=1), Model(700)
    random = np.random.default_rng(3)
    for turn in range(3000):
        keys = (random.zipf(1.2, 35) % 2000).astype(np.int64)
        rows.lookup(keys)
        model.lookup(keys.tolist())
        if turn % 500 == 0:
            rows.apply(keys, np.ones((35, 1), np.float32))  # pushes do not touch recency
            rows.lookup(np.arange(2000, dtype=np.int64), train=False)  # nor does evaluation

    assert oldest_first(rows) == list(model.rows)
    assert rows.stats()["queue_bytes"] < 200_000


@both
def test_a_call_never_evicts_its_own_rows(core: str) -> None:
    rows = table(core, max_rows=4, evict="lru")
    rows.lookup(ids(1, 2, 3, 4))

    with pytest.raises(StoreFullError, match=r"1 of 5 ids found no room.*max_rows`=4"):
        rows.lookup(ids(5, 4, 6, 7, 8))

    assert sorted(everything(rows)) == [4, 5, 6, 7]


@pytest.mark.quick(1)
@both
def test_a_full_table_names_the_setting_and_still_trains(core: str) -> None:
    rows = table(core, capacity="512KiB", dim=16)

    with pytest.raises(StoreFullError, match=r"capacity is 524288 bytes.*Raise them"):
        rows.lookup(np.arange(5000, dtype=np.int64))

    there = np.array(sorted(everything(rows)), np.int64)
    assert 1000 < len(there) < 5000
    assert rows.apply(there, np.ones((len(there), 16), np.float32)).applied == len(there)
    assert rows.lookup(ids(-5), train=False)[1].tolist() == [0]
    rows.remove(there[:500].copy())
    assert rows.lookup(np.arange(100_000, 100_200, dtype=np.int64))[1].all()


def test_at_capacity_the_least_recent_rows_make_room() -> None:
    rows = table(capacity="512KiB", dim=16, evict="lru")
    for start in range(0, 40_000, 500):
        rows.lookup(np.arange(start, start + 500, dtype=np.int64))
    store = store_of(rows)

    assert store.stats()["evicted"] > 30_000
    assert store.stats()["used_bytes"] <= 512 * 1024
    last = oldest_first(rows)
    assert last == list(range(40_000 - len(last), 40_000))
    assert len(last) > 1000


def test_a_table_grows_one_segment_of_sixty_four_at_a_time_and_loses_nobody() -> None:
    rows = table("native", capacity="64MiB", dim=2)
    keys = np.random.default_rng(1).permutation(np.arange(100_000, dtype=np.int64))
    for part in np.split(keys, 100):
        rows.lookup(part)

    weights, found = rows.multi_get(keys)
    assert found.all()
    assert weights.tobytes() == rows.initial(keys).tobytes()
    store = store_of(rows)
    # Each segment doubled eight times: a pause moves a 64th of the rows. How
    # long one is depends on the machine's neighbours; that it is looked at does not.
    assert store.stats()["growths"] == 8 * 64
    assert store.stats()["longest_pause_ns"] > 0
    assert rows.stats()["slots"] * 0.80 >= 100_000


# --- snapshots ------------------------------------------------------------------------------------


@both
def test_a_snapshot_sees_one_moment(core: str) -> None:
    store = make(core)
    rows = store.table("t", dim=2, optimizer=Sgd(lr=1.0), init=Constant(1.0))
    rows.lookup(ids(1, 2, 3))

    with store.snapshot() as snapshot:
        rows.apply(ids(1), np.ones((1, 2), np.float32))
        rows.remove(ids(2))
        rows.lookup(ids(4))
        then, found = rows.multi_get(ids(1, 2, 3, 4), snapshot=snapshot)
        scanned = {k: w.tolist() for p in rows.scan(snapshot) for k, w in zip(p.keys, p.weights())}

    assert found.tolist() == [1, 1, 1, 0]
    assert then[:3].tolist() == [[1, 1]] * 3
    assert scanned == {1: [1, 1], 2: [1, 1], 3: [1, 1]}
    assert rows.multi_get(ids(1, 2, 3, 4))[1].tolist() == [1, 0, 1, 1]
    with pytest.raises(RuntimeError, match="closed"):
        rows.multi_get(ids(1), snapshot=snapshot)


def test_a_snapshot_that_pins_too_much_expires_by_name() -> None:
    store = make("native", snapshot_budget="64KiB")
    rows = store.table("t", dim=16, optimizer=Sgd(lr=1.0))
    keys = np.arange(500, dtype=np.int64)
    rows.lookup(keys)
    snapshot = store.snapshot()
    for _ in range(200):
        rows.apply(keys, np.ones((500, 16), np.float32))

    with pytest.raises(SnapshotExpiredError, match="raise `snapshot_budget`"):
        rows.multi_get(keys, snapshot=snapshot)
    assert store.stats()["snapshots_expired"] == 1


# --- transactions ---------------------------------------------------------------------------------


@both
def test_an_interactive_transaction_commits_all_or_nothing(core: str) -> None:
    store = make(core)
    rows = store.table("t", dim=2)
    with store.begin("t") as txn:
        assert txn.get(1) is None
        txn.put(1, np.array([1, 2], np.float32))
        txn.put(2, np.array([3, 4], np.float32))
    assert rows.multi_get(ids(1, 2))[0].tolist() == [[1, 2], [3, 4]]

    late = store.begin("t")
    seen = late.get(1)
    assert seen is not None
    late.put(2, seen)
    with store.begin("t") as txn:
        txn.put(1, np.array([9, 9], np.float32))
    with pytest.raises(ConflictError, match="begin again"):
        late.commit()
    with store.begin("t") as txn:
        txn.delete(1)

    assert rows.multi_get(ids(1, 2))[1].tolist() == [0, 1]
    assert rows.multi_get(ids(2))[0].tolist() == [[3, 4]]


@both
def test_an_absent_key_that_was_read_and_then_came_is_a_conflict(core: str) -> None:
    store = make(core)
    store.table("t", dim=1)
    late = store.begin("t")
    assert late.get(7) is None
    late.put(8, np.ones(1, np.float32))
    with store.begin("t") as txn:
        txn.put(7, np.ones(1, np.float32))

    with pytest.raises(ConflictError):
        late.commit()


@both
def test_following_a_chain_of_rows_reads_the_last(core: str) -> None:
    rows = table(core, dim=2, init=Constant(0.0), optimizer=None)
    links = np.array([[2], [3], [1]], np.int64).view(np.float32)
    rows.run("put", np.arange(4, dtype=np.int64), ids(1, 2, 3), links)

    result = rows.run("follow", ids(0, 1, 2), ids(1, 5), hops=2)

    assert result.out is not None
    assert result.out[0].tobytes() == np.int64(1).tobytes()  # 1 -> 2 -> 3, which names 1
    assert result.seen.tolist() == [1, 0]


@both
def test_compare_and_put_changes_a_row_only_if_it_is_what_was_said(core: str) -> None:
    rows = table(core, dim=2, init=Constant(0.5), optimizer=None)
    rows.lookup(ids(1, 2))
    pairs = np.array([[0.5, 0.5], [1, 1], [0.25, 0.5], [2, 2]], np.float32)

    statuses = rows.run("compare_and_put", ids(0, 1, 2), ids(1, 2), pairs).statuses.tolist()

    assert statuses == [Status.OK, Status.CONFLICT]
    assert rows.multi_get(ids(1, 2))[0].tolist() == [[1, 1], [0.5, 0.5]]


def test_interleaved_transactions_do_what_sequential_ones_do_and_really_suspend() -> None:
    random = np.random.default_rng(0)
    keys = random.integers(0, 3000, 5000).astype(np.int64)
    offsets = np.arange(0, 5001, 10, dtype=np.int64)
    payload = random.integers(-8, 8, (5000, 4)).astype(np.float32)
    results = []
    for batch, interleave in ((1, False), (8, True), (16, True)):
        rows = table(dim=4, init=Constant(0.0))
        result = rows.run("add", offsets, keys, payload, batch=batch, interleave=interleave)
        assert result.ok
        store = store_of(rows)
        assert (store.stats()["resumes"] > 0) == interleave
        results.append({k: w for p in rows.scan() for k, w in zip(p.keys, p.weights().tolist())})

    assert results[0] == results[1] == results[2]


# --- misuse ---------------------------------------------------------------------------------------


@both
def test_arrays_that_would_need_a_copy_are_refused(core: str) -> None:
    rows = table(core)

    with pytest.raises(TypeError, match=r"keys must be int64, got int32; convert"):
        rows.lookup(np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="not C-contiguous"):
        rows.lookup(np.arange(6, dtype=np.int64)[::2])
    with pytest.raises(TypeError, match=r"numpy array of int64, got list"):
        rows.lookup([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out must have the shape \[2, 8\], got \[2, 7\]"):
        rows.lookup(ids(1, 2), np.empty((2, 7), np.float32))
    fixed = np.empty((1, 8), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        rows.lookup(ids(1), fixed)
    with pytest.raises(ValueError, match="offsets go from 0"):
        rows.run("get", ids(0, 3), ids(1))
    with pytest.raises(ValueError, match="procedures are"):
        rows.run("drop", ids(0, 1), ids(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 10, "chunks": 4}, "multiple of chunks"),
        ({"dim": 0}, "positive"),
        ({"dim": 18, "chunks": 9}, "at most 8"),
        ({"evict": "lfu"}, "evict is"),
        ({"decay": 0.0}, "decay is in"),
    ],
)
def test_a_table_that_cannot_be_is_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(**options)


def test_a_store_cannot_be_pickled_or_used_after_a_fork() -> None:
    rows = table()
    rows.lookup(ids(1))
    store = store_of(rows)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(store)

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest, no assert: this process ends here
        try:
            rows.lookup(np.array([1], np.int64))
            os.write(writing, b"used")
        except StoreForkedError:
            os.write(writing, b"refused")
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)

    assert os.read(reading, 100) == b"refused"
    os.close(reading)


def test_other_threads_run_while_the_store_works() -> None:
    rows = table(capacity="256MiB", dim=32, expected_rows=200_000)
    keys = np.arange(200_000, dtype=np.int64)
    ticks: list[int] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(len(ticks))

    beside = threading.Thread(target=tick)
    rows.lookup(keys[:10].copy())
    beside.start()
    before = len(ticks)
    rows.core.lookup(keys, np.empty((200_000, 32), np.float32), np.empty(200_000, np.uint8), 0)
    during = len(ticks) - before
    done.set()
    beside.join()

    assert during > 100


# --- which core -----------------------------------------------------------------------------------


def test_the_native_core_is_in_use_and_says_so() -> None:
    assert RowStore(capacity="16MiB").native is True
    assert make("twin").stats()["native"] is False


def test_falling_back_to_the_twin_is_logged_once_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = row_core.ROWS_ABI
    monkeypatch.setattr(row_core, "ROWS_ABI", 99)
    monkeypatch.setattr(row_core, "_warned", False)
    with caplog.at_level(logging.WARNING, logger="ray_pipe"):
        assert row_core.core()[0] is row_store_twin
        assert row_core.core()[1] is False

    assert len(caplog.records) == 1
    assert f"row store ABI {built}, this source needs 99; rebuild" in caplog.text
    with pytest.raises(ImportError, match="needs 99"):
        row_core.core("native")
    with pytest.raises(ValueError, match='core is "native", "twin"'):
        row_core.core("fast")


# --- native equals twin ---------------------------------------------------------------------------


@both
def test_alive_tells_which_chunks_rows_have_and_touches_nothing(core: str) -> None:
    rows = table(core, chunks=4, evict="lru", max_rows=9)
    rows.lookup(ids(1, 2))
    gradient = np.zeros((2, 8), np.float32)
    gradient[0, 2:4] = gradient[1, 0:2] = gradient[1, 6:8] = 1.0
    rows.apply(ids(1, 2), gradient)
    rows.prune(keep=3 / 8)

    assert rows.alive(ids(2, 1, 7)).tolist() == [0b1001, 0b0010, 0]
    assert oldest_first(rows) == [1, 2]
    assert rows.stats()["rows"] == 2


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    "optimizer", [Sgd(lr=0.1), Adagrad(lr=0.1), RowAdagrad(lr=0.1), Adam(lr=0.1)]
)
@pytest.mark.parametrize(("dim", "chunks"), [(1, 1), (7, 1), (8, 4), (24, 8), (9, 3)])
def test_training_and_pruning_give_the_twin_s_bits(optimizer: Any, dim: int, chunks: int) -> None:
    random = np.random.default_rng(dim)
    pair = [
        table(core, dim=dim, chunks=chunks, optimizer=optimizer, max_rows=60, evict="lru")
        for core in CORES
    ]
    for turn in range(40):
        keys = random.integers(0, 90, 20).astype(np.int64)
        gradients = (random.standard_normal((20, dim)) * 10.0 ** random.integers(-6, 3)).astype(
            np.float32
        )
        counts = random.integers(1, 5, 20).astype(np.float32)
        seen = [rows.lookup(keys)[0].tobytes() for rows in pair]
        assert seen[0] == seen[1]
        assert len({rows.apply(keys, gradients, counts=counts) for rows in pair}) == 1
        if chunks > 1 and turn % 7 == 6:
            kept, taper = float(random.uniform(0.2, 0.8)), float(random.choice([0.0, 1.5, 3.0]))
            assert len({rows.prune(keep=kept, taper=taper) for rows in pair}) == 1

    assert everything(pair[0]) == everything(pair[1])
    assert oldest_first(pair[0]) == oldest_first(pair[1])
    same = ("rows", "alive_chunks", "steps", "epoch", "row_bytes")
    assert len({tuple(rows.stats()[name] for name in same) for rows in pair}) == 1


def fused_sgd(self: Any, row: Any, gradient: Any, count: Any, step: Any, epoch: int) -> Any:
    """The mutant: a multiply-add that rounds once, as some compilers make it."""
    weights = (
        self.read(row).astype(np.float64) + float(step[0]) * gradient.astype(np.float64)
    ).astype(np.float32)
    return self.rewrite(row, weights)


def test_mutant_a_fused_multiply_add_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.arange(50, dtype=np.int64)
    gradients = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)

    def both_cores() -> list[dict[int, bytes]]:
        pair = [table(core, optimizer=Sgd(lr=0.3)) for core in CORES]
        for rows in pair:
            rows.lookup(keys)
            rows.apply(keys, gradients)
        return [everything(rows) for rows in pair]

    native, twin = both_cores()
    assert native == twin
    monkeypatch.setattr(row_twin_rows.Shape, "optimize", fused_sgd)
    native, twin = both_cores()
    assert native != twin


def test_mutant_pushes_that_refresh_recency_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = row_store_twin.RowTable.apply

    def touching(self: Any, keys: Any, *rest: Any) -> Any:
        for key in keys.tolist():
            self.touch(key)
        return apply(self, keys, *rest)

    def orders() -> list[list[int]]:
        pair = [table(core, evict="lru") for core in CORES]
        for rows in pair:
            rows.lookup(ids(1, 2, 3))
            rows.apply(ids(1), np.ones((1, 8), np.float32))
        return [oldest_first(rows) for rows in pair]

    assert orders() == [[1, 2, 3], [1, 2, 3]]
    monkeypatch.setattr(row_store_twin.RowTable, "apply", touching)
    assert orders() == [[1, 2, 3], [2, 3, 1]]


# --- pruning --------------------------------------------------------------------------------------


@both
def test_pruned_chunks_read_zero_and_regrow_from_zero_with_fresh_state(core: str) -> None:
    rows = table(core, dim=8, chunks=4, optimizer=Adagrad(lr=0.1))
    rows.lookup(ids(1))
    loud = np.repeat(np.array([[4, 3, 2, 1]], np.float32), 2, axis=1)
    rows.apply(ids(1), loud)

    assert rows.prune(keep=0.5) == (1, 2, 0, 0, 2)
    assert (rows.multi_get(ids(1))[0][0, 4:] == 0).all()
    rows.apply(ids(1), loud)  # alive chunks only
    assert (rows.multi_get(ids(1))[0][0, 4:] == 0).all()
    quiet = np.zeros((1, 8), np.float32)
    quiet[0, 6:] = 100  # pruned, but still scored
    rows.apply(ids(1), quiet)
    assert rows.prune(keep=0.5) == (1, 1, 1, 0, 2)

    part = next(rows.scan())
    assert part.alive.tolist() == [0b1001]
    weights, sums = part.parts()[0]
    assert weights[6:].tolist() == [0, 0]
    assert sums[6:].tolist() == [0, 0]
    assert sums[:2].tolist() == [32, 32]


@both
def test_utility_counts_occurrences_and_decays_with_each_prune(core: str) -> None:
    rows = table(core, dim=2, chunks=2, decay=0.5, utility_scale=1.0)
    rows.lookup(ids(1, 2))
    rows.apply(ids(1, 2), np.ones((2, 2), np.float32), counts=np.array([1000, 1], np.float32))

    def utilities() -> dict[int, list[float]]:
        part = next(rows.scan())
        return dict(zip(part.keys.tolist(), part.utilities().tolist(), strict=True))

    assert utilities() == {1: [1000, 1000], 2: [1, 1]}
    rows.prune(keep=1.0)
    rows.prune(keep=1.0)
    rows.apply(ids(2), np.zeros((1, 2), np.float32))
    assert utilities()[2] == [0.25, 0.25]


@both
def test_a_row_without_chunks_and_without_utility_is_dropped(core: str) -> None:
    rows = table(core, dim=2, chunks=2)
    rows.lookup(ids(1, 2))
    rows.apply(ids(1), np.ones((1, 2), np.float32))

    assert rows.prune(keep=0.0).dropped_rows == 1
    assert list(everything(rows)) == [1]


@both
@pytest.mark.parametrize(("taper", "alive"), [(0.0, [0b1111, 0, 0]), (3.0, [0b0011, 0b1, 0b1])])
def test_a_taper_gives_cold_rows_their_first_chunk_before_hot_rows_their_last(
    core: str, taper: float, alive: list[int]
) -> None:
    rows = table(core, dim=8, chunks=4)
    rows.lookup(ids(1, 2, 3))
    rows.apply(ids(1, 2, 3), np.repeat(np.array([[9], [1], [1]], np.float32), 8, axis=1))
    rows.apply(ids(2), np.full((1, 8), 1.0, np.float32))

    rows.prune(keep=4 / 12, taper=taper)

    assert rows.alive(ids(1, 2, 3)).tolist() == alive


@pytest.mark.slow
def test_rows_pruned_again_and_again_stay_in_as_few_slabs_as_hold_them() -> None:
    random, slab = np.random.default_rng(0), 16 << 10
    store = RowStore(capacity="64MiB", pages="4k", slab=slab, core="native")
    rows = store.table("t", dim=64, chunks=8, optimizer=RowAdagrad(lr=0.1))
    rows.lookup(np.arange(40_000, dtype=np.int64))
    unused = []
    for _ in range(6):
        for _ in range(20):
            part = np.unique((40_000 * random.random(2000) ** 3).astype(np.int64))
            rows.apply(part, random.standard_normal((len(part), 64)).astype(np.float32))
        rows.prune(keep=0.15, taper=1.0)
        store.compact()
        stats = rows.stats()
        cells = stats["rows"] * (stats["row_bytes"] - 8 * 32) + stats["alive_chunks"] * 32
        unused.append((store.stats()["used_bytes"] - stats["index_bytes"] - cells) / slab)

    # Nine sizes of rows, each with less than a slab unused, and with one that is being cut.
    assert max(unused) < 18, unused


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_pruning_gives_memory_back_to_the_system() -> None:
    store = RowStore(capacity="512MiB", pages="4k", slab="256KiB", core="native")
    rows = store.table("t", dim=64, chunks=8, optimizer=RowAdagrad(lr=0.1), init=Uniform(0.1))
    keys = np.arange(200_000, dtype=np.int64)
    before = resident_bytes()
    for part in np.split(keys, 20):
        rows.lookup(part)
        rows.apply(part, np.random.default_rng(0).standard_normal((10_000, 64)).astype(np.float32))
    full = resident_bytes() - before
    target = int(0.35 * store.stats()["used_bytes"])

    rows.prune(target)
    store.compact()

    left = resident_bytes() - before
    used = store.stats()["used_bytes"]
    assert rows.stats()["alive_chunks"] < 0.35 * 8 * 200_000
    assert used < 1.1 * target
    assert left < 0.5 * full
    assert rows.multi_get(keys)[1].all()


# --- checkpoints ----------------------------------------------------------------------------------


@both
def test_a_restored_table_goes_on_bit_for_bit(core: str) -> None:
    random = np.random.default_rng(5)
    options: dict[str, Any] = {"dim": 8, "chunks": 4, "optimizer": Adam(lr=0.1)}
    options |= {"max_rows": 50, "evict": "lru"}
    first = table(core, **options)

    def train(rows: RowTable, turns: list[Any]) -> None:
        for keys, gradients in turns:
            rows.lookup(keys)
            rows.apply(keys, gradients)

    def some(count: int) -> list[Any]:
        return [
            (
                random.integers(0, 80, 12).astype(np.int64),
                random.standard_normal((12, 8)).astype(np.float32),
            )
            for _ in range(count)
        ]

    train(first, some(20))
    first.prune(keep=0.7)
    parts = list(first.scan(limit=7))
    order = np.argsort(np.concatenate([p.recency for p in parts]), kind="stable")
    second = table(core, **options)
    second.restore(
        np.concatenate([p.keys for p in parts])[order],
        np.ascontiguousarray(np.concatenate([p.raw for p in parts])[order]),
    )
    second.restore_progress(steps=first.stats()["steps"], epoch=first.stats()["epoch"])
    later = some(30)
    train(first, later)
    train(second, later)

    assert everything(first) == everything(second)
    assert oldest_first(first) == oldest_first(second)


@both
def test_a_store_that_nobody_holds_is_gone_at_once(core: str) -> None:
    gc.collect()
    gc.disable()
    try:
        store = make(core)
        rows = store.table("user", dim=4, evict="lru")
        rows.lookup(ids(1, 2, 3))
        known = weakref.ref(store), weakref.ref(rows)
        del store, rows

        assert [one() for one in known] == [None, None]
    finally:
        gc.enable()
