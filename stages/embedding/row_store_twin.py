"""The row store in plain Python: the dull twin of `native/rows`, entry point for entry point.

One lock, one transaction at a time, a list of versions for each key. It gives the same rows, the
same order of recency, the same pruned chunks and the same records to the bit; it is slow, and what
it cannot have it reports as 0 (resumes, probes, pauses).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.embedding.row_twin_rows import F32, Row, Shape
from stages.embedding.row_twin_versions import INDEX_BYTES, Versions, on_disk

OK, CONFLICT, FULL, PENDING, NONFINITE = range(5)
ABSENT, PRESENT, SPILLED = range(3)
WITHIN_STEP = 24
"""Bits of a row's place in its step, below the step's number, in what `order` tells."""
Keys = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Stamps = npt.NDArray[np.uint64]


class SnapshotExpired(RuntimeError):
    """Kept for the interface: what the twin's snapshots need costs no capacity, and so LRU tables
    leave no part of it free for them."""


class RowStore:
    """Tables that share a clock and a capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lock = threading.RLock()
        self.visible = 0
        self.tables: list[RowTable] = []
        self.open: list[RowSnapshot] = []
        self.counters = dict.fromkeys(("commits", "conflicts", "full", "pending", "evicted"), 0)

    @staticmethod
    def make(capacity: int, slab: int, huge: bool, snapshot_budget: int, /) -> RowStore:
        if capacity // slab < 4:
            raise ValueError(
                f"a capacity of {capacity} bytes holds {capacity // slab} slabs of {slab} bytes, "
                "at least 4 are needed; raise `capacity` or lower `slab`"
            )
        return RowStore(capacity)

    @staticmethod
    def table(store: RowStore, name: str, *rest: Any) -> RowTable:
        names = ["dim", "chunks", "optimizer", "rule", "init", "mean", "scale", "seed", "max_rows"]
        names += ["lru", "spill", "expected_rows", "decay", "utility_scale"]
        given = dict(zip(names, rest, strict=True))
        max_rows, lru, spill = given.pop("max_rows"), given.pop("lru"), given.pop("spill")
        del given["expected_rows"]
        with store.lock:
            if any(table.shape.name == name for table in store.tables):
                raise ValueError(f"there is a table '{name}' already")
            table = RowTable(store, Shape(name=name, **given), max_rows, lru, spill)
            store.tables.append(table)
        return table

    @staticmethod
    def snapshot(store: RowStore, /) -> RowSnapshot:
        return RowSnapshot(store)

    def horizon(self) -> int:
        return min([self.visible, *(snapshot.stamp for snapshot in self.open)])

    def used_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def stats(self) -> dict[str, int]:
        zeros = ["slab_bytes", "growths", "longest_pause_ns", "snapshots_expired", "base"]
        zeros += ["resumes", "batches", "probes", "retired_bytes"]
        return {
            **self.counters,
            **dict.fromkeys(zeros, 0),
            "used_bytes": self.used_bytes(),
            "capacity": self.capacity,
            "stamp": self.visible,
            "horizon": self.horizon(),
        }

    def compact(self) -> int:
        return 0


