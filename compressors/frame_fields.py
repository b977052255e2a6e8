"""What a frame's header may hold: limits, errors, checks, and the compact code of row marks.

Every value is checked before it is used, every count before memory is taken for it. Writing
checks as reading does, so that a sender never makes a frame that its receiver refuses.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from compressors.base import CodecError, RowMarks

MAX_FRAME_NBYTES = 1 << 30
MAX_HEADER_NBYTES = 1 << 18
MAX_ELEMENTS = 1 << 28  # of a packet's shape: a sparse codec could otherwise ask for any memory
MAX_DIMS = 8
MAX_PARTS = 512  # of a frame, all packets together
MAX_PACKETS = 256  # AC-SGD sends repeats of a sample in one micro-batch as packets of their own
MAX_DEPTH = 4  # of packets in packets
MAX_ROWS = 1 << 16
MAX_LIST = 4096  # items of one sequence or mapping in `meta` or `body`
MAX_VALUE_DEPTH = 8

WORDS = (
    "dtype", "float32", "bits", "grid", "group", "signed", "symmetric", "namespace", "rows",
    "bf16", "fp32", "activation", "gradient", "delta", "uniform", "reference", "topk", "zstd",
    "raw", "lengths", "values",
)  # fmt: skip
"""Sent as one character each; part of the format: append only, at most 31."""

_SHORT = {word: chr(number) for number, word in enumerate(WORDS, start=1)}
_LONG = {short: word for word, short in _SHORT.items()}
_WIDTHS = "bhiqQ"  # array typecodes, narrowest first


class FrameError(CodecError):
    """A buffer that is no frame, or a message that does not fit into one."""


class BadMagic(FrameError):
    """The buffer does not begin like a frame."""


class UnknownVersion(FrameError):
    """A frame of another release."""


class Truncated(FrameError):
    """The buffer ends before the frame does."""


class BadChecksum(FrameError):
    """At least one bit changed on the way."""


class TooLarge(FrameError):
    """A size or a count is above its limit."""


class BadHeader(FrameError):
    """The frame is whole, but its header makes no sense."""


def shorten(value: Any) -> Any:
    """The value with known words as one control character, and such characters escaped by NUL."""
    if isinstance(value, str):
        return _SHORT.get(value) or ("\0" + value if value[:1] < " " and value else value)
    if isinstance(value, Mapping):
        return {shorten(key): shorten(item) for key, item in value.items()}
    return [shorten(item) for item in value] if isinstance(value, (list, tuple)) else value


def lengthen(value: Any) -> Any:
    """What `shorten` was given, sequences as tuples."""
    if isinstance(value, str):
        if not value or value[0] >= " ":
            return value
        if value[0] == "\0":
            return value[1:]
        return _LONG.get(value) or bad_header(f"unknown short word {value!r:.40}")
    if isinstance(value, dict):
        return {lengthen(key): lengthen(item) for key, item in value.items()}
    return tuple([lengthen(item) for item in value]) if isinstance(value, tuple) else value


def rows_fields(rows: RowMarks) -> list[Any]:
    num = len(rows.ids)
    if not num == len(rows.visits) == len(rows.generations) == len(rows.cold):
        bad_header(f"row marks of unequal length: {num} ids, {len(rows.visits)} visits, "
             f"{len(rows.generations)} generations, {len(rows.cold)} cold flags")  # fmt: skip
    if max(num, len(rows.evicted)) > MAX_ROWS:
        raise TooLarge(f"{max(num, len(rows.evicted))} row marks, limit is {MAX_ROWS}")
    return [
        num,
        _code_ints(rows.ids),
        _code_ints(rows.visits),
        _code_ints(rows.generations),
        _code_ints([int(flag) for flag in rows.cold]),
        len(rows.evicted),
        _code_ints(rows.evicted),
        None if rows.checksum is None else as_int(rows.checksum, "row checksum"),
    ]


def _code_ints(values: Sequence[int]) -> int | bytes:
    """One integer if all are equal, else a typecode and the values at the narrowest width."""
    if not values:
        return b""
    low, high = min(values), max(values)
    if low == high:
        return as_int(low, "row mark")
    for code in _WIDTHS:
        bits = 8 * array(code).itemsize
        lowest = 0 if code.isupper() else -(1 << (bits - 1))
        if lowest <= low and high < lowest + (1 << bits):
            return code.encode() + array(code, values).tobytes()
    return bad_header(f"row marks from {low} to {high} do not fit 64 bits")


def read_rows(value: Any) -> RowMarks:
    num, ids, visits, generations, cold, num_evicted, evicted, checksum = as_tuple(value, 8, "rows")
    return RowMarks(
        ids=_read_ints(ids, num),
        visits=_read_ints(visits, num),
        generations=_read_ints(generations, num),
        cold=tuple(bool(flag) for flag in _read_ints(cold, num)),
        evicted=_read_ints(evicted, num_evicted),
        checksum=None if checksum is None else as_int(checksum, "row checksum"),
    )


def _read_ints(coded: Any, num: Any) -> tuple[int, ...]:
    if not 0 <= as_int(num, "number of row marks") <= MAX_ROWS:
        raise TooLarge(f"{num} row marks, limit is {MAX_ROWS}")
    if num == 0 and coded == b"":
        return ()
    if num and type(coded) is int:
        return tuple([coded] * num)
    if type(coded) is not bytes or coded[:1] not in [code.encode() for code in _WIDTHS]:
        bad_header(f"row marks coded as {type(coded).__name__}")
    values: array[int] = array(chr(coded[0]))
    if len(coded) != 1 + num * values.itemsize:
        bad_header(f"{num} row marks in {len(coded) - 1} bytes of width {values.itemsize}")
    values.frombytes(coded[1:])
    return tuple(values)


def bytes_view(buffer: Any) -> memoryview:
    try:
        view = memoryview(buffer)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise BadHeader(f"not a contiguous buffer of bytes: {error}") from error


def check_shape(shape: Any) -> None:
    dims = as_tuple(shape, None, "shape")
    if len(dims) > MAX_DIMS:
        raise TooLarge(f"shape with {len(dims)} dimensions, limit is {MAX_DIMS}")
    if any(as_int(size, "shape") < 0 for size in dims):
        bad_header(f"shape {dims}")
    if math.prod(dims) > MAX_ELEMENTS:
        raise TooLarge(f"shape {dims} has more than {MAX_ELEMENTS} elements")


def check_value(value: Any, what: str, *, depth: int) -> None:
    for item in _children(value, what):
        if depth > MAX_VALUE_DEPTH:
            raise TooLarge(f"{what} is nested deeper than {MAX_VALUE_DEPTH}")
        check_value(item, what, depth=depth + 1)


def _children(value: Any, what: str) -> Iterator[Any]:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return iter(())
    if not isinstance(value, (Mapping, list, tuple)):
        bad_header(f"{what} holds a {type(value).__name__}")
    if len(value) > MAX_LIST:
        raise TooLarge(f"{what} holds {len(value)} items in one place, limit is {MAX_LIST}")
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            bad_header(f"{what} has keys that are not text")
        return iter(value.values())
    return iter(value)


def as_mapping(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        bad_header(f"{what} is a {type(value).__name__}, expected a mapping")
    check_value(value, what, depth=1)
    return value


def as_tuple(value: Any, length: int | None, what: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or length not in (None, len(value)):
        size = len(value) if isinstance(value, tuple) else "no"
        bad_header(
            f"{what} is a {type(value).__name__} of {size} items, expected {length or 'a list'}"
        )
    return value


def as_int(value: Any, what: str) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 64:
        bad_header(f"{what} holds {value!r:.80}, expected an integer of 64 bits")
    return value


def bad_header(what: str) -> NoReturn:
    raise BadHeader(f"frame: {what}")
