"""The twin's rows in time: who sees which version, what a commit installs, what it costs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from stages.embedding.row_twin_rows import Row, Shape, mix

BLIND = (1 << 64) - 1
INDEX_BYTES = 12


class Moment(Protocol):
    """A snapshot."""

    stamp: int
    closed: bool


class Clock(Protocol):
    """What versions want from their store."""

    capacity: int
    visible: int
    counters: dict[str, int]

    def horizon(self) -> int: ...

    def used_bytes(self) -> int: ...


def on_disk(row: Row | None) -> bool:
    return row is not None and row.disk_stamp is not None


def num_chunks(row: Row | None) -> int:
    return 0 if row is None else row.alive.bit_count()


class Versions:
    """Rows by key, each a list of (stamp, row or None), oldest first."""

    def __init__(self, store: Clock, shape: Shape, max_rows: int, lru: bool, spill: bool) -> None:
        self.store, self.shape = store, shape
        self.max_rows, self.lru, self.spill = max_rows, lru, spill
        self.versions: dict[int, list[tuple[int, Row | None]]] = {}
        self.recency: OrderedDict[int, int] = OrderedDict()  # key -> step
        self.nbytes = self.rows = self.alive_chunks = self.spilled_rows = 0
        self.steps = self.epoch = self.step = 0
        self._salt = shape.salt

    def hash(self, key: int) -> int:
        return mix((key + self._salt) & BLIND)

    def at(self, key: int, snapshot: Moment | None = None) -> Row | None:
        if snapshot is not None and snapshot.closed:
            raise RuntimeError("the snapshot is closed; take a new one")
        for stamp, row in reversed(self.versions.get(key, ())):
            if snapshot is None or stamp <= snapshot.stamp:
                return row
        return None

    def _cost(self, row: Row | None) -> int:
        if row is None:
            return 0
        alive = 32 if row.disk_stamp is not None else self.shape.cell_bytes(row.alive.bit_count())
        return alive + INDEX_BYTES

    def fits(self, writes: dict[int, Row | None]) -> bool:
        more = sum(self._cost(row) - self._cost(self.at(key)) for key, row in writes.items())
        return more <= 0 or self.store.used_bytes() + more <= self.store.capacity

    def commit(self, writes: dict[int, Row | None]) -> int:
        """Installs all of them under one stamp."""
        store = self.store
        if not writes:
            return store.visible
        store.visible += 1
        store.counters["commits"] += 1
        for key, row in writes.items():
            old = self.at(key)
            self.nbytes += self._cost(row) - self._cost(old)
            self.rows += (row is not None) - (old is not None)
            self.spilled_rows += on_disk(row) - on_disk(old)
            self.alive_chunks += num_chunks(row) - num_chunks(old)
            if row is None or row.disk_stamp is not None:
                self.recency.pop(key, None)
            if row is not None:
                row.stamp = store.visible
            line = self.versions.setdefault(key, [])
            line.append((store.visible, row))
            keep = store.horizon()
            while len(line) > 1 and line[1][0] <= keep:
                line.pop(0)
            if len(line) == 1 and row is None:
                del self.versions[key]
        return store.visible

    def touch(self, key: int) -> None:
        if self.lru:
            self.recency[key] = self.step
            self.recency.move_to_end(key)

    def in_order(self, snapshot: Moment | None = None) -> Iterator[tuple[int, int, Row]]:
        """(hash, key, row) in order of hashes."""
        for hashed, key in sorted((self.hash(key), key) for key in self.versions):
            row = self.at(key, snapshot)
            if row is not None:
                yield hashed, key, row
