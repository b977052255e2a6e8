"""A disk below a table: rows that were used longest ago go down, and come back bit for bit.

The store knows markers only. Going down: the rows are written, and once they are durable a marker
replaces each that has not changed since. Coming back: `announce` reads in bulk and installs rows
whose marker still names that record. A record is called (key, stamp), so an old snapshot still
finds the row it saw after the row has come back, learned and gone down again; what nobody can see
any more is deleted. The disk is a cache of this process, not a checkpoint: it is emptied at the
start, and nobody else may have it (`spill_lock`).
"""

from __future__ import annotations

import struct
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stages.embedding.row_answers import Snapshot
from stages.embedding.row_arrays import Array, check
from stages.embedding.row_errors import RowStoreError, StoreFullError
from stages.embedding.row_records import Records
from stages.embedding.row_store import RowStore
from stages.embedding.row_table import SPILLED, RowTable
from stages.embedding.spill_lock import FolderLock

Name = tuple[int, int]
"""A record on disk: key and stamp."""

AT_ONCE = 4096

HEADROOM = 8
"""A store is kept so far from full, a part of its capacity: an update writes a new version beside
the old one, and one that finds no memory in the middle of a step cannot be taken back."""

MAX_CUTS = 16


class SpillCorruptError(RowStoreError):
    """A record on disk is missing, short, or not what was written."""


class Tier(Protocol):
    """Where records go. When `write_batch` returns they are durable."""

    def write_batch(self, names: Sequence[Name], records: Sequence[bytes]) -> None: ...
    def read_batch(self, names: Sequence[Name]) -> list[bytes]: ...
    def delete_batch(self, names: Sequence[Name]) -> None: ...
    def nbytes(self) -> int: ...
    def close(self) -> None: ...


class LmdbTier:
    """Records in an LMDB file of a directory, each with a checksum."""

    def __init__(self, directory: str | Path, *, max_bytes: int = 1 << 40) -> None:
        import lmdb

        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.directory)
        self._lmdb = lmdb
        self._env = lmdb.open(str(self.directory), map_size=max_bytes, max_dbs=0, readahead=False)
        with self._env.begin(write=True) as txn:
            txn.drop(self._env.open_db(txn=txn), delete=False)

    def write_batch(self, names: Sequence[Name], records: Sequence[bytes]) -> None:
        with self._named("spill to"), self._env.begin(write=True) as txn:  # the commit syncs
            for name, record in zip(names, records, strict=True):
                txn.put(_packed(name), zlib.crc32(record).to_bytes(4, "little") + record)

    def read_batch(self, names: Sequence[Name]) -> list[bytes]:
        records = []
        with self._named("read from"), self._env.begin() as txn:
            for name in sorted(names):  # the order on disk
                stored = txn.get(_packed(name))
                if stored is None or zlib.crc32(stored[4:]).to_bytes(4, "little") != stored[:4]:
                    raise SpillCorruptError(
                        f"row {name[0]} of stamp {name[1]} is "
                        f"{'missing from' if stored is None else 'damaged in'} {self.directory}; "
                        "the spilled rows cannot be trusted, go back to a checkpoint"
                    )
                records.append(stored[4:])
        found = dict(zip(sorted(names), records, strict=True))
        return [found[name] for name in names]

    def delete_batch(self, names: Sequence[Name]) -> None:
        with self._named("delete from"), self._env.begin(write=True) as txn:
            for name in names:
                txn.delete(_packed(name))

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._lmdb.Error as error:
            raise OSError(f"cannot {what} {self.directory}: {error}") from error

    def nbytes(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self.directory.iterdir())

    def close(self) -> None:
        """Let go of the file and remove it: nobody else can read a cache."""
        self._env.close()
        for name in ("data.mdb", "lock.mdb"):
            (self.directory / name).unlink(missing_ok=True)
        self._lock.release()


