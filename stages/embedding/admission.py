"""Who gets a row: ids that were seen often enough. Counted in a table of the same row store.

Rare ids are most of the ids and little of the data; a row each would be most of the memory. The
counters are rows of one number with an exact order of use, so their memory is bounded, an id that
is counted is counted exactly, and checkpoints carry them like any row.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from stages.embedding.row_rules import Sgd
from stages.embedding.row_store import RowStore
from stages.embedding.row_table import RowTable
from stages.embedding.tables import MinCount, Probability

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
LOUD_AFTER = 100_000
LOUD_SHARE = 0.9

_log = logging.getLogger("ray_pipe")


class Admission:
    """Counts the sightings of ids that have no row yet."""

    def __init__(self, store: RowStore, table: str, rule: MinCount | Probability) -> None:
        self.rule = rule
        self.counters: RowTable = store.table(
            f"{table}/sightings", dim=1, optimizer=Sgd(lr=1.0), max_rows=rule.remember, evict="lru"
        )
        self.asked = 0
        self.refused = 0
        """Of all ids that were asked for, each counted once a step."""

        self._table = table
        self._was_loud = False

    def admitted(self, ids: Ids, has_row: Mask, step: int = 0) -> Mask:
        """One sighting of distinct ids: which of them have a row, or get one now."""
        allowed = has_row.copy()
        strangers = np.flatnonzero(~has_row)
        for first in range(0, len(strangers), self.rule.remember):
            some = strangers[first : first + self.rule.remember]
            those = np.ascontiguousarray(ids[some])
            allowed[some] = self._count(those, step) >= self.rule.needed(those, self._table)
        known = np.ascontiguousarray(ids[allowed & ~has_row])
        if len(known):
            self.counters.remove(known)
        self.asked += len(ids)
        self.refused += int((~allowed).sum())
        self._warn()
        return allowed

    def _count(self, ids: Ids, step: int) -> npt.NDArray[np.float32]:
        before, _ = self.counters.lookup(ids, step=step)
        self.counters.apply(ids, np.full((len(ids), 1), -1.0, np.float32))
        return before[:, 0] + 1

    def _warn(self) -> None:
        if self._was_loud or self.asked < LOUD_AFTER or self.refused < LOUD_SHARE * self.asked:
            return
        self._was_loud = True
        _log.warning(
            "table %r: %d of %d ids so far had no row, because admit=%s has not seen them often "
            "enough; they read as zeros. Let them in earlier, or raise `remember` (%d)",
            *(self._table, self.refused, self.asked, self.rule, self.rule.remember),
        )
