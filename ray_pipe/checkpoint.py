"""Saves an arm every so many steps, behind its training.

    pipeline sends step s -> every stage copies its state after s -> training goes on
                             the copies are written beside it     -> progress, manifest, rename

What stops training is the copy in memory. A checkpoint counts once all its files were written, read
back and compared; only then is the oldest one removed. One that cannot be written (a full disk) is
a warning: the run goes on, the last one stays, the next is tried. After the last step there is no
next: that one is tried again, and if it is lost the run says so by its exit status.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import torch

from compressors import kernels
from ray_pipe import __version__
from ray_pipe.checkpoint_files import (
    PROGRESS,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    Manifest,
    pack,
)
from ray_pipe.plans import Arm
from stages.digest import source_digest
from stages.storage import FileNote, Folder, StorageError

FINAL_TRIES = 3
FINAL_PAUSE_S = 2.0
"""Between two tries to save the state after the last step: a store may come back."""

MAX_PENDING = 2
"""Copies of the state that may wait to be written; a third waits for the first."""


class Saves(Protocol):
    """What the saver needs of a pipeline."""

    infos: list[dict[str, Any]]

    def see(self, folder: str, name: str, token: bytes) -> bool: ...
    def start_save(self, key: str, step: int, folder: str | None) -> dict[Any, int]: ...
    def saved(self, calls: dict[Any, int], *, wait: bool) -> list[Any] | None: ...
    def check_in(self) -> None: ...
    def file_of(self, index: int) -> str: ...


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A checkpoint on its way."""

    step: int
    place: Folder
    aside: Folder
    calls: dict[Any, int]
    progress: bytes | None = None
    """Once the driver has the step's records, too."""


