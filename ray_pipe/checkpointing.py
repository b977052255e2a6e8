"""A run's checkpoints from the driver's side: where each arm begins, and saving while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ray_pipe.arm_progress import (
    EvalLosses,
    eval_losses_of,
    prediction_of,
    progress_of,
    restore_meter,
)
from ray_pipe.checkpoint import Pace, Saver
from ray_pipe.checkpoint_files import Checkpoint, CheckpointStore
from ray_pipe.config import RunConfig
from ray_pipe.ledger import Sent
from ray_pipe.metrics import ArmMeter
from ray_pipe.pipeline import Boxes, Pipeline
from ray_pipe.planner.cost import Prediction
from ray_pipe.plans import Arm
from ray_pipe.recovery import Failure
from ray_pipe.resume import Start, default_folder, find_resume, load, states_for
from ray_pipe.taking_up import TakingUp
from stages.storage import StorageError


class InTraining(Protocol):
    """What is saved and restored of an arm besides its stages."""

    arm: Arm
    meter: ArmMeter
    prediction: Prediction | None
    eval_losses: EvalLosses
    saver: Saver | None
    on_evaluated: Callable[[], None] | None
    on_replayed: Callable[[Sent], None] | None

    def extra(self) -> dict[str, Any]: ...
    def restore_extra(self, saved: Mapping[str, Any]) -> None: ...


@dataclass(kw_only=True)
class RunCheckpoints:
    """Made before Ray is started, so that a wrong `--resume` is refused at once."""

    starts: dict[str, Start]
    on_warning: Callable[[str], None]
    on_phase: Callable[[str], None]
    newest: Checkpoint | None = None
    """Of the arm that was trained last."""

    resumed: dict[str, int] = field(default_factory=dict)
    """Arms that did not begin at step 0, and where they did."""

    lost: dict[str, str] = field(default_factory=dict)
    """Arms whose last state could not be saved, and why."""

    failures: list[Failure] = field(default_factory=list)
    """Of the whole run, those before it was resumed first; whoever meets one adds it."""

    taking_up: TakingUp = field(default_factory=TakingUp)
    """What a driver that was killed has left, and what this one would leave."""

    _num_begun: int = 0
    _pace: Pace | None = None
    """Of a run that was not told when to save."""

    _store: CheckpointStore | None = None
    _run_name: str = ""
    _folder: str = ""

    @classmethod
    def find(
        cls,
        config: RunConfig,
        arms: Sequence[Arm],
        *,
        on_warning: Callable[[str], None],
        on_phase: Callable[[str], None],
        want_states: bool = False,
    ) -> RunCheckpoints:
        """Where each arm begins; refuses checkpoints of another run, and damaged ones.
        `want_states`: the weights of the last arm are needed."""
        taking_up = TakingUp.find(config, on_warning=on_warning)
        left = taking_up.left
        default = default_folder(config, f"{config.out}/{config.name}")
        names = [arm.name for arm in arms]
        resume = find_resume(config, default, names, may_lack=left is not None)
        if config.checkpoint.resume == "auto" and resume is None and left is None:
            on_warning("--resume auto: there is no checkpoint yet, the run starts at step 0.")
        starts = {}
        if resume is not None or left is not None:
            for arm in arms:
                is_last = want_states and arm.name == names[-1]
                starts[arm.name] = taking_up.start(arm, resume, is_last=is_last)
        # Each arm has noted those of the arms before it, too.
        noted = [(one.progress or {}).get("failures", []) for one in starts.values()]
        failures = [Failure.from_dict(entry) for entry in max(noted, key=len, default=[])]
        if left is not None:
            failures = left.failures
        return cls(
            starts=starts,
            on_warning=on_warning,
            on_phase=on_phase,
            failures=failures,
            taking_up=taking_up,
        )

    def open(self, config: RunConfig, path: Path) -> None:
        """Where this run's own checkpoints go, once its folder is known."""
        self._run_name, self._folder = path.name, str(path)
        by_time = config.checkpoint.every is None and config.checkpoint.automatic_s > 0
        if by_time and config.sync.replicas == 1:  # replicas meet at barriers to be saved
            self._pace = Pace(config.checkpoint.automatic_s)
        if config.checkpoint.every is not None or self._pace is not None:
            self._store = CheckpointStore(default_folder(config, str(path)))

    def is_done(self, arm: Arm) -> bool:
        """Whether the arm needs no training any more."""
        return self.starts.get(arm.name, Start()).is_done

    def restore(self, one: InTraining) -> None:
        """Give an arm that is done its numbers back."""
        start = self.starts[one.arm.name]
        assert start.progress is not None
        restore_meter(one.meter, start.progress)
        one.eval_losses[:] = eval_losses_of(start.progress)
        one.prediction = prediction_of(start.progress)
        one.restore_extra(start.progress.get("extra", {}))
        self.newest = start.checkpoint
        self.resumed[one.arm.name] = one.arm.num_steps
        self.taking_up.restored(one.arm, start.progress)

    def begin(self, pipeline: Pipeline, one: InTraining) -> None:
        """Load what the arm begins with, if anything, and save from here on, if that is wanted."""
        start = self.starts.get(one.arm.name, Start())
        if start.boxes is not None:
            self.on_phase(f"{one.arm.name}: going back to step {start.boxes.step} in black boxes")
            start = self.starts[one.arm.name] = self.taking_up.go_back(pipeline, start)
        if start.boxes is not None:
            for text in start.boxes.notes:
                self.on_warning(text)
        elif start.checkpoint is not None:
            self.on_phase(f"{one.arm.name}: loading {start.checkpoint.path}")
            for text in (*start.notes, *load(pipeline, start, one.arm)):
                self.on_warning(text)
        self.newest = start.checkpoint
        if self._store is not None:
            self._store.reopen(one.arm.name)
            one.saver = Saver(
                self._store,
                pipeline,
                one.arm,
                run_name=self._run_name,
                progress=lambda: self._numbers(one),
                on_warning=self.on_warning,
                must_write=self._num_begun == 0,
                pace=self._pace,
            )
            one.saver.newest = start.checkpoint
            pipeline.on_sent = one.saver.sent
        progress = start.progress if start.boxes is None else start.boxes.progress
        if progress is not None:  # no stage is called any more: this is done once
            restore_meter(one.meter, progress)
            one.eval_losses[:] = eval_losses_of(progress)
            one.restore_extra(progress.get("extra", {}))
            self.resumed[one.arm.name] = start.after + 1
            pipeline.begun_after = start.after
        pipeline.checkpoints = Fallback(one, start.checkpoint, self.on_warning)
        self._num_begun += 1

    def boxes_of(self, arm: Arm) -> Boxes:
        """Which black boxes the arm's stages begin with."""
        return self.taking_up.boxes_of(self.starts.get(arm.name, Start()))

    def begun(self, pipeline: Pipeline, one: InTraining) -> Failure | None:
        """The rows that the arm begins with are in metrics.jsonl: note how the run could be taken
        up. Returns the end of the driver before, if it goes on after that."""
        taking_up, name = self.taking_up, one.arm.name
        if not taking_up.is_open:
            return None
        start = self.starts.get(name, Start())
        store = self._store or CheckpointStore(default_folder(one.arm.config, self._folder))
        begun_with = start.checkpoint.manifest.serial if start.checkpoint is not None else None
        serial = store.next_serial(name) if begun_with is None else begun_with
        one.on_evaluated = lambda: taking_up.evaluated(name, one.eval_losses)
        one.on_replayed = lambda sent: taking_up.replayed(name, sent)
        return taking_up.begun(pipeline, start, serial=serial, evaluations=one.eval_losses)

    def end_steps(self, pipeline: Pipeline, one: InTraining) -> None:
        """The arm's own steps are done: wait until they are saved."""
        pipeline.on_sent = None
        if one.saver is not None:
            one.saver.finish()
            self.newest = one.saver.newest
            if one.saver.lost and self._pace is None:  # else nobody asked for it: it was warned of
                self.lost[one.arm.name] = one.saver.lost

    def results(self) -> dict[str, Any]:
        """What results.json says of them, where there is something to say."""
        found = {"resumed": dict(self.resumed), "lost_checkpoints": dict(self.lost)}
        return {name: value for name, value in found.items() if value}

    def end(self, one: InTraining) -> None:
        """Nothing more will be trained of this arm."""
        self.taking_up.done(one.arm.name, one.prediction)
        if self._store is None or one.saver is None or one.saver.lost:
            return  # what is lost must be trained again by whoever resumes
        if one.saver.newest is not None:
            try:
                self._store.finish(one.arm.name, self._numbers(one))
            except StorageError as error:
                self.on_warning(f"that {one.arm.name} is done could not be noted: {error}")

    def _numbers(self, one: InTraining) -> dict[str, Any]:
        steps = one.arm.num_steps
        numbers = progress_of(one.meter, one.eval_losses, one.prediction, num_steps=steps)
        failures = [failure.as_dict() for failure in self.failures]
        return numbers | {"extra": one.extra(), "failures": failures}


