"""Where things go in a chart: ticks at round numbers, labels apart, long curves thinned."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]

MAX_POINTS = 400


def thin(points: Sequence[Point], *, limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` points: of each stretch the lowest and the highest, ends kept."""
    if len(points) <= limit:
        return list(points)
    num_stretches = max(limit // 2 - 1, 1)
    kept = [points[0]]
    inner = points[1:-1]
    for index in range(num_stretches):
        stretch = inner[
            index * len(inner) // num_stretches : (index + 1) * len(inner) // num_stretches
        ]
        if stretch:
            low, high = min(stretch, key=_second), max(stretch, key=_second)
            kept += [low] if low == high else sorted((low, high))
    return [*kept, points[-1]]


def spread(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least `gap` apart, so that labels can be read."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    floor = low
    for index in order:
        placed[index] = max(wanted[index], floor)
        floor = placed[index] + gap
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def place_labels(
    ends: Sequence[Point], *, reach: float, gap: float, low: float, high: float
) -> list[Point]:
    """Labels at the ends of curves, moved up or down only where others are within `reach` in x."""
    placed = list(ends)
    order = sorted(range(len(ends)), key=lambda index: ends[index][0])
    groups: list[list[int]] = []
    for index in order:
        if groups and ends[index][0] - ends[groups[-1][-1]][0] < reach:
            groups[-1].append(index)
        else:
            groups.append([index])
    for group in groups:
        heights = spread([ends[index][1] for index in group], gap=gap, low=low, high=high)
        for index, y in zip(group, heights, strict=True):
            placed[index] = (ends[index][0], y)
    return placed


def stack(places: Sequence[float], *, reach: float) -> list[int]:
    """A row for each place (in order), so that none is within `reach` of another in its row."""
    last: list[float] = []
    rows = []
    for place in places:
        row = next((r for r, end in enumerate(last) if place - end >= reach), len(last))
        last[row : row + 1] = [place]
        rows.append(row)
    return rows


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between `low` and `high`: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between `low` and `high`."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        round(digit * 10.0**exponent, 12)
        for exponent in exponents
        for digit in (1, 2, 5)
        if low <= digit * 10.0**exponent <= high
    ]


def _second(point: Point) -> float:
    return point[1]
