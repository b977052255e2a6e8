"""Numbers as people read them: times, amounts."""

from __future__ import annotations

import math
from typing import Any

NONE = "-"


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def show_seconds(seconds: float) -> str:
    """A measured time: `85.0 ms`, `1.24 s`, `2m 05s`, `1h 03m`."""
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds)} s" if seconds < 99.95 else show_clock(seconds)


def show_clock(seconds: float) -> str:
    """A time to wait, in whole seconds: `42 s`, `2m 05s`, `1h 03m`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s" if minutes else f"{rest} s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


def show_amount(value: float, unit: str = "") -> str:
    """Three digits with k, M or G: `8.12k`, `1.30 MB`."""
    gap = " " if unit else ""
    for prefix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * scale:
            return f"{_three_digits(value / scale)}{gap}{prefix}{unit}"
    return f"{value:.3g}{gap}{unit}"


def _three_digits(value: float) -> str:
    size = abs(value)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{digits}f}"
