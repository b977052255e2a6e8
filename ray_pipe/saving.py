"""A checkpoint on its way: what stages and shards write, and whether they are still there.

Path: ray_pipe.pipeline -> ray_pipe.saving -> stages.actor_saving
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ray_pipe.failures import cause_of
from ray_pipe.pulse import PULSE_S, Pulse
from stages.crowding import crowding

PATIENCE_S = 600.0
"""For one that lives, and writes to a slow disk."""


class Save:
    """The files of one checkpoint, by place: stages first, then shards."""

    def __init__(
        self,
        handles: Mapping[int, Any],
        write: Callable[[int], Any],
        *,
        patience_s: float = 0.0,
        on_failed: Callable[[int, BaseException], None] = lambda place, why: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`write` calls an actor: the call ends when its file is written, or its bytes are here.

        One that lives is given `patience_s`, and at least `PATIENCE_S`. Whose file will not come
        is told to `on_failed`: others may wait for its word.
        """
        self._patience_s = max(PATIENCE_S, patience_s)
        self._on_failed = on_failed
        self._clock = clock
        self._places = sorted(handles)
        self._writes = {place: write(place) for place in self._places}
        self._results: dict[int, Any] = {}
        self._pulse = Pulse(
            [handles[place] for place in self._places],
            (),
            doing="writing its state",
            crowding=crowding,
            clock=clock,
        )

    def results(self, *, wait: bool) -> list[Any] | None:
        """What each place wrote, or why it could not, as an exception; None while some write."""
        until_s = self._clock() + self._patience_s
        while not self._hear(PULSE_S if wait else 0.0):
            if not wait:
                return None
            for index, error in self._pulse.look(self._missing()).items():
                self._end(self._places[index], error)
            if self._clock() >= until_s:
                for index in self._missing():
                    late = GetTimeoutError(f"it was not written within {self._patience_s:.0f} s")
                    self._end(self._places[index], late)
        return [self._results[place] for place in self._places]

    def _missing(self) -> list[int]:
        return [i for i, place in enumerate(self._places) if place in self._writes]

    def _hear(self, timeout_s: float) -> bool:
        """Take in what was written; whether that is all."""
        while self._writes:
            refs = list(self._writes.values())
            ready = set(ray.wait(refs, num_returns=1, timeout=timeout_s)[0])
            if not ready:
                return False
            for place, ref in list(self._writes.items()):
                if ref in ready:
                    self._end(place, _get(ref))
        return True

    def _end(self, place: int, result: Any) -> None:
        self._writes.pop(place, None)
        self._results[place] = result
        if isinstance(result, BaseException):
            self._on_failed(place, result)


def _get(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return cause_of(error)
