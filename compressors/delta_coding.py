"""The arithmetic of a change: h - m coded, and added to m at both ends.

Path: compressors.delta -> compressors.delta_coding -> compressors.kernels

Twice: `Fused`, one kernel call per packet, for the uniform quantiser; `Generic`, any inner codec
with Q(0) = 0, in torch operations. On a uniform quantiser both give the same packets and rows to
the bit. Unsent coordinates (top-k, masks) decode to 0 and so keep m.

Samples of one length are stacked [n, ...]; of several lengths, their valid positions are laid
end to end as one sample [1, positions, channels], so that no padding enters a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from compressors.base import CodecError, Compressor, Packet, SampleKeys
from compressors.identity import from_part, to_part
from compressors.kernels import DeltaStats, NonFinite, check_grid, delta_encode
from compressors.kernels_rows import delta_decode_rows, delta_encode_rows
from compressors.quantize import Uniform
from compressors.row_format import RowFormat, is_finite, matrix_shape

Shape = tuple[int, ...]


class GridOptions(TypedDict):
    """What the kernels want to know of a uniform quantiser."""

    bits: int
    grid: str
    group: int


class Batch(NamedTuple):
    """Samples that share an inner packet; `values` are their fp32 matrices."""

    ids: tuple[int, ...]
    shapes: list[Shape]
    values: list[Tensor]


class Outcome(NamedTuple):
    """A coded batch: per sample the new row as stored, and what the coding cost."""

    packet: Packet | None  # None if every sample was refused
    rows: list[Tensor]
    sums: list[DeltaStats]
    refused: set[int]  # indices into the batch: not finite, left out of all of the above


class Changes(Protocol):
    """Codes changes against rows, and adds them."""

    def encode(self, batch: Batch, rows: Sequence[Tensor]) -> Outcome: ...
    def decode(
        self, packet: Packet, rows: Sequence[Tensor], shapes: list[Shape], outs: Sequence[Tensor]
    ) -> list[Tensor]: ...


class Generic:
    """Any inner codec; the twin that `Fused` is tested against."""

    def __init__(self, inner: Compressor, row_format: RowFormat) -> None:
        self._inner = inner
        self._format = row_format

    def encode(self, batch: Batch, rows: Sequence[Tensor]) -> Outcome:
        """Code all samples in one packet; again without those that would not stay finite."""
        olds = [self._format.unpack(row, shape) for row, shape in zip(rows, batch.shapes)]
        changes = [value - old for value, old in zip(batch.values, olds)]
        refused = {i for i, change in enumerate(changes) if not is_finite(change)}
        while True:
            index = [i for i in range(len(changes)) if i not in refused]
            if not index:
                return Outcome(None, [], [], refused)
            shapes = [batch.shapes[i] for i in index]
            keys = keys_of([batch.ids[i] for i in index], shapes)
            packet = self._inner.encode(stack([changes[i] for i in index], shapes), keys=keys)
            sent = unstack(self._inner.decode(packet), shapes)
            news = [olds[i] + part for i, part in zip(index, sent)]
            packed = [self._format.pack(new) for new in news]
            unsound = {i for i, row in zip(index, packed) if row is None}
            if not unsound:
                break
            refused |= unsound
        sums = [
            DeltaStats(square(changes[i]), square(batch.values[i]), square(batch.values[i] - new))
            for i, new in zip(index, news)
        ]
        return Outcome(packet, [row for row in packed if row is not None], sums, refused)

    def decode(
        self, packet: Packet, rows: Sequence[Tensor], shapes: list[Shape], outs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Write the new value of each sample into `outs`; returns its row."""
        check_shape(packet, shapes)
        parts = unstack(self._inner.decode(packet), shapes)
        new_rows = []
        for part, old, shape, out in zip(parts, rows, shapes, outs):
            torch.add(self._format.unpack(old, shape), part, out=out)
            new_rows.append(must_pack(self._format, out))
        return new_rows


