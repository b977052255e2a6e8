"""The file behind spilled rows: chunks mapped into memory, slots of a few sizes.

Path: compressors.spill -> compressors.spill_file

Space is reserved before it is mapped, so that a full disk is an error here and not a fault on a
write to memory. The file has no name once it is open: whatever ends the process, nothing is left.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class SpillError(OSError):
    """The spill file cannot be made, grown, written or read."""


class Slot(NamedTuple):
    """A place in the file."""

    chunk: int
    offset: int
    size: int


class Disk(Protocol):
    """What the shelf needs of a file; a slow one must change nothing but the time."""

    def reserve(self, nbytes: int) -> Slot: ...
    def release(self, slot: Slot) -> None: ...
    def write(self, slot: Slot, raw: Tensor) -> None: ...
    def read(self, slot: Slot, nbytes: int) -> Tensor: ...
    def close(self) -> None: ...


class ChunkFile:
    """A nameless file mapped chunk by chunk; a chunk holds slots of one size."""

    def __init__(self, directory: str | Path, chunk_bytes: int) -> None:
        self._directory = Path(directory)
        page = mmap.ALLOCATIONGRANULARITY
        self._chunk_bytes = -(-chunk_bytes // page) * page
        self._free: dict[int, list[Slot]] = {}
        self._untouched: dict[int, Slot] = {}  # by slot size: the rest of the newest chunk
        self._chunks: list[mmap.mmap] = []
        self._nbytes = 0
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._fd, name = tempfile.mkstemp(prefix="ray_pipe_rows_", dir=self._directory)
            os.unlink(name)
        except OSError as error:
            raise SpillError(
                error.errno,
                f"cannot make a spill file in {str(self._directory)!r}: {error.strerror}; "
                "name a writable directory, or keep the rows in memory",
            ) from error

    def reserve(self, nbytes: int) -> Slot:
        """A free slot of at least `nbytes`; the file grows if there is none."""
        size = _slot_size(nbytes)
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        untouched = self._untouched.get(size)
        if untouched is None or untouched.offset + size > untouched.size:
            untouched = self._grow(size)
        self._untouched[size] = untouched._replace(offset=untouched.offset + size)
        return untouched._replace(size=size)

    def release(self, slot: Slot) -> None:
        self._free[slot.size].append(slot)

    def write(self, slot: Slot, raw: Tensor) -> None:
        if raw.numel():
            self._view(slot, raw.numel()).copy_(raw)

    def read(self, slot: Slot, nbytes: int) -> Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return self._view(slot, nbytes).clone()

    def close(self) -> None:
        if self._fd >= 0:
            self._chunks.clear()  # unmapped when the last view is gone
            self._free.clear()
            self._untouched.clear()
            os.close(self._fd)
            self._fd = -1

    def _view(self, slot: Slot, nbytes: int) -> Tensor:
        chunk = self._chunks[slot.chunk]
        return torch.frombuffer(chunk, dtype=torch.uint8, count=nbytes, offset=slot.offset)

    def _grow(self, size: int) -> Slot:
        """A new chunk, as one slot."""
        page = mmap.ALLOCATIONGRANULARITY
        length = max(self._chunk_bytes, -(-size // page) * page)
        try:
            os.posix_fallocate(self._fd, self._nbytes, length)
            self._chunks.append(mmap.mmap(self._fd, length, offset=self._nbytes))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            why = "the disk is full" if full else error.strerror
            raise SpillError(
                error.errno,
                f"spill file in {str(self._directory)!r} holds {self._nbytes} bytes and cannot "
                f"grow by {length}: {why}; free space, name another directory, lower "
                "`cap_bytes`, or store rows in fewer bits",
            ) from error
        self._nbytes += length
        return Slot(len(self._chunks) - 1, 0, length)


def _slot_size(nbytes: int) -> int:
    """Sizes in quarters of powers of two, so that rows of many lengths share chunks."""
    step = max(64, 1 << max(0, nbytes.bit_length() - 3))
    return max(64, -(-nbytes // step) * step)
