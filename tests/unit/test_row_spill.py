"""Rows below the table: they come back bit for bit and are never lost by a disk that fails."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.embedding import row_store, spill_lock
from stages.embedding.row_errors import RowsOnDiskError, SpillBusyError, StoreFullError
from stages.embedding.row_rules import Adagrad, Adam, RowAdagrad, Uniform
from stages.embedding.row_spill import LmdbTier, Name, SpillCorruptError, SpillingTable
from stages.embedding.row_store import RowStore
from stages.embedding.shard import Shard
from stages.embedding.spill_lock import FolderLock
from stages.embedding.tables import Table

CORES = ["native", "twin"]
both = pytest.mark.parametrize("core", CORES)


def spilling(core: str, path: Path, **options: Any) -> SpillingTable:
    store = RowStore(capacity="8MiB", slab="64KiB", pages="4k", core=core)
    options = {"dim": 8, "chunks": 4, "optimizer": Adam(lr=0.1), "max_rows": 40} | options
    table = store.table("t", init=Uniform(0.1), spill=True, **options)
    return SpillingTable(store, table, LmdbTier(path, max_bytes=1 << 28))


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def everything(rows: Any) -> dict[int, bytes]:
    return {
        key: raw.tobytes()
        for part in rows.scan(limit=17)
        for key, raw in zip(part.keys.tolist(), part.raw, strict=True)
    }


@both
def test_rows_come_back_bit_for_bit_with_state_and_utilities(core: str, tmp_path: Path) -> None:
    rows = spilling(core, tmp_path)
    random = np.random.default_rng(0)
    some = np.arange(30, dtype=np.int64)
    rows.lookup(some)
    for _ in range(3):
        rows.table.apply(some, random.standard_normal((30, 8)).astype(np.float32))
    rows.table.prune(keep=0.6)
    before = everything(rows.table)

    assert rows.spill_out(20) == 20
    assert rows.table.stats()["spilled_rows"] == 20
    assert everything(rows) == before  # a scan reads them from disk
    with pytest.raises(RowsOnDiskError, match="20 of 30 ids are spilled"):
        rows.table.lookup(some)
    assert rows.announce(some) == 20

    assert everything(rows.table) == before
    assert rows.table.stats()["spilled_rows"] == 0
    assert rows.tier.read_batch([]) == []


def test_no_step_asks_the_kernel_about_every_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stats` reads /proc/self/smaps: in every call of every table it took most of a step."""
    rows = spilling("native", tmp_path, max_rows=20)
    asked: list[int] = []
    monkeypatch.setattr(row_store, "huge_bytes", lambda base, nbytes: asked.append(nbytes) or 0)
    for first in (0, 10, 20, 0):
        some = np.arange(first, first + 10, dtype=np.int64)
        rows.lookup(some)
        rows.table.apply(some, np.ones((10, 8), np.float32))

    assert rows.spilled > 0
    assert rows.recalled > 0
    assert asked == []
    assert rows._store.stats()["huge_bytes"] == 0
    assert len(asked) == 1


