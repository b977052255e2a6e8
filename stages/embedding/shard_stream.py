"""A shard as a stream of bytes: one moment of it, written while training goes on, read in pieces.

    with keep_shard(shard) as kept:      # between pushes; costs a snapshot
        for chunk in kept.chunks(): ...  # from any thread; a few megabytes at a time

The bytes are a safetensors file. Each table is one array of bytes with a line for each row: the
key, when it was used last, and the whole row as the store keeps it. Lines come in the order of the
store's hashes, so that nothing needs to be held or sorted to write them; only a table that
remembers its order of use (`evict`, `spill`) takes some 35 bytes a row for it, while it is written
or read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.embedding.row_answers import Snapshot
from stages.embedding.row_records import Records
from stages.embedding.row_table import MAX_STEP, WITHIN_STEP, RowTable
from stages.embedding.shard import Shard
from stages.embedding.shard_terms import SUMS, TICKETS_OF_A_SESSION, TOUCHES_OF_A_SESSION

ABOUT = "ray_pipe_shard"
FORMAT = 2
HEAD = 16
"""Bytes of a line before the row: its key, and when it was used last."""

OLD_TOUCHES = 1 << 36
"""What no file has reached that counted otherwise than by sessions."""

LINES_AT_ONCE = 16_384
MAX_HEADER = 1 << 24

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
Touched = npt.NDArray[np.uint64]


class ShardFileError(RuntimeError):
    """A checkpoint of embeddings that is missing, damaged or of other tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """One array of the file to be."""

    name: str
    num: int
    width: int
    scan: Callable[[Snapshot], Iterator[Records]]
    order: tuple[Ids, Touched] | None
    """Keys by last use, as of the snapshot; the store itself only knows the order of now."""

    @property
    def nbytes(self) -> int:
        return self.num * (HEAD + self.width)

    def chunks(self, snapshot: Snapshot) -> Iterator[memoryview]:
        if self.order is not None:
            known, when = self.order
            by_key = np.argsort(known, kind="stable")
            known[:], when[:] = known[by_key], when[by_key]  # in place: there may be many
            del by_key
        num = 0
        for part in self.scan(snapshot):
            lines = np.zeros((len(part), HEAD + self.width), np.uint8)
            lines[:, :8] = part.keys[:, None].view(np.uint8)
            if self.order is not None and len(known):
                place = np.minimum(np.searchsorted(known, part.keys), len(known) - 1)
                touched = np.where(known[place] == part.keys, when[place], np.uint64(0))
                lines[:, 8:HEAD] = touched[:, None].view(np.uint8)
            lines[:, HEAD:] = part.raw
            num += len(part)
            yield lines.data.cast("B")
        if num != self.num:  # the header was written by now
            raise ShardFileError(
                f"{self.name}: the shard had {self.num} rows when it was kept, its snapshot has "
                f"{num}; it was kept while somebody wrote to it. Save between two pushes"
            )


class KeptShard:
    """One moment of a shard. Holds a snapshot until it is closed."""

    def __init__(self, snapshot: Snapshot, about: dict[str, Any], lines: list[_Lines]) -> None:
        self.about = about
        self._snapshot = snapshot
        self._lines = lines
        self._header = _header(about, lines)

    @property
    def nbytes(self) -> int:
        """Of all chunks together."""
        return len(self._header) + sum(lines.nbytes for lines in self._lines)

    def chunks(self) -> Iterator[memoryview]:
        """The file, in order, each piece for the moment only."""
        yield memoryview(self._header)
        for lines in self._lines:
            yield from lines.chunks(self._snapshot)

    def to_bytes(self) -> bytearray:
        """The file in memory, once."""
        data = bytearray(self.nbytes)
        at = 0
        for chunk in self.chunks():
            data[at : at + len(chunk)] = chunk
            at += len(chunk)
        return data

    def close(self) -> None:
        """Let the store forget that moment."""
        self._snapshot.close()

    def __enter__(self) -> KeptShard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def keep_shard(shard: Shard) -> KeptShard:
    """The shard at its present version. Call it between pushes, from whoever owns the shard.

    Steps that are under way are not part of it: whoever resumes takes them again.
    """
    tables: dict[str, Any] = {}
    lines: list[_Lines] = []
    snapshot = shard.store.snapshot()
    for name, held in shard.rows.items():
        rows = held.rows
        stats = rows.stats()
        tables[name] = {
            "dim": rows.dim,
            "chunks": rows.chunks,
            "state": rows.state,
            "optimizer": type(rows.optimizer).__name__,
            "steps": stats["steps"],
            "epoch": stats["epoch"],
            "rows": stats["rows"],
        }
        lines.append(_lines(f"{name}/rows", rows, held.scan, has_order=held.has_order))
        if held.admission is not None:
            seen = held.admission.counters
            lines.append(_lines(f"{name}/seen", seen, seen.scan, has_order=True))
    about = {
        "format": FORMAT,
        "version": shard.version,
        "touched": shard.touched,
        "touches": TOUCHES_OF_A_SESSION,
        "tables": tables,
        "staleness": {str(age): num for age, num in shard.counts.staleness.items()},
        "sums": _sums(shard),
    }
    return KeptShard(snapshot, about, lines)


def _sums(shard: Shard) -> dict[str, int]:
    told = shard.stats() | {"unsent": shard.counts.unsent}
    return {name: told[name] for name in SUMS}


