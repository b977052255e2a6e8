"""While the driver waits for steps of replicas: who owes one and is silent, or stuck?

Path: ray_pipe.replicas -> ray_pipe.replica_watch -> ray_pipe.pulse

Replicas wait for each other, so who is behind says nothing about who is to blame: where they keep
in step, all stop with the one that stopped.

    gives no sign of life                                        lost, within seconds (`Pulse`)
    lives, and one piece of work of it has lasted for half the   lost, once it is out of patience
    driver's patience; or its loop does not answer
    lives, and waits                                             innocent, however long it takes

Steps of others go on ending meanwhile where nobody waits for the silent one: all who have owed an
answer for longer than a look are looked at, whatever else was heard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ray_pipe.errors import TrainingError
from ray_pipe.failures import Silent, is_death
from ray_pipe.hearing import PING_CROWDING, PING_S
from ray_pipe.pulse import PULSE_S, Pulse

STUCK_SHARE = 0.5
"""A piece of work that has taken so much of the driver's patience will not end."""


class Stuck(Silent):
    """A stage lives and does not get on with its own work."""

    def __init__(self, why: str) -> None:
        RayError.__init__(self, why)


class Standstill(TrainingError):
    """Everybody waits, and nobody is to blame."""


class ReplicaWatch:
    """Of all stages of all replicas, by their place among the actors' handles."""

    def __init__(
        self,
        handles: Sequence[Any],
        new_pulse: Callable[[], Pulse],
        *,
        crowding: Callable[[], float] = lambda: 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handles = handles
        self._new_pulse = new_pulse
        self._crowding = crowding
        self._clock = clock
        self._since: dict[int, float] = {}
        """When each that owes an answer gave its last one, or was first seen to owe one."""

        self.changed()

    def changed(self) -> None:
        """Somebody has gone, or a new actor has come to a place: earlier questions are void, and
        whoever waited has a reason to get on."""
        self._since.clear()
        self._pulse = self._new_pulse()
        self._next = self._clock() + PULSE_S

    def heard(self, place: int) -> None:
        """A step of this stage has ended."""
        self._since[place] = self._clock()

    def look(self, owing: Collection[int], *, patience_s: float) -> dict[int, RayError]:
        """Who is lost, and why; asks nobody before it is time to. Raises `Standstill` if all
        have waited for longer than `patience_s` and nobody is to blame."""
        now = self._clock()
        self._since = {place: self._since.get(place, now) for place in sorted(owing)}
        if now < self._next:
            return {}
        self._next = now + PULSE_S
        late = [place for place, since in self._since.items() if now - since >= PULSE_S]
        lost = self._pulse.look(late)
        overdue = [place for place in late if now - self._since[place] >= patience_s]
        if lost or not overdue:
            return lost
        stuck = self._stuck(overdue, patience_s)
        if not stuck and len(overdue) == len(self._since):
            raise Standstill(
                f"no step of any replica ended within {patience_s:.0f} s: all stages answer, none "
                "is at work, and they wait for each other; their logs are in Ray's session "
                "folder, --resume goes on from the last checkpoint, and `deadline_s` can be raised "
                "if the network is that slow"
            )
        return stuck

    def _stuck(self, places: Sequence[int], patience_s: float) -> dict[int, RayError]:
        calls = {self._handles[place].at_work_s.remote(): place for place in places}
        limit_s = PING_S * min(PING_CROWDING, self._crowding())
        ready, silent = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s)
        found: dict[int, RayError] = {
            calls[ref]: Stuck(f"its event loop did not answer for {limit_s:.0f} s")
            for ref in silent
        }
        for ref in ready:
            try:
                work_s = ray.get(ref)
            except RayError as error:
                if is_death(error):
                    found[calls[ref]] = error
                continue
            if work_s >= STUCK_SHARE * patience_s:
                found[calls[ref]] = Stuck(f"one piece of its work has not ended for {work_s:.0f} s")
        return found
