"""Warm spares: processes that have loaded everything a stage needs, and wait to be one.

A new stage actor costs three to four seconds of CPU before its first line of ours runs: Python,
Ray, torch, and the compiler that torch loads with its first optimizer. A spare has done all that.
It idles at no cost but memory until a stage on its node dies, takes the place, and another one is
started behind the steps that follow. Each node that has stages has its own, because the black box
of a dead stage lies there.

Nothing here is waited for while training goes well: `tend` starts what is missing and returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from ray_pipe.planner.placement import Node
from stages.crowding import crowding

PING_S = 2.0
"""A spare that does not answer within this time is no help,"""

PING_CROWDING = 4.0
"""or on a busy machine up to so many times it: a new process would wait for its turn, too."""

LOOK_S = 1.0
"""Time between two looks whether one is missing."""

MAX_LOST = 3
"""Spares of one node that may die in a row before one is of use; then none is started there
again."""


@dataclass(kw_only=True)
class _Spare:
    handle: Any
    warm: Any
    """The call that loads everything; it fails if the process dies on the way."""


@dataclass(kw_only=True)
class _Home:
    idle: list[_Spare] = field(default_factory=list)
    num_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A spare that was given out."""

    handle: Any
    is_warm: bool
    """Or it was still loading, and will be a stage when it has."""


class Spares:
    """The spares of one pipeline, by node."""

    def __init__(
        self,
        start: Callable[[Node], Any],
        *,
        per_node: int,
        after_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        crowding: Callable[[], float] = crowding,
    ) -> None:
        """`start` makes an actor on a node; the first are made `after_s` after the first call of
        `tend`, so that a run that is over by then has not paid for them. `crowding` is how many
        threads want each core."""
        self._start = start
        self._per_node = per_node
        self._after_s = after_s
        self._clock = clock
        self._crowding = crowding
        self._next_s: float | None = None
        self._homes: dict[str, _Home] = {}

    @property
    def num_idle(self) -> int:
        """Spares that wait, or are on their way."""
        return sum(len(home.idle) for home in self._homes.values())

    @property
    def handles(self) -> list[Any]:
        """The actors of those."""
        return [spare.handle for home in self._homes.values() for spare in home.idle]

    def is_due(self) -> bool:
        """Whether to call `tend`: the run has lasted long enough to be worth a spare, and the last
        look is a while ago. Costs nothing: asked after every step."""
        if self._per_node == 0:
            return False
        now = self._clock()
        if self._next_s is None:
            self._next_s = now + self._after_s
        if now < self._next_s:
            return False
        self._next_s = now + LOOK_S
        return True

    def tend(self, nodes: Sequence[Node], warm_with: Any) -> None:
        """Start what is missing on these nodes; `warm_with` is what `warm_up` is given."""
        for node in nodes:
            home = self._homes.setdefault(node.id, _Home())
            self._drop_dead(home)
            while len(home.idle) < self._per_node and home.num_lost < MAX_LOST:
                handle = self._start(node)
                home.idle.append(_Spare(handle=handle, warm=handle.warm_up.remote(warm_with)))

    def take(self, node_id: str, *, loading: bool = True) -> Taken | None:
        """A spare of that node that answers, else None. It is the caller's from now on.

        One that is still `loading` is taken as well, if that is allowed: it will be ready before a
        new one. If it is not, it is ended: it may be waiting for what the new one needs.
        """
        home = self._homes.get(node_id, _Home())
        if self._next_s is not None:
            self._next_s = min(self._next_s, self._clock())  # the next look is due at once
        self._drop_dead(home)
        home.idle.sort(key=lambda spare: not _is_done(spare.warm))
        while home.idle:
            spare = home.idle.pop(0)
            is_warm = _is_done(spare.warm)
            if not loading and not is_warm:
                ray.kill(spare.handle)
                continue
            try:
                if is_warm:
                    ray.get(spare.handle.ping.remote(), timeout=self._ping_s)
                    home.num_lost = 0
            except RayError:
                ray.kill(spare.handle)
                home.num_lost += 1
                continue
            return Taken(handle=spare.handle, is_warm=is_warm)
        return None

    def are_silent(self, node_id: str) -> bool:
        """Whether there is no answer from any warm spare of a node that has one: then the node
        cannot be reached, whatever Ray still believes."""
        home = self._homes.get(node_id, _Home())
        warm = [spare.handle for spare in home.idle if _is_done(spare.warm)]
        calls = [handle.ping.remote() for handle in warm]
        if not calls:
            return False
        for call in ray.wait(calls, num_returns=len(calls), timeout=self._ping_s)[0]:
            try:
                ray.get(call)
            except ActorUnavailableError:
                continue
            except RayError:
                return False  # it died, which the node could tell
            return False
        return True

    def forget(self, node_id: str) -> None:
        """A node is gone, and its spares with it."""
        for spare in self._homes.pop(node_id, _Home()).idle:
            ray.kill(spare.handle)

    def wait(self, timeout_s: float) -> bool:
        """Whether all are warm within that time; for tests and measurements."""
        calls = [spare.warm for home in self._homes.values() for spare in home.idle]
        return not calls or len(ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[1]) == 0

    def end(self) -> None:
        """No spare is needed any more."""
        for node_id in list(self._homes):
            self.forget(node_id)
        self._per_node = 0

    @property
    def _ping_s(self) -> float:
        return PING_S * min(PING_CROWDING, self._crowding())

    def _drop_dead(self, home: _Home) -> None:
        """Let go of those that died while they were loading."""
        alive = []
        for spare in home.idle:
            try:
                if _is_done(spare.warm):
                    ray.get(spare.warm)
            except RayError:
                ray.kill(spare.handle)
                home.num_lost += 1
            else:
                alive.append(spare)
        home.idle = alive


def _is_done(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])
