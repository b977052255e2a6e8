"""A pipeline of stage actors: give it an arm, get the records of each step.

Path: ray_pipe.driver -> ray_pipe.pipeline -> stages.actor

Each stage is shipped one plan a step, a step ahead, so that the driver's distance never sits in
the critical path. The driver watches every call; on the first failure `ray_pipe.rescue` brings
all stages back to the last step that they have in common, and what came after is run again. Who
asks for the records of the steps gets each of them once, in order, whatever happened between.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from ray_pipe.calls import CallsFailed, Item, Records, Silence, lend
from ray_pipe.checkpoint_files import stage_file
from ray_pipe.deadlines import Deadlines, transfer_s
from ray_pipe.errors import TrainingError
from ray_pipe.failures import cause_of, name_failure, to_error
from ray_pipe.plans import Arm
from ray_pipe.pulse import PULSE_S, Pulse
from ray_pipe.recovery import FRESH, Failure
from ray_pipe.rescue import Rescue
from ray_pipe.same_source import other_hardware, refuse_other_source
from ray_pipe.saving import Save
from ray_pipe.stage_actors import StageActors
from stages.crowding import crowding
from stages.plan import StepPlan
from stages.spec import StageSpec
from stages.state import StageState

AHEAD = 2
"""Steps in flight: the running one and the next."""

KEPT_LOSSES = 10_000
"""Steps that are compared when they are run again; one goes back by two, or to a checkpoint."""

ABORT_TIMEOUT_S = 3.0
PATIENCE_S = 60.0
PATIENCE_DEADLINES = 20
_generations = itertools.count(1)


class Checkpoints(Protocol):
    """Where a pipeline finds saved states when a black box is lost."""

    def newest(self) -> int | None: ...
    def load(self, step: int) -> list[bytes]: ...
    def refuse(self, why: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Which black boxes the stages of an arm begin with."""

    run: str = ""
    """The training whose boxes they take over as they are; empty: new ones."""

    gone: tuple[str, ...] = ()
    """Trainings that were left: their boxes may be removed."""


