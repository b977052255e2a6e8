"""Keeps a stage's black box up to date behind its back, and brings the stage back from it.

    commit of step s -> image of s -> written while step s+1 computes -> norms of s+1 may be sent

Weights change only at the next update, so the box is written from the live ones. A stage waits
for its box before it sends its norms: no stage anywhere can commit s+1 before all boxes hold s.
A box that cannot be written (a full disk) is given up with a note; the run goes on without it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressors.buffers import Change, rows_state
from compressors.row_log import row_store, state_without_rows
from stages.black_box import BlackBox, BoxError, Image, Kept
from stages.lanes import Lane
from stages.record import StepRecord
from stages.state import StageState, compute_parts, ends_of, notes_of
from stages.state_tree import to_tree

if TYPE_CHECKING:
    from stages.stage import Stage

KEPT_RECORDS = 3
"""As many steps as the driver may not have heard of when a stage dies, and one."""


class Keeper:
    """Of one stage; belongs to the event loop."""

    def __init__(self, stage: Stage, box: BlackBox, lane: Lane) -> None:
        """`lane` is where the box is written: never one that the stage computes in."""
        self._stage = stage
        self._box = box
        self._lane = lane
        self._writing: asyncio.Task[None] | None = None
        self._records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self._trouble = ""
        self.events: list[str] = []
        for end in ends_of(stage.wiring).values():
            store = row_store(end.codec)
            if store is not None:
                store.journal = []

    @property
    def log_folder(self) -> Path:
        """Where the rows are kept a second time."""
        return self._box.log_folder

    @property
    def is_off(self) -> bool:
        """Whether the box had to be given up."""
        return bool(self._trouble)

    def trial_s(self, image: Image) -> float:
        """CPU seconds that writing such an image would take; 0 where the box has no room for it."""
        try:
            return 0.0 if self.is_off else self._box.trial_s(image)
        except (OSError, BoxError):
            return 0.0

    def keep(self, record: StepRecord) -> None:
        """Begin to write the step that was just committed; no step may run at this moment."""
        self._records.append(record)
        self._begin(self._changes())

    async def settled(self) -> None:
        """Return when the box holds the last step committed, or was given up."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            # A step that is aborted here goes on writing: the image is of the step before.
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            self._writing = writing
            raise
        except (OSError, BoxError) as error:
            self._give_up(error)

    async def start_over(self) -> None:
        """Write the stage as it is, all rows included, and forget what the box held."""
        await self.settled()
        if self.is_off:
            return
        try:
            self._box.clear()
        except OSError as error:
            self._give_up(error)
            return
        self._changes()  # rows that were loaded came by no commit
        whole: dict[str, list[Change]] = {}
        for name, end in ends_of(self._stage.wiring).items():
            store = row_store(end.codec)
            if store is not None:
                whole[name] = store.rows()
        self._begin(whole)
        await self.settled()

    async def restore(self, step: int) -> None:
        """Bring the stage back to a step of the box, and the box with it."""
        await self.settled()
        kept = await self._lane.run("sync", "read", -1, self._box.read, step)
        state = state_of(kept)
        for name, end in ends_of(self._stage.wiring).items():
            if row_store(end.codec) is not None:
                rows = kept.rows.get(name, rows_state({}, []))
                tree = to_tree(rows, f"codec/{name}", state.arrays)
                state.notes["codec"][name]["state"] |= tree
        await self._stage.load_state(state)
        await self._lane.run("sync", "rewind", -1, self._box.rewind, step)
        self._records = deque(
            (r for r in records_in(kept.notes) if r.step <= step), maxlen=KEPT_RECORDS
        )

    def steps(self) -> list[int]:
        """Steps that `restore` can bring back."""
        return [] if self.is_off else self._box.steps()

    def records(self) -> list[StepRecord]:
        """What the stage did in the last steps, as its box remembers, oldest first."""
        found: dict[int, StepRecord] = {}
        for step in self.steps():
            found |= {record.step: record for record in records_in(self._box.notes(step))}
        return [found[step] for step in sorted(found)]

    def close(self, *, keep_box: bool = False) -> None:
        """The stage has ended well: remove its box, or leave it to another stage."""
        self._trouble = self._trouble or "closed"
        if keep_box:
            self._box.close()
        else:
            self._box.remove()

    def _begin(self, changes: dict[str, list[Change]]) -> None:
        if not self.is_off:
            assert self._writing is None, "two images at once"
            write = self._lane.run("sync", "box", -1, self._box.write, self._image(changes))
            self._writing = asyncio.create_task(_nothing(write), name="black box")

    def _image(self, changes: dict[str, list[Change]]) -> Image:
        stage = self._stage
        arrays, notes = compute_parts(stage.compute, stage.first_block, live=True)
        notes |= notes_of(stage)
        for name, end in ends_of(stage.wiring).items():
            tree = to_tree(state_without_rows(end.codec), f"codec/{name}", arrays)
            notes["codec"][name] = {"name": end.codec.name, "state": tree}
        *_, newest = [-1, *(record.step for record in self._records)]
        notes["records"] = [
            (record if record.step == newest else replace(record, spans=())).as_dict()
            for record in self._records
        ]
        return Image(step=stage.committed, arrays=arrays, notes=notes, changes=changes)

    def _changes(self) -> dict[str, list[Change]]:
        """What commits have changed since the last call."""
        changes: dict[str, list[Change]] = {}
        for name, end in ends_of(self._stage.wiring).items():
            store = row_store(end.codec)
            if store is not None and store.journal:
                changes[name], store.journal = store.journal, []
        return changes

    def _give_up(self, error: Exception) -> None:
        self._trouble = str(error)
        self._box.remove()
        self.events.append(
            f"the black box of stage {self._stage.index} in {self._box.folder.parent} was given "
            f"up: {error}; if this stage dies the run goes back to its last checkpoint "
            "(--checkpoint-every), or set faults.black_box to a folder with more room"
        )
        for end in ends_of(self._stage.wiring).values():
            store = row_store(end.codec)
            if store is not None:
                store.journal = None


def state_of(kept: Kept) -> StageState:
    """What a box keeps of a stage, without its rows."""
    notes = {key: value for key, value in kept.notes.items() if key != "records"}
    return StageState(arrays=kept.arrays, notes=notes)


def records_in(notes: dict[str, Any]) -> list[StepRecord]:
    """The records of the last steps in a box's notes."""
    return [StepRecord.from_dict(values) for values in notes.get("records", ())]


async def _nothing(work: Any) -> None:
    await work
