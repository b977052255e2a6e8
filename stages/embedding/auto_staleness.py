"""`staleness: auto`: the bound on staleness, chosen from what pulls, steps and pushes take.

Enough permits to cover the way to the shards and back, and no more (embeddings.md 7.2): below that
the network waits for rows, above it rows are older than they need be. Where bandwidth or a busy
shard is the limit, more permits only lengthen a queue; that shows as round trips that grow while
steps come no faster, and the bound goes back to what the rate can use (Little's law).

No clock, no permits, no network: numbers in, a bound out. `Hybrid` feeds it and resizes its pool;
shards are made with the largest bound it may choose, `cap`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from stages.embedding.permits import MAX_AUTO_TAU, tau_for

FIRST_LOOK = 2
"""Synchronous steps before the first choice. First steps are not like the others (connections,
caches, allocations), so the shortest way counts, and the windows after it correct what is wrong;
waiting for a whole window would cost more than a bound that is off by one for some steps."""

TRY_AGAIN = 8
"""Windows after which a limit that a queue has set is tried again."""

QUEUE_SIGN = 1.5
"""A round trip so much longer than the shortest has waited in a queue, or the way is longer now."""

IDLE_SIGN = 1.2
"""Steps so much further apart than they take have waited for rows."""

SLACK = 0.2
"""Share by which the way must be shorter than the bound allows before the bound is lowered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TauChange:
    """One decision, for logs and reports."""

    step: int
    tau: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What some steps in a row took, as medians."""

    pull_s: float
    step_s: float
    push_s: float
    interval_s: float
    """Between the ends of two steps, on average: the rate that was reached."""

    @property
    def way_s(self) -> float:
        return self.pull_s + self.push_s


class AutoStaleness:
    """Begins with tau = 0, which measures round trips without queues; looks every few steps."""

    def __init__(self, *, cap: int = MAX_AUTO_TAU, window: int = 8) -> None:
        if cap < 0 or window < 2:
            raise ValueError(f"cap is {cap} and window {window}; at least 0 and 2 are needed")
        self.cap = cap
        self.tau = 0
        self.changes: list[TauChange] = []
        self.window = window
        self._num_seen = 0
        self._skip = 0
        self._times: list[tuple[float, float, float]] = []
        self._began_s = 0.0
        self._floor: _Window | None = None  # the shortest way
        self._ceiling: int | None = None  # what the way carries, where that is the limit
        self._ceiling_left = 0
        self._before_cut: tuple[int, float] | None = None

    def observe(self, *, pull_s: float, step_s: float, push_s: float, now_s: float) -> int | None:
        """One step's times, when its push was acknowledged; a new bound, if it should change.

        `pull_s` is without the wait for a permit, `step_s` the forward and backward pass alone.
        """
        self._num_seen += 1
        if self._num_seen == 1:
            self._began_s = now_s - pull_s - step_s - push_s
        if self._skip:
            self._skip -= 1
            self._began_s = now_s
            return None
        self._times.append((pull_s, step_s, push_s))
        is_first = self._num_seen == len(self._times)
        if len(self._times) < (FIRST_LOOK if is_first else self.window):
            return None
        typical = min if is_first else statistics.median
        pulls, steps, pushes = (typical(part) for part in zip(*self._times, strict=True))
        seen = _Window(
            pull_s=pulls,
            step_s=steps,
            push_s=pushes,
            interval_s=(now_s - self._began_s) / len(self._times),
        )
        self._times.clear()
        self._began_s = now_s
        return self._decide(seen)

    def _decide(self, seen: _Window) -> int | None:
        self._review(seen)
        if self._floor is None or seen.way_s < self._floor.way_s:
            self._floor = seen
        floor = self._floor
        is_longer = seen.way_s > QUEUE_SIGN * floor.way_s
        way = floor if is_longer else seen
        why = f"{1e3 * way.way_s:.1f} ms to shards and back, {1e3 * seen.step_s:.1f} ms a step"
        if is_longer and seen.interval_s > IDLE_SIGN * seen.step_s:
            # Steps under way at this rate and without a queue, and one in hand.
            usable = math.ceil((floor.way_s + seen.step_s) / seen.interval_s - 1e-9)
            if usable < self.tau:
                self._ceiling, self._ceiling_left = usable, TRY_AGAIN
                self._before_cut = (self.tau, seen.way_s)
                why += f", a step in {1e3 * seen.interval_s:.1f} ms is all that the way carries"
        limit = self.cap if self._ceiling is None else min(self.cap, self._ceiling)
        return self._change(min(self._wanted(way, seen.step_s), limit), why)

    def _review(self, seen: _Window) -> None:
        """After a cut: was it a queue at all? And if it was, is it still?"""
        if self._before_cut is not None:
            tau, way_s = self._before_cut
            self._before_cut = None
            # A queue is as much shorter as it has fewer steps in it; a way stays as long as it is.
            if seen.way_s > way_s * math.sqrt((self.tau + 1) / (tau + 1)):
                self._floor, self._ceiling = seen, None
        if self._ceiling is not None:
            self._ceiling_left -= 1
            if self._ceiling_left <= 0:
                self._ceiling, self._ceiling_left = 2 * self._ceiling, 2  # feel for a faster link
            if self._ceiling >= self.cap:
                self._ceiling = None

    def _wanted(self, way: _Window, step_s: float) -> int:
        """Covers the way. A bound that a slightly longer way would need stays, or noise would
        move it at every look."""
        least, most = (
            tau_for(pull_s=slack * way.pull_s, step_s=step_s, push_s=slack * way.push_s)
            for slack in (1.0, 1.0 + SLACK)
        )
        return min(max(self.tau, least), most)

    def _change(self, wanted: int, why: str) -> int | None:
        if wanted == self.tau:
            return None
        self._skip = max(self.tau, wanted) + 1  # those under way were pulled under the old bound
        self.tau = wanted
        self.changes.append(TauChange(step=self._num_seen, tau=wanted, why=why))
        return wanted