class Fused:
    """The uniform quantiser, rounding to nearest: one kernel call for each packet."""

    def __init__(self, inner: Uniform, row_format: RowFormat) -> None:
        self._inner = inner
        self._format = row_format
        self._grid: GridOptions = {"bits": inner.bits, "grid": inner.grid, "group": inner.group}

    def encode(self, batch: Batch, rows: Sequence[Tensor]) -> Outcome:
        """Code all samples at once; if one would not stay finite, each for itself without it."""
        olds = [self._format.unpack(row, shape) for row, shape in zip(rows, batch.shapes)]
        coded = delta_encode_rows(batch.values, olds, **self._grid)
        if coded is not None:
            codes, scales, news, sums = coded
            kept = [
                new if self._format.dtype is not None else self._format.pack(new) for new in news
            ]
            new_rows = [row for row in kept if row is not None]
            if len(new_rows) == len(kept):
                return Outcome(self._packet(codes, scales, batch.shapes), new_rows, sums, set())
        return self._encode_each(batch, rows)

    def _encode_each(self, batch: Batch, rows: Sequence[Tensor]) -> Outcome:
        codes, scales, kept, sums = [], [], [], []
        refused = set()
        for i, (value, row) in enumerate(zip(batch.values, rows)):
            old = self._format.unpack(row, batch.shapes[i])
            try:
                coded = delta_encode(value, old, **self._grid)
            except NonFinite:
                refused.add(i)
                continue
            new_row = coded[2] if self._format.dtype is not None else self._format.pack(coded[2])
            if new_row is None:
                refused.add(i)
                continue
            codes.append(coded[0])
            scales.append(coded[1])
            kept.append(new_row)
            sums.append(coded[3])
        if not kept:
            return Outcome(None, [], [], refused)
        shapes = [shape for i, shape in enumerate(batch.shapes) if i not in refused]
        packet = self._packet(torch.cat(codes), torch.cat(scales), shapes)
        return Outcome(packet, kept, sums, refused)

    def _packet(self, codes: Tensor, scales: Tensor, shapes: list[Shape]) -> Packet:
        return Packet(
            codec=self._inner.name,
            shape=stacked_shape(shapes),
            meta={**self._grid, "dtype": "float32"},
            parts=(to_part(codes), to_part(scales)),
        )

    def decode(
        self, packet: Packet, rows: Sequence[Tensor], shapes: list[Shape], outs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Write the new value of each sample into `outs`; returns its row."""
        check_shape(packet, shapes)
        bits, group, grid = _grid_of(packet)
        sizes = [matrix_shape(shape) for shape in shapes]
        positions, channels = sum(size[0] for size in sizes), sizes[0][1]
        stride, num_groups = -(-channels * bits // 8), -(-channels // group)
        codes = from_part(packet.parts[0], torch.uint8, (positions, stride), codec=packet.codec)
        scales = from_part(
            packet.parts[1], torch.bfloat16, (positions, num_groups), codec=packet.codec
        )
        olds = [self._format.unpack(row, shape) for row, shape in zip(rows, shapes)]
        news = delta_decode_rows(codes, scales, olds, outs, bits=bits, group=group, grid=grid)
        if self._format.dtype is not None:
            return news
        return [must_pack(self._format, out) for out in outs]


def changes_for(inner: Compressor, row_format: RowFormat) -> Changes:
    """The arithmetic for an inner codec: fused where there is a kernel for it."""
    if type(inner) is Uniform and inner.rounding == "nearest":
        return Fused(inner, row_format)
    return Generic(inner, row_format)


def _grid_of(packet: Packet) -> tuple[int, int, str]:
    """Bits, group and grid of a uniform packet, checked; the sender's, whatever ours are."""
    bits, group, grid = (packet.meta.get(name) for name in ("bits", "group", "grid"))
    if (
        packet.codec != Uniform.name
        or len(packet.parts) != 2
        or packet.inner
        or packet.meta.get("dtype") != "float32"
        or "lengths" in packet.meta
        or type(bits) is not int
        or type(group) is not int
        or type(grid) is not str
    ):
        raise CodecError(
            f"changes must be a uniform fp32 packet of codes and scales, got {packet.codec!r:.40} "
            f"with {len(packet.parts)} parts and {dict(packet.meta)!r:.200}"
        )
    try:
        check_grid(bits, group, grid)
    except ValueError as error:
        raise CodecError(f"{packet.codec} packet: {error}") from None
    return bits, group, grid


def stacked_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape in which samples of these shapes travel together."""
    if all(shape == shapes[0] for shape in shapes):
        return (len(shapes), *shapes[0])
    positions = sum(matrix_shape(shape)[0] for shape in shapes)
    return (1, positions, shapes[0][-1])


def stack(matrices: Sequence[Tensor], shapes: Sequence[Shape]) -> Tensor:
    return torch.cat(list(matrices)).view(stacked_shape(shapes))


def unstack(tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The fp32 matrices of a stacked tensor, as views."""
    flat = tensor.to(torch.float32).reshape(-1, matrix_shape(shapes[0])[1])
    return list(torch.split(flat, [matrix_shape(shape)[0] for shape in shapes]))


def keys_of(ids: Sequence[int], shapes: Sequence[Shape]) -> SampleKeys:
    """Keys for an inner packet: nothing is padded there."""
    return SampleKeys(ids=tuple(ids[: stacked_shape(shapes)[0]]))


def check_shape(packet: Packet, shapes: Sequence[Shape]) -> None:
    """Refuse an inner packet that is not of these samples."""
    expected = stacked_shape(shapes)
    if tuple(packet.shape) != expected:
        raise CodecError(
            f"inner packet of codec {packet.codec!r:.40} has shape {tuple(packet.shape)}, "
            f"its {len(shapes)} samples make {expected}"
        )


def must_pack(row_format: RowFormat, new: Tensor) -> Tensor:
    """The row of a value that the sender found finite."""
    row = row_format.pack(new)
    if row is None:
        raise CodecError("a decoded change makes a row that is not finite; no sender sends such")
    return row


def square(x: Tensor) -> float:
    """Sum of squares, without overflow."""
    norm = float(torch.linalg.vector_norm(x))
    if not 1e-15 < norm < 1e15:
        norm = float(torch.linalg.vector_norm(x.double()))
    return norm * norm
