"""Room between tables of one store that drop what was used longest ago (`evict="lru"`).

A table that finds no memory drops its own oldest rows. That alone would let the table that came
first keep what it took for ever: a later one would turn over a few rows, or find no room at all
for one call. So a table that has less than half of what the largest has takes from that one, a part
at a time, and one whose call does not fit takes at once. Tables with a disk below them settle the
same among themselves (`row_spill`).
"""

from __future__ import annotations

from typing import Protocol

from stages.embedding.row_table import RowTable

PART = 8
"""Of the largest table's rows, how many go at once: freeing memory reads all rows of a store."""

AFTER = 16
"""A table that can drop its own rows takes from others after it has dropped this part of the
store's rows, so that what reading them costs stays a few rows for each that was dropped."""


class Sharing(Protocol):
    """What is wanted from a store."""

    slab_bytes: int

    def lru_tables(self) -> list[RowTable]: ...

    def compact(self) -> int: ...


def take_room(store: Sharing, table: RowTable, *, num_rows: int, must: bool) -> bool:
    """Room for `num_rows` of a table at the cost of the largest other one, if that is fair, or if
    it `must` be; whether there is more now."""
    tables = store.lru_tables()
    others = [one for one in tables if one is not table]
    largest = max(others, key=_nbytes, default=None)
    if largest is None:
        return False
    if not must:
        if 2 * _nbytes(table) >= _nbytes(largest):
            return False
        if table.evicted - table.evicted_when_took < sum(map(_rows, tables)) // AFTER:
            return False
    table.evicted_when_took = table.evicted
    wanted = max(2 * num_rows * _row_bytes(table), 2 * store.slab_bytes)
    there = _rows(largest)
    going = max(-(-wanted // _row_bytes(largest)), there // PART)
    gone = largest.evict(min(going, there // 2))  # half stays: steps under way use the newest
    largest.evicted += gone
    if gone:
        store.compact()  # what another table frees must become whole slabs
    return gone > 0


def _rows(table: RowTable) -> int:
    stats = table.stats()
    return stats["rows"] - stats["spilled_rows"]


def _row_bytes(table: RowTable) -> int:
    return table.stats()["row_bytes"]


def _nbytes(table: RowTable) -> int:
    return _rows(table) * _row_bytes(table)
