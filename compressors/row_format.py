"""How a remembered row lies in memory: bf16, fp32, or 8, 4, 2 bits.

Path: compressors.delta -> compressors.row_format -> compressors.buffers

Rounding happens once, here, from the fp32 value that both ends computed, so equal values give
equal rows. fp16 is not offered: its rows overflow and come back as NaN an epoch later. Low-bit
rows are quantised with one scale per sample and channel, taken over all positions; the receiver
still computes on the unrounded value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compressors.kernels import NonFinite, dequantize, packed_nbytes, quantize

_FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LOW_BITS = {"int8": 8, "int4": 4, "int2": 2}


class RowFormat:
    """Packs fp32 values into rows and back; a pure function of its name."""

    def __init__(self, name: str) -> None:
        if name not in _FLOATS and name not in _LOW_BITS:
            known = ", ".join([*_FLOATS, *_LOW_BITS])
            raise ValueError(f"rows={name!r} is no row format; choose one of {known}")
        self.name = name
        self.dtype = _FLOATS.get(name)
        """What a kernel may read and write directly; None for low-bit rows."""

        self._bits = _LOW_BITS.get(name, 0)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one row."""
        positions, channels = matrix_shape(shape)
        if self.dtype is not None:
            return positions * channels * self.dtype.itemsize
        return sum(self._packed_nbytes(positions, channels))

    def pack(self, new: Tensor) -> Tensor | None:
        """The row of an fp32 matrix, in memory of its own; None if it would not be finite."""
        if self.dtype is not None:
            row = new.to(self.dtype, copy=True)
            return row if is_finite(row) else None
        try:
            group = max(new.shape[0], 1)
            codes, scales = quantize(new.t().contiguous(), bits=self._bits, group=group)
        except NonFinite:
            return None
        return torch.cat([codes.reshape(-1), scales.reshape(-1).view(torch.uint8)])

    def unpack(self, row: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The matrix that a row stands for: bf16 or fp32 as kept, fp32 from low bits."""
        if self.dtype is not None:
            return row
        positions, channels = matrix_shape(shape)
        num_codes, _ = self._packed_nbytes(positions, channels)
        codes = row[:num_codes].view(channels, -(-positions * self._bits // 8))
        scales = row[num_codes:].clone().view(torch.bfloat16).view(channels, -1)
        group = max(positions, 1)
        columns = dequantize(codes, scales, channels=positions, bits=self._bits, group=group)
        return columns.t().contiguous()

    def from_bytes(self, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A row from its bytes (uint8, aligned)."""
        if self.dtype is None:
            return raw
        return raw.view(self.dtype).view(matrix_shape(shape))

    def _packed_nbytes(self, positions: int, channels: int) -> tuple[int, int]:
        return packed_nbytes(channels, positions, bits=self._bits, group=max(positions, 1))


def is_finite(x: Tensor) -> bool:
    """Whether no value is an infinity or NaN: either one spoils the sum, whatever else is in it."""
    return math.isfinite(float(x.sum())) or bool(torch.isfinite(x).all())


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A sample as a matrix: channels last, all other dimensions are positions."""
    return math.prod(shape[:-1]), (shape[-1] if shape else 1)
