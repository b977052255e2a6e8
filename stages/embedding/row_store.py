"""The row store: embedding rows by key, multi-version, transactional, in one process.

Arrays of keys go in, arrays of rows come out, and the GIL is released meanwhile. Readers use
snapshots and never abort; updates are serialisable. `native/rows` does the work, or its Python twin
(`stages.embedding.row_store_twin`) with the same results, announced by a warning. Specification:
row_store.md, sections 4 to 6.

    store = RowStore(capacity="6GiB")
    rows = store.table("user", dim=32, optimizer=RowAdagrad(lr=0.05), init=Uniform(0.05), seed=7)
    weights, seen = rows.lookup(ids)
    rows.apply(ids, gradients)
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

from stages.embedding import row_rules as rules
from stages.embedding.row_answers import Snapshot
from stages.embedding.row_arrays import Array, nbytes_of
from stages.embedding.row_core import core as choose_core
from stages.embedding.row_errors import StoreForkedError
from stages.embedding.row_shares import take_room
from stages.embedding.row_table import RowTable
from stages.embedding.row_transaction import Transaction

__all__ = ["RowStore", "RowTable", "Snapshot"]

_commons: weakref.WeakSet[Commons] = weakref.WeakSet()


class Commons:
    """What the tables of a store share.

    Knows them weakly: were store and tables to hold each other, a store that nobody needs any more
    would keep its memory until Python's collector comes by, which native pages do not hasten.
    """

    def __init__(self, module: Any, core: Any, *, capacity: int, slab_bytes: int) -> None:
        self.expired: type[Exception] = module.SnapshotExpired
        self.core = core
        self.capacity, self.slab_bytes = capacity, slab_bytes
        self.is_forked = False
        self._tables: list[weakref.ref[RowTable]] = []
        _commons.add(self)

    def add(self, table: RowTable) -> None:
        self._tables.append(weakref.ref(table))

    def lru_tables(self) -> list[RowTable]:
        """Tables that drop their oldest rows for room."""
        tables = [table() for table in self._tables]
        return [table for table in tables if table is not None and table.evicts]

    def take_room(self, table: RowTable, *, num_rows: int, must: bool) -> bool:
        """`row_shares.take_room`, for the store's own tables."""
        return take_room(self, table, num_rows=num_rows, must=must)

    def compact(self) -> int:
        self.check_alive()
        return int(self.core.compact())

    def check_alive(self) -> None:
        if self.is_forked:
            raise StoreForkedError(
                f"process {os.getpid()} was forked while it held a row store, whose locks and "
                "threads did not come along. Make the store in the process that uses it"
            )


