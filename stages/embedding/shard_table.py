"""One table of one shard: rows in memory, those below on disk, and who gets a row at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.embedding import chunk_prune
from stages.embedding.admission import Admission
from stages.embedding.row_answers import Snapshot
from stages.embedding.row_arrays import nbytes_of
from stages.embedding.row_records import Records
from stages.embedding.row_spill import LmdbTier, SpillingTable
from stages.embedding.row_store import RowStore
from stages.embedding.row_table import RowTable
from stages.embedding.tables import Table

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
QUEUE_BYTES = 8
"""Of the order of use, for each row: four, and as much again before it is written anew."""

DEFAULT_BYTES = 1 << 30
"""Of a shard's store whose tables have no limit of their own."""

SLACK_BYTES = 64 << 20
"""Beside each limited table: slabs that are not full, sightings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one table, in the order of the ids."""

    weights: F32
    alive: npt.NDArray[np.uint8] | None = None
    """Chunks that each row has; None: all of them."""

    epoch: int = 0
    """Prunes before this was read: the version of the bitmaps."""

    admitted: npt.NDArray[np.bool_] | None = None
    """Ids that have a row; None: all. Stays on the shard."""


class ShardTable:
    """Looks up, steps and hands out whole rows. One thread at a time."""

    def __init__(
        self,
        store: RowStore,
        table: Table,
        *,
        seed: int,
        num_shards: int = 1,
        spill: Path | None = None,
    ) -> None:
        self._store, self._table = store, table
        self.looked_up = 0
        max_rows = table.rows_within(whole_bytes(table), num_shards)
        self.max_rows = max_rows
        self.rows: RowTable = store.table(
            table.name,
            dim=table.dim,
            optimizer=table.optimizer,
            init=table.init,
            seed=seed,
            chunks=table.chunks,
            max_rows=max_rows,
            evict=None if spill is not None else table.evict,
            spill=spill is not None,
            decay=table.prune.decay if table.prune is not None else 1.0,
        )
        self.spilling = None if spill is None else SpillingTable(store, self.rows, LmdbTier(spill))
        self.admission = None if table.admit is None else Admission(store, table.name, table.admit)

    def announce(self, ids: Ids) -> None:
        """Rows that will be asked for: those on disk come up now."""
        if self.spilling is not None and not self.max_rows:
            self.spilling.announce(ids)  # with a cap they could push out what is under way

    def pull(self, ids: Ids, step: int = 0, told: Sequence[tuple[Ids, Mask]] = ()) -> Rows:
        """Rows of distinct ids for training; ids that are admitted and new are created. `step` is
        what the order of use remembers.

        `told`: which ids earlier pulls of the same step asked for, and who was admitted. Those are
        not sighted again, and the answer is the same: a step is one sighting.
        """
        self.looked_up += len(ids)
        admitted = None
        wanted = ids
        if self.admission is not None:
            admitted = self._admitted(self.admission, ids, step, told)
            wanted = np.ascontiguousarray(ids[admitted])
        look_up = self.rows.lookup if self.spilling is None else self.spilling.lookup
        weights, _ = look_up(wanted, step=step)
        if admitted is not None:
            whole = np.zeros((len(ids), self.rows.dim), np.float32)
            whole[admitted] = weights
            weights = whole
        return self._with_bitmaps(ids, weights, admitted)

    def _admitted(
        self, admission: Admission, ids: Ids, step: int, told: Sequence[tuple[Ids, Mask]]
    ) -> Mask:
        old = np.zeros(len(ids), np.bool_)
        answer = np.zeros(len(ids), np.bool_)
        for asked, admitted in told:
            old |= np.isin(ids, asked)
            answer |= np.isin(ids, asked[admitted])
        new = np.ascontiguousarray(ids[~old])
        _, found = self.rows.multi_get(new)
        answer[~old] = admission.admitted(new, found != 0, step)
        return answer

    def read(self, ids: Ids) -> Rows:
        """Rows for evaluation: unknown ids are zeros; nothing is created, moved or touched."""
        if self.spilling is None:
            return self._with_bitmaps(ids, self.rows.lookup(ids, train=False)[0], None)
        weights, alive = self.spilling.read(ids)
        if self.rows.chunks == 1:
            return Rows(weights=weights)
        return Rows(weights=weights, alive=alive, epoch=self.rows.stats()["epoch"])

    def _with_bitmaps(self, ids: Ids, weights: F32, admitted: Any) -> Rows:
        if self.rows.chunks == 1:
            return Rows(weights=weights, admitted=admitted)
        return Rows(
            weights=weights,
            alive=self.rows.alive(ids),
            epoch=self.rows.stats()["epoch"],
            admitted=admitted,
        )

    def call_up(self, ids: Ids, pulled: Rows) -> None:
        """Rows that another step has sent to disk since they were pulled."""
        if self.spilling is not None:
            admitted = pulled.admitted
            self.spilling.announce(ids if admitted is None else np.ascontiguousarray(ids[admitted]))

    def apply(self, ids: Ids, gradients: F32, counts: F32 | None, pulled: Rows) -> int:
        """One optimizer step, on rows as they were pulled; how many were gone by now."""
        then = pulled.alive
        if pulled.admitted is not None:
            keep = pulled.admitted
            ids, gradients = np.ascontiguousarray(ids[keep]), gradients[keep]
            counts = None if counts is None else np.ascontiguousarray(counts[keep])
            then = None if then is None else then[keep]
        if self.spilling is not None:
            self.spilling.announce(ids)  # another table may have sent them down since `call_up`
        if then is not None:
            now = self.rows.alive(ids)
            gradients = chunk_prune.without_regrown(gradients, then, now, chunks=self.rows.chunks)
        gradients = np.ascontiguousarray(gradients, np.float32)
        # An empty part counts too: Adam's bias correction counts steps, on every shard alike.
        return self.rows.apply(ids, gradients, counts=counts).dropped

    def scan(self, snapshot: Snapshot | None = None, *, limit: int = 65_536) -> Iterator[Records]:
        """All rows, those on disk too. With a snapshot, from any thread."""
        return (self.spilling or self.rows).scan(snapshot, limit=limit)

    def restore(
        self,
        keys: Ids,
        raw: npt.NDArray[np.uint8],
        touched: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """Whole rows, the one that was used last at the end."""
        (self.spilling or self.rows).restore(keys, raw, touched)

    @property
    def has_order(self) -> bool:
        """Whether somebody remembers which row was used last."""
        return self._table.evict is not None or self.spilling is not None

    def stats(self) -> dict[str, Any]:
        """Numbers of this table."""
        numbers: dict[str, Any] = self.rows.stats()
        came = self.rows.inserted + (self.spilling.recalled if self.spilling else 0)
        numbers["hit_rate"] = 1 - min(came, self.looked_up) / max(1, self.looked_up)
        numbers["evictions"] = self.rows.evicted
        if self.spilling is not None:
            numbers["spilled"], numbers["recalled"] = self.spilling.spilled, self.spilling.recalled
            numbers["disk_bytes"] = self.spilling.tier.nbytes()
        if self.admission is not None:
            numbers["unadmitted_share"] = self.admission.refused / max(1, self.admission.asked)
        return numbers

    def close(self) -> None:
        """Let go of the disk."""
        if self.spilling is not None:
            self.spilling.tier.close()


def whole_bytes(table: Table) -> int:
    """Real bytes of a row with all its chunks: cell, its part of the index and of the queue."""
    state = {"Adam": 2, "Adagrad": 1}.get(type(table.optimizer).__name__, 0)
    utilities = (2 * (table.chunks + 1) + 3) // 4 * 4 if table.chunks > 1 else 0
    cell = 32 + utilities + 4 * table.dim * (1 + state)
    queue = QUEUE_BYTES if table.evict or table.spill else 0
    return (cell + 15) // 16 * 16 + chunk_prune.INDEX_BYTES + queue


def store_capacity(
    tables: Sequence[Table], *, num_shards: int, given: int | str | None = None
) -> int:
    """Bytes of one shard's store: as `given`, or what the tables' own limits want.

    Given less than they want it is refused: a table's `capacity` would be a promise that nobody
    keeps. Memory is taken as rows come, so a limit above them costs nothing.
    """
    wants = {
        table.name: table.rows_within(whole_bytes(table), num_shards) * whole_bytes(table)
        for table in tables
    }
    if given is None:
        # Twice: a table that grows has two indices, and an update a second version, for a moment.
        limited = sum(2 * want + SLACK_BYTES for want in wants.values() if want)
        return limited + (0 if wants and all(wants.values()) else DEFAULT_BYTES)
    capacity = nbytes_of(given)
    said = {
        table.name: want
        for table, want in zip(tables, wants.values(), strict=True)
        if table.capacity is not None
    }
    if sum(said.values()) > capacity:
        raise ValueError(
            f"the tables' capacities are {said} bytes on each of {num_shards} shards, together "
            f"{sum(said.values())}, and the store they share has a `capacity` of {capacity}; raise "
            "that, leave it out, or lower theirs"
        )
    return capacity
