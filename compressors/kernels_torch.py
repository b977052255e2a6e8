"""The torch twin of the native kernels: the same codes, scales and rows, to the bit.

It runs on any device, serves as the reference for `native/kernels.cpp`, and is what
`compressors.kernels` falls back to, loudly. Arithmetic is fp32 throughout, in this order:

    signed     s = bf16(-x_k), k the first argmax of |x|   code = clip(rne(x/s*F), -F, F-1)
               value = code/F*s
    symmetric  s = bf16(max|x|)                            code = clip(rne(x/s*L), -L, L)
               value = code/L*s

with F = 2**(bits-1) and L = F-1. Codes travel as the unsigned number code+F, each row an LSB-first
bit stream of its own. A scale that would round to infinity is the largest finite bf16; a scale that
rounds to zero makes every code of its group zero. Arguments are checked by the facade.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BF16_MAX = torch.finfo(torch.bfloat16).max

# Outside these a sum of fp32 squares may have overflowed or vanished: it is taken again in fp64.
NORM_LOW, NORM_HIGH = 1e-15, 1e15


def quantize(
    x: Tensor, *, bits: int, group: int, grid: str, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor] | None:
    """Codes and scales of `x`; None if a value is not finite.

    With a generator the rounding is stochastic, floor(z+u), and the symmetric grid's scale is
    rounded away from zero so that no value is clipped and the expectation is exact.
    """
    rows, channels = x.shape
    group = _width(group, channels)
    num_groups = -(-channels // group)
    if rows == 0 or channels == 0:
        return _empty(x, rows, channels, bits), x.new_empty(rows, num_groups, dtype=torch.bfloat16)
    groups = _as_groups(x, num_groups, group)
    if grid == "signed":
        index = groups.abs().argmax(dim=-1, keepdim=True)
        extreme = groups.gather(-1, index).squeeze(-1).neg()
    else:
        extreme = groups.abs().amax(dim=-1)
    if not bool(torch.isfinite(extreme).all()):
        return None
    scales = extreme.to(torch.bfloat16)
    if generator is not None and grid == "symmetric":
        raised = (scales.view(torch.int16) + 1).view(torch.bfloat16)
        scales = torch.where(scales.float() < extreme, raised, scales)
    scales = scales.clamp_(-_BF16_MAX, _BF16_MAX).add_(0.0)  # adding 0 turns -0 into +0
    step = scales.float()
    step = torch.where(step == 0, math.inf, step)  # x/inf = 0: the group's codes are zero
    full = 1 << (bits - 1)
    levels = full if grid == "signed" else full - 1
    z = groups.div(step.unsqueeze(-1)).mul_(levels)
    if generator is None:
        z.round_()
    else:
        noise = torch.rand(z.shape, generator=generator, device=generator.device)
        z.add_(noise.to(z.device)).floor_()
    z.clamp_(-levels, full - 1).add_(full)
    codes = z.to(torch.uint8).view(rows, num_groups * group)
    return pack(codes[:, :channels], bits), scales


def dequantize(
    codes: Tensor, scales: Tensor, *, channels: int, bits: int, group: int, grid: str
) -> Tensor:
    """The values that the codes stand for."""
    rows = codes.shape[0]
    group = _width(group, channels)
    num_groups = -(-channels // group)
    if rows == 0 or channels == 0:
        return scales.new_empty(rows, channels, dtype=torch.float32)
    full = 1 << (bits - 1)
    levels = full if grid == "signed" else full - 1
    value = unpack(codes, channels, bits).to(torch.float32).sub_(full).div_(levels)
    groups = _as_groups(value, num_groups, group).mul_(scales.float().unsqueeze(-1))
    return groups.view(rows, num_groups * group)[:, :channels].contiguous()


def delta_encode(
    h: Tensor, row: Tensor, *, bits: int, group: int, grid: str
) -> tuple[Tensor, Tensor, Tensor, tuple[float, float, float]] | None:
    """Codes, scales, the row to remember and (|d|^2, |h|^2, |h-new|^2); None if not finite."""
    old = row.float()
    delta = h - old
    coded = quantize(delta, bits=bits, group=group, grid=grid)
    if coded is None:
        return None
    codes, scales = coded
    new, new_row = delta_decode(codes, scales, row, bits=bits, group=group, grid=grid)
    norms = (_norm(delta), _norm(h), _norm(h - new))
    if not norms[1] < NORM_HIGH and not bool(torch.isfinite(new_row).all()):
        return None
    return codes, scales, new_row, (norms[0] ** 2, norms[1] ** 2, norms[2] ** 2)


def delta_decode(
    codes: Tensor, scales: Tensor, row: Tensor, *, bits: int, group: int, grid: str
) -> tuple[Tensor, Tensor]:
    """The new value in fp32, and the same rounded once to the row's dtype."""
    value = dequantize(codes, scales, channels=row.shape[1], bits=bits, group=group, grid=grid)
    new = value.add_(row.float())
    return new, new.to(row.dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [R, C] as R bit streams, least significant bit first, unused bits zero."""
    rows, channels = codes.shape
    if bits == 8:
        return codes.contiguous()
    nbytes = -(-channels * bits // 8)
    if 8 % bits == 0:
        per_byte = 8 // bits
        lanes = _pad(codes, nbytes * per_byte).view(rows, nbytes, per_byte)
        packed = lanes[..., 0].clone()
        for lane in range(1, per_byte):
            packed |= lanes[..., lane] << (lane * bits)
        return packed
    octets = -(-channels // 8)
    lanes = _pad(codes, octets * 8).view(rows, octets, 8).to(torch.int64)
    shift = torch.arange(0, 8 * bits, bits, device=codes.device)
    words = (lanes << shift).sum(dim=-1)
    stream = _bytes_of(words, bits)
    return stream.reshape(rows, octets * bits)[:, :nbytes].contiguous()


def unpack(packed: Tensor, channels: int, bits: int) -> Tensor:
    """The unsigned codes [R, channels] of R bit streams."""
    rows = packed.shape[0]
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        per_byte = 8 // bits
        lanes = [(packed >> (lane * bits)) & mask for lane in range(per_byte)]
        return torch.stack(lanes, dim=-1).view(rows, -1)[:, :channels]
    octets = -(-channels // 8)
    lanes8 = _pad(packed, octets * bits).view(rows, octets, bits).to(torch.int64)
    words = (lanes8 << torch.arange(0, 8 * bits, 8, device=packed.device)).sum(dim=-1)
    shift = torch.arange(0, 8 * bits, bits, device=packed.device)
    codes = (words.unsqueeze(-1) >> shift) & mask
    return codes.to(torch.uint8).view(rows, octets * 8)[:, :channels]


def _empty(x: Tensor, rows: int, channels: int, bits: int) -> Tensor:
    return x.new_empty(rows, -(-channels * bits // 8), dtype=torch.uint8)


def _pad(x: Tensor, columns: int) -> Tensor:
    missing = columns - x.shape[1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()


def _width(group: int, channels: int) -> int:
    """A group wider than the row is one of the row's width: rows are padded to whole groups."""
    return min(group, max(channels, 1))


def _as_groups(x: Tensor, num_groups: int, group: int) -> Tensor:
    return _pad(x, num_groups * group).view(x.shape[0], num_groups, group)


def _bytes_of(words: Tensor, count: int) -> Tensor:
    shift = torch.arange(0, 8 * count, 8, device=words.device)
    return ((words.unsqueeze(-1) >> shift) & 0xFF).to(torch.uint8)


def _norm(x: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(x))
    if NORM_LOW < norm < NORM_HIGH:
        return norm
    return float(torch.linalg.vector_norm(x.double()))
