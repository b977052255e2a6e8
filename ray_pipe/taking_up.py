"""Takes up a run whose driver was killed, and keeps the record by which this one can be taken up.

    before Ray is started   `find`       what is left, which arms are done
    Ray is there            `await_nodes`  until the nodes with boxes have joined, on a cluster
                            `ask`        nodes tell what boxes they have; stages are placed there
    an arm begins           `go_back`    all stages to the step that was chosen, or to a checkpoint
                            `begun`      the arm's entry in unfinished.json
    the run is over         `over`       the record goes

`ray_pipe.checkpointing` calls it; what to choose is decided in `ray_pipe.left_run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ray_pipe.box_search import await_nodes, find_boxes
from ray_pipe.checkpoint import code_version, data_of
from ray_pipe.checkpoint_files import Checkpoint, CheckpointError
from ray_pipe.cluster import nodes
from ray_pipe.config import RunConfig
from ray_pipe.errors import ConfigError, Terminated
from ray_pipe.ledger import Ledger, Sent
from ray_pipe.left_run import LeftRun, choose, explain, find_left
from ray_pipe.pipeline import Boxes, Pipeline
from ray_pipe.planner.cost import Prediction
from ray_pipe.planner.placement import Placement, at_home
from ray_pipe.plans import Arm
from ray_pipe.recovery import DRIVER, Failure
from ray_pipe.resume import BoxStart, Resume, Start
from ray_pipe.unfinished import RunRecord, remove_record

Warn = Callable[[str], None]


class TakingUp:
    """Of one run; without anything left it only keeps the record."""

    def __init__(
        self, left: LeftRun | None = None, *, on_warning: Warn = lambda text: None
    ) -> None:
        self.left = left
        self._on_warning = on_warning
        self._start_s = time.monotonic()
        self._record: RunRecord | None = None
        self._folder: Path | None = None
        self._gone: tuple[str, ...] = ()
        self._is_told = False
        self._failures: list[Failure] = []
        self._again: dict[str, Ledger] = {}
        self._refused: dict[str, CheckpointError] = {}
        self._must_fit = False
        """Whether a run that left something of another training is refused, not begun anew."""

    @classmethod
    def find(cls, config: RunConfig, *, on_warning: Warn) -> TakingUp:
        """What `checkpoint.resume` names, if its driver was killed."""
        left = None
        try:
            left = find_left(config)
        except CheckpointError:
            raise
        except ConfigError as error:
            on_warning(explain(error))
        found = cls(left, on_warning=on_warning)
        found._must_fit = config.checkpoint.resume != "auto"
        return found

    def start(self, arm: Arm, resume: Resume | None, *, is_last: bool) -> Start:
        """How an arm begins as far as that is known before boxes are asked for. One that was done
        when the driver was killed is done, unless it `is_last` and its weights are wanted."""
        left = self.left
        try:
            saved = Start() if resume is None else resume.start(arm)
        except CheckpointError as error:
            if left is None:
                raise
            saved, self._refused[arm.name] = Start(), error  # its boxes may do without
        if left is not None and not saved.is_done and left.is_done(arm):
            is_whole = saved.checkpoint is not None and saved.checkpoint.step == arm.num_steps
            newest = saved.checkpoint if is_whole else None
            if newest is not None or not is_last:
                self._refused.pop(arm.name, None)
                numbers = left.progress(arm.name)
                return Start(checkpoint=newest, progress=numbers, is_done=True)
        if left is None or left.training != arm.name:
            self._raise_refusal(arm.name)
        return saved

    def _raise_refusal(self, arm: str) -> None:
        """A checkpoint that cannot be used ends the run, unless boxes can."""
        if arm in self._refused:
            raise self._refused[arm]

    # --- black boxes ------------------------------------------------------------------------

    def await_nodes(self, on_phase: Callable[[str], None]) -> None:
        """On a cluster, before stages are placed: the nodes with boxes may be on their way."""
        left = self.left
        if left is not None and left.training and (note := left.note(left.training))["run"]:
            await_nodes(
                note.get("nodes", ()),
                folder=left.folder,
                on_phase=on_phase,
                on_warning=self._on_warning,
            )

    def ask(
        self,
        arms: Sequence[Arm],
        starts: dict[str, Start],
        placement: Placement,
        *,
        want_states: bool = False,
    ) -> Placement:
        """Ask all nodes for the boxes of the arm that was in training; if they are newer than its
        checkpoint it begins there, and its stages are placed where their boxes lie."""
        left = self.left
        if left is None or not left.training:
            return placement
        name, note = left.training, left.note(left.training)
        arm = next((arm for arm in arms if arm.name == name), None)
        self._gone = (note["run"],) if note["run"] else ()
        start = starts.get(name, Start())
        if arm is None or not note["run"]:
            return placement
        trouble = left.trouble(arm) or _off(arm)
        if trouble:
            if self._must_fit and start.checkpoint is None and name not in self._refused:
                raise CheckpointError(
                    f"--resume {left.folder}: it has no checkpoint, and its black boxes cannot be "
                    f"used: {trouble}. Resume with the same settings and code, or start the run "
                    "again without --resume."
                )
            self._tell_why_not(name, start, [trouble])
            return placement
        found = find_boxes(note, len(placement.nodes), on_warning=self._on_warning)
        held = [box.trouble for own in found.values() for box in own if box.is_held]
        if held:
            raise CheckpointError(
                f"{left.folder} is still being trained: {held[0]}. End that run and resume again, "
                "or give this one another --name."
            )
        checkpoint = self._own(start.checkpoint)
        choice = choose(
            found,
            num_stages=len(placement.nodes),
            recorded=left.recorded(name),
            latest=_latest(arm, note, has_overtime=not (want_states and arm is arms[-1])),
            checkpoint=None if checkpoint is None else checkpoint.step - 1,
        )
        if choice.source != "box":
            self._tell_why_not(name, start, choice.troubles)
            return placement
        moved, homeless = at_home(placement, choice.homes, nodes())
        if homeless:
            names = ", ".join(map(str, homeless))
            why = f"the node with the black box of stage {names} has no free GPU for it"
            self._tell_why_not(name, start, [why])
            return placement
        chosen = [
            next(
                box
                for node, own in found.items()
                for box in own
                if box.stage == stage and node == home.id
            )
            for stage, home in enumerate(moved.nodes)
        ]
        starts[name] = replace(
            start,
            checkpoint=checkpoint,
            boxes=BoxStart(
                run=note["run"],
                step=choice.step,
                progress=left.progress(name, choice.step, chosen),
                notes=tuple(left.notes(arm, choice.step)),
            ),
        )
        self._gone = ()
        return moved

    def _own(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """A checkpoint of the course that the boxes are of; one that an earlier run has left in
        the same folder is not, however many steps it had."""
        assert self.left is not None
        serial = int(self.left.note(self.left.training)["serial"])
        is_own = checkpoint is not None and checkpoint.manifest.serial >= serial
        return checkpoint if is_own else None

    def _tell_why_not(self, arm: str, start: Start, troubles: Sequence[str]) -> None:
        """Without troubles the checkpoint is the newer one."""
        self._raise_refusal(arm)
        if troubles:
            assert self.left is not None
            self._on_warning(
                f"the black boxes of {self.left.folder} cannot be used: {'; '.join(troubles)}. "
                + _instead(start)
            )

    def boxes_of(self, start: Start) -> Boxes:
        """What the stages of an arm begin with."""
        if start.boxes is not None:
            return Boxes(run=start.boxes.run)
        return Boxes(gone=self._gone)

    def go_back(self, pipeline: Pipeline, start: Start) -> Start:
        """All stages to the step in their boxes; if that fails they are as new, and the answer is
        how the arm begins instead."""
        assert start.boxes is not None
        assert self.left is not None
        trouble = self.left.other_blocks(pipeline.arm.name, pipeline.infos)
        troubles = [trouble] if trouble else pipeline.go_back(start.boxes.step)
        if not troubles:
            return start
        instead = replace(start, boxes=None)
        self._tell_why_not(pipeline.arm.name, instead, troubles)
        pipeline.start_anew()
        return instead

    # --- the record of this run ---------------------------------------------------------------

    def open(
        self, config: RunConfig, folder: Path, failures: list[Failure], *, epoch_s: float
    ) -> None:
        """Where this run's own record goes. Nothing is written before an arm has begun, so that a
        start that fails leaves what it found."""
        self._folder, self._failures = folder, failures
        if self.left is None:
            remove_record(folder)  # of a run that is written over now
        settings = config.to_dict()
        settings["name"] = folder.name
        settings["checkpoint"]["resume"] = None
        self._record = RunRecord(
            folder,
            config=settings,
            code=code_version(),
            epoch_s=epoch_s,
            on_warning=self._on_warning,
        )

    @property
    def is_open(self) -> bool:
        """Whether this run keeps a record."""
        return self._record is not None

    def begun(
        self, pipeline: Pipeline, start: Start, *, serial: int, evaluations: Sequence[Any]
    ) -> Failure | None:
        """An arm is ready to train, with its rows in metrics.jsonl; returns the end of the driver
        before, if this is where the run goes on after it."""
        failure = None
        if self.left is not None and not self._is_told:
            self._is_told = True
            failure = self._driver_failure(pipeline, start)
            self._failures.append(failure)
        name, arm = pipeline.arm.name, pipeline.arm
        note = {} if self.left is None else self.left.note(name)
        again: Sent = note.get("again", {}) if start.boxes is not None else {}
        self._again[name] = Ledger()
        self._again[name].add_late(again)
        has_boxes = any(spec.black_box != "off" for spec in pipeline.specs)
        assert self._record is not None
        self._record.arm(
            name,
            run=pipeline.run if has_boxes else "",
            black_box=arm.config.faults.black_box,
            spill=arm.codec.spill_dir if arm.codec.has_memory else None,
            nodes=[node.ip for node in pipeline.actors.placement.nodes],
            pids=[info["pid"] for info in pipeline.infos],
            num_steps=arm.num_steps,
            data=data_of(arm),
            blocks={str(b): d for info in pipeline.infos for b, d in info["blocks"].items()},
            cuts=[[c.start, c.stop] for c in arm.workload.cuts(arm.config.pipeline.stages)],
            serial=int(note["serial"]) if start.boxes is not None else serial,
            evaluations=[list(one) for one in evaluations],
            again=again,
            is_done=False,
        )
        self.save()
        here = None if self._folder is None else self._folder.absolute()
        if self.left is not None and self.left.folder.absolute() != here:
            remove_record(self.left.folder)  # it goes on here
        return failure

    def restored(self, arm: Arm, progress: Mapping[str, Any]) -> None:
        """An arm was done before."""
        if self._record is None:
            return
        note = {} if self.left is None else self.left.note(arm.name)
        self._record.arm(
            arm.name,
            run="",
            num_steps=arm.num_steps,
            data=data_of(arm),
            cuts=[[c.start, c.stop] for c in arm.workload.cuts(arm.config.pipeline.stages)],
            evaluations=progress["eval_losses"],
            again=note.get("again", {}),
            prediction=progress["prediction"],
            is_done=True,
        )

    def evaluated(self, arm: str, losses: Sequence[Any]) -> None:
        """An evaluation's weights are gone when the run goes on: its loss is kept."""
        self._note(arm, evaluations=[list(one) for one in losses])

    def replayed(self, arm: str, sent: Sent) -> None:
        """Bytes that no line of metrics.jsonl has: a step was run again."""
        if arm in self._again:
            self._again[arm].add_late(sent)
            self._note(arm, again=self._again[arm].by_link())

    def done(self, arm: str, prediction: Prediction | None) -> None:
        """All of an arm is trained."""
        told = None if prediction is None else asdict(prediction)
        self._note(arm, is_done=True, prediction=told)

    def failed(self, pipeline: Pipeline) -> None:
        """Stages may be elsewhere now."""
        self._note(pipeline.arm.name, nodes=[node.ip for node in pipeline.actors.placement.nodes])

    def save(self, *, stopped_by: str = "") -> None:
        """Write the record."""
        if self._record is not None:
            entries = [failure.as_dict() for failure in self._failures]
            self._record.save(entries, stopped_by=stopped_by)

    def over(self, error: BaseException | None, *, leaves_boxes: bool) -> bool:
        """The run ends; returns whether it can be taken up where it is.

        It can if the machine ended it, or if it failed and its stages could not remove their
        boxes; not at its end, nor if the user stopped it.
        """
        was_stopped = isinstance(error, KeyboardInterrupt) and not isinstance(error, Terminated)
        if self._record is None or not self._again:
            return False  # no arm has begun: what was found is as it was
        if error is None or was_stopped or not (leaves_boxes or isinstance(error, Terminated)):
            self._record.remove()
            return False
        is_told = isinstance(error, Terminated)
        self.save(stopped_by="it was told to end (SIGTERM)" if is_told else str(error))
        return True

    def _note(self, arm: str, **values: Any) -> None:
        if self._record is not None and arm in self._again:
            self._record.arm(arm, **values)
            self.save()

    def _driver_failure(self, pipeline: Pipeline, start: Start) -> Failure:
        assert self.left is not None
        name = pipeline.arm.name
        was_in = self.left.training or name
        recorded = self.left.recorded(was_in)
        return Failure(
            kind="driver",
            stage=DRIVER,
            step=recorded + 1,
            cause=self.left.cause,
            arm=was_in,
            at_s=self.left.at_s,
            replaced=tuple(range(len(pipeline.handles))),
            resumed_from=start.after,
            source=start.source,
            replayed_steps=max(0, recorded - start.after) if was_in == name else 0,
            recovery_s=time.monotonic() - self._start_s,
        )


def _off(arm: Arm) -> str:
    if all(spec.black_box == "off" for spec in arm.specs(run="any")):
        return "this run keeps none (--max-failures 0, or faults.black_box=off)"
    return ""


def _latest(arm: Arm, note: Mapping[str, Any], *, has_overtime: bool) -> int | None:
    """The last step whose state is of use: one beyond the arm's own (to reach fp32's loss) only
    if it has as many of its own as before, and nobody wants the weights after those."""
    if has_overtime and note["num_steps"] == arm.num_steps:
        return None
    return min(int(note["num_steps"]), arm.num_steps) - 1


def _instead(start: Start) -> str:
    if start.checkpoint is None:
        return "There is no checkpoint, so the arm begins at step 0."
    return f"The run goes on from {start.checkpoint.path}, after {start.checkpoint.step} steps."
