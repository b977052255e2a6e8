"""All rows of an arm, in little memory: the latest as they are, the others in a file.

A row of three stages takes four kilobytes of Python objects, and a run has as many as it has steps.
Results, report and checkpoints read them again, but seldom and from front to back. So full blocks
of rows are packed into a file without a name, which ends with the process; a row that is read from
there equals the one that was added, to the bit. A disk that is full costs no training: the packed
block stays in memory, at a tenth of its size.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, overload

from ray_pipe.step_row import StepRow, row_from, row_to

BLOCK = 128
"""Rows that are packed together; up to twice as many are kept as they are."""

Block = tuple[int, int] | bytes
"""Where packed rows lie in the file, or they themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsThen:
    """The rows of a log as they were at one moment. Read as often as one likes, in any thread,
    while the log grows."""

    blocks: tuple[Block, ...]
    latest: tuple[StepRow, ...]
    file: IO[bytes] | None

    def texts(self) -> Iterator[str]:
        """The rows in JSON, many at a time, separated by commas as in a list."""
        for block in self.blocks:
            yield zlib.decompress(_take(self.file, block)).decode()
        if self.latest:
            yield ", ".join(_texts(self.latest))


class StepLog(Sequence[StepRow]):
    """A list of rows that only grows."""

    def __init__(self, rows: Iterable[StepRow] = ()) -> None:
        self._blocks: list[Block] = []
        self._latest: list[StepRow] = []
        self._file: IO[bytes] | None = None
        self._end = 0
        for row in rows:
            self.append(row)

    def append(self, row: StepRow) -> None:
        """Add the row of the next step."""
        self._latest.append(row)
        if len(self._latest) == 2 * BLOCK:
            text = ", ".join(_texts(self._latest[:BLOCK]))
            self._blocks.append(self._put(zlib.compress(text.encode(), 1)))
            del self._latest[:BLOCK]

    def then(self) -> RowsThen:
        """The rows up to now, for whoever reads them later."""
        return RowsThen(blocks=tuple(self._blocks), latest=tuple(self._latest), file=self._file)

    def close(self) -> None:
        """Give the file back; nothing packed can be read any more."""
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return BLOCK * len(self._blocks) + len(self._latest)

    def __iter__(self) -> Iterator[StepRow]:
        for index in range(len(self._blocks)):
            yield from self._unpacked(index)
        yield from self._latest

    @overload
    def __getitem__(self, index: int) -> StepRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRow]: ...
    def __getitem__(self, index: int | slice) -> StepRow | list[StepRow]:
        if isinstance(index, slice):
            return self._some(range(*index.indices(len(self))))
        place = range(len(self))[index]
        block, within = divmod(place, BLOCK)
        if block < len(self._blocks):
            return self._unpacked(block)[within]
        return self._latest[place - BLOCK * len(self._blocks)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (StepLog, list)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # it grows

    def _some(self, places: range) -> list[StepRow]:
        found: list[StepRow] = []
        held, rows = -1, self._latest
        packed = BLOCK * len(self._blocks)
        for place in places:
            if place >= packed:
                found.append(self._latest[place - packed])
                continue
            if place // BLOCK != held:
                held = place // BLOCK
                rows = self._unpacked(held)
            found.append(rows[place % BLOCK])
        return found

    def _unpacked(self, index: int) -> list[StepRow]:
        text = zlib.decompress(_take(self._file, self._blocks[index])).decode()
        return [row_from(saved) for saved in json.loads(f"[{text}]")]

    def _put(self, packed: bytes) -> Block:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="ray_pipe-rows-", buffering=0)  # noqa: SIM115
            self._file.seek(self._end)
            if self._file.write(packed) != len(packed):
                raise OSError("the disk is full")
        except OSError:
            if self._file is not None:
                with suppress(OSError):
                    self._file.truncate(self._end)
            return packed
        place = (self._end, len(packed))
        self._end += len(packed)
        return place


def _take(file: IO[bytes] | None, block: Block) -> bytes:
    if isinstance(block, bytes):
        return block
    assert file is not None
    place, nbytes = block
    return os.pread(file.fileno(), nbytes, place)  # the file's own position is the writer's


def _texts(rows: Iterable[StepRow]) -> Iterator[str]:
    return (json.dumps(row_to(row), default=_plain) for row in rows)


def _plain(value: Any) -> Any:
    """A codec of the user's may report numbers of numpy or torch; whatever it is, the run goes
    on."""
    return value.item() if hasattr(value, "item") else str(value)
