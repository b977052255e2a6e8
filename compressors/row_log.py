"""Changed rows in files: what a process must leave behind to be reborn with them.

Path: compressors.buffers -> compressors.row_log -> stages.black_box

    rows-0001.log   [entry of step 4][entry of step 5]...   which rows changed, oldest first
    rows.values     their values, each in a place of its own

An entry is what one commit changed, of every end of a stage: marks, and where the values lie.
Replayed up to a position they give the rows of that moment, in the order of use. A new value never
overwrites the one before: **the last two positions can be read**, and places of older values are
used again, so that the file is not much larger than two steps need and its pages stay warm. A log
that holds mostly marks that were replaced since is written anew.

Nothing is forced to the disk: what was written survives the process, not the machine.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch

from compressors.base import Buffer, Compressor, State
from compressors.buffers import Change, Mark, RowStore, as_bytes, rows_state
from compressors.checksum import crc32
from compressors.delta import Delta
from compressors.row_room import Room, room_for

MAGIC = b"RLG2"
HEAD = struct.Struct("<4sII")  # magic, bytes of the list of rows, crc-32 of it
SLACK_NBYTES = 1 << 20
"""A log may hold so many bytes more than twice what the marks that live in it need."""

MARK_NBYTES = 48
"""About what one row takes in the log."""


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
    offset: int = 0
    nbytes: int = 0
    crc: int = 0


Index = dict[str, OrderedDict[int, _Row]]


class RowLog:
    """The log of one stage's rows, by the name of the end. One writer, one thread at a time."""

    def __init__(self, directory: Path, *, slack_nbytes: int = SLACK_NBYTES) -> None:
        self._directory = directory
        self._slack_nbytes = slack_nbytes
        self._index: Index = {}
        self._room = Room()
        self._fd = self._values = -1
        self.position = Position(0, 0)

    def append(self, changes: Mapping[str, Sequence[Change]]) -> Position:
        """Write what a commit changed; returns the position that includes it.

        From now on the position of the append before can be read, and older ones no more.
        """
        if self._fd < 0:
            self._open(self.position.number)
        placed: list[tuple[int, int]] = []
        try:
            listed = {
                name: [_show(change, self._write_value(change, placed)) for change in own]
                for name, own in changes.items()
                if own
            }
            if listed:
                self._write_entry(listed)
        except BaseException:
            for offset, nbytes in placed:
                self._room.give_back(offset, nbytes)
            raise
        for old in _apply(self._index, listed):
            self._room.give_back(old.offset, old.nbytes)
        num_rows = sum(len(own) for own in self._index.values())
        if self.position.end > self._slack_nbytes + 2 * MARK_NBYTES * num_rows:
            self._write_anew()
        return self.position

    def rows_at(self, position: Position) -> dict[str, State]:
        """The rows of that moment, by end, as `RowStore.load_state_dict` reads them, checked."""
        found: dict[str, State] = {}
        values = os.open(self._path_of_values, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for name, rows in self._replay(position).items():
                kept = []
                for row in rows.values():
                    if row.mark.kept:
                        raw = read_all(values, row.nbytes, row.offset)
                        _expect(crc32(raw) == row.crc, "has a row whose checksum is wrong")
                        kept.append(torch.frombuffer(raw, dtype=torch.uint8))
                found[name] = rows_state({s: row.mark for s, row in rows.items()}, kept)
        finally:
            os.close(values)
        return found

    def rewind(self, position: Position, *, before: Position | None = None) -> None:
        """Forget what was written after `position`; what comes next is written there.

        What was written up to `before` can still be read, until the next append.
        """
        self.close()
        self._index = self._replay(position)
        live = _places(self._index)
        older = _places(self._replay(before)) if before else set()
        self._room = Room(live, end=max((at + room_for(size) for at, size in older), default=0))
        self.position = position
        for other in self._numbers():
            if other > position.number:
                self._path(other).unlink()
        self._open(position.number)
        os.ftruncate(self._fd, position.end)
        os.ftruncate(self._values, self._room.end)

    def drop_before(self, number: int) -> None:
        """Remove logs that nobody will go back to."""
        for other in self._numbers():
            if other < number:
                self._path(other).unlink()

    def close(self) -> None:
        """Close the files; they stay where they are. May be called twice."""
        for fd in (self._fd, self._values):
            if fd >= 0:
                os.close(fd)
        self._fd = self._values = -1

    def _write_value(self, change: Change, placed: list[tuple[int, int]]) -> tuple[int, int]:
        """Where the value of a change lies now, and its checksum."""
        if change.value is None or change.mark is None:
            return 0, 0
        raw = as_bytes(change.value)
        offset = self._room.take(raw.nbytes)
        placed.append((offset, raw.nbytes))
        write_all(self._values, [raw], offset)
        return offset, crc32(raw)

    def _write_entry(self, listed: dict[str, list[Any]]) -> None:
        end = write_all(self._fd, _entry(listed), self.position.end)
        self.position = Position(self.position.number, end)

    def _write_anew(self) -> None:
        """The marks that live in a log of their own; values stay where they are."""
        listed = {
            name: [_show_row(sample, row) for sample, row in own.items()]
            for name, own in self._index.items()
        }
        number = self.position.number + 1
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        new = os.open(self._path(number), flags, 0o600)
        try:
            end = write_all(new, _entry(listed), 0)
        except BaseException:
            os.close(new)
            raise
        os.close(self._fd)
        self._fd, self.position = new, Position(number, end)

    def _replay(self, position: Position) -> Index:
        """The index after all entries up to a position, each checked."""
        if not position.end:
            return {}
        with self._path(position.number).open("rb") as file:
            raw = file.read(position.end)
        _expect(len(raw) == position.end, "ends in the middle of an entry")
        index: Index = {}
        at = 0
        while at < position.end:
            _expect(at + HEAD.size <= len(raw), "ends in the middle of an entry")
            magic, length, crc = HEAD.unpack_from(raw, at)
            head = raw[at + HEAD.size : at + HEAD.size + length]
            _expect(magic == MAGIC and len(head) == length, "is no row log")
            _expect(crc32(head) == crc, "has an entry whose checksum is wrong")
            _apply(index, msgpack.unpackb(head))
            at += HEAD.size + length
        return index

    def _open(self, number: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path(number), flags, 0o600)
        self._values = os.open(self._path_of_values, flags, 0o600)

    def _path(self, number: int) -> Path:
        return self._directory / f"rows-{number:04d}.log"

    @property
    def _path_of_values(self) -> Path:
        return self._directory / "rows.values"

    def _numbers(self) -> list[int]:
        return [int(path.stem[5:]) for path in self._directory.glob("rows-*.log")]


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


def _entry(listed: Mapping[str, Sequence[Any]]) -> list[bytes]:
    head: bytes = msgpack.packb(listed)
    return [HEAD.pack(MAGIC, len(head), crc32(head)), head]


def _show(change: Change, place: tuple[int, int]) -> list[Any]:
    if change.mark is None:
        return [change.sample]
    offset, crc = place
    nbytes = 0 if change.value is None else change.value.nbytes
    return _show_row(change.sample, _Row(change.mark, offset, nbytes, crc))


def _show_row(sample: int, row: _Row) -> list[Any]:
    mark = row.mark
    shape = list(mark.shape)
    return [sample, mark.generation, mark.visit, shape, mark.kept, row.offset, row.nbytes, row.crc]


def _apply(index: Index, listed: Mapping[str, Sequence[Sequence[Any]]]) -> list[_Row]:
    """Bring an index up to date with an entry; returns the rows that had values and are no more."""
    gone = []
    for name, own in listed.items():
        rows = index.setdefault(name, OrderedDict())
        for sample, *rest in own:
            if (before := rows.pop(sample, None)) is not None and before.nbytes:
                gone.append(before)
            if rest:
                generation, visit, shape, kept, *place = rest
                rows[sample] = _Row(Mark(generation, visit, tuple(shape), kept), *place)
    return gone


def _places(index: Index) -> set[tuple[int, int]]:
    rows = (row for own in index.values() for row in own.values())
    return {(row.offset, row.nbytes) for row in rows if row.nbytes}


def _expect(holds: bool, trouble: str) -> None:
    if not holds:
        raise RowLogError(f"the log of rows {trouble}; its stage goes back to a checkpoint")
