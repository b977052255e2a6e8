"""How long a stage waits before it gives up, from what was measured.

A wait inside a step is never longer than the step. So once some steps have been seen, a wait of
several steps is a fault and not slowness: a process that stopped, a frame that nobody has. The
limit follows the median of the latest steps and how far they vary (median absolute deviation),
so that neither one slow step nor a first epoch of large frames moves it for good. Short waits are
forgiven up to a floor, which rises with the load of the busiest machine: where ten threads want
each core, a process that is well may be silent for ten times as long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from stages.crowding import crowding

WINDOW = 32
MIN_STEPS = 3
STEPS = 4.0
"""A wait may take so many median steps,"""

DEVIATIONS = 10.0
"""and so many deviations more."""

CEILING_STEPS = 10.0
STRETCH = 2.0


TRANSFER_S = 300.0
TRANSFER_MARGIN = 4.0
UNKNOWN_BPS = 10e6
"""What a link is taken for that nobody has measured."""


def transfer_s(nbytes: int, rate_bps: float = math.inf) -> float:
    """How long those who live may take over so many bytes, where the slowest link has this rate.

    Whoever is stopped or gone is missed by its pulse (`ray_pipe.pulse`) long before.
    """
    known_bps = rate_bps if math.isfinite(rate_bps) else UNKNOWN_BPS
    return max(TRANSFER_S, TRANSFER_MARGIN * 8 * nbytes / known_bps)


class Deadlines:
    """`value_s` is the deadline of the next step's waits."""

    def __init__(
        self,
        *,
        start_s: float,
        floor_s: float,
        expected_s: float = 0.0,
        crowding: Callable[[], float] = crowding,
    ) -> None:
        """`start_s` holds until steps were measured, or longer if the step expected is slow;
        `floor_s` is the shortest there will be, times `crowding` but not beyond `start_s`."""
        self._crowding = crowding
        self._start_s = max(start_s, CEILING_STEPS * expected_s)
        self._floor_s = floor_s
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._stretch = 1.0

    def add(self, step_s: float) -> None:
        """A step took so long."""
        self._steps.append(step_s)

    def stretch(self) -> None:
        """A wait ended in vain though everybody was alive: be more patient from now on."""
        self._stretch *= STRETCH

    @property
    def value_s(self) -> float:
        if len(self._steps) < MIN_STEPS:
            return self._start_s * self._stretch
        usual = median(self._steps)
        deviation = median(abs(step - usual) for step in self._steps)
        ceiling = max(self._start_s, CEILING_STEPS * usual, self._floor_s)
        measured = STEPS * usual + DEVIATIONS * deviation
        floor = self._floor_s * self._crowding()
        return min(max(measured, floor), ceiling) * self._stretch