class SpillingTable:
    """A table made with `spill=True`, with its disk. One thread at a time."""

    def __init__(self, store: RowStore, table: RowTable, tier: Tier) -> None:
        if not table.spill:
            raise ValueError(f"table {table.name!r} was not made with spill=True")
        self._store, self.table, self.tier = store, table, tier
        self._peers: list[weakref.ref[SpillingTable]] = store.spilling
        self._peers.append(weakref.ref(self))
        self._over: deque[tuple[int, Name]] = deque()  # (stamp from which nobody needs it, record)
        self.spilled = self.recalled = 0

    def lookup(
        self, ids: Array, out: Array | None = None, mask: Array | None = None, *, step: int = 0
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
        """`RowTable.lookup` for training; spilled rows come back first, others go to make room."""
        self.announce(ids)
        while True:
            self._keep_within(self._absent(ids), ids)
            try:
                return self.table.lookup(ids, out, mask, step=step)
            except StoreFullError:
                if not self._make_room(len(ids), keep=ids):
                    raise

    def read(self, ids: Array) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
        """Weights and alive chunks, read from disk where they are there; nothing moves."""
        weights, found = self.table.multi_get(ids)
        alive = self.table.alive(ids)
        below = np.flatnonzero(found == SPILLED)
        if len(below):
            keys = np.ascontiguousarray(ids[below])
            stamps, on_disk = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.uint64)
            self.table.core.stamps(keys, None, stamps, on_disk)
            names = list(zip(keys.tolist(), on_disk.tolist(), strict=True))
            raw = np.frombuffer(b"".join(self.tier.read_batch(names)), np.uint8)
            records = self.table.records(keys, raw.reshape(len(names), -1))
            weights[below], alive[below] = records.weights(), records.alive
        return weights, alive

    def restore(self, keys: Array, raw: Array, touched: Array | None = None) -> None:
        """`RowTable.restore`; what does not fit goes down, oldest first."""
        at_once = min(AT_ONCE, self.table.max_rows or AT_ONCE)
        for first in range(0, len(keys), at_once):
            some, rows = keys[first : first + at_once], raw[first : first + at_once]
            when = None if touched is None else touched[first : first + at_once]
            self._keep_within(len(some), some)
            while True:
                try:
                    self.table.restore(some, rows, when)
                    break
                except StoreFullError:
                    if not self._make_room(len(some), keep=some):
                        raise

    def announce(self, ids: Array) -> int:
        """Brings back those of these rows that are on disk; returns how many."""
        ids = np.unique(check("ids", ids, np.int64, (None,)))
        self._keep_headroom(ids)
        stamps, on_disk = np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.uint64)
        self.table.core.stamps(ids, None, stamps, on_disk)
        there = on_disk != 0
        keys, names = ids[there], on_disk[there]
        came = 0
        for first in range(0, len(keys), AT_ONCE):
            some, called = keys[first : first + AT_ONCE], names[first : first + AT_ONCE]
            self._keep_within(len(some), ids)
            came += self._recall(some, called, ids)
        return came

    def _recall(self, keys: Any, stamps: Any, keep: Any) -> int:
        names = list(zip(keys.tolist(), stamps.tolist(), strict=True))
        raw = np.frombuffer(b"".join(self.tier.read_batch(names)), np.uint8)
        raw = raw.reshape(len(names), -1)
        done = np.zeros(len(names), np.uint8)
        came = int(self.table.core.recall(keys, stamps, raw, done))
        while not done.all():
            if not self._make_room(len(names), keep=keep):
                raise self.table.full_error(f"{int((done == 0).sum())} spilled rows cannot return")
            left = done == 0
            again = np.zeros(int(left.sum()), np.uint8)
            came += int(
                self.table.core.recall(
                    *(np.ascontiguousarray(x[left]) for x in (keys, stamps, raw)), again
                )
            )
            done[left] = again
        self.recalled += came
        now = self._store.counters()["stamp"]
        self._over.extend((now, name) for name in names)
        self._forget()
        return came

    def _keep_headroom(self, ids: Array) -> None:
        """Room for these rows and their next versions, before anything is written."""
        for _ in range(MAX_CUTS):
            stats = self._store.counters()
            row = self.table.stats()["row_bytes"]
            least = self._store.capacity // HEADROOM
            wanted = min(max(least, 2 * len(ids) * row), 4 * least)
            # What a snapshot holds is not freed by spilling; the store ends it if it must.
            held = stats["retired_bytes"] if stats["horizon"] < stats["stamp"] else 0
            if stats["used_bytes"] - held + wanted <= self._store.capacity:
                return
            if not self._make_room(len(ids), keep=ids):
                return

    def _make_room(self, num_rows: int, *, keep: Array) -> bool:
        """Rows go down where most are in memory: here, or in another table of the same store,
        which would otherwise keep what it took first while this one had no room at all."""
        peers = [peer for known in self._peers if (peer := known()) is not None]
        for one in sorted(peers, key=SpillingTable._in_memory, reverse=True):
            if one.spill_out(max(64, num_rows), keep=keep if one is self else None):
                self._store.compact()  # what another table frees must become whole slabs
                return True
        return False

    def _in_memory(self) -> int:
        stats = self.table.stats()
        return int(stats["rows"] - stats["spilled_rows"])

    def spill_out(self, num_rows: int, *, keep: Array | None = None) -> int:
        """Writes the rows that were used longest ago to disk; returns how many went.

        Rows of `keep` stay. If the disk refuses, everything is as before.
        """
        went = 0
        looked = num_rows
        while went < num_rows:
            room = min(AT_ONCE, looked)
            keys, stamps = np.empty(room, np.int64), np.empty(room, np.uint64)
            raw = np.empty((room, self.table.core.record_bytes), np.uint8)
            n = self.table.core.oldest(keys, stamps, raw)
            may_go = np.ones(n, np.bool_) if keep is None else ~np.isin(keys[:n], keep)
            may_go &= np.cumsum(may_go) <= num_rows - went
            chosen = np.flatnonzero(may_go)
            moved = self._move(keys[chosen], stamps[chosen], raw[chosen])
            went += moved
            if not moved:
                if n < room or room == AT_ONCE:
                    break
                looked *= 2  # those at the front stay: look behind them
        self.spilled += went
        return went

    def _move(self, keys: Any, stamps: Any, raw: Any) -> int:
        if not len(keys):
            return 0
        names = list(zip(keys.tolist(), stamps.tolist(), strict=True))
        self.tier.write_batch(names, [record.tobytes() for record in raw])
        return int(self.table.core.mark_spilled(keys, stamps))  # durable by now

    def scan(self, snapshot: Snapshot | None = None, *, limit: int = 65_536) -> Iterator[Records]:
        """`RowTable.scan`, with the rows on disk read from there."""
        for part in self.table.scan(snapshot, limit=limit):
            below = np.flatnonzero(part.spilled)
            if not len(below):
                yield part
                continue
            raw = part.raw.copy()
            names = [(int(part.keys[i]), int(part.stamps[i])) for i in below]
            for i, record in zip(below, self.tier.read_batch(names), strict=True):
                raw[i] = np.frombuffer(record, np.uint8)
            yield replace(part, raw=raw)

    def _absent(self, ids: Array) -> int:
        distinct = np.unique(check("ids", ids, np.int64, (None,)))
        _, found = self.table.multi_get(distinct)
        return int((found == 0).sum())

    def _keep_within(self, more: int, keep: Array) -> None:
        stats = self.table.stats()
        over = stats["rows"] - stats["spilled_rows"] + more - self.table.max_rows
        if self.table.max_rows and over > 0:
            self.spill_out(over, keep=keep)

    def _forget(self) -> None:
        """Deletes records that no snapshot can name any more."""
        horizon = self._store.counters()["horizon"]
        gone = []
        while self._over and self._over[0][0] <= horizon:
            gone.append(self._over.popleft()[1])
        if gone:
            self.tier.delete_batch(gone)


def _packed(name: Name) -> bytes:
    return struct.pack(">qQ", *name)
