"""Saves an arm every so many steps, behind its training.

    pipeline sends step s -> every stage copies its state after s -> training goes on
                             the copies are written beside it     -> progress, manifest, rename

What stops training is the copy in memory: the driver's part is done in a thread, one checkpoint
after the other, and what became of it is seen at the next step. A checkpoint counts once all its
files were written, read back and compared; only then is the oldest one removed. One that cannot be
written (a full disk) is a warning: the run goes on, the last one stays, the next is tried. After
the last step there is no next: that one is tried again, and if it is lost the run says so by its
exit status.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import torch

from ray_pipe import __version__
from ray_pipe.checkpoint_files import (
    PROGRESS,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    Manifest,
    Numbers,
)
from ray_pipe.errors import TrainingError
from ray_pipe.plans import Arm
from ray_pipe.same_source import kind_of
from stages.digest import software
from stages.storage import FileNote, Folder, StorageError

FINAL_TRIES = 3
FINAL_PAUSE_S = 2.0
"""Between two tries to save the state after the last step: a store may come back."""

MAX_PENDING = 2
"""Copies of the state that may wait to be written; a third waits for the first."""


KEEP, AUTOMATIC_KEEP = 3, 1
"""Checkpoints of an arm that are kept where nobody said how many: of those that were asked for, and
of those that were not."""


class Pace:
    """When to save in a run that was not told: what its driver's death may cost, in seconds."""

    def __init__(self, every_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._start = self._last = clock()

    def is_due(self, *, at_the_end: bool) -> bool:
        """Whether it is time; `at_the_end` of an arm it is, once the run has lasted so long."""
        since = self._start if at_the_end else self._last
        return self._clock() - since >= self._every_s

    def saved(self) -> None:
        """One is on its way."""
        self._last = self._clock()


class Written(Protocol):
    """What is being written; see `ray_pipe.saving.Save`."""

    def results(self, *, wait: bool) -> list[Any] | None: ...


@dataclass(frozen=True)
class Unwritten:
    """What stages were not even asked to write."""

    error: StorageError

    def results(self, *, wait: bool) -> list[Any] | None:
        return [self.error]


class Saves(Protocol):
    """What the saver needs of a pipeline."""

    infos: list[dict[str, Any]]

    def see(self, folder: str, name: str, token: bytes) -> bool: ...
    def start_save(self, key: str, step: int, folder: str | None) -> Written: ...
    def check_in(self) -> None: ...
    def file_of(self, index: int) -> str: ...


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A checkpoint on its way."""

    step: int
    place: Folder
    aside: Folder
    save: Written
    progress: Numbers | None = None
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
        must_write: bool = True,
        pace: Pace | None = None,
    ) -> None:
        """`progress` gives the arm's numbers so far. Refuses a folder that cannot be written, if it
        `must_write`: once an arm was trained, that is a warning, and the next save tries again.
        With a `pace` it saves by time; then nothing is written before it is due."""
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._committing: tuple[_Pending, Future[list[str]]] | None = None
        self._shared: bool | None = None
        """Whether stages see the same folder; None while nobody could write to it."""

        self._pace = pace
        usual = KEEP if pace is None else AUTOMATIC_KEEP
        self._keep = arm.config.checkpoint.keep or usual
        try:
            self._shared = self._probe() if pace is None else None
        except StorageError as error:
            if must_write:
                raise CheckpointError(f"checkpoints cannot be written: {error}.") from error
            on_warning(
                f"checkpoints of {arm.name} cannot be written: {error}; training goes on, and the "
                "next one tries again"
            )

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is to be saved."""
        every, done = self._arm.config.checkpoint.every, step + 1
        if done > self._arm.num_steps:
            return False
        is_last = done == self._arm.num_steps
        if self._pace is not None:
            if any(one.step == step for one in self._pending):
                return True  # it is run again, and what was copied of it is void
            # What was begun with is older than this run.
            return self._pace.is_due(at_the_end=is_last) or (is_last and self.newest is not None)
        return every is not None and (done % every == 0 or is_last)

    def sent(self, step: int) -> None:
        """A step was sent to the stages: have them save after it, if it is time."""
        if not self.is_due(step):
            return
        self._pending = [one for one in self._pending if one.step != step]  # it is run again
        if self._committing is not None and self._committing[0].step == step:
            self.settle()  # before what lies aside is written over
        while len(self._pending) >= MAX_PENDING and self._pending[0].progress is not None:
            self._end(self._pending.pop(0))
        self._pending.append(self._begin(step))
        if self._pace is not None:
            self._pace.saved()

    def _begin(self, step: int) -> _Pending:
        place = self._store.place(self._arm.name, step + 1)
        aside = place.aside()
        self._tidy(aside)
        save: Written
        try:
            if self._shared is None:
                self._shared = self._probe()
        except StorageError as error:
            save = Unwritten(error)
            return _Pending(step=step, place=place, aside=aside, save=save)
        except TrainingError:
            pass  # a stage is lost: who waits for its step will see to it
        folder = str(aside) if self._shared else None
        save = self._pipeline.start_save(uuid.uuid4().hex, step, folder)
        return _Pending(step=step, place=place, aside=aside, save=save)

    def recorded(self, step: int) -> None:
        """The driver has the records of a step; ends what has been written meanwhile."""
        for one in self._pending:
            if one.step == step:
                one.progress = Numbers.of(self._progress())
        if self._committing is not None and self._committing[1].done():
            self.settle()
        if self._committing is None and self._pending and self._pending[0].progress is not None:
            results = self._pending[0].save.results(wait=False)
            if results is not None:
                self._commit_beside(self._pending.pop(0), results)

    def settle(self) -> None:
        """Wait until what is being committed counts, or is known to be lost."""
        if self._committing is None:
            return
        one, future = self._committing
        self._committing = None
        try:
            texts = future.result()
        except (StorageError, CheckpointError) as error:
            self._give_up(one, error)
            return
        if one.step + 1 == self._arm.num_steps:
            self.lost = ""
        for text in texts:
            self._on_warning(text)

    def finish(self) -> None:
        """Wait for what is still being written; try again what was lost of the last step. Nothing
        is saved after this."""
        while self._pending:
            one = self._pending.pop(0)
            if one.progress is not None:
                self._end(one)
        self.settle()
        for _ in range(FINAL_TRIES - 1):
            if not self.lost:
                break
            assert self._final is not None
            self._pause(FINAL_PAUSE_S)
            self._pipeline.check_in()
            again = self._begin(self._final.step)
            again.progress = self._final.progress
            self._end(again)
        self._thread.shutdown()

    def _end(self, one: _Pending) -> None:
        """Wait for a checkpoint, and for the one before it."""
        self.settle()
        results = one.save.results(wait=True)
        assert results is not None
        self._commit_beside(one, results)
        self.settle()

    def _commit_beside(self, one: _Pending, results: list[Any]) -> None:
        infos = list(self._pipeline.infos)  # as they are now: a stage may be lost meanwhile
        self._committing = one, self._thread.submit(self._commit, one, results, infos)

    def _give_up(self, one: _Pending, error: Exception) -> None:
        is_final = one.step + 1 == self._arm.num_steps
        if is_final:
            self.lost, self._final = str(error), one
        last = "there is none before it" if self.newest is None else f"{self.newest.path} stays"
        self._on_warning(
            f"the checkpoint of step {one.step + 1} could not be written: {error}; {last}, and "
            + ("it was of the last step" if is_final else "training goes on")
        )
        self._tidy(one.aside)

    def _tidy(self, aside: Folder) -> None:
        """Remove what an earlier try has left; if that fails it will be written over."""
        try:
            aside.remove()
        except StorageError as error:
            self._on_warning(f"what is left of a checkpoint could not be removed: {error}")

    def _commit(
        self, one: _Pending, results: list[Any], infos: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """All files, then the manifest, then the rename; the oldest goes last. In the thread.

        Returns what the user should know.
        """
        self.newest = self._publish(one, results, infos)
        self.history = [*self.history, self.newest][-self._keep :]
        try:
            self._store.tidy(self.newest)
            self._store.prune(self._arm.name, self._keep)
        except StorageError as error:
            return [f"an old checkpoint could not be removed: {error}"]
        return []

    def _publish(
        self, one: _Pending, results: list[Any], infos: Sequence[Mapping[str, Any]]
    ) -> Checkpoint:
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
        notes.append(one.aside.write(PROGRESS, one.progress.packed()))
        return self._store.commit(one.place, one.aside, self._manifest(one.step, notes, infos))

    def _manifest(
        self, step: int, notes: list[FileNote], infos: Sequence[Mapping[str, Any]]
    ) -> Manifest:
        arm, config = self._arm, self._arm.config.to_dict()
        config["name"] = self._run_name
        config["checkpoint"]["resume"] = None
        blocks = {str(b): d for info in infos for b, d in info["blocks"].items()}
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
            code=code_version(infos),
            written=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _probe(self) -> bool:
        """Whether the stages see the same folder as the driver."""
        home = self._store.folder.child(self._arm.name)
        name, token = f".probe-{uuid.uuid4().hex[:8]}", uuid.uuid4().bytes
        home.write(name, [token])
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


def code_version(infos: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What wrote a checkpoint: the same bits can be promised to the same code only, and on the
    same kinds of processors; those of the stages that `infos` tell of."""
    kinds = sorted({kind_of(info["hardware"]) for info in infos})
    return ({"hardware": ", ".join(kinds)} if kinds else {}) | {
        "ray_pipe": __version__,
        **software(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
