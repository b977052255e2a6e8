"""An interactive transaction, key by key: for tests and tools, not for training loops."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from stages.embedding.row_answers import Snapshot, Status
from stages.embedding.row_arrays import check
from stages.embedding.row_errors import ConflictError, RowsOnDiskError
from stages.embedding.row_table import RowTable

Row = npt.NDArray[np.float32]
READ, PUT, DELETE = range(3)
BLIND = (1 << 64) - 1


class Transaction:
    """Reads one snapshot, stages writes, commits all or nothing. Leaving the context commits.

    Serialisable: a commit raises `ConflictError` if anything that was read has changed since.
    """

    def __init__(self, table: RowTable, snapshot: Snapshot) -> None:
        self._table, self._snapshot = table, snapshot
        self._stamps: dict[int, int] = {}
        self._writes: dict[int, Row | None] = {}
        self._open = True

    def get(self, key: int) -> Row | None:
        """The row, or None."""
        if key in self._writes:
            return self._writes[key]
        keys = np.array([key], np.int64)
        row, found = self._table.multi_get(keys, snapshot=self._snapshot)
        stamp, on_disk = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        self._table.core.stamps(keys, self._snapshot.handle, stamp, on_disk)
        if on_disk[0]:
            raise RowsOnDiskError(f"table {self._table.name!r}: row {key} is spilled; recall it")
        self._stamps[key] = int(stamp[0])
        return row[0] if found[0] else None

    def put(self, key: int, row: Row) -> None:
        """Stages other weights; a new row gets fresh optimizer state, an old one keeps its own."""
        self._writes[key] = check("row", row, np.float32, (self._table.dim,)).copy()

    def delete(self, key: int) -> None:
        """Stages that the row goes."""
        self._writes[key] = None

    def commit(self) -> None:
        """Makes the writes visible together, or raises and changes nothing."""
        if not self._open:
            raise ValueError("the transaction is over; begin a new one")
        self._open = False
        self._snapshot.close()
        keys = sorted({*self._stamps, *self._writes})
        if not self._writes:
            return  # what it read was one snapshot
        modes = [READ if k not in self._writes else PUT for k in keys]
        rows = np.zeros((len(keys), self._table.dim), np.float32)
        for i, key in enumerate(keys):
            if key in self._writes:
                row = self._writes[key]
                if row is None:
                    modes[i] = DELETE
                else:
                    rows[i] = row
        result = self._table.run(
            "commit_if",
            np.array([0, len(keys)], np.int64),
            np.array(keys, np.int64),
            rows,
            modes=np.array(modes, np.uint8),
            expected=np.array([self._stamps.get(k, BLIND) for k in keys], np.uint64),
            want_rows=False,
        )
        status = Status(int(result.statuses[0]))
        if status is Status.FULL:
            raise self._table.full_error("a commit found no room")
        if status is not Status.OK:
            raise ConflictError(
                f"table {self._table.name!r}: something among {len(self._stamps)} rows read has "
                f"changed since stamp {self._snapshot.stamp}; begin again"
            )

    def abort(self) -> None:
        """Forgets the writes."""
        self._open = False
        self._snapshot.close()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()
