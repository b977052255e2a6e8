"""Quantise, pack and add: the inner loops of every quantising codec.

Path: compressors.delta -> compressors.kernels -> compressors.frame

Each entry point exists twice, in C++ (`native/kernels.cpp`) and as torch operations
(`compressors.kernels_torch`), and gives the same codes, scales and rows to the bit, so that the
two ends of a link may differ in hardware. CPU tensors go to the native core, all others to the
twin; `compressors.native` says which core is in use.

Tensors are matrices here: a row is a token (or whatever else has its own scales), a column a
channel. Codes are uint8 [R, ceil(C*bits/8)], scales bfloat16 [R, ceil(C/group)].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compressors import kernels_torch as twin
from compressors.base import CodecError
from compressors.native import build_info, core, native, use

__all__ = [
    "DeltaStats",
    "NonFinite",
    "build_info",
    "check_grid",
    "core",
    "delta_decode",
    "delta_encode",
    "dequantize",
    "non_finite",
    "packed_nbytes",
    "quantize",
    "use",
]

GRIDS = ("signed", "symmetric")
ROW_DTYPES = (torch.bfloat16, torch.float32)


class NonFinite(CodecError):
    """Some rows hold infinities or NaNs, or do after adding: no grid can carry them.

    Nothing was changed. `rows` are the offending rows; the others can be encoded without them.
    """

    def __init__(self, what: str, rows: tuple[int, ...]) -> None:
        super().__init__(what, rows)
        self.what = what
        self.rows = rows

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.rows[:8])) + (", …" if len(self.rows) > 8 else "")
        return (
            f"{self.what} is not finite in {len(self.rows)} rows ({shown}); send these as raw "
            "floats (a cold visit) and count them"
        )


class DeltaStats(NamedTuple):
    """Sums of squares over one tensor, for ‖Δ‖/‖h‖ and the reconstruction error."""

    delta: float
    value: float
    error: float


def quantize(
    x: Tensor, *, bits: int, group: int = 32, grid: str = "signed"
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the fp32 matrix `x`, rounding to nearest even.

    Raises `NonFinite` if a value is an infinity or NaN.
    """
    check_grid(bits, group, grid)
    rows, channels = _check_matrix("x", x, (torch.float32,))
    if not _is_native(x):
        coded = twin.quantize(x, bits=bits, group=group, grid=grid)
        if coded is None:
            raise non_finite("x", x)
        return coded
    x = x.contiguous()
    codes, scales = _new_packed(x, bits, group)
    bad = native().quantize(
        x.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        rows,
        channels,
        bits,
        group,
        grid == "symmetric",
    )
    if bad:
        raise non_finite("x", x)
    return codes, scales


def dequantize(
    codes: Tensor,
    scales: Tensor,
    *,
    channels: int,
    bits: int,
    group: int = 32,
    grid: str = "signed",
) -> Tensor:
    """The fp32 matrix [R, channels] that codes and scales stand for.

    Raises `CodecError` if the sizes do not fit or a scale is not finite.
    """
    check_grid(bits, group, grid)
    rows = _check_packed(codes, scales, channels, bits, group)
    if not _is_native(codes):
        _check_scales(scales)
        return twin.dequantize(codes, scales, channels=channels, bits=bits, group=group, grid=grid)
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty(rows, channels)
    bad = native().dequantize(
        codes.data_ptr(),
        scales.data_ptr(),
        out.data_ptr(),
        rows,
        channels,
        bits,
        group,
        grid == "symmetric",
    )
    if bad:
        _check_scales(scales)
    return out


def delta_encode(
    h: Tensor, row: Tensor, *, bits: int, group: int = 32, grid: str = "signed"
) -> tuple[Tensor, Tensor, Tensor, DeltaStats]:
    """Codes and scales of h - row, the row that both ends remember next, and what it cost.

    The new row is row + dequantize(codes) in fp32, rounded once to the dtype of `row` (bf16 or
    fp32): what `delta_decode` computes at the other end, never `h` itself. Raises `NonFinite`,
    changing nothing, if h, the difference or the new row is not finite.
    """
    check_grid(bits, group, grid)
    rows, channels = _check_matrix("h", h, (torch.float32,))
    _check_row(row, rows, channels, h.device)
    if not _is_native(h):
        coded = twin.delta_encode(h, row, bits=bits, group=group, grid=grid)
        if coded is None:
            raise _non_finite_delta(h, row, bits, group, grid)
        return coded[0], coded[1], coded[2], DeltaStats(*coded[3])
    h, row = h.contiguous(), row.contiguous()
    codes, scales = _new_packed(h, bits, group)
    new_row = torch.empty(rows, channels, dtype=row.dtype)
    bad, delta, value, error = native().delta_encode(
        h.data_ptr(),
        row.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        new_row.data_ptr(),
        rows,
        channels,
        bits,
        group,
        grid == "symmetric",
        row.dtype == torch.bfloat16,
    )
    if bad:
        raise _non_finite_delta(h, row, bits, group, grid)
    return codes, scales, new_row, DeltaStats(delta, value, error)