@dataclass(frozen=True)
class Fallback:
    """What a pipeline goes back to when a stage is lost with its black box.

    Only what this run saved or began with: an older checkpoint in the same folder may be of a
    course that was left."""

    one: InTraining
    first: Checkpoint | None
    """What the arm began with, if it was resumed."""

    on_warning: Callable[[str], None]
    _refused: set[str] = field(default_factory=set)

    def newest(self) -> int | None:
        """The step whose commit was saved last, as far as that can still be read."""
        if self.one.saver is not None:
            self.one.saver.settle()  # else what is chosen here could be removed meanwhile
        checkpoint = self._checkpoint()
        return None if checkpoint is None else checkpoint.step - 1

    def load(self, step: int) -> list[bytes]:
        """That state of every stage, as `StageState` writes it.

        Raises `CheckpointError` if it is damaged: `refuse` it, and there may be one before it.
        """
        checkpoint = self._checkpoint()
        assert checkpoint is not None
        assert checkpoint.step - 1 == step
        checkpoint.verify()
        states, _ = states_for(self.one.arm, checkpoint)
        return [state.to_bytes() for state in states]

    def refuse(self, why: str) -> None:
        """The newest cannot be used: `newest` is the one before it from now on."""
        checkpoint = self._checkpoint()
        assert checkpoint is not None
        self._refused.add(checkpoint.path)
        before = self._checkpoint()
        left = "the run begins anew" if before is None else f"{before.path} is tried"
        self.on_warning(f"the checkpoint {checkpoint.path} cannot be used: {why}; {left}")

    def _checkpoint(self) -> Checkpoint | None:
        own = [] if self.one.saver is None else self.one.saver.history
        found = [one for one in (self.first, *own) if one and one.path not in self._refused]
        return found[-1] if found else None
