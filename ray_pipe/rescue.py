"""After a failure: who is left, new actors for those who are not, everybody back to one step.

The effects of what `ray_pipe.recovery` decides:

    abort the survivors and hear them out -> replace the dead -> ask everybody what they have
    -> all go back to the newest common step -> what came after it is queued again

The records of steps that all stages have committed are not lost with a stage: its black box has
them. A failure during the rescue begins it anew, and counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ray_pipe.checkpoint_files import CheckpointError
from ray_pipe.errors import ClusterError
from ray_pipe.failures import cause_of, is_death, is_out_of_reach, name_failure, to_error
from ray_pipe.hearing import Hearing
from ray_pipe.recovery import FRESH, Decision, Failure, Status, common_step, verdict

if TYPE_CHECKING:
    from ray_pipe.pipeline import Item, Pipeline

RESTORE_S = 300.0


class Rescue:
    """One failure of a pipeline, from its first error until all stages are at work again."""

    def __init__(self, pipeline: Pipeline, item: Item, errors: dict[int, BaseException]) -> None:
        self.pipeline = pipeline
        self.step = item.plan.step
        self.errors = dict(errors)
        self.start = time.monotonic()
        self.at_s = time.time() - pipeline.epoch_s
        self.phases: dict[str, float] = {}
        self.warm: set[int] = set()

    def recover(self) -> None:
        """Bring the pipeline back, or raise the error that ends the run."""
        pipeline = self.pipeline
        while True:
            with self._timed("hear_out"):
                why = f"step {self.step} failed elsewhere"
                dead, hung = Hearing(pipeline, self.errors, why=why).hold()
            failure = name_failure(
                self.errors, step=self.step, infos=pipeline.infos, hung=hung, arm=pipeline.arm.name
            )
            failure = replace(failure, at_s=self.at_s)
            limit = pipeline.arm.config.faults.max_failures
            reason = verdict(failure, pipeline.failures, max_failures=limit)
            pipeline.failures.append(failure)
            if reason:
                raise to_error(failure, doing=f"in step {self.step}", hint=reason)
            try:
                done = self._bring_back(failure, tuple(sorted({*dead, *hung})), hung)
            except RayError as error:
                self.errors = {failure.stage: error}
                continue
            pipeline.failures[-1] = done
            pipeline.on_failure(done)
            return

    def _bring_back(self, failure: Failure, lost: tuple[int, ...], hung: set[int]) -> Failure:
        pipeline = self.pipeline
        if failure.kind == "timeout" and not lost:
            pipeline.deadlines.stretch()
        if lost:
            self._replace(lost, hung)
        with self._timed("ask"):
            statuses = self._statuses(lost)
        with self._timed("restore"):
            decision = self._restore(statuses)
        replayed = self._queue_again(decision.step)
        pipeline.attempt += 1
        troubles = [text for i in lost if (text := pipeline.infos[i]["box_trouble"])]
        changed = {decision.sources[i] for i in lost} or {*decision.sources} - {"live"} or {"box"}
        return replace(
            failure,
            cause="; ".join([failure.cause, *troubles]),
            replaced=lost,
            resumed_from=decision.step,
            source=sorted(changed)[0],
            replayed_steps=replayed,
            recovery_s=time.monotonic() - self.start,
            spares=tuple(sorted(self.warm & {*lost})),
            phases=dict(self.phases),
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Count what is done inside towards a phase of the recovery."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.monotonic() - start

    def _replace(self, lost: tuple[int, ...], hung: set[int]) -> None:
        """New actors; a node that cannot start one is avoided the second time."""
        pipeline, actors = self.pipeline, self.pipeline.actors
        avoid = {
            pipeline.infos[index]["node"]
            for index in lost
            if (error := self.errors.get(index)) is not None and is_out_of_reach(cause_of(error))
        }
        with self._timed("process"):
            self.warm = actors.replace(lost, avoid=avoid)
            try:
                actors.introduce()
            except ClusterError:
                avoid |= {pipeline.infos[index]["node"] for index in lost}
                self.warm = actors.replace(lost, avoid=avoid)
                actors.introduce()
            for index in hung:
                # Ray takes five seconds to end a process that was stopped, and its box is locked.
                pipeline.handles[index].end_process.remote(pipeline.infos[index])
        with self._timed("set_up"):
            infos = _get(pipeline.set_up(lost, reborn=True))
            for index in lost:
                pipeline.infos[index] = infos[index]
            pipeline.check_infos(pipeline.infos)

    def _statuses(self, lost: tuple[int, ...]) -> list[Status]:
        """What every stage has; records that the driver has not seen are filled in."""
        pipeline = self.pipeline
        found = _get({handle.status.remote(): i for i, handle in enumerate(pipeline.handles)})
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
                _get(pipeline.set_up(range(len(pipeline.handles))))
                return decision
            saved: list[Any] = [None] * len(statuses)
            if "checkpoint" in decision.sources:
                assert saves is not None
                try:
                    saved = saves.load(decision.step)
                except CheckpointError as error:
                    saves.refuse(str(error))
                    continue
                _get(pipeline.set_up(range(len(pipeline.handles))))
                statuses = [Status(index=i, live=None) for i in range(len(statuses))]
            calls = {
                handle.restore.remote(decision.step, own): i
                for i, (handle, own) in enumerate(zip(pipeline.handles, saved, strict=True))
            }
            damaged = _failed(calls)
            if not damaged:
                return decision
            if "checkpoint" in decision.sources:
                assert saves is not None
                saves.refuse(str(cause_of(next(iter(damaged.values())))))
                continue
            for index in damaged:
                statuses[index] = Status(index=index, live=None)

    def _queue_again(self, step: int) -> int:
        """Put what must be run again in front; returns how many steps of it were recorded."""
        from ray_pipe.pipeline import Item

        pipeline = self.pipeline
        num_stages = len(pipeline.handles)
        replays = [
            Item(plan=pipeline.arm.plan(number), is_replay=True)
            for number in range(step + 1, max(pipeline.losses, default=-1) + 1)
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


def _get(calls: dict[Any, int]) -> dict[int, Any]:
    """Results by stage, or the first error."""
    results = ray.get(list(calls), timeout=RESTORE_S)
    return dict(zip(calls.values(), results, strict=True))


def _failed(calls: dict[Any, int]) -> dict[int, RayError]:
    """Errors by stage, of a stage's own work; the death of one ends the rescue."""
    ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=RESTORE_S)
    if late:
        raise GetTimeoutError(f"stages {sorted(calls[ref] for ref in late)} do not come back")
    errors: dict[int, RayError] = {}
    for ref in ready:
        try:
            ray.get(ref)
        except RayError as error:
            if is_death(error):
                raise
            errors[calls[ref]] = error
    return errors