def delta_decode(
    codes: Tensor,
    scales: Tensor,
    row: Tensor,
    *,
    bits: int,
    group: int = 32,
    grid: str = "signed",
) -> tuple[Tensor, Tensor]:
    """The new value in fp32, to compute on, and the same rounded once to the row's dtype, to keep.

    Raises `CodecError` if the sizes do not fit or a scale is not finite.
    """
    check_grid(bits, group, grid)
    rows, channels = _check_matrix("row", row, ROW_DTYPES)
    if _check_packed(codes, scales, channels, bits, group) != rows:
        raise CodecError(f"codes are for {codes.shape[0]} rows, the remembered rows are {rows}")
    if not _is_native(row):
        _check_scales(scales)
        return twin.delta_decode(codes, scales, row, bits=bits, group=group, grid=grid)
    codes, scales, row = codes.contiguous(), scales.contiguous(), row.contiguous()
    new = torch.empty(rows, channels)
    new_row = torch.empty(rows, channels, dtype=row.dtype)
    bad = native().delta_decode(
        codes.data_ptr(),
        scales.data_ptr(),
        row.data_ptr(),
        new.data_ptr(),
        new_row.data_ptr(),
        rows,
        channels,
        bits,
        group,
        grid == "symmetric",
        row.dtype == torch.bfloat16,
    )
    if bad:
        _check_scales(scales)
    return new, new_row


def packed_nbytes(rows: int, channels: int, *, bits: int, group: int = 32) -> tuple[int, int]:
    """Bytes of codes and of scales for a matrix of this size."""
    return rows * -(-channels * bits // 8), rows * -(-channels // group) * 2


# --- checks -------------------------------------------------------------------------------------


def _is_native(tensor: Tensor) -> bool:
    return tensor.is_cpu and core() == "native"


def check_grid(bits: int, group: int, grid: str) -> None:
    """Raise ValueError unless there is such a grid."""
    if grid not in GRIDS:
        raise ValueError(f"grid is one of {list(GRIDS)}, got {grid!r}")
    least = 2 if grid == "symmetric" else 1
    if not least <= bits <= 8:
        raise ValueError(f"the {grid} grid takes {least} to 8 bits, got {bits}")
    if group < 1:
        raise ValueError(f"group is a number of channels, at least 1, got {group}")


def _check_matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
    shape = x.shape
    if len(shape) != 2 or x.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be a {wanted} matrix [rows, channels], got {x.dtype} {tuple(shape)}"
        )
    return shape[0], shape[1]


def _check_row(row: Tensor, rows: int, channels: int, device: torch.device) -> None:
    _check_matrix("row", row, ROW_DTYPES)
    if row.shape != (rows, channels) or row.device != device:
        raise ValueError(
            f"row {tuple(row.shape)} on {row.device} does not match h {(rows, channels)} on "
            f"{device}; a changed shape is a cold visit"
        )


def _check_packed(codes: Tensor, scales: Tensor, channels: int, bits: int, group: int) -> int:
    shape = codes.shape
    rows = shape[0] if len(shape) == 2 else -1
    nbytes, groups = -(-channels * bits // 8), -(-channels // group)
    if codes.dtype != torch.uint8 or shape != (rows, nbytes):
        raise CodecError(
            f"{channels} channels of {bits} bits are uint8 codes [rows, {nbytes}], "
            f"got {codes.dtype} {tuple(shape)}"
        )
    if scales.dtype != torch.bfloat16 or scales.shape != (rows, groups):
        raise CodecError(
            f"{channels} channels in groups of {group} have bfloat16 scales {(rows, groups)}, "
            f"got {scales.dtype} {tuple(scales.shape)}"
        )
    return rows


def _check_scales(scales: Tensor) -> None:
    if not bool(torch.isfinite(scales).all()):
        raise CodecError("a scale is not finite; no encoder here sends such a packet")


def _new_packed(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    rows, channels = x.shape
    codes = torch.empty(rows, -(-channels * bits // 8), dtype=torch.uint8)
    scales = torch.empty(rows, -(-channels // group), dtype=torch.bfloat16)
    return codes, scales


def _rows_where_not_finite(x: Tensor) -> tuple[int, ...]:
    return tuple((~torch.isfinite(x)).any(dim=1).nonzero().flatten().tolist())


def non_finite(what: str, x: Tensor) -> NonFinite:
    """The error to raise for a matrix that has values which are not finite."""
    return NonFinite(what, _rows_where_not_finite(x))


def _non_finite_delta(h: Tensor, row: Tensor, bits: int, group: int, grid: str) -> NonFinite:
    delta = h - row.float()
    bad = _rows_where_not_finite(delta)
    if bad:
        return NonFinite("h - row", bad)
    coded = twin.quantize(delta, bits=bits, group=group, grid=grid)
    assert coded is not None
    _, new_row = twin.delta_decode(*coded, row, bits=bits, group=group, grid=grid)
    return NonFinite("the new row", _rows_where_not_finite(new_row))