class RowSnapshot:
    """One value of the clock; what it sees stays."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        with store.lock:
            self.stamp = store.visible
            store.open.append(self)
        self.closed = False

    def close(self) -> None:
        with self._store.lock:
            if not self.closed:
                self._store.open.remove(self)
            self.closed = True


class RowTable(Versions):
    """The native table's entry points."""

    store: RowStore

    @property
    def record_bytes(self) -> int:
        return self.shape.record_bytes

    # --- arrays -----------------------------------------------------------------------------------

    def _give(self, row: Row | None, out: F32) -> int:
        out[:] = 0
        if row is None:
            return ABSENT
        if row.disk_stamp is not None:
            return SPILLED
        out[:] = self.shape.read(row)
        return PRESENT

    def multi_get(
        self, keys: Keys, out: F32, seen: Bytes, snapshot: RowSnapshot | None, group: int, /
    ) -> int:
        with self.store.lock:
            for i, key in enumerate(keys.tolist()):
                seen[i] = self._give(self.at(key, snapshot), out[i])
        return int((seen == SPILLED).sum())

    def lookup(self, keys: Keys, out: F32, seen: Bytes, step: int, /) -> tuple[int, int, int, int]:
        with self.store.lock:
            self.step = max(self.step, step)
            missing: list[int] = []
            mine = set()
            for i, key in enumerate(keys.tolist()):
                seen[i] = self._give(self.at(key), out[i])
                if seen[i] == PRESENT:
                    self.touch(key)
                    mine.add(key)
                elif seen[i] == ABSENT:
                    missing.append(i)
            spilled = int((seen == SPILLED).sum())
            inserted = evicted = full = 0
            for i in missing:
                key = int(keys[i])
                row = self.at(key)
                if row is None:
                    out[i] = self.shape.initial(key)
                    row = self.shape.new_row(out[i].copy(), self.shape.all_chunks, self.epoch)
                    while not self._room({key: row}) and self._evict_one(mine):
                        evicted += 1
                    if not self._room({key: row}):
                        full += 1
                        continue
                    self.commit({key: row})
                    self.touch(key)
                    mine.add(key)
                    inserted += 1
                seen[i] = self._give(row, out[i])
            self.store.counters["full"] += full
            return inserted, evicted, full, spilled

    def _room(self, writes: dict[int, Row | None]) -> bool:
        resident = self.rows - self.spilled_rows
        return (not self.max_rows or resident < self.max_rows) and self.fits(writes)

    def _evict_one(self, mine: set[int]) -> bool:
        if not self.lru or self.spill:
            return False
        victim = next(iter(self.recency), None)
        if victim is None or victim in mine:
            return False
        self.commit({victim: None})
        self.store.counters["evicted"] += 1
        return True

    def apply(
        self, keys: Keys, gradients: F32, lr: float, counts: F32 | None, seen: Bytes, /
    ) -> tuple[int, int, int, int]:
        with self.store.lock:
            self.steps += 1
            step = self.shape.numbers(lr, self.steps)
            for i, key in enumerate(keys.tolist()):
                row = self.at(key)
                seen[i] = ABSENT if row is None else SPILLED if on_disk(row) else PRESENT
                if row is not None and seen[i] == PRESENT:
                    count = np.float32(1) if counts is None else counts[i]
                    self.commit(
                        {key: self.shape.optimize(row, gradients[i], count, step, self.epoch)}
                    )
            kinds = np.bincount(seen, minlength=3)
            return int(kinds[PRESENT]), int(kinds[ABSENT]), int(kinds[SPILLED]), 0

    def scan(
        self,
        snapshot: RowSnapshot | None,
        cursor: int,
        keys: Keys,
        stamps: Stamps,
        recency: npt.NDArray[np.uint32],
        records: Bytes,
        /,
    ) -> tuple[int, int, bool]:
        with self.store.lock:
            place = {key: i for i, key in enumerate(self.recency)}
            n = 0
            for hashed, key, row in self.in_order(snapshot):
                if hashed < cursor:
                    continue
                if n == len(keys):
                    return n, hashed, False
                keys[n] = key
                stamps[n] = row.stamp if row.disk_stamp is None else row.disk_stamp
                recency[n] = place.get(key, 0)
                records[n] = np.frombuffer(self.shape.to_record(row), np.uint8)
                n += 1
            return n, cursor, True

    def restore(self, keys: Keys, records: Bytes, touched: Stamps | None, /) -> int:
        refused = 0
        with self.store.lock:
            for i, (key, record) in enumerate(zip(keys.tolist(), records, strict=True)):
                row = self.shape.from_record(record.tobytes())
                if touched is not None:
                    self.step = int(touched[i]) >> WITHIN_STEP
                if self.fits({key: row}):
                    self.commit({key: row})
                    self.touch(key)
                else:
                    refused += 1
        return refused

    def order(self, keys: Keys, touched: Stamps, /) -> int:
        with self.store.lock:
            before, within = -1, 0
            for n, (key, step) in enumerate(self.recency.items()):
                if n == len(keys):
                    return n
                within = within + 1 if step == before else 0
                before = step
                keys[n], touched[n] = key, step << WITHIN_STEP | within
            return len(self.recency)

    def remove(self, keys: Keys, /) -> int:
        with self.store.lock:
            gone = [key for key in dict.fromkeys(keys.tolist()) if self.at(key) is not None]
            for key in gone:
                self.commit({key: None})
            return len(gone)

    def evict(self, n: int, /) -> int:
        with self.store.lock:
            victims = list(self.recency)[:n]
            for key in victims:
                self.commit({key: None})
            self.store.counters["evicted"] += len(victims)
            return len(victims)

    # --- spill ------------------------------------------------------------------------------------

    def oldest(self, keys: Keys, stamps: Stamps, records: Bytes, /) -> int:
        with self.store.lock:
            found = list(self.recency)[: len(keys)]
            for i, key in enumerate(found):
                row = self.at(key)
                assert row is not None
                keys[i], stamps[i] = key, row.stamp
                records[i] = np.frombuffer(self.shape.to_record(row), np.uint8)
            return len(found)

    def mark_spilled(self, keys: Keys, stamps: Stamps, /) -> int:
        marked = 0
        with self.store.lock:
            for key, stamp in zip(keys.tolist(), stamps.tolist(), strict=True):
                row = self.at(key)
                if row is None or row.disk_stamp is not None or row.stamp != stamp:
                    continue
                none = np.zeros(self.shape.chunks, np.uint16)
                self.commit({key: Row(0, np.float32(0), 0, none, [], disk_stamp=stamp)})
                marked += 1
        return marked

    def recall(self, keys: Keys, stamps: Stamps, records: Bytes, done: Bytes, /) -> int:
        recalled = 0
        with self.store.lock:
            for i, (key, stamp) in enumerate(zip(keys.tolist(), stamps.tolist(), strict=True)):
                row = self.at(key)
                done[i] = 1
                if row is None or row.disk_stamp != stamp:
                    continue
                fresh = self.shape.from_record(records[i].tobytes())
                done[i] = self.fits({key: fresh})
                if done[i]:
                    self.commit({key: fresh})
                    self.touch(key)
                    recalled += 1
        return recalled

    def stamps(
        self, keys: Keys, snapshot: RowSnapshot | None, stamps: Stamps, on_disk: Stamps, /
    ) -> None:
        with self.store.lock:
            for i, key in enumerate(keys.tolist()):
                row = self.at(key, snapshot)
                stamps[i] = 0 if row is None else row.stamp
                on_disk[i] = 0 if row is None or row.disk_stamp is None else row.disk_stamp

    def alive(self, keys: Keys, alive: Bytes, /) -> None:
        with self.store.lock:
            for i, key in enumerate(keys.tolist()):
                row = self.at(key)
                alive[i] = 0 if row is None or on_disk(row) else row.alive

    def initial(self, keys: Keys, out: F32, /) -> None:
        for i, key in enumerate(keys.tolist()):
            out[i] = self.shape.initial(key)

    # --- pruning, progress ------------------------------------------------------------------------

    def prune(self, max_alive: int, weights: F32, /) -> tuple[int, int, int, int, int]:
        lines = weights.reshape(-1, self.shape.chunks)

        def scores(row: Row) -> list[int]:
            age = min(self.shape.idle_periods(row, self.epoch), len(lines) - 1)
            return [int(u) for u in self.shape.current(row, self.epoch, lines[age])]

        with self.store.lock:
            self.epoch += 1
            rows = [(key, row) for _, key, row in self.in_order()]
            ranked: dict[int, list[int]] = {}  # utility -> [gone, living]
            for _, row in rows:
                if not on_disk(row):
                    for c, u in enumerate(scores(row)):
                        ranked.setdefault(u, [0, 0])[row.alive >> c & 1] += 1
            above, cut, keep = 0, -1, [0, 0]
            for u in sorted(ranked, reverse=True):
                if above + sum(ranked[u]) > max_alive:
                    living = min(max_alive - above, ranked[u][1])
                    cut, keep = u, [max_alive - above - living, living]
                    break
                above += sum(ranked[u])
            pruned = regrown = dropped = 0
            for key, row in rows:
                if on_disk(row):
                    continue
                alive = 0
                for c, u in enumerate(scores(row)):
                    has = row.alive >> c & 1
                    lives = u > cut
                    if u == cut and keep[has] > 0:
                        keep[has] -= 1
                        lives = True
                    alive |= lives << c
                if alive == 0 and not self.shape.current(row, self.epoch).any():
                    self.commit({key: None})
                    dropped += 1
                elif alive != row.alive:
                    self.commit({key: self.shape.reshape(row, alive)})
                else:
                    continue
                pruned += (row.alive & ~alive).bit_count()
                regrown += (alive & ~row.alive).bit_count()
            return len(rows), pruned, regrown, dropped, self.alive_chunks

    def stats(self) -> dict[str, int]:
        return {
            "rows": self.rows,
            "alive_chunks": self.alive_chunks,
            "spilled_rows": self.spilled_rows,
            "slots": len(self.versions),
            "index_bytes": INDEX_BYTES * self.rows,
            "queue_bytes": 4 * len(self.recency),
            "row_bytes": self.shape.cell_bytes(self.shape.chunks),
            "steps": self.steps,
            "epoch": self.epoch,
        }

    def set_progress(self, steps: int, epoch: int, /) -> None:
        self.steps, self.epoch = steps, epoch

    def run(self, name: str, offsets: Keys, keys: Keys, *rest: Any) -> None:
        from stages.embedding.row_twin_procedures import run_procedure

        run_procedure(self, name, offsets, keys, *rest)
