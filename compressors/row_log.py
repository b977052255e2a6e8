"""Changed rows in an append-only file: what a process must leave behind to be reborn with them.

Path: compressors.buffers -> compressors.row_log -> stages.black_box

    rows-0001.log   [entry of step 4][entry of step 5]...   oldest first

An entry is what one commit changed, of every end of a stage. Replayed up to a position they give
the rows of that moment, in the order of use. A file that holds mostly rows that were replaced
since is written anew, and the old one stays until nobody may want to go back beyond it. Each row
has a checksum that it keeps for life: a row that the disk has changed is refused, not copied.

Nothing is forced to the disk: what was written survives the process, not the machine.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch

from compressors.base import Buffer, Compressor, State
from compressors.buffers import Change, Mark, RowStore, as_bytes, rows_state
from compressors.delta import Delta

MAGIC = b"RLG2"
HEAD = struct.Struct("<4sIQI")  # magic, bytes of the list of rows, of their values, crc of the list
SLACK_NBYTES = 8 << 20
"""A file may hold so many bytes more than one and a half times the rows that live in it."""

COPY_NBYTES = 1 << 20


class RowLogError(ValueError):
    """A log that is damaged, or not one."""


class Position(NamedTuple):
    """A moment in the life of a log."""

    number: int
    """Of the file."""

    end: int
    """Bytes of it that count."""


class _Row(NamedTuple):
    mark: Mark
    offset: int
    nbytes: int
    crc: int


Index = dict[str, OrderedDict[int, _Row]]


class RowLog:
    """The log of one stage's rows, by the name of the end. One writer, one thread at a time."""

    def __init__(self, directory: Path, *, slack_nbytes: int = SLACK_NBYTES) -> None:
        self._directory = directory
        self._slack_nbytes = slack_nbytes
        self._index: Index = {}
        self._live_nbytes = 0
        self._fd = -1
        self.position = Position(0, 0)

    def append(self, changes: Mapping[str, Sequence[Change]]) -> Position:
        """Write what a commit changed; returns the position that includes it."""
        if self._fd < 0:
            self._open(self.position.number)
        listed = {name: [_show(change) for change in own] for name, own in changes.items() if own}
        if listed:
            values = [
                as_bytes(change.value)
                for name in listed
                for change in changes[name]
                if change.value is not None
            ]
            self._write_entry(listed, values)
        if self.position.end > self._slack_nbytes + 3 * self._live_nbytes // 2:
            self._compact()
        return self.position

    def rows_at(self, position: Position) -> dict[str, State]:
        """The rows of that moment, by end, as `RowStore.load_state_dict` reads them."""
        found: dict[str, State] = {}
        with self._path(position.number).open("rb") as file:
            for name, rows in _replay(file, position.end).items():
                values = []
                for row in rows.values():
                    if row.mark.kept:
                        file.seek(row.offset)
                        raw = bytearray(row.nbytes)
                        _expect(file.readinto(raw) == row.nbytes, "ends in the middle of a row")
                        values.append(torch.frombuffer(raw, dtype=torch.uint8))
                found[name] = rows_state({s: row.mark for s, row in rows.items()}, values)
        return found

    def rewind(self, position: Position) -> None:
        """Forget what was written after `position`; what comes next is written there."""
        self.close()
        path = self._path(position.number)
        self._index = {}
        if position.end:
            with path.open("rb") as file:
                self._index = _replay(file, position.end)
        self._live_nbytes = sum(row.nbytes for own in self._index.values() for row in own.values())
        self.position = position
        for other in self._numbers():
            if other > position.number:
                self._path(other).unlink()
        self._open(position.number)
        os.ftruncate(self._fd, position.end)

    def drop_before(self, number: int) -> None:
        """Remove files that nobody will go back to."""
        for other in self._numbers():
            if other < number:
                self._path(other).unlink()

    def close(self) -> None:
        """Close the file; it stays where it is. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_entry(self, listed: dict[str, list[Any]], values: list[memoryview]) -> None:
        head: bytes = msgpack.packb(listed)
        num_values = sum(value.nbytes for value in values)
        start = self.position.end
        end = write_all(self._fd, [_head(head, num_values), head, *values], start)
        self._live_nbytes += _apply(self._index, listed, start + HEAD.size + len(head))
        self.position = Position(self.position.number, end)

    def _compact(self) -> None:
        """Copy the rows that live to a new file, oldest first."""
        old, index, number = self._fd, self._index, self.position.number + 1
        listed = {
            name: [_show_row(sample, row) for sample, row in own.items()]
            for name, own in index.items()
        }
        head: bytes = msgpack.packb(listed)
        new = self._create(number)
        at = first = HEAD.size + len(head)
        try:
            for row in (row for own in index.values() for row in own.values()):
                crc = 0
                for offset in range(row.offset, row.offset + row.nbytes, COPY_NBYTES):
                    nbytes = min(COPY_NBYTES, row.offset + row.nbytes - offset)
                    piece = os.pread(old, nbytes, offset)
                    _expect(len(piece) == nbytes, "ends in the middle of a row")
                    crc = zlib.crc32(piece, crc)
                    at = write_all(new, [piece], at)
                _expect(crc == row.crc, "has a row whose checksum is wrong")
            write_all(new, [_head(head, at - first), head], 0)
        except BaseException:
            os.close(new)
            raise
        os.close(old)
        self._fd, self._index = new, {}
        _apply(self._index, listed, first)
        self.position = Position(number, at)

    def _create(self, number: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(self._path(number), flags, 0o600)

    def _open(self, number: int) -> None:
        self._fd = os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _path(self, number: int) -> Path:
        return self._directory / f"rows-{number:04d}.log"

    def _numbers(self) -> list[int]:
        return [int(path.stem[5:]) for path in self._directory.glob("rows-*.log")]


def _head(head: bytes, num_values: int) -> bytes:
    return HEAD.pack(MAGIC, len(head), num_values, zlib.crc32(head))


def write_all(fd: int, buffers: Iterable[Buffer], offset: int) -> int:
    """Write them one behind the other, all of each; returns where they end."""
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while view.nbytes:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
    return offset


def read_all(fd: int, nbytes: int, offset: int) -> bytearray:
    """That many bytes, fewer only where the file ends; one call of the system gives up to 2 GiB."""
    found = bytearray(nbytes)
    at = 0
    while at < nbytes and (count := os.preadv(fd, [memoryview(found)[at:]], offset + at)):
        at += count
    return found[:at] if at < nbytes else found


def row_store(codec: Compressor | None) -> RowStore | None:
    """The rows that a codec, or one it wraps, remembers."""
    delta = _delta_of(codec)
    return None if delta is None else delta.store


def state_without_rows(codec: Compressor) -> State:
    """A codec's `state_dict`, its rows left out: small, and cheap to take each step."""
    delta = _delta_of(codec)
    if delta is None:
        return codec.state_dict()
    with delta.rows_left_out():
        return codec.state_dict()


