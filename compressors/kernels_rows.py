"""Many samples in one kernel call: a micro-batch's changes coded and added at once.

Path: compressors.delta_coding -> compressors.kernels_rows -> compressors.frame

What `kernels.delta_encode` and `delta_decode` do for one sample, for a list of them: each sample
keeps a row of its own in memory, their codes and scales lie one after the other, as they travel.
The same bits as sample by sample; only the price of a call is paid once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressors.base import CodecError
from compressors.kernels import ROW_DTYPES, DeltaStats, check_grid, delta_decode, delta_encode
from compressors.native import core, native

Encoded = tuple[Tensor, Tensor, list[Tensor], list[DeltaStats]]


def delta_encode_rows(
    values: Sequence[Tensor], rows: Sequence[Tensor], *, bits: int, group: int, grid: str
) -> Encoded | None:
    """Codes and scales of all samples, their new rows, and what each cost.

    None if one of them would not stay finite: whoever asks looks at them one by one.
    """
    check_grid(bits, group, grid)
    channels, is_dense = _check_rows(rows, values)
    if not is_dense or core() != "native":
        return _encode_each(values, rows, bits=bits, group=group, grid=grid)
    positions = [value.shape[0] for value in values]
    total = sum(positions)
    codes = torch.empty(total, -(-channels * bits // 8), dtype=torch.uint8)
    scales = torch.empty(total, -(-channels // group), dtype=torch.bfloat16)
    new_rows = [torch.empty_like(row) for row in rows]
    sums = native().delta_encode_rows(
        [value.data_ptr() for value in values],
        [row.data_ptr() for row in rows],
        codes.data_ptr(),
        scales.data_ptr(),
        [row.data_ptr() for row in new_rows],
        positions,
        channels,
        bits,
        group,
        grid == "symmetric",
        rows[0].dtype == torch.bfloat16,
    )
    if not sums:
        return None
    stats = [DeltaStats(*sums[at : at + 3]) for at in range(0, len(sums), 3)]
    return codes, scales, new_rows, stats


def delta_decode_rows(
    codes: Tensor,
    scales: Tensor,
    rows: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
    grid: str,
) -> list[Tensor]:
    """Write the new values into `outs` (fp32 matrices like the rows); returns the new rows.

    Raises `CodecError` if the sizes do not fit or a scale is not finite.
    """
    check_grid(bits, group, grid)
    channels, is_dense = _check_rows(rows, outs)
    positions = [row.shape[0] for row in rows]
    stride, num_groups = -(-channels * bits // 8), -(-channels // group)
    if codes.shape != (sum(positions), stride) or scales.shape != (sum(positions), num_groups):
        raise CodecError(
            f"{len(rows)} samples of {sum(positions)} positions and {channels} channels have codes "
            f"{(sum(positions), stride)} and scales {(sum(positions), num_groups)}, got "
            f"{tuple(codes.shape)} and {tuple(scales.shape)}"
        )
    if not (is_dense and codes.is_contiguous() and scales.is_contiguous()) or core() != "native":
        return _decode_each(codes, scales, rows, outs, bits=bits, group=group, grid=grid)
    new_rows = [torch.empty_like(row) for row in rows]
    num_bad = native().delta_decode_rows(
        codes.data_ptr(),
        scales.data_ptr(),
        [row.data_ptr() for row in rows],
        [out.data_ptr() for out in outs],
        [row.data_ptr() for row in new_rows],
        positions,
        channels,
        bits,
        group,
        grid == "symmetric",
        rows[0].dtype == torch.bfloat16,
    )
    if num_bad:
        raise CodecError("a scale is not finite; no encoder here sends such a packet")
    return new_rows


def _encode_each(
    values: Sequence[Tensor], rows: Sequence[Tensor], *, bits: int, group: int, grid: str
) -> Encoded | None:
    """The twin: sample by sample."""
    parts = []
    for value, row in zip(values, rows):
        try:
            parts.append(delta_encode(value, row, bits=bits, group=group, grid=grid))
        except CodecError:
            return None
    codes = torch.cat([part[0] for part in parts])
    scales = torch.cat([part[1] for part in parts])
    return codes, scales, [part[2] for part in parts], [part[3] for part in parts]


def _decode_each(
    codes: Tensor,
    scales: Tensor,
    rows: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
    grid: str,
) -> list[Tensor]:
    """The twin: sample by sample."""
    new_rows = []
    start = 0
    for row, out in zip(rows, outs):
        part = slice(start, start + row.shape[0])
        new, new_row = delta_decode(
            codes[part], scales[part], row, bits=bits, group=group, grid=grid
        )
        out.copy_(new)
        new_rows.append(new_row)
        start = part.stop
    return new_rows


def _check_rows(rows: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[int, bool]:
    """Channels, and whether all is dense in main memory; refuses what does not fit together."""
    channels, dtype = rows[0].shape[-1], rows[0].dtype
    is_dense = True
    for row, value in zip(rows, values, strict=True):
        if (
            row.dim() != 2
            or row.shape != value.shape
            or row.shape[1] != channels
            or row.dtype != dtype
            or dtype not in ROW_DTYPES
            or value.dtype != torch.float32
        ):
            raise ValueError(
                f"a sample is a float32 matrix with a row of its shape in bfloat16 or float32; got "
                f"{value.dtype} {tuple(value.shape)} with a row {row.dtype} {tuple(row.shape)} "
                f"among rows of {channels} channels in {dtype}"
            )
        is_dense &= row.is_contiguous() and value.is_contiguous()
        is_dense &= row.device.type == "cpu" and value.device.type == "cpu"
    return channels, is_dense
