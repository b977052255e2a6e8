"""Rows and ids on their way to the wire: the C++ kernels, or their numpy twins, bit for bit.

    half_rows, rows_of_half     row-scaled fp16: codes, and the power of two of each row
    int8_rows, rows_of_int8     int8: codes, and the step of each row
    dedupe                      distinct ids, where each occurrence is among them, how often

Which of the two runs is `compressors.native.core()`; falling back is announced there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from compressors import native

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]
SMALLEST_STEP = np.float32(2.0**-126)
LARGEST_STEP = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
"""Of int8: normal numbers, and 127 of them still finite."""

TOP_EXPONENT, TOP_HALF = -113, 32752
"""Where the next half float up, 32768, would scale back to infinity."""


class NotFinite(Exception):
    """Some value is infinite or NaN, or would be."""


def half_rows(rows: F32) -> tuple[npt.NDArray[np.float16], I32]:
    """Rows times a power of two each, in half floats; and its exponent."""
    if native.core() != "native":
        return _half_rows(rows)
    rows = np.ascontiguousarray(rows)
    codes, exponents = np.empty(rows.shape, np.float16), np.empty(len(rows), np.int32)
    _work("rows_to_half", rows, *rows.shape, codes, exponents)
    return codes, exponents


def rows_of_half(codes: npt.NDArray[np.float16], exponents: I32) -> F32:
    """The rows that `half_rows` coded, as nearly as half floats say."""
    if native.core() != "native":
        return _rows_of_half(codes, exponents)
    codes, exponents = np.ascontiguousarray(codes), np.ascontiguousarray(exponents)
    rows = np.empty(codes.shape, np.float32)
    _work("half_to_rows", codes, exponents, *codes.shape, rows)
    return rows


def int8_rows(rows: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """Rows in 127 steps either way; and the step of each."""
    if native.core() != "native":
        return _int8_rows(rows)
    rows = np.ascontiguousarray(rows)
    codes, steps = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    limits = float(SMALLEST_STEP), float(LARGEST_STEP)
    _work("rows_to_int8", rows, *rows.shape, *limits, codes, steps)
    return codes, steps


def rows_of_int8(codes: npt.NDArray[np.int8], steps: F32) -> F32:
    """The rows that `int8_rows` coded, as nearly as its steps say."""
    if native.core() != "native":
        return _rows_of_int8(codes, steps)
    codes, steps = np.ascontiguousarray(codes), np.ascontiguousarray(steps)
    rows = np.empty(codes.shape, np.float32)
    _work("int8_to_rows", codes, steps, *codes.shape, rows)
    return rows


def dedupe(ids: Ids) -> tuple[Ids, Ids, Ids]:
    """Distinct ids in rising order, the place of each occurrence among them, and how often."""
    if native.core() != "native":
        return _dedupe(ids)
    flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
    unique, inverse, counts = (np.empty(len(flat), np.int64) for _ in range(3))
    num = _call("dedupe", flat, len(flat), unique, inverse, counts)
    return unique[:num].copy(), inverse, counts[:num].copy()


def _work(name: str, *arguments: Any) -> None:
    if _call(name, *arguments):
        raise NotFinite


def _call(name: str, *arguments: Any) -> int:
    """Arrays go as addresses; the caller holds them."""
    plain = [one.ctypes.data if isinstance(one, np.ndarray) else one for one in arguments]
    return int(getattr(native.native(), name)(*plain))


# --- the twins ------------------------------------------------------------------------------------


def row_exponents(rows: F32) -> I32:
    """log2 of the power of two that brings each row's largest value into (16384, 32768]."""
    largest = _largest(rows)
    fraction, exponent = np.frexp(largest)  # largest = fraction * 2**exponent, 0.5 <= fraction < 1
    exponent = exponent - (fraction == np.float32(0.5))
    return np.where(largest > 0, 15 - exponent, 0).astype(np.int32)


def _half_rows(rows: F32) -> tuple[npt.NDArray[np.float16], I32]:
    _refuse_nonfinite(rows)
    exponents = row_exponents(rows)
    codes = np.ldexp(rows, exponents[:, None]).astype(np.float16)
    top = exponents == TOP_EXPONENT
    codes[top] = np.clip(codes[top], -TOP_HALF, TOP_HALF)
    return codes, exponents


def _rows_of_half(codes: npt.NDArray[np.float16], exponents: I32) -> F32:
    with np.errstate(over="ignore", invalid="ignore"):  # of damaged packets, refused below
        rows = np.ldexp(codes.astype(np.float32), -exponents[:, None])
    _refuse_nonfinite(rows)
    return np.asarray(rows, np.float32)


def _int8_rows(rows: F32) -> tuple[npt.NDArray[np.int8], F32]:
    _refuse_nonfinite(rows)
    steps = np.clip(_largest(rows) / np.float32(127), SMALLEST_STEP, LARGEST_STEP)
    codes = np.clip(np.rint(rows / steps[:, None]), -127, 127).astype(np.int8)
    return codes, np.asarray(steps, np.float32)


def _rows_of_int8(codes: npt.NDArray[np.int8], steps: F32) -> F32:
    with np.errstate(over="ignore", invalid="ignore"):
        rows = codes.astype(np.float32) * steps[:, None]
    _refuse_nonfinite(rows)
    return np.asarray(rows, np.float32)


def _dedupe(ids: Ids) -> tuple[Ids, Ids, Ids]:
    unique, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return unique, inverse.reshape(-1).astype(np.int64), counts.astype(np.int64)


def _largest(rows: F32) -> F32:
    if rows.shape[1] == 0:
        return np.zeros(len(rows), np.float32)
    return np.asarray(np.abs(rows).max(axis=1), np.float32)


def _refuse_nonfinite(rows: F32) -> None:
    if not np.isfinite(rows).all():
        raise NotFinite