class RowStore:
    """Tables that share memory, a clock and a capacity. One for each process; not to be forked."""

    def __init__(
        self,
        *,
        capacity: int | str = "1GiB",
        pages: str = "huge",
        slab: int | str = "2MiB",
        snapshot_budget: int | str = 0,
        core: str | None = None,
    ) -> None:
        if pages not in ("huge", "4k"):
            raise ValueError(f'pages is "huge" or "4k", got {pages!r}')
        self._module, self.native = choose_core(core)
        self.capacity = nbytes_of(capacity)
        self.slab_bytes = nbytes_of(slab)
        self._core = self._module.RowStore.make(
            self.capacity, self.slab_bytes, pages == "huge", nbytes_of(snapshot_budget)
        )
        self._commons = Commons(
            self._module, self._core, capacity=self.capacity, slab_bytes=self.slab_bytes
        )
        self._tables: dict[str, RowTable] = {}
        self.spilling: list[weakref.ref[Any]] = []
        """Tables with a disk below them (`row_spill`): they make room for each other."""

    def table(
        self,
        name: str,
        *,
        dim: int,
        optimizer: rules.Optimizer | None = None,
        init: rules.Init = rules.Constant(0.0),  # noqa: B008 (frozen)
        seed: int = 0,
        chunks: int = 1,
        max_rows: int = 0,
        evict: str | None = None,
        spill: bool = False,
        expected_rows: int = 0,
        decay: float = 0.98,
        utility_scale: float = 4096.0,
    ) -> RowTable:
        """A new table. Rows depend on (seed, name, id) only.

        `chunks` cuts a row into columns that can be pruned one by one. `evict="lru"` makes room at
        `max_rows`, or at the store's capacity, by dropping the rows that training looked up longest
        ago, here or in a larger such table (`row_shares`); `spill=True` leaves that to the caller
        (see `stages.embedding.row_spill`).
        """
        self.check_alive()
        if dim < 1 or not 1 <= chunks <= 8 or dim % chunks:
            raise ValueError(
                f"table {name!r}: dim is a positive multiple of chunks, and chunks at most 8; "
                f"got dim={dim}, chunks={chunks}"
            )
        if evict not in (None, "lru"):
            raise ValueError(f'table {name!r}: evict is "lru" or None, got {evict!r}')
        if not 0 < decay <= 1:
            raise ValueError(f"table {name!r}: decay is in (0, 1], got {decay}")
        if name in self._tables:
            raise ValueError(
                f"there is a table {name!r} already; names are part of a row's identity"
            )
        rule, numbers = rules.rule_of(optimizer)
        kind, mean, scale = rules.init_of(init)
        lru = evict == "lru" or spill
        table = self._module.RowStore.table(
            self._core,
            *(name, dim, chunks, rule, numbers, kind, mean, scale, seed, max_rows),
            *(lru, spill, expected_rows, decay, utility_scale),
        )
        evicts = lru and not spill
        self._tables[name] = RowTable(
            *(self._commons, table, name, dim, chunks, optimizer, max_rows, spill),
            evicts=evicts,
            decay=decay,
        )
        self._commons.add(self._tables[name])
        return self._tables[name]

    def __getitem__(self, name: str) -> RowTable:
        if name not in self._tables:
            raise KeyError(f"no table {name!r}; there are {sorted(self._tables)}")
        return self._tables[name]

    def run(
        self, name: str, offsets: Array, keys: Array, payload: Array | None = None, **more: Any
    ) -> Any:
        """`RowTable.run` of the table named by `table=`, or of the only one."""
        table = more.pop("table", None)
        if table is None:
            if len(self._tables) != 1:
                raise ValueError(f"say which table: `table=` one of {sorted(self._tables)}")
            table = next(iter(self._tables))
        return self[table].run(name, offsets, keys, payload, **more)

    def snapshot(self) -> Snapshot:
        """What is committed now, for as long as the snapshot is open."""
        self.check_alive()
        return Snapshot(self._module.RowStore.snapshot(self._core))

    def begin(self, table: str) -> Transaction:
        """An interactive transaction on one table, key by key: for tests and tools."""
        return Transaction(self[table], self.snapshot())

    def compact(self) -> int:
        """Packs the rows of each size into as few slabs as hold them, which frees the others.

        Returns how many slabs that were. Worth calling after pruning: memory goes back to the
        system as soon as no snapshot needs the old rows; and where tables of other row sizes are to
        use what one has freed.
        """
        return self._commons.compact()

    def counters(self) -> dict[str, Any]:
        """What the core counts, at once: for whoever asks in every step."""
        self.check_alive()
        return dict(self._core.stats())

    def stats(self) -> dict[str, Any]:
        """Numbers for metrics; `native` says which core gave them. Finding out which pages are huge
        takes the kernel some ten milliseconds, or more with much memory."""
        numbers = self.counters()
        base = numbers.pop("base")
        tables = {name: table.stats() for name, table in self._tables.items()}
        numbers["rows"] = sum(table["rows"] for table in tables.values())
        numbers["huge_bytes"] = huge_bytes(base, self.capacity) if base else 0
        return {**numbers, "native": self.native, "tables": tables}

    def check_alive(self) -> None:
        self._commons.check_alive()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a row store is memory of one process and cannot be pickled; send rows "
            "(`scan`, `restore`) or make the store where it is used"
        )


def huge_bytes(base: int, nbytes: int) -> int:
    """How much of a mapping the kernel backs with huge pages."""
    try:
        lines = open("/proc/self/smaps").read().splitlines()  # noqa: SIM115
    except OSError:
        return 0
    total, inside = 0, False
    for line in lines:
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start < base + nbytes and end > base
        elif inside and head == "AnonHugePages:":
            total += int(line.split()[1]) * 1024
    return total


def _mark_forked() -> None:
    for commons in _commons:
        commons.is_forked = True


os.register_at_fork(after_in_child=_mark_forked)
