"""While the driver waits for calls: are those who owe an answer alive?

Path: ray_pipe.pipeline -> ray_pipe.pulse

A stage that waits for another gives up after its deadline. Nobody waits for the only stage of a
run, for one that is being set up or measured, or when all have stopped at once. So whoever owes
the driver an answer is asked for a sign of life every few seconds, in a thread of the actor that
no work holds up. Calls that are answered sooner than that cost nothing.

    no answer, and its process is stopped as its node sees it     silent after `STOPPED_S`
    no answer, whatever the reason                                silent after `SILENT_S`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_pipe.failures import Silent, is_death
from stages.process_state import is_stopped

PULSE_S = 2.0
"""Seconds between two looks."""

STOPPED_S = 5.0
SILENT_S = 15.0
SILENT_CROWDING = 4.0
"""On a busy machine `SILENT_S` is times the threads that want each core, up to this."""


class Pulse:
    """The signs of life of the stages that one wait is for."""

    def __init__(
        self,
        handles: Sequence[Any],
        infos: Sequence[Mapping[str, Any]],
        *,
        doing: str,
        crowding: Callable[[], float] = lambda: 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`infos` are what `setup` returned, empty before it has."""
        self._handles = handles
        self._infos = infos
        self._doing = doing
        self._crowding = crowding
        self._clock = clock
        self._since = clock()
        self._seen: dict[int, float] = {}
        """When a stage has last answered."""

        self._pings: dict[int, Any] = {}
        self._looks: dict[int, Any] = {}
        self._stopped: dict[int, float] = {}
        """Since when a stage is known to be stopped."""

    def look(self, waiting: Collection[int]) -> dict[int, RayError]:
        """Hear those who answered, ask all who are waited for; who is lost, by stage, and why."""
        lost: dict[int, RayError] = {}
        now = self._clock()
        for index in sorted(set(waiting)):
            error = self._hear(index, now)
            if error is not None:
                lost[index] = error
                continue
            if index not in self._pings:
                self._pings[index] = self._handles[index].ping.remote()
                self._seen.setdefault(index, now)
            silent_s = now - self._seen[index]
            if silent_s > 0 and self._is_stopped(index):
                stopped_s = now - self._stopped.setdefault(index, now)
                if max(stopped_s, silent_s) >= STOPPED_S:
                    pid = self._infos[index]["pid"]
                    lost[index] = Silent(silent_s, self._doing, stopped_pid=pid)
            elif silent_s >= SILENT_S * min(SILENT_CROWDING, self._crowding()):
                lost[index] = Silent(silent_s, self._doing)
        return lost

    def _hear(self, index: int, now: float) -> RayError | None:
        """Take in the answer of a stage, if there is one; the error if it is dead."""
        ping = self._pings.get(index)
        if ping is None or not ray.wait([ping], num_returns=1, timeout=0)[0]:
            return None
        del self._pings[index]
        try:
            ray.get(ping)
        except RayError as error:
            return error if is_death(error) else None  # out of reach for now: no sign of life
        self._seen[index] = now
        self._stopped.pop(index, None)
        return None

    def _is_stopped(self, index: int) -> bool:
        """What the node of a stage says; on another node it says so by the next look."""
        if index >= len(self._infos):
            return False
        info = self._infos[index]
        if is_here(info):
            return is_stopped(info["pid"])
        look = self._looks.pop(index, None)
        seen = False
        if look is not None:
            if not ray.wait([look], num_returns=1, timeout=0)[0]:
                self._looks[index] = look
                return index in self._stopped
            with suppress(RayError):
                seen = bool(ray.get(look))
        self._looks[index] = _look_there(info)
        return seen


def is_here(info: Mapping[str, Any]) -> bool:
    """Whether the stage that `setup` returned `info` of is on the driver's node."""
    if not ray.is_initialized():  # else Ray would start one to answer the question
        return False
    return bool(info["node"] == ray.get_runtime_context().get_node_id())


def _look_there(info: Mapping[str, Any]) -> Any:
    """Have the stage's node look at its process."""
    there = NodeAffinitySchedulingStrategy(info["node"], soft=False)
    return (
        _looker()
        .options(scheduling_strategy=there, name="look at a silent stage")
        .remote(info["pid"])
    )


@cache
def _looker() -> Any:
    """One for all looks: Ray keeps every function that it is given."""
    return ray.remote(num_cpus=0, max_retries=0)(is_stopped)
