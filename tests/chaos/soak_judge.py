"""Does it grow? What a soak has seen, judged: memory by slope and in all, counts by their levels.

Memory of a process that trains is never still: allocators keep pages, caches fill. Two questions
are asked, and each alone can fail a run. Is there more at the end than at the beginning, by more
than a process may keep? Does it rise from beginning to end, at a rate that would matter in a day?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

Points = Sequence[tuple[float, float]]
"""(seconds, megabytes)."""

MAX_PAIRS = 150
MIN_POINTS = 12
MIN_SLOPE_S = 240.0
"""Over less than this a slope is noise: only what was added in all counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may grow by."""

    mb: float
    """In all, from the first quarter of the time to the last."""

    mb_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What one process did."""

    seconds: float
    first_mb: float
    last_mb: float
    grown_mb: float
    """Median of the last quarter less that of the first."""

    mb_per_hour: float
    """Median of the slopes between all pairs of points: a few jumps do not move it."""

    explained_mb_per_hour: float
    leaks: bool
    why: str

    def as_dict(self) -> dict[str, Any]:
        """For the file of results."""
        return asdict(self)


def judge(points: Points, limits: Limits, *, explained_mb_per_hour: float = 0.0) -> Growth | None:
    """Whether a process leaks; None if it was not seen for long enough to say anything.

    `explained_mb_per_hour` is what is kept on purpose, and is not held against it.
    """
    if len(points) < MIN_POINTS:
        return None
    seconds = points[-1][0] - points[0][0]
    quarter = len(points) // 4
    first, last = (median(mb for _, mb in part) for part in (points[:quarter], points[-quarter:]))
    slope = 3600 * slope_of(points)
    rate = slope - explained_mb_per_hour
    grown = last - first - explained_mb_per_hour * 0.75 * seconds / 3600
    why = ""
    if grown > limits.mb:
        why = f"{grown:.1f} MB more at the end, limit {limits.mb:g}"
    elif seconds >= MIN_SLOPE_S and rate > limits.mb_per_hour and is_steady(points, slope / 3600):
        why = f"{rate:.1f} MB an hour, limit {limits.mb_per_hour:g}"
    return Growth(
        seconds=seconds,
        first_mb=points[0][1],
        last_mb=points[-1][1],
        grown_mb=last - first,
        mb_per_hour=slope,
        explained_mb_per_hour=explained_mb_per_hour,
        leaks=bool(why),
        why=why,
    )


def slope_of(points: Points) -> float:
    """Median slope between all pairs (Theil and Sen), a second."""
    chosen = points[:: max(1, len(points) // MAX_PAIRS)]
    return median(
        (b[1] - a[1]) / (b[0] - a[0])
        for i, a in enumerate(chosen)
        for b in chosen[i + 1 :]
        if b[0] > a[0]
    )


def is_steady(points: Points, slope: float) -> bool:
    """Whether the line explains the points: each third ends higher than the one before by at
    least half of what the slope says. A single jump does not."""
    third = len(points) // 3
    levels = [median(mb for _, mb in points[i * third : (i + 1) * third]) for i in range(3)]
    rise = slope * (points[-1][0] - points[0][0]) / 3
    return all(after - before > rise / 2 for before, after in pairwise(levels))


def counts_that_grew(
    seen: Sequence[Mapping[str, int]], limits: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Counts that are never as low again as they were: (highest of the first third, lowest of the
    last), for those that rose by more than their limit. In between a spare starts, a step is in
    flight: what leaked does not go away."""
    third = max(1, len(seen) // 3)
    found = {}
    for name, limit in limits.items():
        before = max(look[name] for look in seen[:third])
        after = min(look[name] for look in seen[-third:])
        if after - before > limit:
            found[name] = (before, after)
    return found
