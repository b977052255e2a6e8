"""Before an arm's first step: whoever is lost is replaced, and the arm is prepared anew.

Nothing has been trained yet, so there is nothing to go back to: new processes for those who are
gone, all are told who the others are, and the arm's pipeline is built again. It counts like any
other failure (`--max-failures`). In training `ray_pipe.rescue` does more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import ray
from ray.exceptions import RayError

from ray_pipe.calls import Silence
from ray_pipe.errors import TrainingError
from ray_pipe.failures import cause_of, is_out_of_reach, name_failure, to_error
from ray_pipe.hearing import PING_CROWDING, PING_S
from ray_pipe.recovery import FRESH, Failure, Source, verdict
from ray_pipe.replica_actors import ReplicaActors
from ray_pipe.stage_actors import GUEST, NotIntroduced, StageActors
from stages.crowding import crowding

T = TypeVar("T")


class Preparation:
    """The beginning of one arm, as often as it takes."""

    def __init__(
        self,
        actors: StageActors,
        *,
        arm: str,
        max_failures: int,
        failures: list[Failure],
        epoch_s: float,
        on_failure: Callable[[Failure], None],
        begins_after: int = FRESH,
        begins_from: Source = "checkpoint",
    ) -> None:
        """`failures` of the run so far, to which those to come are added; `begins_after` the step
        whose state the arm begins with, and `begins_from` where that is."""
        self._actors = actors
        self._arm = arm
        self._max_failures = max_failures
        self._failures = failures
        self._epoch_s = epoch_s
        self._on_failure = on_failure
        self._begins_after = begins_after
        self._begins_from = begins_from
        self._open: list[tuple[int, float]] = []
        """Places among the failures that the arm has not come back from, and since when."""

    def run(self, make: Callable[[], T]) -> T:
        """What `make` returns, once it does; an error that is no loss of a stage is passed on."""
        while True:
            try:
                if self._open:
                    self._introduce()
                made = make()
            except TrainingError as error:
                self._replace(error)
                continue
            for place, start in self._open:
                done = replace(self._failures[place], recovery_s=time.monotonic() - start)
                self._failures[place] = done
                self._on_failure(done)
            return made

    def _replace(self, error: TrainingError) -> None:
        """New actors for those who are lost; raises `error` if nobody is, or the run must end."""
        start = time.monotonic()
        errors = error.errors if isinstance(error, NotIntroduced) else error.by_stage
        errors = {index: why for index, why in errors.items() if index != GUEST}
        if not errors:
            raise error
        ids = [{"actor": handle._actor_id.hex(), "pid": -1} for handle in self._actors.handles]
        step = self._begins_after + 1
        failure = name_failure(errors, step=step, infos=ids, arm=self._arm)
        failure = replace(
            failure,
            at_s=time.time() - self._epoch_s,
            cause=f"{failure.cause} ({error.doing or 'before the first step'})",
        )
        reason = verdict(failure, self._failures, max_failures=self._max_failures)
        if reason:
            self._failures.append(failure)
            raise to_error(failure, doing=error.doing, hint=reason) from error
        lost = self._lost(errors)
        self._failures.append(
            replace(
                failure,
                replaced=tuple(sorted(lost)),
                resumed_from=self._begins_after,
                source="fresh" if self._begins_after == FRESH else self._begins_from,
            )
        )
        self._open.append((len(self._failures) - 1, start))
        self._start_anew(lost, errors)

    def _lost(self, errors: Mapping[int, BaseException]) -> set[int]:
        """Who is gone, does not answer, or was stuck in its own work."""
        pings = {handle.ping.remote(): i for i, handle in enumerate(self._actors.handles)}
        timeout_s = PING_S * min(PING_CROWDING, crowding())
        ready, late = ray.wait(list(pings), num_returns=len(pings), timeout=timeout_s)
        lost = {pings[ref] for ref in late}
        for ref in ready:
            try:
                ray.get(ref)
            except RayError:
                lost.add(pings[ref])
        return lost | {index for index, why in errors.items() if isinstance(why, Silence)}

    def _start_anew(self, lost: set[int], errors: Mapping[int, BaseException]) -> None:
        actors = self._actors
        if isinstance(actors, ReplicaActors):
            for replica in {index // actors.num_stages for index in lost} - actors.dead:
                actors.end(replica)
                actors.dead.add(replica)  # the next pipeline gives it new actors
            return
        avoid = {
            actors.placement.nodes[index].id
            for index in lost
            if index in errors and is_out_of_reach(cause_of(errors[index]))
        }
        if lost:
            actors.replace(sorted(lost), avoid=avoid)

    def _introduce(self) -> None:
        if not isinstance(self._actors, ReplicaActors):
            self._actors.introduce()
