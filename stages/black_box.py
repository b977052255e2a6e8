"""A stage's black box: what it needs to be reborn, kept outside its process.

    <folder>/stage-1/slot-0, slot-1   weights, optimizer, small state of two steps, in turn
                     rows-0001.log, rows.values   rows that the steps changed (compressors.row_log)
                     lock             held by the process whose box this is

After each commit the stage writes the step's image into the older of two slots: first the slot
is marked empty, then rows and arrays are written, then the slot is marked with its step. A kill -9
at any moment leaves the other slot whole. Nothing is forced to the disk: page cache outlives the
process, and a machine that dies takes its boxes along (that is what checkpoints are for).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressors.base import State
from compressors.buffers import Change, as_bytes
from compressors.checksum import crc32
from compressors.row_log import Position, RowLog, RowLogError, read_all, write_all

MAGIC = b"BOX1"
MARK = struct.Struct("<4s4xqQII")  # magic, step, bytes of the notes, crc of notes and arrays, own


TRIAL = "trial"
TRIAL_WRITES = 3
"""The first two fill a slot each; pages of the third are warm, as they are in training."""


class BoxError(ValueError):
    """A box that does not hold what was asked of it, or is damaged."""


class BoxHeld(BoxError):
    """A box that another process has open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A stage after a commit. Its arrays may be the live ones: they change at the next update."""

    step: int
    arrays: Mapping[str, Tensor]
    notes: Mapping[str, Any]
    """What JSON can hold."""

    changes: Mapping[str, Sequence[Change]] = field(default_factory=dict)
    """Rows that changed since the last image, by end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a slot holds."""

    step: int
    arrays: dict[str, Tensor]
    notes: dict[str, Any]
    rows: dict[str, State]
    """By end, as `RowStore.load_state_dict` reads them."""


class BlackBox:
    """One stage's box. Methods may be called from any thread, one at a time."""

    def __init__(self, folder: Path, *, rows: Path | None = None, as_found: bool = False) -> None:
        """Open the box in `folder`, or make it; `rows` is a folder of its own for the log of rows,
        if that is to lie elsewhere. Raises `BoxHeld` if another process holds it. One that is
        opened `as_found` can be read only, and is left as it is, damaged or not."""
        self.folder = folder
        self._folders = [folder] if rows is None else [folder, rows]
        self.log_folder = self._folders[-1]
        self._locks: list[int] = []
        for one in self._folders:
            self._hold(one)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._slots = [os.open(folder / f"slot-{i}", flags, 0o600) for i in (0, 1)]
        self._log = RowLog(self._folders[-1])
        self._positions: dict[int, Position] = {}  # by step
        self._is_closed = False
        self.on_write: Callable[[str, int], None] | None = None
        """Told each part and its step before it is written, for tests that stop there."""

        if as_found:
            return
        try:
            for step in self.steps():
                slot = self._slot_of(step)
                try:
                    self._positions[step] = _position(self._notes(slot)[0])
                except (BoxError, KeyError, TypeError):  # damaged: the other one may be whole
                    os.pwrite(self._slots[slot], bytes(MARK.size), 0)
            if self._positions:
                self._rewind_log()
        except (BoxError, RowLogError, OSError):
            self.clear()  # damaged: as good as none

    def write(self, image: Image) -> None:
        """Put an image in place of the older one."""
        self._refuse_if_closed()
        steps = [mark[0] if (mark := self._mark(slot)) else None for slot in (0, 1)]
        slot = min((0, 1), key=lambda i: (steps[i] is not None, steps[i] or 0))
        fd, old = self._slots[slot], steps[slot]
        if old is not None:
            self._positions.pop(old, None)
        os.pwrite(fd, bytes(MARK.size), 0)
        self._tell("rows", image.step)
        try:
            position = self._log.append(image.changes)
        except RowLogError as error:
            raise BoxError(f"the black box {self.folder}: {error}") from error
        arrays = {name: tensor.detach() for name, tensor in image.arrays.items()}
        table = {name: [_dtype_name(t.dtype), list(t.shape)] for name, t in arrays.items()}
        body = {"step": image.step, "rows": position, "arrays": table, "notes": image.notes}
        notes = json.dumps(body).encode()
        self._tell("arrays", image.step)
        crc, at = crc32(notes), write_all(fd, [notes], MARK.size)
        for tensor in arrays.values():
            raw = as_bytes(tensor)
            at = write_all(fd, [raw], at)
            crc = crc32(raw, crc)
        self._tell("mark", image.step)
        head = MARK.pack(MAGIC, image.step, len(notes), crc, 0)[:-4]
        os.pwrite(fd, head + struct.pack("<I", crc32(head)), 0)
        self._positions[image.step] = position
        self._log.drop_before(min(p.number for p in self._positions.values()))
        self._tell("kept", image.step)

    def trial_s(self, image: Image) -> float:
        """CPU seconds that writing such an image takes here, tried in a box beside this one."""
        self._refuse_if_closed()
        beside = [folder / TRIAL for folder in self._folders]
        box = BlackBox(beside[0], rows=beside[1] if len(beside) > 1 else None)
        took_s = 0.0
        try:
            for _ in range(TRIAL_WRITES):
                start = time.thread_time()
                box.write(image)
                took_s = time.thread_time() - start
        finally:
            box.remove()
        return took_s

    def steps(self) -> list[int]:
        """Steps that can be read, oldest first."""
        if self._is_closed:
            return []
        return sorted(mark[0] for slot in (0, 1) if (mark := self._mark(slot)) is not None)

    def read(self, step: int) -> Kept:
        """The image of a step, checked; raises `BoxError` if it is not there or damaged."""
        self._refuse_if_closed()
        slot = self._slot_of(step)
        body, offset, crc = self._notes(slot)
        arrays: dict[str, Tensor] = {}
        for name, (dtype, shape) in body["arrays"].items():
            kind: torch.dtype = getattr(torch, dtype)
            count = torch.Size(shape).numel()
            raw = read_all(self._slots[slot], count * kind.itemsize, offset)
            crc = crc32(raw, crc)
            offset += len(raw)
            if len(raw) != count * kind.itemsize:
                break
            flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
            arrays[name] = flat.reshape(shape)
        if crc != self._expect_mark(slot)[2]:
            raise BoxError(f"step {step} of the black box {self.folder} has a wrong checksum")
        try:
            rows = self._log.rows_at(_position(body)) if body["rows"][1] else {}
        except (RowLogError, OSError) as error:
            raise BoxError(f"step {step} of the black box {self.folder}: {error}") from error
        return Kept(step=step, arrays=arrays, notes=body["notes"], rows=rows)

    def notes(self, step: int) -> dict[str, Any]:
        """The notes of a step, without its arrays and rows."""
        found: dict[str, Any] = self._notes(self._slot_of(step))[0]["notes"]
        return found

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: the stage goes on from there."""
        self._refuse_if_closed()
        self._slot_of(step)
        for slot in (0, 1):
            mark = self._mark(slot)
            if mark is not None and mark[0] > step:
                os.pwrite(self._slots[slot], bytes(MARK.size), 0)
                self._positions.pop(mark[0], None)
        self._rewind_log()

    def clear(self) -> None:
        """Forget everything: the next image must hold all rows."""
        self._refuse_if_closed()
        for fd in self._slots:
            os.pwrite(fd, bytes(MARK.size), 0)
            os.ftruncate(fd, 0)
        self._positions.clear()
        self._log.rewind(Position(self._log.position.number + 1, 0))
        self._log.drop_before(self._log.position.number)

    def close(self) -> None:
        """Let go of the files; they stay where they are. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._log.close()
        for fd in (*self._slots, *self._locks):
            os.close(fd)

    def remove(self) -> None:
        """Close the box and delete it."""
        self.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.parent.rmdir()  # the last one out; fails while others are there

    def _hold(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._locks.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            for held in self._locks:
                os.close(held)
            raise BoxHeld(
                f"the black box {folder} is held by another process; a stage that was replaced "
                "must be dead before its box is opened"
            ) from None

    def _rewind_log(self) -> None:
        """To the newest step that is left; the one before can be read until the next write."""
        *older, newest = sorted(self._positions)
        before = self._positions[older[-1]] if older else None
        self._log.rewind(self._positions[newest], before=before)

    def _mark(self, slot: int) -> tuple[int, int, int] | None:
        """Step, bytes of the notes and checksum of a slot; None if it is empty or half written."""
        raw = os.pread(self._slots[slot], MARK.size, 0)
        if len(raw) < MARK.size or raw[:4] != MAGIC:
            return None
        _, step, length, crc, own = MARK.unpack(raw)
        return (step, length, crc) if crc32(raw[:-4]) == own else None

    def _expect_mark(self, slot: int) -> tuple[int, int, int]:
        mark = self._mark(slot)
        assert mark is not None
        return mark

    def _slot_of(self, step: int) -> int:
        for slot in (0, 1):
            mark = self._mark(slot)
            if mark is not None and mark[0] == step:
                return slot
        raise BoxError(f"the black box {self.folder} holds steps {self.steps()}, not {step}")

    def _notes(self, slot: int) -> tuple[dict[str, Any], int, int]:
        """Notes of a marked slot, where its arrays begin, and the checksum so far."""
        step, length, _ = self._expect_mark(slot)
        raw = os.pread(self._slots[slot], length, MARK.size)
        try:
            body: dict[str, Any] = json.loads(raw)
        except ValueError as error:
            raise BoxError(f"step {step} of the black box {self.folder}: {error}") from error
        return body, MARK.size + length, crc32(raw)

    def _tell(self, part: str, step: int) -> None:
        if self.on_write is not None:
            self.on_write(part, step)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise BoxError(f"the black box {self.folder} is closed")


def _position(body: Mapping[str, Any]) -> Position:
    return Position(*body["rows"])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
