"""Rows that memory should not hold: a chunked, memory-mapped file behind a memory tier.

Path: compressors.buffers -> compressors.spill -> compressors.spill_file

    put -> memory tier --oldest--> write area --writer thread--> file
    get <- memory tier, write area, read area, or else the file
    prefetch: file --reader thread--> read area

Writing and reading have areas of their own, so a prefetch can never hand out what a write is
about to replace. A row whose write is pending is taken from the write area: no read of the file
sees bytes older than the last `put`. How slow the disk is changes when things happen, never
what is read.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compressors.spill_file import ChunkFile, Disk, Slot, SpillError

MIB = 1 << 20
DEFAULT_RAM_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """Where rows go that memory should not hold, and how much memory may."""

    directory: str | Path
    """On a local disk; rows are read and written every step."""

    ram_bytes: int = DEFAULT_RAM_BYTES
    """Rows kept in memory; the least recently written go to the file first."""

    chunk_bytes: int = 64 * MIB
    """The file grows by this much."""

    write_behind_bytes: int = 64 * MIB
    """Rows that may wait to be written; `put` waits beyond it."""

    def __post_init__(self) -> None:
        for name in ("ram_bytes", "write_behind_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"spill.{name} must not be negative, got {getattr(self, name)}")
        if self.chunk_bytes < mmap.ALLOCATIONGRANULARITY:
            raise ValueError(
                f"spill.chunk_bytes is {self.chunk_bytes}, at least {mmap.ALLOCATIONGRANULARITY}"
            )

    @classmethod
    def of(cls, spill: str | Path | Spill) -> Spill:
        return spill if isinstance(spill, Spill) else cls(directory=spill)


class _Filed(NamedTuple):
    """A row in the file, or on its way there."""

    slot: Slot
    dtype: torch.dtype
    shape: torch.Size


class SpillShelf:
    """Values of rows, in memory up to a limit and in a file beyond it.

    `get`, `put` and `drop` come from one thread at a time; the two threads of the shelf share
    only what `_changed` guards.
    """

    def __init__(self, spill: Spill, *, disk: Disk | None = None) -> None:
        self._spill = spill
        self._disk = ChunkFile(spill.directory, spill.chunk_bytes) if disk is None else disk
        self._changed = threading.Condition()
        self._memory: OrderedDict[int, Tensor] = OrderedDict()  # oldest first
        self._memory_nbytes = 0
        self._filed: dict[int, _Filed] = {}
        self._writing: OrderedDict[int, Tensor] = OrderedDict()  # filed, but not written yet
        self._writing_nbytes = 0
        self._file_nbytes = 0
        self._read: dict[int, Tensor] = {}
        self._wishes: tuple[dict[int, None], dict[int, None]] = ({}, {})
        self._to_read: deque[int] = deque()
        self._reading: int | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    def get(self, sample: int) -> Tensor:
        with self._changed:
            while True:
                self._check()
                for area in (self._memory, self._writing, self._read):
                    if sample in area:
                        return area[sample]
                if self._reading != sample:
                    break
                self._changed.wait()
            filed = self._filed[sample]
            if sample in self._to_read:
                self._to_read.remove(sample)
        # No write to this slot can begin now: only `put` and `drop` lead to one, and they wait.
        return self._load(filed)

    def put(self, sample: int, value: Tensor) -> None:
        with self._changed:
            self._check()
            self._drop(sample)
            self._memory[sample] = value
            self._memory_nbytes += value.nbytes
            while self._memory_nbytes > self._spill.ram_bytes and self._memory:
                self._file_oldest()

    def drop(self, sample: int) -> None:
        with self._changed:
            self._drop(sample)

    def prefetch(self, samples: Collection[int]) -> None:
        """Read these rows ahead, after those of the last call, whose step may still be running.

        What was read for older calls and never asked for is forgotten. Returns at once.
        """
        with self._changed:
            self._check()
            self._wishes = (self._wishes[1], dict.fromkeys(samples))
            wanted = self._wishes[0] | self._wishes[1]
            self._read = {s: value for s, value in self._read.items() if s in wanted}
            self._to_read = deque(
                s for s in wanted if s in self._filed and s not in self._read and s != self._reading
            )
            if self._to_read:
                self._start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until nothing is left to write or to read ahead."""
        with self._changed:
            while self._writing or self._to_read or self._reading is not None:
                self._check()
                self._changed.wait()
            self._check()

    def close(self) -> None:
        """Stop both threads and give back memory and the file."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with self._changed:
            for area in (self._memory, self._writing, self._read, self._filed):
                area.clear()
            self._memory_nbytes = self._writing_nbytes = self._file_nbytes = 0
        self._disk.close()

    @property
    def resident_bytes(self) -> int:
        with self._changed:
            ahead = sum(value.nbytes for value in self._read.values())
            return self._memory_nbytes + self._writing_nbytes + ahead

    @property
    def spilled_bytes(self) -> int:
        """Bytes of rows in the file, or on their way there."""
        with self._changed:
            return self._file_nbytes

    # All below with the lock held, save for the threads' own disk access.

    def _check(self) -> None:
        if self._failure is not None:
            raise SpillError(
                getattr(self._failure, "errno", None), f"spill file failed: {self._failure}"
            ) from self._failure
        if self._closed:
            raise ValueError("the rows were closed and are gone")

    def _drop(self, sample: int) -> None:
        value = self._memory.pop(sample, None)
        if value is not None:
            self._memory_nbytes -= value.nbytes
        self._read.pop(sample, None)
        filed = self._filed.pop(sample, None)
        if filed is not None:
            self._file_nbytes -= _nbytes(filed)
            self._disk.release(filed.slot)
            waiting = self._writing.pop(sample, None)
            if waiting is not None:
                self._writing_nbytes -= waiting.nbytes
                self._changed.notify_all()

    def _file_oldest(self) -> None:
        """Move the oldest row of the memory tier to the write area."""
        sample, value = next(iter(self._memory.items()))
        while (
            self._writing and self._writing_nbytes + value.nbytes > self._spill.write_behind_bytes
        ):
            self._changed.wait()
            self._check()
        slot = self._disk.reserve(value.nbytes)  # may raise: the row then stays in memory
        del self._memory[sample]
        self._memory_nbytes -= value.nbytes
        self._filed[sample] = _Filed(slot, value.dtype, value.shape)
        self._file_nbytes += value.nbytes
        self._writing[sample] = value
        self._writing_nbytes += value.nbytes
        self._start()
        self._changed.notify_all()

    def _start(self) -> None:
        if not self._threads:
            for target in (self._write_behind, self._read_ahead):
                thread = threading.Thread(
                    target=target, name=f"spill{target.__name__}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                while not self._writing and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                sample, value = next(iter(self._writing.items()))
                slot = self._filed[sample].slot
            # If the row is dropped meanwhile its slot may get a new owner, whose own write comes
            # after this one, from this thread, and who is read from the write area until then.
            try:
                self._disk.write(slot, value.reshape(-1).view(torch.uint8))
            except Exception as error:
                self._fail(error)
                return
            with self._changed:
                if self._writing.get(sample) is value:
                    del self._writing[sample]
                    self._writing_nbytes -= value.nbytes
                self._changed.notify_all()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                while not self._to_read and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                sample = self._to_read.popleft()
                filed = self._filed.get(sample)
                if filed is None or sample in self._writing:
                    self._changed.notify_all()
                    continue
                self._reading = sample
            try:
                value = self._load(filed)
            except Exception as error:
                self._fail(error)
                return
            with self._changed:
                self._reading = None
                # A row written or dropped meanwhile is another one: what was read is void.
                if self._filed.get(sample) is filed:
                    self._read[sample] = value
                self._changed.notify_all()

    def _load(self, filed: _Filed) -> Tensor:
        return self._disk.read(filed.slot, _nbytes(filed)).view(filed.dtype).view(filed.shape)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._reading = None
            self._changed.notify_all()


def _nbytes(filed: _Filed) -> int:
    return filed.shape.numel() * filed.dtype.itemsize
