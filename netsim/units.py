"""Rates, durations and sizes as people write them: read strictly, shown so that they read back.

`b` is a bit and `B` a byte, everywhere. Decimal arithmetic, so "300us" is the float 0.0003.
A writing that could mean two things is refused, with the nearest one that means one thing.
"""

from __future__ import annotations

import difflib
import math
import re
from decimal import Decimal

_NUMBER = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?)\s*(.*)", re.DOTALL
)
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_BIT_RATES = {
    f"{prefix}{tail}": Decimal(scale)
    for tail in ("bps", "bit/s", "b/s", "bits/s")
    for prefix, scale in (_DECIMAL | {"K": 10**3}).items()
}
# All-lower-case writings that have no byte reading. `mb/s` has one, so it is not here.
_LOWER_RATES = {
    f"{prefix}{tail}": Decimal(scale)
    for tail in ("bps", "bit/s")
    for prefix, scale in {"m": 10**6, "g": 10**9, "t": 10**12}.items()
}
_BYTE_RATES = {
    f"{prefix}B/s": Decimal(8 * scale)
    for prefix, scale in (_DECIMAL | {"K": 10**3} | _BINARY).items()
}
_BANDWIDTHS = _BIT_RATES | _BYTE_RATES | _LOWER_RATES
_DURATIONS = {
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "\u00b5s": Decimal("1e-6"),
    "\u03bcs": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_SIZES = {
    f"{prefix}B": Decimal(scale) for prefix, scale in (_DECIMAL | {"K": 10**3} | _BINARY).items()
} | {"bytes": Decimal(1)}

_BANDWIDTH_EXPECTED = "'100Mbps' or '1.5 Gbit/s' (bits), '12.5 MB/s' (bytes), or 'unlimited'"
_SURELY_BPS = 10**5
"""A bare number from here on was written in bits per second, one below in Mbps."""
_DURATION_EXPECTED = "'20ms', '1.5 s', '300us' or '2min'"
_SIZE_EXPECTED = "'6GiB' (2^30 bytes), '200 MB' (10^6 bytes) or '4096B'"
_MAX_NBYTES = 2**63 - 1


class UnitError(ValueError):
    """A quantity that cannot be read in exactly one way."""


def parse_bandwidth(text: str) -> float:
    """Bits per second, more than zero; `unlimited` is infinity."""
    if isinstance(text, str) and text.strip().lower() == "unlimited":
        return math.inf
    if isinstance(text, str) and text.strip().lower() in ("inf", "infinity", "none", "unlimitted"):
        raise _refusal("bandwidth", text, _BANDWIDTH_EXPECTED, "unlimited")
    number, unit = _split("bandwidth", text, _BANDWIDTH_EXPECTED)
    if unit not in _BANDWIDTHS:
        if number == 0:
            raise _refusal("bandwidth", text, f"more than zero, {_BANDWIDTH_EXPECTED}", "unlimited")
        if not unit and abs(number) >= _SURELY_BPS:
            meant = show_bandwidth(float(abs(number)))
            raise _refusal("bandwidth", text, _BANDWIDTH_EXPECTED, meant)
        bytes_meant = "B" in unit
        spellings = [*_BYTE_RATES] if bytes_meant else ["Mbps", *_BIT_RATES, *_BYTE_RATES]
        nearest = _nearest_unit(unit, spellings)
        meant = f"{_plain(abs(number))}{nearest}"
        bits = show_bandwidth(float(abs(number) * _BANDWIDTHS[nearest])) if bytes_meant else None
        raise _refusal("bandwidth", text, _BANDWIDTH_EXPECTED, meant, same=bits)
    rate_bps = _as_float("bandwidth", text, number * _BANDWIDTHS[unit], _BANDWIDTH_EXPECTED)
    if rate_bps <= 0:
        nearest = f"{_plain(abs(number))}{unit}" if number < 0 else "unlimited"
        raise _refusal("bandwidth", text, f"more than zero, {_BANDWIDTH_EXPECTED}", nearest)
    return rate_bps


def parse_duration(text: str) -> float:
    """Seconds, zero or more. A bare `0` is the same in every unit and is read."""
    number, unit = _split("duration", text, _DURATION_EXPECTED)
    if not unit and number == 0:
        return 0.0
    if unit not in _DURATIONS:
        nearest = _nearest_unit(unit, ["ms", *_DURATIONS])
        raise _refusal("duration", text, _DURATION_EXPECTED, f"{_plain(abs(number))}{nearest}")
    if number < 0:
        raise _refusal(
            "duration", text, f"zero or more, {_DURATION_EXPECTED}", f"{_plain(abs(number))}{unit}"
        )
    return _as_float("duration", text, number * _DURATIONS[unit], _DURATION_EXPECTED)


def parse_size(text: str) -> int:
    """Bytes, zero or more, rounded to a whole one. A bare `0` is read."""
    number, unit = _split("size", text, _SIZE_EXPECTED)
    if not unit and number == 0:
        return 0
    if unit not in _SIZES:
        nearest = _nearest_unit(unit, ["MB", *_SIZES])
        raise _refusal("size", text, _SIZE_EXPECTED, f"{_plain(abs(number))}{nearest}")
    if number < 0:
        raise _refusal(
            "size", text, f"zero or more, {_SIZE_EXPECTED}", f"{_plain(abs(number))}{unit}"
        )
    if number * _SIZES[unit] > _MAX_NBYTES:
        raise _refusal("size", text, f"at most 2^63 - 1 bytes, {_SIZE_EXPECTED}", "1TB")
    return round(number * _SIZES[unit])


def parse_fraction(text: str | float) -> float:
    """A share of one: `0.01`, or `1%`."""
    expected = "a share from 0 to 1 such as 0.01, or a percentage such as '1%'"
    number, unit = _split("fraction", str(text), expected)
    if unit not in ("", "%"):
        raise _refusal("fraction", str(text), expected, f"{_plain(abs(number))}%")
    share = float(number / 100 if unit else number)
    if not 0 <= share <= 1:
        raise _refusal("fraction", str(text), expected, f"{_plain(abs(number))}%")
    return share


def show_bandwidth(bandwidth_bps: float, *, digits: int | None = None) -> str:
    """The inverse of `parse_bandwidth`, exact unless `digits` asks for fewer."""
    if math.isinf(bandwidth_bps) and bandwidth_bps > 0:
        return "unlimited"
    units = {"Gbps": 10**9, "Mbps": 10**6, "kbps": 10**3, "bps": 1}
    return _show(bandwidth_bps, {name: Decimal(scale) for name, scale in units.items()}, digits)


def show_duration(duration_s: float, *, digits: int | None = None) -> str:
    """The inverse of `parse_duration`, exact unless `digits` asks for fewer."""
    return _show(duration_s, {name: _DURATIONS[name] for name in ("s", "ms", "us", "ns")}, digits)


def show_size(nbytes: int, *, digits: int | None = None) -> str:
    """The inverse of `parse_size`: the shortest exact writing, or decimal units with `digits`."""
    decimal = {name: _SIZES[name] for name in ("TB", "GB", "MB", "kB", "B")}
    if digits is not None:
        return _show(nbytes, decimal, digits)
    binary = {name: _SIZES[name] for name in ("TiB", "GiB", "MiB", "KiB")}
    texts = [
        f"{_plain(Decimal(nbytes) / scale)}{name}"
        for name, scale in (decimal | binary).items()
        if abs(nbytes) >= scale
    ]
    exact = [text for text in texts if parse_size(text) == nbytes]
    return min(exact, key=len, default=f"{nbytes}B")


def _split(what: str, text: object, expected: str) -> tuple[Decimal, str]:
    if not isinstance(text, str):
        raise _refusal(what, text, expected, None)
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise _refusal(what, text, expected, None)
    number, unit = match.groups()
    if unit.startswith(","):
        raise _refusal(what, text, f"{expected}, with a point for decimals", None)
    if math.isinf(float(number)):
        raise _refusal(what, text, f"a finite number, {expected}", None)
    return Decimal(number), unit


def _as_float(what: str, text: str, value: Decimal, expected: str) -> float:
    result = float(value)
    if math.isinf(result):
        raise _refusal(what, text, f"a finite number, {expected}", None)
    return result


def _nearest_unit(unit: str, spellings: list[str]) -> str:
    """The closest spelling, letter case aside; the first of the list when nothing is close."""
    by_lower: dict[str, str] = {}
    for spelling in spellings:
        by_lower.setdefault(spelling.lower(), spelling)
    near = difflib.get_close_matches(unit.lower(), list(by_lower), n=1, cutoff=0.3)
    return by_lower[near[0]] if near else spellings[0]


def _refusal(
    what: str, text: object, expected: str, nearest: str | None, *, same: str | None = None
) -> UnitError:
    """`same` is `nearest` in another unit, where the two are easily mixed up."""
    hint = f"; did you mean '{nearest}'{f', which is {same}' if same else ''}?" if nearest else ""
    return UnitError(f"{what} {text!r} is not understood: expected {expected}{hint}")


def _show(value: float, units: dict[str, Decimal], digits: int | None) -> str:
    """In the largest unit that leaves at least one before the point; `units` goes downwards."""
    exact = Decimal(repr(value))
    if not exact.is_finite():
        raise ValueError(f"cannot show {value!r}: not a finite number")
    name, scale = next(
        ((name, scale) for name, scale in units.items() if abs(exact) >= scale),
        list(units.items())[-1] if exact else next((n, s) for n, s in units.items() if s == 1),
    )
    number = exact / scale
    if digits is not None:
        number = Decimal(f"{number:.{digits}g}")
    return f"{_plain(number)}{name}"


def _plain(number: Decimal) -> str:
    """Without an exponent where that is short, and without trailing zeros."""
    number = number.normalize()
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return f"{number:f}" if -20 < exponent < 20 else str(number)
