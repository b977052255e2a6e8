"""After a failure: who is left, new actors for those who are not, everybody back to one step.

The effects of what `ray_pipe.recovery` decides:

    abort the survivors and hear them out -> replace the dead -> ask everybody what they have
    -> all go back to the newest common step -> what came after it is queued again

The records of steps that all stages have committed are not lost with a stage: its black box has
them. A failure during the rescue begins it anew, and counts; when all are at work again, each of
them has an entry that says where the run went on.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ray_pipe.calls import CallsFailed, Item, lend
from ray_pipe.checkpoint_files import CheckpointError
from ray_pipe.failures import cause_of, is_death, is_out_of_reach, name_failure, to_error
from ray_pipe.hearing import Hearing
from ray_pipe.pulse import PULSE_S
from ray_pipe.recovery import FRESH, Decision, Failure, Status, common_step, verdict
from ray_pipe.stage_actors import GUEST, NotIntroduced

if TYPE_CHECKING:
    from ray_pipe.pipeline import Pipeline


@dataclass(kw_only=True)
class Round:
    """One failure of a rescue: the one that began it, or one that came on the way."""

    failure: Failure
    start: float
    lost: tuple[int, ...] = ()
    excused: bool = False
    """Somebody else was the cause, and has an entry."""

    warm: set[int] = field(default_factory=set)
    phases: dict[str, float] = field(default_factory=dict)


class Interrupted(Exception):
    """Somebody was lost on the way back."""

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        super().__init__(errors)
        self.errors = dict(errors)


class Rescue:
    """One failure of a pipeline, from its first error until all stages are at work again."""

    def __init__(self, pipeline: Pipeline, item: Item, errors: dict[int, BaseException]) -> None:
        self.pipeline = pipeline
        self.step = item.plan.step
        self.errors = dict(errors)
        self.rounds: list[Round] = []
        self.new: set[int] = set()
        """Stages that have a new process which is not a stage yet."""

        self.hung: set[int] = set()
        """Stages whose old process may still be there."""

    def recover(self) -> None:
        """Bring the pipeline back, or raise the error that ends the run."""
        pipeline = self.pipeline
        while True:
            start, at_s = time.monotonic(), time.time() - pipeline.epoch_s
            why = f"step {self.step} failed elsewhere"
            dead, hung = Hearing(pipeline, self.errors, why=why).hold()
            failure = name_failure(
                self.errors, step=self.step, infos=pipeline.infos, hung=hung, arm=pipeline.arm.name
            )
            failure = replace(failure, at_s=at_s)
            limit = pipeline.arm.config.faults.max_failures
            excused = pipeline.excuses(failure)
            reason = "" if excused else verdict(failure, pipeline.counted(), max_failures=limit)
            if not excused:
                pipeline.failures.append(failure)
            if reason:
                raise to_error(failure, doing=f"in step {self.step}", hint=reason)
            lost = tuple(sorted({*dead, *hung}))
            self.hung |= hung
            self.rounds.append(Round(failure=failure, start=start, lost=lost, excused=excused))
            self._count("hear_out", time.monotonic() - start)
            try:
                self._bring_back()
            except Interrupted as interrupted:
                self.errors = interrupted.errors
                continue
            except RayError as error:
                self.errors = {self._blame(error, failure.stage): error}
                continue
            return

    def _blame(self, error: BaseException, default: int) -> int:
        """The stage whose process an error speaks of."""
        actor = getattr(cause_of(error), "actor_id", None)
        ids = [handle._actor_id.hex() for handle in self.pipeline.handles]
        return ids.index(actor) if actor in ids else default

    def _bring_back(self) -> None:
        pipeline, this = self.pipeline, self.rounds[-1]
        if this.failure.kind == "timeout" and not this.lost:
            pipeline.deadlines.stretch()
        if this.lost or self.new:
            self._replace(this)
        everybody_lost = {index for one in self.rounds for index in one.lost}
        with self._timed("ask"):
            statuses = self._statuses(everybody_lost)
        with self._timed("restore"):
            decision = self._restore(statuses)
        replayed = self._queue_again(decision.step)
        pipeline.attempt += 1
        # By place: somebody else than this rescue may have told of a failure meanwhile.
        places = {id(failure): place for place, failure in enumerate(pipeline.failures)}
        for one in self.rounds:
            if not one.excused:
                done = self._done(one, decision, replayed)
                pipeline.failures[places[id(one.failure)]] = done
                pipeline.on_failure(done)

    def _done(self, one: Round, decision: Decision, replayed: int) -> Failure:
        """The entry of a failure, now that the run goes on."""
        infos = self.pipeline.infos
        troubles = [text for i in one.lost if (text := infos[i]["box_trouble"])]
        sources = decision.sources
        changed = {sources[i] for i in one.lost} or {*sources} - {"live"} or {"box"}
        return replace(
            one.failure,
            cause="; ".join([one.failure.cause, *troubles]),
            replaced=one.lost,
            resumed_from=decision.step,
            source=sorted(changed)[0],
            replayed_steps=replayed if one is self.rounds[-1] else 0,
            recovery_s=time.monotonic() - one.start,
            spares=tuple(sorted(one.warm & {*one.lost})),
            phases=dict(one.phases),
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Count what is done inside towards a phase of the recovery."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._count(phase, time.monotonic() - start)

    def _count(self, phase: str, seconds: float) -> None:
        """Every failure that the run has not come back from waits for it."""
        for one in self.rounds:
            one.phases[phase] = one.phases.get(phase, 0.0) + seconds

    def _replace(self, this: Round) -> None:
        """New actors, which become stages."""
        pipeline, actors, lost = self.pipeline, self.pipeline.actors, this.lost
        avoid = {
            pipeline.infos[index]["node"]
            for index in lost
            if (error := self.errors.get(index)) is not None and is_out_of_reach(cause_of(error))
        }
        with self._timed("process"):
            this.warm = actors.replace(lost, avoid=avoid)
            self.new |= {*lost}
            self._introduce(this, avoid)
            for index in self.hung:
                # Ray takes five seconds to end a process that was stopped, and its box is locked.
                pipeline.handles[index].end_process.remote(pipeline.infos[index])
            self.hung.clear()
        with self._timed("set_up"):
            infos = self._get(pipeline.set_up(tuple(sorted(self.new)), reborn=True))
            for index in self.new:
                pipeline.infos[index] = infos[index]
            pipeline.check_infos(pipeline.infos)
            self.new.clear()

    def _introduce(self, this: Round, avoid: set[str]) -> None:
        """Until all know all. Who of the new ones cannot start is tried once more elsewhere; if it
        is one of the others who is lost, the nodes of the new ones are well, and so are the boxes
        that lie on them."""
        pipeline, actors = self.pipeline, self.pipeline.actors
        pulse = pipeline.pulse("hearing who the others are")

        def look(waiting: Collection[int]) -> Mapping[int, RayError]:
            return pulse.look({*waiting} - self.new - {GUEST})  # a new process may take its time

        for is_last in (False, True):
            try:
                actors.introduce(look=look)
            except NotIntroduced as error:
                stages = {i: why for i, why in error.errors.items() if i != GUEST}
                others = {i: why for i, why in stages.items() if i not in self.new}
                if others:
                    raise Interrupted(others) from error
                if is_last or not stages:
                    raise
                avoid |= {pipeline.infos[index]["node"] for index in stages}
                this.warm -= stages.keys()
                this.warm |= actors.replace(sorted(stages), avoid=avoid)
            else:
                return

    def _statuses(self, lost: Collection[int]) -> list[Status]:
        """What every stage has; records that the driver has not seen are filled in."""
        pipeline = self.pipeline
        found = self._get({handle.status.remote(): i for i, handle in enumerate(pipeline.handles)})
        for item in pipeline.queue:
            item.calls = {}
            for index, status in found.items():
                for record in status.records:
                    if item.plan.train and record.step == item.plan.step:
                        item.results.setdefault(index, record)
        return [
            Status(index=i, live=None if i in lost else found[i].live, box=found[i].box)
            for i in range(len(pipeline.handles))
        ]

    def _restore(self, statuses: list[Status]) -> Decision:
        """Everybody to the newest common step; a box that turns out damaged is done without."""
        pipeline, saves = self.pipeline, self.pipeline.checkpoints
        while True:
            newest = None if saves is None else saves.newest()
            decision = common_step(statuses, checkpoint=newest)
            if decision.step == FRESH and "fresh" in decision.sources:
                self._get(pipeline.set_up(range(len(pipeline.handles))))
                return decision
            saved: list[Any] = [None] * len(statuses)
            patience_s = pipeline.patience_s()
            if "checkpoint" in decision.sources:
                assert saves is not None
                try:
                    saved = [lend(raw) for raw in saves.load(decision.step)]
                except CheckpointError as error:
                    saves.refuse(str(error))
                    continue
                self._get(pipeline.set_up(range(len(pipeline.handles))))
                statuses = [Status(index=i, live=None) for i in range(len(statuses))]
            calls = {
                handle.restore.remote(decision.step, own): i
                for i, (handle, own) in enumerate(zip(pipeline.handles, saved, strict=True))
            }
            damaged = self._failed(calls, patience_s)
            if not damaged:
                return decision
            if "checkpoint" in decision.sources:
                assert saves is not None
                saves.refuse(str(cause_of(next(iter(damaged.values())))))
                continue
            for index in damaged:
                statuses[index] = Status(index=index, live=None)

    def _failed(self, calls: dict[Any, int], patience_s: float) -> dict[int, RayError]:
        """Errors by stage, of a stage's own work; who is lost meanwhile begins the rescue anew."""
        pulse = self.pipeline.pulse("going back")
        until_s = time.monotonic() + patience_s
        waiting, errors = dict(calls), {}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=PULSE_S)
            if not ready:
                lost = pulse.look(waiting.values())
                if not lost and time.monotonic() >= until_s:
                    late = GetTimeoutError(f"it did not come back within {patience_s:.0f} s")
                    lost = dict.fromkeys(waiting.values(), late)
                if lost:
                    raise Interrupted(lost)
                continue
            index = waiting.pop(ready[0])
            try:
                ray.get(ready[0])
            except RayError as error:
                if is_death(error):
                    raise Interrupted({index: error}) from error
                errors[index] = error
        return errors

    def _get(self, calls: dict[Any, int]) -> dict[int, Any]:
        """Results by stage; who is lost meanwhile begins the rescue anew."""
        try:
            return self.pipeline.results(calls, "on the way back")
        except CallsFailed as failed:
            raise Interrupted(failed.errors) from failed

    def _queue_again(self, step: int) -> int:
        """Put what must be run again in front; returns how many steps of it were recorded."""
        pipeline = self.pipeline
        num_stages = len(pipeline.handles)
        replays = [
            Item(plan=pipeline.arm.plan(number), is_replay=True)
            for number in range(step + 1, pipeline.last_known + 1)
        ]
        kept = []
        for item in pipeline.queue:
            is_done = item.plan.train and item.plan.step <= step and len(item.results) == num_stages
            if item.is_replay and not is_done:
                continue  # is among the replays anew
            if not is_done:
                item.results = {}
            kept.append(item)
        pipeline.queue.clear()
        pipeline.queue.extend([*replays, *kept])
        return len(replays)
