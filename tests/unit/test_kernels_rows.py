"""Many samples in one call give the bits of one call for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from torch import Tensor

from compressors import kernels_rows
from compressors.base import CodecError
from compressors.kernels import delta_decode, delta_encode, use
from compressors.kernels_rows import delta_decode_rows, delta_encode_rows

torch.set_num_threads(1)


def samples(
    lengths: list[int], channels: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, channels, generator=generator).to(dtype) for n in lengths]
    moved = [row.float() + 0.1 * torch.randn(row.shape, generator=generator) for row in rows]
    return moved, rows


def outs_for(rows: list[Tensor]) -> list[Tensor]:
    return [torch.full(tuple(row.shape), -7.0) for row in rows]


@settings(deadline=None, max_examples=examples(80))
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    channels=st.integers(1, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    bits=st.integers(2, 8),
    group=st.sampled_from([1, 5, 32, 64]),
    grid=st.sampled_from(["signed", "symmetric"]),
    core=st.sampled_from(["native", "torch"]),
)
def test_many_samples_at_once_give_the_bits_of_one_by_one(
    lengths: list[int],
    channels: int,
    dtype: torch.dtype,
    bits: int,
    group: int,
    grid: str,
    core: str,
) -> None:
    values, rows = samples(lengths, channels, dtype)
    options: dict[str, Any] = {"bits": bits, "group": group, "grid": grid}
    with use(core):
        coded = delta_encode_rows(values, rows, **options)
        assert coded is not None
        codes, scales, new_rows, stats = coded
        outs = outs_for(rows)
        there = delta_decode_rows(codes, scales, rows, outs, **options)
        alone = [delta_encode(value, row, **options) for value, row in zip(values, rows)]
        read = [delta_decode(a[0], a[1], row, **options) for a, row in zip(alone, rows)]

    assert torch.equal(codes, torch.cat([a[0] for a in alone]))
    assert torch.equal(scales, torch.cat([a[1] for a in alone]))
    assert stats == [a[3] for a in alone]
    for i, (value, kept) in enumerate(read):
        assert torch.equal(outs[i], value)
        assert torch.equal(new_rows[i], kept)
        assert torch.equal(there[i], kept)
        assert there[i].dtype == dtype


@pytest.mark.parametrize("core", ["native", "torch"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_sample_that_is_not_finite_refuses_the_whole_call(core: str, bad: float) -> None:
    values, rows = samples([3, 3, 3], 32, torch.bfloat16)
    values[1][2, 5] = bad
    with use(core):
        assert delta_encode_rows(values, rows, bits=4, group=32, grid="signed") is None


@pytest.mark.parametrize("core", ["native", "torch"])
def test_a_scale_that_is_not_finite_is_refused(core: str) -> None:
    values, rows = samples([2, 2], 32, torch.bfloat16)
    with use(core):
        coded = delta_encode_rows(values, rows, bits=4, group=32, grid="signed")
        assert coded is not None
        coded[1][3, 0] = float("inf")
        with pytest.raises(CodecError, match="a scale is not finite"):
            delta_decode_rows(
                coded[0], coded[1], rows, outs_for(rows), bits=4, group=32, grid="signed"
            )


def test_codes_of_fewer_positions_than_the_rows_are_refused() -> None:
    values, rows = samples([2, 2], 32, torch.bfloat16)
    coded = delta_encode_rows(values, rows, bits=4, group=32, grid="signed")
    assert coded is not None
    with pytest.raises(CodecError, match=r"2 samples of 4 positions .* got \(3, 16\)"):
        delta_decode_rows(
            coded[0][:3], coded[1][:3], rows, outs_for(rows), bits=4, group=32, grid="signed"
        )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values, rows: (values, [rows[0], rows[1][:1]]),
        lambda values, rows: (values, [rows[0], rows[1].float()]),
        lambda values, rows: ([values[0], values[1].double()], rows),
        lambda values, rows: (values, [row.half() for row in rows]),
    ],
    ids=["another shape", "mixed dtypes", "double values", "half rows"],
)
def test_samples_that_do_not_fit_their_rows_are_refused(spoil: Any) -> None:
    values, rows = spoil(*samples([2, 2], 32, torch.bfloat16))
    with pytest.raises(ValueError, match="a sample is a float32 matrix with a row of its shape"):
        delta_encode_rows(values, rows, bits=4, group=32, grid="signed")


def test_a_view_with_gaps_is_coded_by_the_twin_to_the_same_bits() -> None:
    values, rows = samples([4, 4], 64, torch.float32)
    whole = delta_encode_rows(values, rows, bits=4, group=32, grid="signed")
    gaps = [torch.cat([v, v], dim=1)[:, :64] for v in values]
    again = delta_encode_rows(gaps, rows, bits=4, group=32, grid="signed")
    assert whole is not None
    assert again is not None
    assert torch.equal(whole[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(whole[2], again[2]))


def test_dense_samples_do_take_the_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("went sample by sample")

    monkeypatch.setattr(kernels_rows, "_encode_each", refuse)
    monkeypatch.setattr(kernels_rows, "_decode_each", refuse)
    values, rows = samples([4, 4], 64, torch.bfloat16)
    coded = delta_encode_rows(values, rows, bits=4, group=32, grid="signed")
    assert coded is not None
    delta_decode_rows(coded[0], coded[1], rows, outs_for(rows), bits=4, group=32, grid="signed")
