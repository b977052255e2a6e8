"""Tensors as matrices of their valid positions, and back.

The first dimension of a tensor is the sample, the last the channel. With `keys.lengths` the second
is the position, of which each sample has so many that count; the rest is padding, which is neither
sent nor enters a scale and comes back as zeros.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compressors.base import CodecError, Packet, SampleKeys

Shape = tuple[int, ...]
Lengths = tuple[int, ...]


def split_valid(tensor: Tensor, keys: SampleKeys) -> tuple[Tensor, Lengths | None]:
    """The valid positions as a matrix [rows, channels], and the lengths if some are padded."""
    shape = tuple(tensor.shape)
    channels = shape[-1] if shape else 1
    if keys.lengths is None:
        return tensor.reshape(math.prod(shape[:-1]), channels), None
    lengths = tuple(int(length) for length in keys.lengths)
    check_lengths(shape, lengths)
    rows = [sample[:n].reshape(-1, channels) for sample, n in zip(tensor, lengths) if n]
    return (torch.cat(rows) if rows else tensor.new_empty(0, channels)), lengths


def join_valid(matrix: Tensor, shape: Shape, lengths: Lengths | None) -> Tensor:
    """The tensor again, zero where it was padded."""
    if lengths is None:
        return matrix.reshape(shape)
    out = matrix.new_zeros(shape)
    per_position = math.prod(shape[2:-1])
    start = 0
    for sample, n in zip(out, lengths):
        rows = n * per_position
        sample[:n] = matrix[start : start + rows].reshape(n, *shape[2:])
        start += rows
    return out


def num_valid_rows(shape: Shape, lengths: Lengths | None) -> tuple[int, int]:
    """Rows and channels of the matrix that `split_valid` makes of such a tensor."""
    channels = shape[-1] if shape else 1
    if lengths is None:
        return math.prod(shape[:-1]), channels
    check_lengths(shape, lengths)
    return sum(lengths) * math.prod(shape[2:-1]), channels


def lengths_of(packet: Packet) -> Lengths | None:
    """The lengths that a packet names; None if nothing was padded."""
    lengths = packet.meta.get("lengths")
    if lengths is None:
        return None
    if not isinstance(lengths, (tuple, list)) or not all(type(n) is int for n in lengths):
        raise CodecError(f"{packet.codec} packet has lengths {lengths!r:.80}, not whole numbers")
    return tuple(lengths)


def check_lengths(shape: Shape, lengths: Lengths) -> None:
    if len(shape) < 3 or len(lengths) != shape[0]:
        raise CodecError(
            "lengths need a tensor [samples, positions, ..., channels] and one for each sample, "
            f"got shape {shape} and {len(lengths)} lengths"
        )
    for n in lengths:
        if not 0 <= n <= shape[1]:
            raise CodecError(f"length {n} of a sample is not within its {shape[1]} positions")
