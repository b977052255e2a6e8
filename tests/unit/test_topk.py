"""Top-k: which values are sent, how compactly, and what a damaged index does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors.base import CodecError, Packet, SampleKeys
from compressors.topk import TopK, code_positions, index_nbytes, read_positions

torch.set_num_threads(1)


def keys(num: int, lengths: tuple[int, ...] | None = None) -> SampleKeys:
    return SampleKeys(ids=tuple(range(num)), lengths=lengths)


def through(codec: TopK, x: torch.Tensor, lengths: tuple[int, ...] | None = None) -> torch.Tensor:
    return codec.decode(codec.encode(x, keys=keys(x.shape[0], lengths)))


def test_the_largest_magnitudes_of_each_sample_arrive_and_the_others_are_zero() -> None:
    x = torch.tensor([[1.0, -4.0, 2.0, 0.5, 3.0], [100.0, 200.0, -50.0, 0.0, 25.0]])

    got = through(TopK(0.4), x)

    assert got.tolist() == [[0, -4.0, 0, 0, 3.0], [100.0, 200.0, 0, 0, 0]]


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    x = torch.tensor([[1.0, -2.0, 1.0, -1.0, 1.0, 1.0]])

    assert through(TopK(0.5), x).tolist() == [[1.0, -2.0, 1.0, 0, 0, 0]]


@pytest.mark.parametrize(("density", "expected"), [(0.1, 0.75), (0.3, 0.47)])
def test_contraction_on_gaussian_values_is_that_of_the_specification(
    density: float, expected: float
) -> None:
    x = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(0))

    error = (through(TopK(density), x) - x).norm() / x.norm()

    assert error.item() == pytest.approx(expected, abs=0.01)


def test_mutant_that_scales_up_what_it_sends_breaks_the_contraction() -> None:
    x = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(0))

    error = (through(TopK(0.1), x) / 0.1 - x).norm() / x.norm()

    assert error > 1


def test_every_sample_sends_at_least_one_value() -> None:
    assert through(TopK(0.001), torch.tensor([[1.0, 2.0], [4.0, 3.0]])).tolist() == [
        [0, 2.0],
        [4.0, 0],
    ]


def test_density_one_sends_all() -> None:
    x = torch.tensor([[1.0, 0.0, -3.0]])

    assert torch.equal(through(TopK(1.0, values="fp32"), x), x)


def test_scaling_by_a_power_of_two_is_exact_from_tiny_to_huge() -> None:
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    base = through(TopK(0.3), x)

    for power in (-27, 0, 27):
        assert torch.equal(through(TopK(0.3), x * 2.0**power), base * 2.0**power)


def test_a_nan_is_sent_not_hidden() -> None:
    x = torch.tensor([[1.0, float("nan"), 5.0, float("inf")]])

    got = through(TopK(0.5), x)

    assert got[0, 1].isnan()
    assert got[0, 3] == float("inf")
    assert got[0, 2] == 0


def test_padding_is_never_sent() -> None:
    x = torch.tensor([[[1.0], [2.0], [900.0], [float("nan")]], [[1.0], [2.0], [3.0], [4.0]]])

    got = through(TopK(0.5), x, lengths=(2, 4))

    assert got[..., 0].tolist() == [[1.0, 2.0, 0, 0], [0, 0, 3.0, 4.0]]


@pytest.mark.parametrize("shape", [(2, 4), (3, 4, 1), (2, 3, 1)])
def test_lengths_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CodecError, match="length"):
        through(TopK(0.5), torch.ones(shape), lengths=(2, 4))


def test_the_index_takes_half_a_bit_per_element_at_density_a_tenth() -> None:
    assert index_nbytes(1_000, 10_000) * 8 / 10_000 == pytest.approx(0.525, abs=0.01)
    assert index_nbytes(5_000, 10_000) == 1250  # the bitmap is smaller from a quarter on
    assert index_nbytes(1_000, 1_000_000) * 8 / 1_000 == pytest.approx(11.96, abs=0.01)


@settings(deadline=None)
@given(st.data())
def test_any_set_of_positions_survives_in_the_stated_size(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3000))
    chosen = data.draw(st.sets(st.integers(0, size - 1), max_size=200))
    positions = np.array(sorted(chosen), dtype=np.int64)

    coded = code_positions(positions, size)

    assert len(coded) == index_nbytes(len(chosen), size)
    assert read_positions(coded, len(chosen), size).tolist() == sorted(chosen)


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 40), st.integers(1, 500))
def test_a_random_index_gives_positions_in_range_or_a_codec_error(
    coded: bytes, count: int, size: int
) -> None:
    padded = coded.ljust(index_nbytes(count, size), b"\0")[: index_nbytes(count, size)]
    for part in (coded, padded):
        try:
            positions = read_positions(part, count, size)
        except CodecError:
            continue
        assert len(positions) == count
        assert all(0 <= p < size for p in positions)
        assert len(set(positions.tolist())) == count


META = {"dtype": "float32", "values": "bf16", "k": 1}


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (Packet(codec="topk", shape=(1, 8), meta=META), "0 parts"),
        (Packet(codec="topk", shape=(1, 8), meta=META | {"values": "int4"}), "'int4'"),
        (Packet(codec="topk", shape=(1, 8), meta=META | {"k": 9}), "k = 9 for samples of 8"),
        (Packet(codec="topk", shape=(1, 8), meta=META | {"k": -1}), "k = -1"),
        (Packet(codec="topk", shape=(1, 8), meta=META | {"k": True}), "k = True"),
        (
            Packet(codec="topk", shape=(1, 1 << 40), meta=META, parts=(b"\1", b"ab")),
            "topk index of 1 bytes for 1 of 1099511627776",
        ),
        (Packet(codec="topk", shape=(1, 8), meta=META, parts=(b"\1", b"a")), "needs 2 bytes"),
        (Packet(codec="topk", shape=(1, 8), meta=META, parts=(b"\3", b"ab")), "2 positions"),
        (Packet(codec="topk", shape=(1, 8), meta=META, parts=(b"\0", b"ab")), "0 positions"),
    ],
)
def test_a_packet_that_does_not_add_up_is_refused(packet: Packet, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        TopK().decode(packet)


@pytest.mark.parametrize("density", [0, -0.1, 1.01, float("nan")])
def test_a_density_outside_its_range_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match="expected above 0 and at most 1"):
        TopK(density)


def test_unknown_values_and_integer_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="'int4', expected one of bf16, fp16, fp32"):
        TopK(0.1, values="int4")
    with pytest.raises(CodecError, match="got int64 of shape"):
        TopK().encode(torch.tensor([[1]]), keys=keys(1))
    with pytest.raises(CodecError, match=r"of shape \(\)"):
        TopK().encode(torch.tensor(1.0), keys=keys(1))
