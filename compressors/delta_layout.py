"""What a delta packet holds where: samples, their valid positions, and what they will leave.

Path: compressors.delta -> compressors.delta_layout -> compressors.visits

The first dimension of a tensor is the sample. With lengths the second is the position, of which
only the valid ones are coded and remembered; a sample is a matrix [positions, channels] here.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compressors.base import CodecError, Compressor, Packet, RowMarks, SampleKeys
from compressors.buffers import Mark, RowStore, as_bytes
from compressors.delta_coding import Batch, Changes, Shape
from compressors.identity import Identity, dtype_name, dtype_of
from compressors.row_format import RowFormat, matrix_shape

NAME = "delta"


@dataclass(slots=True)
class StepStats:
    """Counts and sums of squares since the last commit."""

    hits: int = 0
    cold: int = 0
    nonfinite: int = 0
    resends: int = 0
    nacks: int = 0
    warm_delta: float = 0.0
    warm_value: float = 0.0
    value: float = 0.0
    error: float = 0.0


@dataclass(slots=True)
class Draft:
    """What a packet will stage if all of it succeeds."""

    ids: tuple[int, ...]
    shapes: list[Shape]
    visits: dict[int, tuple[Mark, Tensor | None]] = field(default_factory=dict)  # by position
    latest: dict[int, int] = field(default_factory=dict)  # sample -> its last position so far

    def put(self, position: int, *, generation: int, visit: int, row: Tensor | None) -> None:
        mark = Mark(generation, visit, self.shapes[position], row is not None)
        self.visits[position] = (mark, row)
        self.latest[self.ids[position]] = position

    def in_order(self) -> list[tuple[Mark, Tensor | None]]:
        return [self.visits[position] for position in range(len(self.ids))]

    def checksum(self) -> int:
        """CRC-32 of all new rows, in order."""
        total = 0
        for _, row in self.in_order():
            total = total if row is None else zlib.crc32(as_bytes(row), total)
        return total

    def batch(self, positions: Sequence[int], matrices: Sequence[Tensor]) -> Batch:
        """Samples that will share an inner packet."""
        return Batch(
            tuple(self.ids[p] for p in positions),
            [self.shapes[p] for p in positions],
            [matrices[p] for p in positions],
        )


@dataclass(slots=True)
class End:
    """What sending and receiving share: the rows of one end of an edge and how to code them."""

    namespace: tuple[str | int, ...]
    row_format: RowFormat
    store: RowStore
    changes: Changes
    first_visit: Compressor
    checksum: bool
    compressed_evaluation: bool = False
    raw: Identity = field(default_factory=Identity)
    step: StepStats = field(default_factory=StepStats)

    def mark(self, draft: Draft, sample: int) -> Mark | None:
        """Counters of a sample as the next visit sees them."""
        if sample in draft.latest:
            return draft.visits[draft.latest[sample]][0]
        return self.store.mark(sample)

    def row(self, draft: Draft, sample: int) -> Tensor:
        """Value of a row that `mark` says is kept."""
        if sample in draft.latest:
            row = draft.visits[draft.latest[sample]][1]
            assert row is not None, f"row {sample} was not kept"
            return row
        return self.store.value(sample)

    def stage(self, draft: Draft) -> None:
        """Make a packet's visits visible to those that follow in the step."""
        for sample, (mark, row) in zip(draft.ids, draft.in_order()):
            self.store.stage(sample, mark, row)


def check_tensor(tensor: Tensor, keys: SampleKeys) -> tuple[Tensor, list[Shape]]:
    """The tensor as contiguous fp32 in main memory, and the valid shape of each sample."""
    shape = tuple(tensor.shape)
    if not shape or len(keys.ids) != shape[0]:
        raise ValueError(
            f"tensor of shape {shape} comes with {len(keys.ids)} sample ids; "
            "its first dimension is the sample"
        )
    values = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
    return values, _valid_shapes(shape, keys.lengths)


def dtype_meta(dtype: torch.dtype) -> dict[str, Any]:
    """What a packet says of its tensor's dtype: nothing in the usual case, so it costs no bytes."""
    return (
        {}
        if dtype == torch.float32 or not dtype.is_floating_point
        else {"dtype": dtype_name(dtype)}
    )


def stated_dtype(packet: Packet) -> torch.dtype:
    """The dtype that the decoded values shall have."""
    if "dtype" not in packet.meta:
        return torch.float32
    dtype = dtype_of(packet)
    if not dtype.is_floating_point:
        raise CodecError(f"delta packet has dtype {dtype_name(dtype)}, which is no float")
    return dtype


def _valid_shapes(shape: Shape, lengths: Sequence[int] | None) -> list[Shape]:
    if lengths is None:
        return [shape[1:]] * shape[0]
    if len(shape) < 3 or len(lengths) != shape[0]:
        raise CodecError(
            f"lengths need a tensor [samples, positions, ..., channels] and one for each sample, "
            f"got shape {shape} and {len(lengths)} lengths"
        )
    for length in lengths:
        if type(length) is not int or not 0 <= length <= shape[1]:
            raise CodecError(f"a sample of length {length!r:.40} in a tensor of shape {shape}")
    return [(length, *shape[2:]) for length in lengths]


def valid_part(tensor: Tensor, position: int, shape: Shape) -> Tensor:
    """The valid positions of one sample as a matrix; a view."""
    sample = tensor[position]
    return (sample[: shape[0]] if shape else sample).view(matrix_shape(shape))


def valid_parts(tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The valid positions of every sample as matrices; views of a contiguous tensor."""
    whole = tuple(tensor.shape[1:])
    if tensor.numel() and all(shape == whole for shape in shapes):
        return list(tensor.view(len(shapes), *matrix_shape(whole)).unbind())
    return [valid_part(tensor, position, shape) for position, shape in enumerate(shapes)]


def read_layout(packet: Packet, rows: RowMarks) -> tuple[list[Shape], frozenset[int]]:
    """Valid shapes and raw positions that a packet states, checked."""
    num = packet.shape[0] if packet.shape else -1
    if not num == len(rows.ids) == len(rows.visits) == len(rows.generations) == len(rows.cold):
        raise CodecError(
            f"delta packet of shape {tuple(packet.shape)} has {len(rows.ids)} ids, "
            f"{len(rows.visits)} visits, {len(rows.generations)} generations, "
            f"{len(rows.cold)} cold flags"
        )
    if any(visit < 1 or (cold and visit != 1) for visit, cold in zip(rows.visits, rows.cold)):
        raise CodecError("delta packet has a cold sample that is not at visit 1, or a visit below")
    raw = packet.meta.get("raw", ())
    if not isinstance(raw, (tuple, list)) or not all(
        type(p) is int and 0 <= p < num and rows.cold[p] for p in raw
    ):
        raise CodecError(f"delta packet names raw samples {raw!r:.80} of {num}")
    lengths = packet.meta.get("lengths")
    if lengths is not None and not isinstance(lengths, (tuple, list)):
        raise CodecError(f"delta packet has lengths {lengths!r:.80}")
    return _valid_shapes(tuple(packet.shape), lengths), frozenset(raw)
