"""Embedding rows on the wire: fp32, fp16 with a power of two for each row, or int8 with a scale.

`fp16-rowscale` multiplies each row by the power of two s that brings its largest value into
(16384, 32768], which is exact, and rounds to fp16 (embeddings.md 2.7):

    |x - x'| <= max(2**-11 |x|, 2**-25 max|row| / (s max|row|))

A plain cast would lose every gradient below 3e-8 and overflow above 65504. `int8` rounds to
nearest, 127 steps either way: |x - x'| <= max|row| / 254. Values that are not finite are refused
with the rows that have them, never clamped. With a mask only its values travel, and scales of rows
that have some; both ends know it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from compressors import wire_kernels
from compressors.base import CodecError, Packet
from compressors.wire_kernels import NotFinite, row_exponents

__all__ = ["FORMATS", "NonFiniteRows", "decode_rows", "encode_rows", "row_exponents"]
F32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
FORMATS = ("fp32", "fp16-rowscale", "int8")


class NonFiniteRows(CodecError):
    """Rows that have infinities or NaNs; `rows` are their places."""

    def __init__(self, rows: tuple[int, ...], num_rows: int) -> None:
        super().__init__(rows, num_rows)
        self.rows = rows
        self.num_rows = num_rows

    def __str__(self) -> str:
        return f"{len(self.rows)} of {self.num_rows} rows are not finite"


def encode_rows(rows: F32, *, values: str = "fp16-rowscale", mask: Mask | None = None) -> Packet:
    """A packet of rows [n, dim]; of `mask`'s values only, where there is one."""
    if values not in FORMATS:
        raise ValueError(f"rows travel as one of {list(FORMATS)}, got {values!r}")
    if rows.dtype != np.float32 or rows.ndim != 2:
        raise CodecError(f"rows are float32 [n, dim], got {rows.dtype} {rows.shape}")
    if mask is not None:
        _check_mask(mask, rows.shape)
        rows = np.where(mask, rows, np.float32(0))
    codes: npt.NDArray[Any] = rows
    scaled = _scaled(mask, len(rows))
    scales = b""
    meta: dict[str, Any] = {}
    try:
        if values == "fp16-rowscale":
            codes, exponents = wire_kernels.half_rows(rows)
            scales, meta = _pack_exponents(exponents[scaled])
        elif values == "int8":
            codes, steps = wire_kernels.int8_rows(rows)
            scales = steps[scaled].tobytes()
        elif not np.isfinite(rows).all():
            raise NotFinite
    except NotFinite:
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        raise NonFiniteRows(tuple(bad.tolist()), len(rows)) from None
    body = codes[mask] if mask is not None else codes
    return Packet(
        codec=values, shape=rows.shape, meta=meta, parts=(np.ascontiguousarray(body).data, scales)
    )


def decode_rows(packet: Packet, *, mask: Mask | None = None) -> F32:
    """Rows [n, dim]; zeros where the mask is not set."""
    if packet.codec not in FORMATS or len(packet.shape) != 2 or len(packet.parts) != 2:
        raise CodecError(f"no packet of rows: {packet.codec!r} {packet.shape}")
    num, dim = packet.shape
    dtype = {"fp32": np.float32, "fp16-rowscale": np.float16, "int8": np.int8}[packet.codec]
    if mask is not None:
        _check_mask(mask, packet.shape)
    wanted = num * dim if mask is None else int(mask.sum())
    if memoryview(packet.parts[0]).nbytes != wanted * np.dtype(dtype).itemsize:
        raise CodecError(
            f"{packet.codec}: {memoryview(packet.parts[0]).nbytes} bytes are not {wanted} values"
        )
    body = np.frombuffer(packet.parts[0], dtype)
    if mask is None:
        codes: npt.NDArray[Any] = body.reshape(num, dim)
    else:
        codes = np.zeros((num, dim), dtype)
        codes[mask] = body
    scaled = _scaled(mask, num)
    try:
        if packet.codec == "fp16-rowscale":
            exponents = np.zeros(num, np.int32)
            exponents[scaled] = _read_exponents(packet, int(scaled.sum()))
            return wire_kernels.rows_of_half(codes, exponents)
        if packet.codec == "int8":
            steps = np.zeros(num, np.float32)
            steps[scaled] = _read_steps(packet, int(scaled.sum()))
            return wire_kernels.rows_of_int8(codes, steps)
        if not np.isfinite(codes).all():
            raise NotFinite
    except NotFinite:
        raise CodecError(
            f"{packet.codec}: rows that are not finite; no encoder here sends them"
        ) from None
    return codes.astype(np.float32)


def _scaled(mask: Mask | None, num: int) -> Mask:
    """Which rows have a scale: all, or those with a value that travels."""
    return np.ones(num, np.bool_) if mask is None else np.asarray(mask.any(axis=1))


def _pack_exponents(exponents: npt.NDArray[np.int32]) -> tuple[bytes, dict[str, Any]]:
    """One byte a row above the smallest, nearly always; two where they span more."""
    if len(exponents) == 0:
        return b"", {}
    low = int(exponents.min())
    if int(exponents.max()) - low < 256:
        return (exponents - low).astype(np.uint8).tobytes(), {"low": low}
    return exponents.astype(np.int16).tobytes(), {}


def _read_exponents(packet: Packet, num: int) -> npt.NDArray[np.int32]:
    low = packet.meta.get("low")
    dtype: Any = np.int16 if low is None else np.uint8
    if memoryview(packet.parts[1]).nbytes != num * np.dtype(dtype).itemsize:
        raise CodecError(f"fp16-rowscale: {num} rows have as many exponents")
    exponents = np.frombuffer(packet.parts[1], dtype).astype(np.int32)
    if low is not None:
        if type(low) is not int or not -200 <= low <= 200:
            raise CodecError(f"fp16-rowscale: exponents start at {low!r}")
        exponents = exponents + low
    return exponents


def _read_steps(packet: Packet, num: int) -> F32:
    if memoryview(packet.parts[1]).nbytes != 4 * num:
        raise CodecError(f"int8: {num} rows have as many scales")
    return np.frombuffer(packet.parts[1], np.float32)


def _check_mask(mask: Mask, shape: tuple[int, ...]) -> None:
    if mask.dtype != np.bool_ or mask.shape != tuple(shape):
        raise CodecError(f"a mask of {mask.dtype} {mask.shape} for rows of {tuple(shape)}")