class Pipeline:
    """The stages of one arm, ready to train, stages pushing to each other."""

    transport = "push"
    box_prefix = ""
    """Of the name that this training's black boxes have."""

    can_train_on = True
    """Whether steps beyond the arm's own make sense."""

    def __init__(
        self,
        actors: StageActors,
        arm: Arm,
        *,
        epoch_s: float,
        failures: list[Failure] | None = None,
        boxes: Boxes | None = None,
    ) -> None:
        """`failures` of the run so far, in other arms too; those to come are added to it. With
        `boxes` of a driver that is gone, `go_back` comes next, or `start_anew`."""
        self.arm = arm
        self.actors = actors
        self.handles = actors.handles
        self.epoch_s = epoch_s
        self.failures: list[Failure] = [] if failures is None else failures
        self.checkpoints: Checkpoints | None = None
        self.on_sent: Callable[[int], None] | None = None
        """Told each step once it was sent to the stages: what is sent next comes after it."""

        self.on_failure: Callable[[Failure], None] = lambda failure: None
        self.on_replay: Callable[[Records], None] = lambda records: None
        """Told the records of a step that was run again; they equal those handed out before."""

        self.on_warning: Callable[[str], None] = lambda text: None
        self.hardware: set[tuple[tuple[str, ...], ...]] = set()
        """Of all stages together, each one that the arm has computed on."""

        self.infos: list[dict[str, Any]] = []
        self.deadlines = self._deadlines()
        self.attempt = 0
        self.queue: deque[Item] = deque()
        self.losses: OrderedDict[int, float | None] = OrderedDict()
        """Of the latest steps handed out: a replay must give the same."""

        self.begun_after = FRESH
        """The step that it began with, in a run that was resumed: steps up to there were handed out
        by another driver, and are run again like the others if the way back leads further."""

        self._samples = ray.put(arm.workload.samples)
        generation = next(_generations)
        boxes = boxes or Boxes()
        self.run = boxes.run or f"{self.box_prefix}{uuid.uuid4().hex[:12]}-{generation}"
        """Names this training: its black boxes are found by it."""

        specs = arm.specs(epoch_s=epoch_s, generation=generation, run=self.run)
        self.specs = [replace(spec, gone=boxes.gone) for spec in specs]
        everybody = range(len(self.handles))
        calls = self.set_up(everybody, reborn=True) if boxes.run else self.set_up(everybody)
        self.infos = self.gather(calls, doing="being set up")
        self.check_infos(self.infos)

    def start_anew(self) -> None:
        """Every stage as it is before its first step, and an empty box."""
        calls = self.set_up(range(len(self.handles)))
        self.infos = self.gather(calls, doing="being set up")
        self.check_infos(self.infos)

    def go_back(self, step: int) -> list[str]:
        """All stages to a step that their black boxes hold, before the first one is run; returns
        why that cannot be, if it cannot: then `start_anew`."""
        calls = {handle.status.remote(): i for i, handle in enumerate(self.handles)}
        found = self.gather(calls, doing="telling what its black box holds")
        troubles = [
            f"the black box of stage {index} holds steps {list(status.box)}, not {step}"
            for index, status in enumerate(found)
            if step not in status.box
        ]
        if troubles:
            return troubles
        calls = {handle.restore.remote(step): i for i, handle in enumerate(self.handles)}
        try:
            self.gather(calls, doing="going back", patience_s=self.patience_s())
        except TrainingError as error:
            if not all(isinstance(why, RayTaskError) for why in error.by_stage.values()):
                raise  # somebody is lost, and will be replaced
            return [f"stage {i}: {cause_of(why)}" for i, why in error.by_stage.items()]
        return []

    def set_up(self, stages: range | tuple[int, ...], *, reborn: bool = False) -> dict[Any, int]:
        """Calls that make these actors stages of this arm."""
        last = len(self.handles) - 1
        return {
            self.handles[index].setup.remote(
                self.spec_of(index),
                [self._samples] if index in (0, last) else None,  # see `lend`
                self.transport,
                reborn,
            ): index
            for index in stages
        }

    def spec_of(self, index: int) -> StageSpec:
        """What a stage is told; how many share its node may have changed since the run began."""
        spec = self.specs[index]
        if spec.threads:
            return spec
        homes = [node.id for node in self.actors.placement.nodes]
        return replace(spec, sharing=homes.count(homes[index % len(homes)]))

    def check_infos(self, infos: list[dict[str, Any]]) -> None:
        """Refuse workers that run other code; note who they are."""
        refuse_other_source(infos)
        for info, handle in zip(infos, self.handles, strict=True):
            info["actor"] = handle._actor_id.hex()
        self.hardware.add(tuple(tuple(info["hardware"].values()) for info in infos))

    def notes(self) -> list[str]:
        """What the user should know about the stages."""
        texts = [info["box_trouble"] for info in self.infos]
        return [text for text in (*texts, other_hardware(self.infos)) if text]

    def expect(self, step_s: float) -> None:
        """A step will take about so long: waits are given time accordingly."""
        self.deadlines = self._deadlines(step_s)

    def _deadlines(self, expected_s: float = 0.0) -> Deadlines:
        start_s, floor_s = self.arm.deadline_s, self.arm.config.faults.min_deadline_s
        return Deadlines(
            start_s=start_s,
            floor_s=min(floor_s, start_s),
            expected_s=expected_s,
            crowding=self.crowding,
        )

    def crowding(self) -> float:
        """How busy the busiest machine is, the driver's and those of the stages."""
        return max([crowding(), *(float(info["crowding"]) for info in self.infos)])

    # --- steps ----------------------------------------------------------------------------

    def train(self, steps: range | None = None) -> Generator[Records, None, None]:
        """Run the arm's steps (or some more); yields the records of each step, in order.

        Whoever stops early calls `settle`, because a step may be in flight.
        """
        for step in range(self.arm.num_steps) if steps is None else steps:
            self.queue.append(Item(plan=self.arm.plan(step)))
            if len(self.queue) >= AHEAD:
                yield self._next()
        while self.queue:
            yield self._next()

    def settle(self) -> None:
        """Let the steps that are in flight end."""
        while self.queue:
            self._next()

    def evaluate(self, plan: StepPlan) -> Records:
        """Forward passes only, uncompressed; nothing that training remembers is touched."""
        self.settle()
        self.queue.append(Item(plan=plan))
        return self._next()

    def _next(self) -> Records:
        """The records of the next step that was not handed out yet; empty if there is none."""
        while self.queue:
            self._launch()
            item = self.queue[0]
            try:
                self.finish(item)
            except CallsFailed as failed:
                self._rescue(item, failed)
                continue
            self.queue.popleft()
            self.actors.tend(self.specs[0])
            records = [item.results[index] for index in sorted(item.results)]
            for info, record in zip(self.infos, records, strict=True):
                info["crowding"] = record.crowding
            if not item.is_replay:
                if item.plan.train:
                    self._note_loss(item.plan.step, records[-1].loss)
                return records
            self._check_replay(item.plan.step, records)
        return []

    def _note_loss(self, step: int, loss: float | None) -> None:
        self.losses[step] = loss
        if len(self.losses) > KEPT_LOSSES:
            self.losses.popitem(last=False)

    def _rescue(self, item: Item, failed: CallsFailed) -> None:
        Rescue(self, item, failed.errors).recover()

    def excuses(self, failure: Failure) -> bool:
        """Whether something else than a stage was the cause, and was told of and mended."""
        return False

    def counted(self) -> Sequence[Failure]:
        """The failures so far that count when a stage is lost."""
        return self.failures

    def _launch(self) -> None:
        for item in itertools.islice(self.queue, AHEAD):
            if not item.calls and len(item.results) < len(self.handles):
                plan = self.current(item.plan)
                name = (
                    f"{self.arm.name} {'step' if plan.train else 'evaluation'}"  # on the dashboard
                )
                item.calls = {
                    handle.run_step.options(name=name).remote(plan): index
                    for index, handle in enumerate(self.handles)
                }
                self.tell_sent(item)

    def tell_sent(self, item: Item) -> None:
        """A step went out; again only if the numbers that belong to it are those of now."""
        is_last = not item.is_replay or item.plan.step == self.last_known
        if self.on_sent is not None and item.plan.train and is_last:
            self.on_sent(item.plan.step)

    @property
    def last_known(self) -> int:
        """The last step whose records were handed out, by this driver or one before."""
        return max(self.losses, default=self.begun_after)

    def current(self, plan: StepPlan) -> StepPlan:
        """The plan with what may have changed since it was made."""
        return replace(plan, attempt=self.attempt, deadline_s=self.deadlines.value_s)

    def finish(self, item: Item) -> None:
        """Wait until every stage has done its part; raises `CallsFailed`."""
        item.results |= self.results(item.calls, f"in step {item.plan.step}")
        item.calls = {}

    def _check_replay(self, step: int, records: Records) -> None:
        self.on_replay(records)
        before, again = self.losses.get(step), records[-1].loss
        if step not in self.losses or before == again or _are_nan(before, again):
            return
        text = (
            f"step {step} was run again after a failure and gave the loss {again!r} instead of "
            f"{before!r}"
        )
        why = self._excuse_bits()
        if not why:
            raise TrainingError(
                f"{text}; something in the model is not the same twice (fresh random numbers): "
                "set --max-failures 0 to forbid replays"
            )
        self.losses[step] = again
        mine = [i for i, one in enumerate(self.failures) if one.arm == self.arm.name]
        if mine and not self.failures[mine[-1]].mismatch:
            text = f"{text}: {why}"
            self.failures[mine[-1]] = replace(self.failures[mine[-1]], mismatch=text)
            self.on_warning(text)

    def _excuse_bits(self) -> str:
        """Why the same step may end in other bits here; empty where it may not."""
        devices = {stage[0] for stages in self.hardware for stage in stages}
        if devices - {"cpu"}:
            return "kernels of a GPU may add in any order"
        if len(self.hardware) > 1:
            return "a stage has moved to a machine with another processor"
        return ""

    # --- calls ----------------------------------------------------------------------------

    def state_dicts(self) -> list[dict[str, Any]]:
        """Weights and optimizer of each stage after the last step."""
        return self._ask("state_dict", "telling its weights")

    def check_in(self) -> None:
        """Between steps: whoever does not answer is replaced."""
        self._ask("ping", "answering")

    def _ask(self, method: str, doing: str) -> list[Any]:
        """The answers of all stages between steps, with new stages for those that are lost."""
        while True:
            self.settle()
            calls = {getattr(handle, method).remote(): i for i, handle in enumerate(self.handles)}
            try:
                results = self.results(calls, doing)
            except CallsFailed as failed:  # the last step is in the boxes, too
                self._rescue(Item(plan=self.arm.plan(max(self.last_known, 0))), failed)
                continue
            return [results[index] for index in sorted(results)]

    def load_states(self, states: Sequence[StageState]) -> None:
        """Make each stage what it was; between steps."""
        calls = {
            handle.load_state.remote(lend(state.to_bytes())): index
            for index, (handle, state) in enumerate(zip(self.handles, states, strict=True))
        }
        self.gather(calls, doing="loading its state", patience_s=self.patience_s())

    def see(self, folder: str, name: str, token: bytes) -> bool:
        """Whether all stages see a file of the driver: then they write to that folder too."""
        calls = {
            handle.sees.remote(folder, name, token): index
            for index, handle in enumerate(self.handles)
        }
        return all(self.gather(calls, doing="looking for the checkpoints' folder"))

    def start_save(self, key: str, step: int, folder: str | None) -> Save:
        """Have every stage copy its state after `step`, the one sent last, then write it beside
        the next ones; without a folder it sends its bytes."""
        for handle in self.handles:
            handle.keep_state.remote(key, step)
        handles = dict(enumerate(self.handles))
        return Save(
            handles,
            lambda index: handles[index].write_kept.remote(key, folder, self.file_of(index)),
            patience_s=self.patience_s(),
        )

    def file_of(self, index: int) -> str:
        """What a checkpoint calls the state of a stage."""
        return stage_file(index)

    def patience_s(self) -> float:
        """For those who live, with a state of all stages on its way."""
        nbytes = 12 * sum(info["num_parameters"] for info in self.infos)  # weights and optimizer
        return transfer_s(nbytes + self.specs[0].rows_nbytes, self.arm.topology.slowest_bps)

    def gather(
        self,
        calls: dict[Any, int],
        *,
        doing: str,
        step: int = 0,
        watch: Collection[int] = (),
        patience_s: float = 0.0,
    ) -> list[Any]:
        """The results of one call to each stage, in stage order; raises the first failure."""
        try:
            results = self.results(calls, doing, watch=watch, patience_s=patience_s)
        except CallsFailed as failed:
            errors = failed.errors
            for handle in self.handles:
                handle.abort.remote(f"stage {next(iter(errors))} failed {doing}")
            left = [ref for ref, index in calls.items() if index not in errors]
            for ref in ray.wait(left, num_returns=len(left), timeout=ABORT_TIMEOUT_S)[0]:
                try:
                    ray.get(ref)
                except RayError as also:
                    errors[calls[ref]] = also
            failure = name_failure(errors, step=step, infos=self.infos, arm=self.arm.name)
            error = to_error(failure, doing=doing)
            error.by_stage, error.doing = errors, doing
            raise error from failed
        return [results[index] for index in sorted(results)]

    def pulse(self, doing: str) -> Pulse:
        """For one wait for stages."""
        return Pulse(
            self.handles, self.infos, doing=doing, crowding=self.crowding, clock=time.monotonic
        )

    def results(
        self,
        calls: dict[Any, int],
        doing: str,
        *,
        watch: Collection[int] = (),
        patience_s: float = 0.0,
    ) -> dict[int, Any]:
        """Results by stage. A stage that waits for another gives up by itself after its deadline,
        and one that gives no sign of life is seen by its pulse; the patience here is longer, for
        a stage that lives and hangs in its own work. `watch`: whom those who are called wait for.
        """
        timeout_s = max(PATIENCE_S, PATIENCE_DEADLINES * self.deadlines.value_s, patience_s)
        pulse = self.pulse(doing)
        results: dict[int, Any] = {}
        waiting = dict(calls)
        last = time.monotonic()
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=PULSE_S)
            if not ready:
                lost = pulse.look({*waiting.values(), *watch})
                if lost:
                    raise CallsFailed(dict(lost))
                if time.monotonic() - last >= timeout_s:
                    names = sorted(waiting.values())
                    raise CallsFailed({index: Silence(names, timeout_s, doing) for index in names})
                continue
            last = time.monotonic()
            index = waiting.pop(ready[0])
            try:
                results[index] = ray.get(ready[0])
            except RayError as error:
                raise CallsFailed({index: error}) from error
        return results


def _are_nan(*losses: float | None) -> bool:
    return all(loss is not None and math.isnan(loss) for loss in losses)
