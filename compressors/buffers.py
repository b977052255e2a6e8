"""Rows that both ends of an edge remember: staged, committed, evicted, saved.

Path: compressors.delta -> compressors.buffers -> compressors.spill

A row is what a sample's activation decoded to on its last visit. AC-SGD holds only while the rows
of sender and receiver are equal to the bit, so a store never decides anything its peer cannot
see: values come from packets, and eviction is decided by the sender and told to the receiver.

What a step learns sits in an overlay that later micro-batches of the step already see; `commit`
makes it permanent, `abort` forgets it at both ends. Values of committed rows lie on a `Shelf`:
plain memory here, memory and a file in `compressors.spill`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compressors.base import State
from compressors.identity import to_part
from compressors.row_format import RowFormat


@dataclass(frozen=True, slots=True)
class Mark:
    """What is known of a row without touching its value."""

    generation: int
    visit: int
    shape: tuple[int, ...]
    kept: bool = True
    """False when the value was not finite: the counters stay, the next visit is cold."""


class Change(NamedTuple):
    """What one commit did to one row; applied in order they make the rows what they are."""

    sample: int
    mark: Mark | None
    """None when the row was dropped or evicted."""

    value: Tensor | None
    """None when the mark says that it was not kept."""


class Shelf(Protocol):
    """Where the values of committed rows lie."""

    def get(self, sample: int) -> Tensor: ...
    def put(self, sample: int, value: Tensor) -> None: ...
    def drop(self, sample: int) -> None: ...
    def prefetch(self, samples: Collection[int]) -> None: ...
    def close(self) -> None: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def spilled_bytes(self) -> int: ...


class MemoryShelf:
    """Every row in memory."""

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}
        self._nbytes = 0

    def get(self, sample: int) -> Tensor:
        return self._values[sample]

    def put(self, sample: int, value: Tensor) -> None:
        self.drop(sample)
        self._values[sample] = value
        self._nbytes += value.nbytes

    def drop(self, sample: int) -> None:
        value = self._values.pop(sample, None)
        if value is not None:
            self._nbytes -= value.nbytes

    def prefetch(self, samples: Collection[int]) -> None:
        """Everything is here already."""

    def close(self) -> None:
        self._values.clear()
        self._nbytes = 0

    @property
    def resident_bytes(self) -> int:
        return self._nbytes

    @property
    def spilled_bytes(self) -> int:
        return 0


class RowStore:
    """The rows of one end of one edge. Not thread-safe: its owner holds the lock."""

    def __init__(
        self,
        *,
        row_format: RowFormat,
        shelf: Shelf | None = None,
        cap_bytes: int | None = None,
        incarnation: int = 0,
    ) -> None:
        if cap_bytes is not None and cap_bytes <= 0:
            raise ValueError(f"cap_bytes must be positive or None for no cap, got {cap_bytes}")
        if not 0 <= incarnation < 1 << 20:
            raise ValueError(f"incarnation must be in 0..{(1 << 20) - 1}, got {incarnation}")
        self.row_format = row_format
        self.cap_bytes = cap_bytes
        self.shelf: Shelf = MemoryShelf() if shelf is None else shelf
        self._marks: OrderedDict[int, Mark] = OrderedDict()  # committed, least recent first
        self._overlay: dict[int, tuple[Mark, Tensor | None] | None] = {}  # None: dropped
        self._row_bytes = 0
        # Generations never rewind, not even by an abort: what was sent stays sent.
        self._generation = incarnation << 32
        self._pending_evictions: dict[int, None] = {}
        self._announced: set[int] = set()  # pending ones that a packet of this step has told
        self.journal: list[Change] | None = None
        """If it is a list, every commit adds what it changed; whoever set it takes them out."""

    # Looking, overlay first.

    def mark(self, sample: int) -> Mark | None:
        if sample in self._overlay:
            staged = self._overlay[sample]
            return None if staged is None else staged[0]
        return self._marks.get(sample)

    def value(self, sample: int) -> Tensor:
        """The stored form of a row that `mark` says is kept."""
        staged = self._overlay.get(sample)
        if staged is not None:
            assert staged[1] is not None, f"row {sample} was not kept"
            return staged[1]
        return self.shelf.get(sample)

    def samples(self) -> list[int]:
        """Ids of all visible rows, sorted."""
        visible = self._marks.keys() | self._overlay.keys()
        return sorted(s for s in visible if self.mark(s) is not None)

    def rows(self) -> list[Change]:
        """All committed rows, least recent first, as the changes that would make them."""
        return [
            Change(sample, mark, self.shelf.get(sample) if mark.kept else None)
            for sample, mark in self._marks.items()
        ]

    @property
    def num_rows(self) -> int:
        return len(self._marks)

    @property
    def row_bytes(self) -> int:
        """Bytes of all committed rows, in memory or not."""
        return self._row_bytes

    # Changing, in the overlay only.

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def stage(self, sample: int, mark: Mark, value: Tensor | None) -> None:
        assert mark.kept == (value is not None)
        self._overlay.pop(sample, None)  # the newest visit is the most recent for eviction
        self._overlay[sample] = (mark, value)

    def stage_drop(self, sample: int) -> None:
        self._overlay.pop(sample, None)
        if sample in self._marks:
            self._overlay[sample] = None

    def abort(self) -> None:
        """Forget the step. Evictions stay pending: the packet that told them is void."""
        self._overlay.clear()
        self._announced.clear()

    def commit(self, *, evict: bool) -> int:
        """Make the step permanent; with `evict` (the sender), keep below the cap.

        Returns the number of rows evicted.
        """
        for sample in self._announced:
            self._pending_evictions.pop(sample, None)
        self._announced.clear()
        for sample, staged in self._overlay.items():
            self._forget(sample)
            if staged is not None:
                self._keep(sample, *staged)
            if self.journal is not None:
                self.journal.append(Change(sample, *(staged or (None, None))))
        self._overlay.clear()
        return self._evict() if evict else 0

    def announce_evictions(self, *, limit: int, again: bool = False) -> tuple[int, ...]:
        """Evictions that the packet being written shall tell the receiver.

        Each is told once a step; `again` tells them anew, for a packet that replaces one. A
        sample staged in this step is left out: its cold packet overwrites the row anyway.
        """
        if not self._pending_evictions:
            return ()
        told = [
            sample
            for sample in self._pending_evictions
            if sample not in self._overlay and (again or sample not in self._announced)
        ][:limit]
        self._announced.update(told)
        return tuple(told)

    @property
    def pending_evictions(self) -> tuple[int, ...]:
        """Samples given up here that the receiver may still hold."""
        return tuple(s for s in self._pending_evictions if s not in self._overlay)

    def _keep(self, sample: int, mark: Mark, value: Tensor | None) -> None:
        self._marks[sample] = mark
        self._pending_evictions.pop(sample, None)
        if value is not None:
            self.shelf.put(sample, value)
            self._row_bytes += value.nbytes

    def _forget(self, sample: int) -> None:
        mark = self._marks.pop(sample, None)
        if mark is not None and mark.kept:
            self._row_bytes -= self.row_format.nbytes(mark.shape)
            self.shelf.drop(sample)

    def _evict(self) -> int:
        num_evicted = 0
        while self.cap_bytes is not None and self._row_bytes > self.cap_bytes:
            sample = next(iter(self._marks))
            self._forget(sample)
            self._pending_evictions[sample] = None
            if self.journal is not None:
                self.journal.append(Change(sample, None, None))
            num_evicted += 1
        return num_evicted

    # Saving and comparing.

    def digest(self, *, without: Collection[int] = ()) -> str:
        """Hash over ids, generations, visits, shapes and values of all visible rows."""
        total = hashlib.blake2b(digest_size=16)
        for sample in self.samples():
            if sample in without:
                continue
            mark = self.mark(sample)
            assert mark is not None
            head = (sample, mark.generation, mark.visit, mark.shape, mark.kept)
            total.update(repr(head).encode())
            if mark.kept:
                total.update(as_bytes(self.value(sample)))
        return total.hexdigest()

    def state_dict(self, *, rows: bool = True) -> State:
        """Committed rows and counters as flat tensors and plain values, least recent first.

        Without `rows` only what is not a row: `rows_state` makes the rest.
        """
        state: State = {
            "format": self.row_format.name,
            "generation": self._generation,
            "pending_evictions": list(self._pending_evictions),
        }
        if rows:
            values = [_flat(self.shelf.get(s)) for s, mark in self._marks.items() if mark.kept]
            state |= rows_state(self._marks, values)
        return state

    def load_state_dict(self, state: State) -> None:
        """Replace everything by a saved state; the next step is as if it had never stopped."""
        if state["format"] != self.row_format.name:
            raise ValueError(
                f"the saved rows are {state['format']}, this store keeps {self.row_format.name}; "
                f"resume with rows={state['format']!r}, or drop the rows at both ends"
            )
        for sample in list(self._marks):
            self._forget(sample)
        self.abort()
        if self.journal is not None:
            self.journal.clear()
        self._generation = int(state["generation"])
        self._pending_evictions = dict.fromkeys(int(s) for s in state["pending_evictions"])
        dims = iter(state["dims"].tolist())
        values: Tensor = state["values"]
        offset = 0
        columns = (state[key].tolist() for key in ("ids", "generations", "visits", "kept"))
        for sample, generation, visit, kept, num_dims in zip(*columns, state["num_dims"].tolist()):
            shape = tuple(next(dims) for _ in range(num_dims))
            value = None
            if kept:
                nbytes = self.row_format.nbytes(shape)
                raw = values[offset : offset + nbytes].clone()
                value = self.row_format.from_bytes(raw, shape)
                offset += nbytes
            self._marks[sample] = Mark(generation, visit, shape, bool(kept))
            if value is not None:
                self.shelf.put(sample, value)
                self._row_bytes += value.nbytes


def rows_state(marks: Mapping[int, Mark], values: Sequence[Tensor]) -> State:
    """Rows as `RowStore.load_state_dict` reads them; `values` are the bytes of those kept."""
    each = list(marks.values())
    return {
        "ids": _int64(marks),
        "generations": _int64(mark.generation for mark in each),
        "visits": _int64(mark.visit for mark in each),
        "kept": _int64(int(mark.kept) for mark in each),
        "num_dims": _int64(len(mark.shape) for mark in each),
        "dims": _int64(size for mark in each for size in mark.shape),
        "values": torch.cat(list(values)) if values else torch.empty(0, dtype=torch.uint8),
    }


def as_bytes(value: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    return to_part(value)


def _flat(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def _int64(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)
