"""One table of the row store: look up, train, prune, run transactions, hand out whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stages.embedding import row_rules as rules
from stages.embedding.row_answers import Applied, Pruned, RunResult, Snapshot
from stages.embedding.row_arrays import Array, check, room_for
from stages.embedding.row_errors import (
    NonFiniteGradientError,
    RowsOnDiskError,
    SnapshotExpiredError,
    StoreFullError,
)
from stages.embedding.row_records import Records
from stages.embedding.row_taper import column_weights

PAYLOAD_ROWS = {"put": 1, "add": 1, "delta_step": 1, "optimize": 1, "compare_and_put": 2}
PROCEDURES = ("get", "get_or_init", *PAYLOAD_ROWS, "follow", "prune", "evict", "commit_if")
ABSENT, PRESENT, SPILLED = range(3)
WITHIN_STEP = 24
"""Bits of a row's place in its step, below the step's number, in what `order` tells."""

MARKER_BYTES = 46
"""In memory of each row on disk, about: its marker, and its part of the index."""

MAX_STEP = 1 << 64 - WITHIN_STEP
MAX_TAKES = 16
"""How often a call that does not fit takes room from other tables before it is refused."""


class Owner(Protocol):
    """What a table wants from its store."""

    capacity: int
    expired: type[Exception]

    def check_alive(self) -> None: ...

    def take_room(self, table: RowTable, *, num_rows: int, must: bool) -> bool: ...


class RowTable:
    """Rows of one dimension by int64 key. Made by `RowStore.table`."""

    def __init__(
        self,
        store: Owner,
        table: Any,
        name: str,
        dim: int,
        chunks: int,
        optimizer: rules.Optimizer | None,
        max_rows: int,
        spill: bool,
        evicts: bool = False,
        decay: float = 1.0,
    ) -> None:
        self.name, self.dim, self.chunks, self.max_rows = name, dim, chunks, max_rows
        self.optimizer, self.spill, self.decay = optimizer, spill, decay
        self.evicts = evicts
        """Drops its oldest rows for room."""

        self.core = table
        self.inserted = self.evicted = 0
        """For `lookup`, so far, of this or another table."""

        self.evicted_when_took = 0
        """`evicted` when this table last took room from another."""

        self._store = store

    # --- reading ----------------------------------------------------------------------------------

    def multi_get(
        self,
        keys: Array,
        out: Array | None = None,
        found: Array | None = None,
        *,
        snapshot: Snapshot | None = None,
        group: int = 32,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
        """Rows of one snapshot; zeros where there is none. `found` is 1, 0, or 2 for spilled rows.

        Nothing is inserted or touched. `group` keys are under way at a time; 1 reads them one after
        the other.
        """
        keys, out, found = self._arrays(keys, out, found)
        handle = None if snapshot is None else snapshot.handle
        with self._reading():
            self.core.multi_get(keys, out, found, handle, group)
        return out, found

    def lookup(
        self,
        ids: Array,
        out: Array | None = None,
        mask: Array | None = None,
        *,
        train: bool = True,
        step: int = 0,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
        """Rows for a batch. In training, absent ids are inserted and recency is refreshed.

        Recency after the call: rows that were there in the order of `ids`, then new ones in that
        order. A call never evicts its own rows; when they do not fit it raises `StoreFullError`,
        and those that did fit stay. Spilled rows raise `RowsOnDiskError`: `announce` them first.
        `step` is what `order` tells of these rows; it never falls.
        """
        if not train:
            return self.multi_get(ids, out, mask)
        if not 0 <= step < MAX_STEP:
            raise ValueError(
                f"table {self.name!r}: step {step} is beyond 2 ** 40, and the order of use "
                "would be spoilt; number steps from where the run began"
            )
        ids, out, mask = self._arrays(ids, out, mask)
        self._store.check_alive()
        full = spilled = 0
        for _ in range(MAX_TAKES):
            inserted, evicted, full, spilled = self.core.lookup(ids, out, mask, step)
            self.inserted += inserted
            self.evicted += evicted
            short = self.evicts and (full or evicted) and not self._is_at_max_rows()
            if not short or spilled:
                break
            took = self._store.take_room(self, num_rows=full or evicted, must=full > 0)
            if not (full and took):
                break
        if spilled:
            raise RowsOnDiskError(
                f"table {self.name!r}: {spilled} of {len(ids)} ids are spilled; `announce` them "
                "before they are looked up"
            )
        if full:
            raise self.full_error(f"{full} of {len(ids)} ids found no room")
        return out, mask

    def alive(self, keys: Array) -> npt.NDArray[np.uint8]:
        """Which chunks these rows have now: bit c of a row is its chunk c; 0 where there is none.

        Nothing is inserted or touched.
        """
        keys = check("keys", keys, np.int64, (None,))
        alive = np.empty(len(keys), np.uint8)
        self._store.check_alive()
        self.core.alive(keys, alive)
        return alive

    def initial(self, keys: Array) -> npt.NDArray[np.float32]:
        """What these rows begin as. Depends on (seed, table, key) only."""
        keys = check("keys", keys, np.int64, (None,))
        out = np.empty((len(keys), self.dim), np.float32)
        self.core.initial(keys, out)
        return out

    # --- training ---------------------------------------------------------------------------------

    def apply(
        self,
        ids: Array,
        gradients: Array,
        lr: float | None = None,
        counts: Array | None = None,
        v_read: int | None = None,
    ) -> Applied:
        """One optimizer step on these rows, in transactions of at most 64.

        `counts` says how often each id occurred in the batch (for utilities). An id that comes
        twice is stepped twice. Gradients that are not finite raise `NonFiniteGradientError` before
        anything is applied.
        """
        if self.optimizer is None:
            raise ValueError(f"table {self.name!r} has no optimizer; give it one to train it")
        ids = check("ids", ids, np.int64, (None,))
        gradients = check("gradients", gradients, np.float32, (len(ids), self.dim))
        if counts is not None:
            counts = check("counts", counts, np.float32, (len(ids),))
        finite = np.isfinite(gradients)
        if not finite.all():
            bad = ids[~finite.all(axis=1)]
            shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
            raise NonFiniteGradientError(
                f"table {self.name!r}: the gradients of {len(bad)} of {len(ids)} ids are not "
                f"finite ({shown}); nothing was applied. Skip the step, or look at the loss"
            )
        self._store.check_alive()
        before = self.version
        seen = np.empty(len(ids), np.uint8)
        rate = self.optimizer.lr if lr is None else lr
        applied, absent, spilled, full = self.core.apply(ids, gradients, rate, counts, seen)
        if full:
            raise self.full_error(f"{full} of {len(ids)} updates found no memory")
        return Applied(
            applied=applied,
            dropped=absent + spilled,
            version=before + 1,
            staleness=None if v_read is None else before - v_read,
        )

    @property
    def version(self) -> int:
        """Optimizer steps of this table so far."""
        return int(self.core.stats()["steps"])

    def run(
        self,
        name: str,
        offsets: Array,
        keys: Array,
        payload: Array | None = None,
        *,
        modes: Array | None = None,
        expected: Array | None = None,
        batch: int = 8,
        interleave: bool | None = None,
        lr: float | None = None,
        hops: int = 1,
        want_rows: bool = True,
    ) -> RunResult:
        """An array of transactions: number t has the keys offsets[t] to offsets[t + 1].

        Each is a native procedure (`PROCEDURES`), a coroutine of which `batch` run interleaved on
        one snapshot, so that their cache misses overlap. `interleave` None lets tables that fit the
        cache run inline. Conflicts are tried again on new snapshots; what is left is in `statuses`.
        """
        if name not in PROCEDURES:
            raise ValueError(f"procedures are {list(PROCEDURES)}, got {name!r}")
        offsets = check("offsets", offsets, np.int64, (None,))
        keys = check("keys", keys, np.int64, (None,))
        if (
            len(offsets) == 0
            or offsets[0] != 0
            or offsets[-1] != len(keys)
            or (np.diff(offsets) < 0).any()
        ):
            raise ValueError("offsets go from 0 to len(keys) and never fall")
        if name in PAYLOAD_ROWS:
            payload = check(
                "payload", payload, np.float32, (PAYLOAD_ROWS[name] * len(keys), self.dim)
            )
        elif name == "commit_if":
            payload = check("payload", payload, np.float32, (len(keys), self.dim))
            expected = check("expected", expected, np.uint64, (len(keys),))
        if modes is not None or name in ("prune", "commit_if"):
            modes = check("modes", modes, np.uint8, (len(keys),))
        if not 1 <= batch <= 64:
            raise ValueError(f"batch is 1 to 64 transactions at a time, got {batch}")
        if name == "optimize" and self.optimizer is None:
            raise ValueError(f"table {self.name!r} has no optimizer; give it one to train it")
        self._store.check_alive()
        statuses = np.zeros(len(offsets) - 1, np.uint8)
        seen = np.zeros(len(keys), np.uint8)
        out = np.zeros((len(keys), self.dim), np.float32) if want_rows else None
        rate = lr if lr is not None else self.optimizer.lr if self.optimizer else 0.0
        inlined = -1 if interleave is None else int(not interleave)
        self.core.run(
            *(name, offsets, keys, payload, modes, expected, out, seen, statuses),
            *(batch, inlined, rate, hops),
        )
        return RunResult(statuses, out, seen)

    def remove(self, keys: Array) -> int:
        """Deletes rows; returns how many there were."""
        self._store.check_alive()
        return int(self.core.remove(check("keys", keys, np.int64, (None,))))

    def evict(self, num_rows: int) -> int:
        """Drops the rows that were looked up longest ago; returns how many."""
        self._store.check_alive()
        return int(self.core.evict(num_rows))

    # --- pruning ----------------------------------------------------------------------------------

    def prune(
        self, target_bytes: int | None = None, *, keep: float | None = None, taper: float = 0.0
    ) -> Pruned:
        """Keeps the chunks of highest utility, within a number of bytes or a share of all chunks.

        Chunks above the cut that were gone come back as zeros with fresh state. Rows without chunks
        whose utility has decayed to nothing are dropped. Bytes count rows with their headers and
        the index at its present load; call `RowStore.compact` to give freed memory back.
        Column c competes with its utilities over (c + 1) ** `taper`: rows give up the last first,
        but for rows that are not used any more (`row_taper`).
        """
        if self.chunks == 1:
            raise ValueError(f"table {self.name!r} has one chunk; pruning needs `chunks` of 2 to 8")
        if (target_bytes is None) == (keep is None):
            raise ValueError("say either `target_bytes` or `keep`")
        stats = self.stats()
        resident = stats["rows"] - stats["spilled_rows"]
        if keep is not None:
            if not 0 <= keep <= 1:
                raise ValueError(f"keep is a share of all chunks, in [0, 1], got {keep}")
            chunks = round(keep * resident * self.chunks)
        else:
            assert target_bytes is not None
            per_chunk = 4 * self.dim // self.chunks * (1 + self.state)
            bare = stats["row_bytes"] - per_chunk * self.chunks
            fixed = resident * bare + stats["index_bytes"] + stats["queue_bytes"]
            chunks = max(0, (target_bytes - fixed) // per_chunk)
        self._store.check_alive()
        weights = column_weights(self.chunks, taper=taper, decay=self.decay)
        return Pruned(*self.core.prune(int(chunks), weights))

    @property
    def state(self) -> int:
        """Floats of optimizer state beside each weight."""
        return {rules.ADAM_RULE: 2, rules.ADAGRAD_RULE: 1}.get(rules.rule_of(self.optimizer)[0], 0)

    # --- whole rows -------------------------------------------------------------------------------

    def scan(self, snapshot: Snapshot | None = None, *, limit: int = 65_536) -> Iterator[Records]:
        """All rows of a snapshot, each once, some thousand at a time, while training goes on.

        Without a snapshot each part is of its own moment.
        """
        cursor, done = 0, False
        handle = None if snapshot is None else snapshot.handle
        while not done:
            keys, stamps = np.empty(limit, np.int64), np.empty(limit, np.uint64)
            recency = np.empty(limit, np.uint32)
            raw = np.empty((limit, self.core.record_bytes), np.uint8)
            with self._reading():
                n, cursor, done = self.core.scan(handle, cursor, keys, stamps, recency, raw)
            if n:
                yield self.records(keys[:n], raw[:n], stamps[:n], recency[:n])

    def records(
        self, keys: Array, raw: Array, stamps: Array | None = None, recency: Array | None = None
    ) -> Records:
        """Raw rows, made readable."""
        n = len(keys)
        return Records(
            keys=keys,
            stamps=np.zeros(n, np.uint64) if stamps is None else stamps,
            recency=np.zeros(n, np.uint32) if recency is None else recency,
            raw=raw,
            dim=self.dim,
            chunks=self.chunks,
            state=self.state,
        )

    def order(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Keys of the rows in memory, longest unused first, and when: numbers that only rise.

        Such a number is the step of the last lookup and the row's place in it (`restore` takes it
        back), so that rows of several stores can be put in one order. Empty without an order.
        """
        most = self.stats()["rows"]
        keys, touched = np.empty(most, np.int64), np.empty(most, np.uint64)
        self._store.check_alive()
        n = self.core.order(keys, touched)
        return keys[:n], touched[:n]

    def restore(self, keys: Array, raw: Array, touched: Array | None = None) -> None:
        """Writes whole rows as they were, in order of recency: the last is the most recent."""
        keys = check("keys", keys, np.int64, (None,))
        raw = check("raw", raw, np.uint8, (len(keys), self.core.record_bytes))
        if touched is not None:
            touched = check("touched", touched, np.uint64, (len(keys),))
        self._store.check_alive()
        refused = self.core.restore(keys, raw, touched)
        if refused:
            raise self.full_error(f"{refused} of {len(keys)} restored rows found no room")

    def restore_progress(self, *, steps: int, epoch: int) -> None:
        """Adam's step count and the number of prunes, from a checkpoint's `stats()`."""
        self.core.set_progress(steps, epoch)

    def stats(self) -> dict[str, int]:
        """Rows, chunks, bytes of the index and the queue, optimizer steps, prunes."""
        return dict(self.core.stats())

    # --- inside -----------------------------------------------------------------------------------

    def _is_at_max_rows(self) -> bool:
        if not self.max_rows:
            return False
        stats = self.stats()
        return stats["rows"] - stats["spilled_rows"] >= self.max_rows

    def full_error(self, what: str) -> StoreFullError:
        limit = f"`max_rows`={self.max_rows}" if self.max_rows else "no `max_rows`"
        drop = "" if self.evicts else ' use evict="lru",'
        stats = self.stats()
        below = stats["spilled_rows"]
        markers = (
            f", {below} of them on disk, which keep about {MARKER_BYTES} bytes each here "
            f"({below * MARKER_BYTES} in all)"
        )
        if self.spill:
            drop = " use more shards, evict instead of spilling,"
        return StoreFullError(
            f"table {self.name!r}: {what}; the store's capacity is {self._store.capacity} bytes, "
            f"the table has {limit} and {stats['rows']} rows{markers if below else ''}. Raise them,"
            f"{drop} or send fewer distinct ids in one call"
        )

    def _arrays(self, keys: Array, out: Array | None, seen: Array | None) -> tuple[Any, Any, Any]:
        keys = check("keys", keys, np.int64, (None,))
        out = room_for("out", out, np.float32, (len(keys), self.dim))
        return keys, out, room_for("found", seen, np.uint8, (len(keys),))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._store.check_alive()
        try:
            yield
        except self._store.expired as error:
            raise SnapshotExpiredError(str(error)) from error