def _lines(name: str, rows: RowTable, scan: Any, *, has_order: bool) -> _Lines:
    return _Lines(
        name=name,
        num=rows.stats()["rows"],
        width=rows.core.record_bytes,
        scan=lambda snapshot: scan(snapshot, limit=LINES_AT_ONCE),
        order=rows.order() if has_order else None,
    )


def _header(about: dict[str, Any], lines: list[_Lines]) -> bytes:
    arrays: dict[str, Any] = {"__metadata__": {ABOUT: json.dumps(about)}}
    at = 0
    for one in lines:
        shape = [one.num, HEAD + one.width]
        arrays[one.name] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + one.nbytes]}
        at += one.nbytes
    text = json.dumps(arrays).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedShard:
    """A shard's file, where it lies: nothing is copied."""

    about: dict[str, Any]
    arrays: dict[str, Bytes]


def read_shard(file: Any) -> SavedShard:
    """What `KeptShard` wrote, in anything that holds bytes; refuses what it did not write."""
    data = np.frombuffer(memoryview(file).cast("B"), np.uint8)
    try:
        end = 8 + int.from_bytes(data[:8].tobytes(), "little")
        if not 8 < end <= min(len(data), MAX_HEADER):
            raise ValueError
        header = json.loads(data[8:end].tobytes())
        about = json.loads(header.pop("__metadata__")[ABOUT])
    except (ValueError, KeyError, TypeError):
        raise ShardFileError("this is no saved shard of embeddings, or it was cut off") from None
    if about.get("format") != FORMAT:
        raise ShardFileError(
            f"a saved shard of format {about.get('format')}, this source reads {FORMAT}; load it "
            "with the source that wrote it"
        )
    arrays = {}
    for name, entry in header.items():
        first, last = (end + int(at) for at in entry["data_offsets"])
        num, width = entry["shape"]
        if not end <= first <= last <= len(data) or last - first != num * width or width < HEAD:
            raise ShardFileError(f"a saved shard whose array {name} was cut off")
        arrays[name] = data[first:last].reshape(num, width)
    return SavedShard(about, arrays)


def touches_of(about: dict[str, Any]) -> tuple[int, Callable[[Touched], Touched]]:
    """The last use that a file knows of, and how to read those of its rows.

    Files that do not say `touches` counted 2 ** 20 to a millisecond of the run, which goes beyond
    the 40 bits of a step after 17 minutes; they are counted as now (`touch_of`).
    """
    touched = int(about["touched"])
    if "touches" in about or touched < OLD_TOUCHES:
        return touched, lambda when: when
    within = np.uint64((1 << WITHIN_STEP) - 1)

    def renumbered(when: Touched) -> Touched:
        steps = when >> np.uint64(WITHIN_STEP)
        session, number = np.divmod(steps, np.uint64(TICKETS_OF_A_SESSION))
        steps = session * np.uint64(TOUCHES_OF_A_SESSION) + number
        return (steps << np.uint64(WITHIN_STEP)) | (when & within)

    sessions = min(touched, MAX_STEP) // TICKETS_OF_A_SESSION + 1
    return sessions * TOUCHES_OF_A_SESSION + TICKETS_OF_A_SESSION, renumbered


def rows_for(
    arrays: list[Bytes], wanted: Callable[[Ids], npt.NDArray[np.bool_]], *, in_order: bool
) -> Iterator[tuple[Ids, Bytes, Touched | None]]:
    """Keys, whole rows and their last use, some thousand at a time: those that are `wanted`.

    In the order of their last use, whichever file they are in, if that is asked for; rows of two
    files that one step used, in the order of the places that they had there.
    """
    if not in_order:
        for array in arrays:
            for lines in _blocks(array):
                keys = _column(lines, 0).view(np.int64)
                mine = wanted(keys)
                if mine.any():
                    yield keys[mine], np.ascontiguousarray(lines[mine][:, HEAD:]), None
        return
    places, when = [], []
    first = 0
    for array in arrays:
        for lines in _blocks(array):
            here = np.flatnonzero(wanted(_column(lines, 0).view(np.int64)))
            places.append(here + first)
            when.append(_column(lines[here], 8))
            first += len(lines)
    starts = np.cumsum([0, *(len(array) for array in arrays)])
    place = np.concatenate([np.empty(0, np.int64), *places])
    touched = np.concatenate([np.empty(0, np.uint64), *when])
    order = np.argsort(touched, kind="stable")
    for at in range(0, len(order), LINES_AT_ONCE):
        some = order[at : at + LINES_AT_ONCE]
        files = np.searchsorted(starts, place[some], side="right") - 1
        lines = np.empty((len(some), arrays[0].shape[1]), np.uint8)
        for file in np.unique(files):
            mine = files == file
            lines[mine] = arrays[file][place[some][mine] - starts[file]]
        yield (
            _column(lines, 0).view(np.int64),
            np.ascontiguousarray(lines[:, HEAD:]),
            touched[some],
        )


def _blocks(array: Bytes) -> Iterator[Bytes]:
    for first in range(0, len(array), LINES_AT_ONCE):
        yield array[first : first + LINES_AT_ONCE]


def _column(lines: Bytes, first: int) -> Touched:
    return np.ascontiguousarray(lines[:, first : first + 8]).view(np.uint64)[:, 0]
