"""After the first error: stop everybody, hear everybody out, and tell the guilty from the waiting.

    no answer to a ping, and its process is stopped as somebody on its node sees        -> guilty
    no answer to a ping within seconds              its machine hangs, or is gone       -> guilty
    answers, but its step has not ended in time     stuck in its own work               -> guilty
    answers, and waits for what a guilty one owes   ends when that one is gone          -> innocent

Only the guilty are killed: an innocent stage keeps its process, and with it everything it has
loaded. When this is over nothing of the old attempt runs any more and no abort is on its way, so
that what is sent next cannot meet either.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from ray_pipe.failures import is_death
from ray_pipe.pulse import is_here
from stages.process_state import is_stopped

if TYPE_CHECKING:
    from ray_pipe.calls import Item
    from ray_pipe.pipeline import Pipeline

SILENT_S = 1.0
"""After so long without an answer somebody on the node looks whether the process is stopped;"""

PING_S = 5.0
"""any that is not answers within this time, whatever it is computing,"""

PING_CROWDING = 4.0
"""or on a busy machine up to so many times it."""

UNAVAILABLE_S = 20.0
"""Until Ray knows whether an actor that cannot be reached is gone with its node."""

LOOK_S = 0.1


class Hearing:
    """One hearing. `errors`, by stage, are those known before; what is learnt is added."""

    def __init__(self, pipeline: Pipeline, errors: dict[int, BaseException], *, why: str) -> None:
        self._pipeline = pipeline
        self._why = why
        self.errors = errors
        self.hung: set[int] = set()
        """There, but silent or stuck; killed."""

        self._waiting: dict[Any, tuple[int, Item | None]] = {}
        self._pings: set[Any] = set()

    def hold(self) -> tuple[set[int], set[int]]:
        """Stages that are dead, and those that hung."""
        pipeline = self._pipeline
        pushes = pipeline.transport == "push"
        if pushes:
            self._abort(range(len(pipeline.handles)))
        self._waiting = {
            ref: (index, item) for item in pipeline.queue for ref, index in item.calls.items()
        }
        # In the same thread of the actor as the abort: who answers has heard it.
        pings = {handle.ping.remote(): (i, None) for i, handle in enumerate(pipeline.handles)}
        self._pings = set(pings)
        self._waiting |= pings
        ping_s = PING_S * min(PING_CROWDING, pipeline.crowding())
        start = time.monotonic()
        self._listen(start + SILENT_S, only_pings=True)
        self._kill(self._stopped(self._silent()))
        self._listen(start + ping_s, only_pings=True)
        self._kill(self._silent())
        self._listen(max(start + pipeline.deadlines.value_s, time.monotonic() + LOOK_S))
        if self._waiting:
            self._kill(self._stuck(ping_s))
            self._listen(time.monotonic() + ping_s)
            self._kill({index for index, _ in self._waiting.values()})
        dead = self._dead()
        if not pushes:  # now nothing is left that could run on after the abort
            living = set(range(len(pipeline.handles))) - dead - self.hung
            self._await(self._abort(living), ping_s)
        return dead, self.hung - dead

    def _silent(self) -> set[int]:
        waiting = {index for ref, (index, _) in self._waiting.items() if ref in self._pings}
        return waiting - self.hung

    def _stopped(self, silent: set[int]) -> set[int]:
        """Of the silent ones, those that were stopped, as the driver, if it is on their node, or
        another stage there can see."""
        infos, handles = self._pipeline.infos, self._pipeline.handles
        ours = {i for i in silent if is_here(infos[i])}
        stopped = {i for i in ours if is_stopped(infos[i]["pid"])}
        witnesses = {infos[i]["node"]: handles[i] for i in range(len(handles)) if i not in silent}
        calls = {
            witnesses[infos[i]["node"]].sees_stopped.remote(infos[i]): i
            for i in silent - ours
            if infos[i]["node"] in witnesses
        }
        if not calls:
            return stopped
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=SILENT_S)
        for ref in ready:
            with suppress(RayError):
                if ray.get(ref):
                    stopped.add(calls[ref])
        return stopped

    def _await(self, aborts: dict[Any, int], ping_s: float) -> None:
        """A later abort would end the next attempt: who does not confirm it is killed."""
        if aborts:
            _, late = ray.wait(list(aborts), num_returns=len(aborts), timeout=ping_s)
            self._kill({aborts[ref] for ref in late})

    def _listen(self, until_s: float, *, only_pings: bool = False) -> None:
        """Hear who answers, until all have or it is too late."""
        while self._waiting and (not only_pings or self._pings & self._waiting.keys()):
            ready, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=LOOK_S)
            for ref in ready:
                self._hear(ref, *self._waiting.pop(ref))
            if time.monotonic() >= until_s:
                return

    def _hear(self, ref: Any, index: int, item: Item | None) -> None:
        try:
            result = ray.get(ref)
        except RayError as error:
            if index in self.hung:
                return  # its death was our doing
            known = self.errors.get(index)
            if known is None or (is_death(error) and not is_death(known)):
                self.errors[index] = error
        else:
            if item is not None and type(result).__name__ == "StepRecord":
                item.results[index] = result

    def _kill(self, guilty: Collection[int]) -> None:
        for index in set(guilty) - self.hung - self._dead_so_far():
            self.hung.add(index)
            ray.kill(self._pipeline.handles[index])

    def _stuck(self, ping_s: float) -> set[int]:
        """Of those whose calls have not ended, who is at work on one; all, if none says so.

        With refs a call also waits for the results of another stage's calls: then its actor idles.
        """
        waiting = {index for index, _ in self._waiting.values()} - self.hung
        calls = {self._pipeline.handles[i].is_at_work.remote(): i for i in waiting}
        if not calls:
            return set()
        ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=ping_s)
        stuck = {calls[ref] for ref in late}
        for ref in ready:
            try:
                if ray.get(ref):
                    stuck.add(calls[ref])
            except RayError as error:
                self.errors.setdefault(calls[ref], error)
        return stuck or waiting

    def _dead_so_far(self) -> set[int]:
        return {index for index, error in self.errors.items() if is_death(error)}

    def _dead(self) -> set[int]:
        dead = self._dead_so_far()
        unsure = {i for i, e in self.errors.items() if isinstance(e, ActorUnavailableError)}
        return dead | {i for i in unsure - dead - self.hung if not self._is_there(i)}

    def _is_there(self, index: int) -> bool:
        """Asks until Ray knows: a node that is gone is not known to be for some ten seconds."""
        until_s = time.monotonic() + UNAVAILABLE_S
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                ray.get(self._pipeline.handles[index].ping.remote(), timeout=left_s)
            except ActorUnavailableError:
                time.sleep(LOOK_S)
            except RayError as error:
                if is_death(error):
                    self.errors[index] = error
                return False
            else:
                return True
        return False

    def _abort(self, stages: Collection[int]) -> dict[Any, int]:
        return {self._pipeline.handles[i].abort.remote(self._why): i for i in sorted(stages)}