@pytest.mark.slow
@both
def test_a_capped_table_with_a_disk_trains_as_one_without_a_cap(core: str, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    capped = spilling(core, tmp_path, optimizer=RowAdagrad(lr=0.1))
    store = RowStore(capacity="8MiB", slab="64KiB", pages="4k", core=core)
    free = store.table(
        "t", dim=8, chunks=4, optimizer=RowAdagrad(lr=0.1), init=Uniform(0.1), evict="lru"
    )
    for _ in range(40):
        keys = (random.zipf(1.3, 25) % 300).astype(np.int64)
        gradients = random.standard_normal((25, 8)).astype(np.float32)
        assert capped.lookup(keys)[0].tobytes() == free.lookup(keys)[0].tobytes()
        assert capped.table.apply(keys, gradients).dropped == 0
        free.apply(keys, gradients)
        stats = capped.table.stats()
        assert stats["rows"] - stats["spilled_rows"] <= 40

    assert capped.spilled > 100
    assert capped.recalled > 50
    assert everything(capped) == everything(free)


def test_more_ids_in_one_call_than_fit_are_refused(tmp_path: Path) -> None:
    rows = spilling("native", tmp_path)

    with pytest.raises(StoreFullError, match="found no room"):
        rows.lookup(np.arange(41, dtype=np.int64))


@both
def test_an_old_snapshot_still_sees_the_row_it_saw(core: str, tmp_path: Path) -> None:
    rows = spilling(core, tmp_path)
    rows.lookup(ids(1, 2))
    before = everything(rows.table)
    rows.spill_out(2)
    snapshot = rows._store.snapshot()
    rows.announce(ids(1, 2))
    rows.table.apply(ids(1, 2), np.ones((2, 8), np.float32))
    rows.spill_out(2)
    rows.announce(ids(1))

    then = {
        key: raw.tobytes()
        for part in rows.scan(snapshot)
        for key, raw in zip(part.keys.tolist(), part.raw, strict=True)
    }
    snapshot.close()

    assert then == before
    assert everything(rows) != before


# --- a disk that fails ----------------------------------------------------------------------------


class FullDisk(LmdbTier):
    def write_batch(self, names: Sequence[Name], records: Sequence[bytes]) -> None:
        raise OSError("no space left on device")


class MarkerFirst(SpillingTable):
    """The mutant: rows are replaced by markers before they are durable."""

    def _move(self, keys: Any, stamps: Any, raw: Any) -> int:
        marked = int(self.table.core.mark_spilled(keys, stamps))
        names = list(zip(keys.tolist(), stamps.tolist(), strict=True))
        self.tier.write_batch(names, [record.tobytes() for record in raw])
        return marked


def lost_rows(kind: type[SpillingTable], path: Path) -> int:
    rows = spilling("native", path)
    rows.tier.close()
    failing = kind(rows._store, rows.table, FullDisk(path, max_bytes=1 << 28))
    failing.lookup(np.arange(10, dtype=np.int64))
    with pytest.raises(OSError, match="no space left"):
        failing.spill_out(5)
    return failing.table.stats()["spilled_rows"]


def test_a_disk_that_refuses_changes_nothing(tmp_path: Path) -> None:
    assert lost_rows(SpillingTable, tmp_path) == 0


def test_mutant_a_marker_before_the_write_is_durable_loses_rows(tmp_path: Path) -> None:
    assert lost_rows(MarkerFirst, tmp_path) == 5


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    rows = spilling("native", tmp_path)
    rows.lookup(ids(7))
    rows.spill_out(1)
    tier = rows.tier
    assert isinstance(tier, LmdbTier)
    with tier._env.begin(write=True) as txn:
        key, value = next(iter(txn.cursor()))
        txn.put(key, value[:-1] + b"\x55")

    with pytest.raises(SpillCorruptError, match=r"row 7 of stamp .* damaged"):
        rows.announce(ids(7))
    with tier._env.begin(write=True) as txn:
        txn.delete(key)
    with pytest.raises(SpillCorruptError, match="missing"):
        rows.announce(ids(7))


@pytest.mark.slow
def test_records_that_nobody_needs_are_deleted(tmp_path: Path) -> None:
    rows = spilling("native", tmp_path)
    tier = rows.tier
    assert isinstance(tier, LmdbTier)
    rows.lookup(np.arange(20, dtype=np.int64))
    for _ in range(5):
        rows.spill_out(20)
        rows.announce(np.arange(20, dtype=np.int64))

    assert tier._env.stat()["entries"] <= 20


def test_a_row_that_changed_after_it_was_written_stays(tmp_path: Path) -> None:
    rows = spilling("native", tmp_path)
    rows.lookup(ids(1))
    keys, stamps = np.zeros(1, np.int64), np.zeros(1, np.uint64)
    raw = np.zeros((1, rows.table.core.record_bytes), np.uint8)
    rows.table.core.oldest(keys, stamps, raw)
    rows.table.apply(ids(1), np.ones((1, 8), np.float32))

    assert rows._move(keys, stamps, raw) == 0
    assert rows.table.stats()["spilled_rows"] == 0


def test_only_a_table_made_for_it_can_spill(tmp_path: Path) -> None:
    store = RowStore(capacity="8MiB", slab="64KiB", core="native")
    with pytest.raises(ValueError, match="spill=True"):
        SpillingTable(store, store.table("t", dim=2), LmdbTier(tmp_path, max_bytes=1 << 24))


@pytest.mark.slow
@both
def test_tables_of_one_store_make_room_for_each_other_and_lose_no_bit(
    tmp_path: Path, core: str
) -> None:
    """One grows and would take everything; the other comes late. No table has `max_rows`."""
    tables = tuple(Table(name=name, dim=64, optimizer=Adagrad(lr=0.1)) for name in "ab")
    common: dict[str, Any] = {"index": 0, "tau": 0, "slab": "16KiB", "pages": "4k", "core": core}
    small = Shard(tables, capacity="512KiB", spill=str(tmp_path), **common)
    whole = Shard(tables, capacity="16MiB", **common)
    generator = np.random.default_rng(0)
    for step in range(60):
        late = np.unique(generator.integers(0, 4 * step + 1, step + 1))
        for name, ids in (("a", np.arange(20 * step, 20 * (step + 1))), ("b", late)):
            gradients = generator.standard_normal((len(ids), 64)).astype(np.float32)
            for shard in (small, whole):
                rows = shard.rows[name].pull(ids)
                assert shard.rows[name].apply(ids, gradients, None, rows) == 0

    for name in "ab":
        ids = np.sort(np.concatenate([part.keys for part in whole.rows[name].scan()]))
        ours, theirs = (shard.rows[name].read(ids).weights for shard in (small, whole))
        assert np.array_equal(ours, theirs)
    stats = {name: small.rows[name].stats() for name in "ab"}
    assert stats["a"]["spilled_rows"] > 600
    assert core == "twin" or stats["b"]["recalled"] > 100  # the twin has no queues to pay for
    small.close()


@pytest.mark.slow
@both
def test_rows_on_disk_still_take_the_bytes_that_the_documents_say(
    tmp_path: Path, core: str
) -> None:
    """D = 16, no `max_rows`: a disk lifts the capacity by the part of a row that can go down."""
    table = Table(name="a", dim=16, optimizer=RowAdagrad(lr=0.1))
    capacity = (1 << 18) if core == "native" else (1 << 16)
    shard = Shard(
        (table,), tau=0, capacity=capacity, slab="16KiB", pages="4k", core=core, spill=tmp_path
    )  # fmt: skip
    rows, ids = shard.rows["a"], np.arange(50, dtype=np.int64)

    def fill() -> None:
        for first in range(0, 500_000, 50):
            rows.pull(ids + first)

    with pytest.raises(StoreFullError) as caught:
        fill()

    stats = rows.stats()
    assert capacity / 96 < stats["spilled_rows"] < capacity / 44
    assert stats["spilled_rows"] > 0.8 * stats["rows"]
    assert "on disk, which keep about 46 bytes each here" in str(caught.value)
    assert "evict instead of spilling" in str(caught.value)


# --- a folder of one's own ------------------------------------------------------------------------

OTHER_RUN = """
import sys
from pathlib import Path
from stages.embedding.row_spill import LmdbTier
tier = LmdbTier(sys.argv[1], max_bytes=1 << 24)
tier.write_batch([(7, 1)], [b"other"])
print("there", flush=True)
sys.stdin.readline()
"""


def test_a_folder_that_another_run_spills_to_is_refused_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are called by key and stamp: two runs would read each other's rows as their own."""
    monkeypatch.setattr(spill_lock, "WAIT_S", 0.0)
    mine = LmdbTier(tmp_path, max_bytes=1 << 24)
    mine.write_batch([(7, 1)], [b"mine"])
    with pytest.raises(SpillBusyError, match=r"in use by process \d+; give each run"):
        LmdbTier(tmp_path, max_bytes=1 << 24)
    assert mine.read_batch([(7, 1)]) == [b"mine"]
    mine.close()
    assert list(tmp_path.iterdir()) == []

    command = [sys.executable, "-c", OTHER_RUN, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        with pytest.raises(SpillBusyError, match=f"in use by process {other.pid};"):
            LmdbTier(tmp_path, max_bytes=1 << 24)
        other.kill()
        other.wait()

    FolderLock(tmp_path, wait_s=5.0).release()  # the lock ended with the process


def test_who_is_forgotten_lets_go_of_the_folder(tmp_path: Path) -> None:
    FolderLock(tmp_path)
    gc.collect()

    FolderLock(tmp_path, wait_s=0.0).release()
    assert list(tmp_path.iterdir()) == []
