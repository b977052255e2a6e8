"""The fused arithmetic of AC-SGD equals its generic twin to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from torch import Tensor

from compressors.base import CodecError, Packet
from compressors.delta_coding import (
    Batch,
    Changes,
    Fused,
    Generic,
    changes_for,
    stack,
    unstack,
)
from compressors.quantize import Uniform
from compressors.row_format import RowFormat, matrix_shape
from compressors.topk import TopK

torch.set_num_threads(1)

Shapes = list[tuple[int, ...]]


def content(packet: Packet) -> tuple[object, ...]:
    parts = tuple(bytes(part) for part in packet.parts)
    return packet.codec, packet.shape, dict(packet.meta), parts, packet.inner, packet.rows


def random_batch(shapes: Shapes, *, seed: int, drift: float = 0.1) -> tuple[Batch, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    old = [torch.randn(matrix_shape(shape), generator=generator) for shape in shapes]
    moved = [x + drift * torch.randn(x.shape, generator=generator) for x in old]
    return Batch(tuple(range(len(shapes))), shapes, moved), old


def rows_of(values: list[Tensor], row_format: RowFormat) -> list[Tensor]:
    rows = [row_format.pack(value) for value in values]
    return [row for row in rows if row is not None]


def decode(
    coder: Changes, packet: Packet, rows: Sequence[Tensor], shapes: Shapes
) -> list[tuple[Tensor, Tensor]]:
    outs = [torch.full(matrix_shape(shape), -7.0) for shape in shapes]
    return list(zip(outs, coder.decode(packet, rows, shapes, outs)))


@settings(deadline=None, max_examples=examples(60))
@given(
    bits=st.integers(2, 8),
    grid=st.sampled_from(["signed", "symmetric"]),
    group=st.sampled_from([1, 5, 32, 64]),
    rows=st.sampled_from(["bf16", "fp32", "int8", "int4", "int2"]),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    channels=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_fused_and_generic_give_the_same_packets_values_and_rows(
    bits: int, grid: str, group: int, rows: str, lengths: list[int], channels: int, seed: int
) -> None:
    row_format = RowFormat(rows)
    codec = Uniform(bits, grid=grid, group=group)
    fused, generic = Fused(codec, row_format), Generic(codec, row_format)
    shapes: Shapes = [(length, channels) for length in lengths]
    batch, old = random_batch(shapes, seed=seed)
    before = rows_of(old, row_format)
    one, two = fused.encode(batch, before), generic.encode(batch, before)

    assert one.packet is not None
    assert two.packet is not None
    assert content(one.packet) == content(two.packet)
    assert all(torch.equal(a, b) for a, b in zip(one.rows, two.rows))
    for a, b in zip(one.sums, two.sums):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-12)
    decoded = [decode(coder, one.packet, before, shapes) for coder in (fused, generic)]
    for (new, row), (twin, twin_row), sent in zip(*decoded, one.rows):
        assert torch.equal(new, twin)
        assert torch.equal(row, twin_row)
        assert torch.equal(row, sent)
        assert row.dtype == sent.dtype


@pytest.mark.parametrize("rows", ["bf16", "fp32", "int8"])
def test_both_leave_out_the_same_samples_when_a_change_is_not_finite(rows: str) -> None:
    row_format, codec = RowFormat(rows), Uniform(4)
    shapes: Shapes = [(2, 32)] * 4
    batch, old = random_batch(shapes, seed=0)
    batch.values[1][0, 0] = float("nan")
    old[2][:] = -3e38
    batch.values[2][:] = 3e38  # the change overflows
    before = rows_of(old, row_format)
    outcomes = [Fused(codec, row_format).encode(batch, before)]
    outcomes.append(Generic(codec, row_format).encode(batch, before))

    assert [outcome.refused for outcome in outcomes] == [{1, 2}, {1, 2}]
    packets = [outcome.packet for outcome in outcomes]
    assert packets[0] is not None
    assert packets[1] is not None
    assert content(packets[0]) == content(packets[1])
    assert packets[0].shape == (2, 2, 32)
    assert len(outcomes[0].rows) == 2


@pytest.mark.parametrize("coder", [Fused, Generic])
def test_a_batch_of_refused_samples_has_no_packet(coder: type[Fused | Generic]) -> None:
    batch, old = random_batch([(2, 32)], seed=0)
    batch.values[0][0, 0] = float("inf")

    outcome = coder(Uniform(4), RowFormat("bf16")).encode(batch, rows_of(old, RowFormat("bf16")))
    assert outcome == (None, [], [], {0})


def test_only_the_uniform_quantiser_rounding_to_nearest_is_fused() -> None:
    bf16 = RowFormat("bf16")

    assert isinstance(changes_for(Uniform(4), bf16), Fused)
    assert isinstance(changes_for(Uniform(4, rounding="stochastic"), bf16), Generic)
    assert isinstance(changes_for(TopK(0.1), bf16), Generic)


def test_the_receiver_takes_the_bits_from_the_packet() -> None:
    bf16 = RowFormat("bf16")
    shapes: Shapes = [(3, 40)]
    batch, old = random_batch(shapes, seed=3)
    before = rows_of(old, bf16)
    outcome = Fused(Uniform(3, group=8), bf16).encode(batch, before)
    assert outcome.packet is not None
    ((_, row),) = decode(Fused(Uniform(8), bf16), outcome.packet, before, shapes)

    assert torch.equal(row, outcome.rows[0])


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "topk"},
        {"parts": (b"",)},
        {"parts": (b"", b"")},
        {"shape": (1, 3, 31)},
        {"meta": {}},
        {"meta": {"bits": 9, "group": 32, "grid": "signed", "dtype": "float32"}},
        {"meta": {"bits": 4, "group": 0, "grid": "signed", "dtype": "float32"}},
        {"meta": {"bits": 4, "group": 32, "grid": "bent", "dtype": "float32"}},
        {"meta": {"bits": True, "group": 32, "grid": "signed", "dtype": "float32"}},
        {"meta": {"bits": 4, "group": 32, "grid": "signed", "dtype": "float16"}},
        {"meta": {"bits": 4, "group": 32, "grid": "signed", "dtype": "float32", "lengths": [1]}},
    ],
)
def test_a_packet_of_something_else_is_refused(change: dict[str, object]) -> None:
    bf16 = RowFormat("bf16")
    coder = Fused(Uniform(4), bf16)
    batch, old = random_batch([(3, 32)], seed=3)
    before = rows_of(old, bf16)
    packet = coder.encode(batch, before).packet
    assert packet is not None

    with pytest.raises(CodecError):
        decode(coder, dataclasses.replace(packet, **change), before, [(3, 32)])


def test_samples_of_one_length_are_stacked_and_others_laid_end_to_end() -> None:
    a, b = torch.ones(2, 3), torch.zeros(1, 3)

    assert stack([a, a], [(2, 3), (2, 3)]).shape == (2, 2, 3)
    assert stack([a, b], [(2, 3), (1, 3)]).shape == (1, 3, 3)
    back = unstack(stack([a, b], [(2, 3), (1, 3)]), [(2, 3), (1, 3)])
    assert torch.equal(back[0], a)
    assert torch.equal(back[1], b)