def _delta_of(codec: Compressor | None) -> Delta | None:
    while codec is not None and not isinstance(codec, Delta):
        codec = getattr(codec, "inner", None)
    return codec


def _show(change: Change) -> list[Any]:
    if change.mark is None:
        return [change.sample]
    value = b"" if change.value is None else as_bytes(change.value)
    return _show_row(change.sample, _Row(change.mark, 0, len(value), zlib.crc32(value)))


def _show_row(sample: int, row: _Row) -> list[Any]:
    mark = row.mark
    return [sample, mark.generation, mark.visit, list(mark.shape), mark.kept, row.nbytes, row.crc]


def _apply(index: Index, listed: Mapping[str, Sequence[Sequence[Any]]], offset: int) -> int:
    """Bring an index up to date with an entry whose values begin at `offset`.

    Returns how many bytes of rows live more than before.
    """
    more = 0
    for name, own in listed.items():
        rows = index.setdefault(name, OrderedDict())
        for sample, *rest in own:
            if (before := rows.pop(sample, None)) is not None:
                more -= before.nbytes
            if rest:
                generation, visit, shape, kept, nbytes, crc = rest
                mark = Mark(generation, visit, tuple(shape), kept)
                rows[sample] = _Row(mark, offset, nbytes, crc)
                offset += nbytes
                more += nbytes
    return more


def _replay(file: Any, end: int) -> Index:
    """The index after all entries up to `end`, each checked."""
    index: Index = {}
    at = 0
    while at < end:
        raw = file.read(HEAD.size)
        _expect(len(raw) == HEAD.size, "ends in the middle of an entry")
        magic, num_head, num_values, crc = HEAD.unpack(raw)
        _expect(magic == MAGIC and at + HEAD.size + num_head + num_values <= end, "is no row log")
        head = file.read(num_head)
        _expect(zlib.crc32(head) == crc, "has an entry whose checksum is wrong")
        listed = msgpack.unpackb(head)
        at += HEAD.size + num_head
        _expect(_check_values(file, listed) == num_values, "is no row log")
        _apply(index, listed, at)
        at += num_values
    return index


def _check_values(file: Any, listed: Mapping[str, Sequence[Sequence[Any]]]) -> int:
    """Read the values of an entry, each checked; returns how many bytes they are."""
    total = 0
    for _, *rest in (row for own in listed.values() for row in own):
        if rest:
            *_, nbytes, crc = rest
            own = 0
            for left in range(nbytes, 0, -COPY_NBYTES):
                own = zlib.crc32(file.read(min(left, COPY_NBYTES)), own)
            _expect(own == crc, "has a row whose checksum is wrong")
            total += nbytes
    return total


def _expect(holds: bool, trouble: str) -> None:
    if not holds:
        raise RowLogError(f"the log of rows {trouble}; its stage goes back to a checkpoint")