class Saver:
    """Writes the checkpoints of one arm."""

    def __init__(
        self,
        store: CheckpointStore,
        pipeline: Saves,
        arm: Arm,
        *,
        run_name: str,
        progress: Callable[[], Mapping[str, Any]],
        on_warning: Callable[[str], None],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`progress` gives the arm's numbers so far. Refuses a folder that cannot be written."""
        self._store = store
        self._pipeline = pipeline
        self._arm = arm
        self._run_name = run_name
        self._progress = progress
        self._on_warning = on_warning
        self._pause = pause
        self._pending: list[_Pending] = []
        self.newest: Checkpoint | None = None
        self.history: list[Checkpoint] = []
        """Those of this run that are kept, oldest first."""

        self.lost = ""
        """Why the state after the last step is not saved, if it should be and is not."""

        self._final: _Pending | None = None
        self._shared = self._probe()

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is to be saved."""
        every, done = self._arm.config.checkpoint.every, step + 1
        if every is None or done > self._arm.num_steps:
            return False
        return done % every == 0 or done == self._arm.num_steps

    def sent(self, step: int) -> None:
        """A step was sent to the stages: have them save after it, if it is time."""
        if not self.is_due(step):
            return
        self._pending = [one for one in self._pending if one.step != step]  # it is run again
        while len(self._pending) >= MAX_PENDING and self._pending[0].progress is not None:
            self._end(self._pending.pop(0))
        self._pending.append(self._begin(step))

    def _begin(self, step: int) -> _Pending:
        place = self._store.place(self._arm.name, step + 1)
        aside = place.aside()
        self._tidy(aside)
        folder = str(aside) if self._shared else None
        calls = self._pipeline.start_save(uuid.uuid4().hex, step, folder)
        return _Pending(step=step, place=place, aside=aside, calls=calls)

    def recorded(self, step: int) -> None:
        """The driver has the records of a step; ends what has been written meanwhile."""
        for one in self._pending:
            if one.step == step:
                one.progress = pack(self._progress())
        while self._pending and self._pending[0].progress is not None:
            if self._pipeline.saved(self._pending[0].calls, wait=False) is None:
                break
            self._end(self._pending.pop(0))

    def finish(self) -> None:
        """Wait for what is still being written; try again what was lost of the last step."""
        while self._pending:
            one = self._pending.pop(0)
            if one.progress is not None:
                self._end(one)
        for _ in range(FINAL_TRIES - 1):
            if not self.lost:
                return
            assert self._final is not None
            self._pause(FINAL_PAUSE_S)
            self._pipeline.check_in()
            again = self._begin(self._final.step)
            again.progress = self._final.progress
            self._end(again)

    def _end(self, one: _Pending) -> None:
        """All files, then the manifest, then the rename; the oldest goes last."""
        try:
            self.newest = self._commit(one)
        except (StorageError, CheckpointError) as error:
            is_final = one.step + 1 == self._arm.num_steps
            if is_final:
                self.lost, self._final = str(error), one
            last = "there is none before it" if self.newest is None else f"{self.newest.path} stays"
            self._on_warning(
                f"the checkpoint of step {one.step + 1} could not be written: {error}; {last}, and "
                + ("it was of the last step" if is_final else "training goes on")
            )
            self._tidy(one.aside)
            return
        self.history = [*self.history, self.newest][-self._arm.config.checkpoint.keep :]
        if one.step + 1 == self._arm.num_steps:
            self.lost = ""
        try:
            self._store.tidy(self.newest)
            self._store.prune(self._arm.name, self._arm.config.checkpoint.keep)
        except StorageError as error:
            self._on_warning(f"an old checkpoint could not be removed: {error}")

    def _tidy(self, aside: Folder) -> None:
        """Remove what an earlier try has left; if that fails it will be written over."""
        try:
            aside.remove()
        except StorageError as error:
            self._on_warning(f"what is left of a checkpoint could not be removed: {error}")

    def _commit(self, one: _Pending) -> Checkpoint:
        results = self._pipeline.saved(one.calls, wait=True)
        assert results is not None
        assert one.progress is not None
        notes: list[FileNote] = []
        for index, result in enumerate(results):
            if isinstance(result, BaseException):
                if isinstance(result, StorageError):
                    raise result
                raise CheckpointError(f"stage {index} did not save its state: {result}")
            if not isinstance(result, FileNote):  # its bytes: the driver writes for it
                name = self._pipeline.file_of(index)
                result = one.aside.write(name, [memoryview(result)])
            notes.append(result)
        notes.append(one.aside.write(PROGRESS, [one.progress]))
        return self._store.commit(one.place, one.aside, self._manifest(one.step, notes))

    def _manifest(self, step: int, notes: list[FileNote]) -> Manifest:
        arm, config = self._arm, self._arm.config.to_dict()
        config["name"] = self._run_name
        config["checkpoint"]["resume"] = None
        blocks = {str(b): d for info in self._pipeline.infos for b, d in info["blocks"].items()}
        cuts = arm.workload.cuts(arm.config.pipeline.stages)
        if arm.fleet is not None:
            cuts *= (len(notes) - 1) // len(cuts)  # once for each replica
        return Manifest(
            arm=arm.name,
            step=step + 1,
            serial=self._store.next_serial(arm.name),
            config=config,
            data=data_of(arm),
            blocks=blocks,
            cuts=tuple((cut.start, cut.stop) for cut in cuts),
            files=tuple(notes),
            code=code_version(),
            written=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _probe(self) -> bool:
        """Whether the stages see the same folder as the driver."""
        home = self._store.folder.child(self._arm.name)
        name, token = f".probe-{uuid.uuid4().hex[:8]}", uuid.uuid4().bytes
        try:
            home.write(name, [token])
        except StorageError as error:
            raise CheckpointError(f"checkpoints cannot be written: {error}.") from error
        try:
            return self._pipeline.see(str(home), name, token)
        finally:
            home.remove_file(name)


def data_of(arm: Arm) -> dict[str, Any]:
    """What the arm reads, and in which order; the cursor is the step."""
    order = arm.order
    return {
        "digest": arm.workload.samples.digest,
        "num_samples": order.num_samples,
        "micro_batches": order.micro_batches,
        "micro_batch_size": order.micro_batch_size,
        "seed": order.seed,
    }


def code_version() -> dict[str, Any]:
    """What wrote a checkpoint: the same bits can be promised to the same code only."""
    return {
        "ray_pipe": __version__,
        "source": source_digest(),
        "torch": torch.__version__,
        "core": kernels.core(),
        "machine": platform.machine(),
    }
