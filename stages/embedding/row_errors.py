"""What can go wrong in the row store, by name."""

from __future__ import annotations


class RowStoreError(RuntimeError):
    """Any of the below."""


class StoreFullError(RowStoreError):
    """There is no room for new rows; rows that exist can still be read and trained."""


class SnapshotExpiredError(RowStoreError):
    """A snapshot pinned more old versions than `snapshot_budget` or the capacity allows."""


class StoreForkedError(RowStoreError):
    """A store was used in a process that was forked from its own."""


class ConflictError(RowStoreError):
    """An interactive transaction read something that has changed since; run it again."""


class RowsOnDiskError(RowStoreError):
    """Rows are spilled; recall them first."""


class SpillBusyError(RowStoreError):
    """Another process, or another model, spills to that folder."""


class NonFiniteGradientError(RowStoreError):
    """A gradient has infinities or NaNs. Nothing was applied."""
