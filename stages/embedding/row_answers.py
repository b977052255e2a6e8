"""What a table answers with, and the moment of the store that it may be asked about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Status(IntEnum):
    """What became of a transaction."""

    OK = 0
    CONFLICT = 1
    FULL = 2
    PENDING = 3  # met a spilled row; recall it and run the transaction again
    NONFINITE = 4


class Applied(NamedTuple):
    """What one optimizer step did."""

    applied: int
    dropped: int
    """Rows that are not there any more: their gradients were skipped, nobody else's."""
    version: int
    """Optimizer steps of the table, this one included."""
    staleness: int | None
    """Steps that others made since `v_read`."""


class Pruned(NamedTuple):
    """What one prune did, in chunks but for the rows."""

    rows: int
    pruned: int
    regrown: int
    dropped_rows: int
    alive: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """An array of transactions, by position."""

    statuses: npt.NDArray[np.uint8]
    out: npt.NDArray[np.float32] | None
    seen: npt.NDArray[np.uint8]

    @property
    def ok(self) -> bool:
        return not self.statuses.any()


class Snapshot:
    """One moment of the store; a context manager. Reads of it never abort.

    It pins the versions it can see. When those outgrow the store's `snapshot_budget`, or leave no
    room for new rows, it expires, and reading it raises `SnapshotExpiredError`.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @property
    def stamp(self) -> int:
        return int(self.handle.stamp)

    def close(self) -> None:
        self.handle.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
