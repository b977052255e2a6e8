"""Rows on the wire: the bounds that the formats promise, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples

from compressors.base import CodecError
from compressors.frame import FrameHeader, pack, unpack
from compressors.row_values import (
    FORMATS,
    NonFiniteRows,
    decode_rows,
    encode_rows,
    row_exponents,
)

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(0, 6), st.integers(1, 9)), elements=FINITE)


def through_the_wire(packet: Any) -> Any:
    return unpack(pack(FrameHeader(kind="embedding", source=0, target=1, step=3), packet))[1]


def outside_the_bound(rows: Any, back: Any) -> int:
    """How many values break embeddings.md 2.7, in exact enough arithmetic."""
    wide = rows.astype(np.float64)
    largest = np.abs(wide).max(axis=1, keepdims=True)
    kappa = np.ldexp(largest, row_exponents(rows)[:, None])
    absolute = np.divide(largest, kappa, out=np.zeros_like(largest), where=kappa > 0)
    bound = np.maximum(2.0**-11 * np.abs(wide), 2.0**-25 * absolute)
    return int((np.abs(wide - back.astype(np.float64)) > bound).sum())


@settings(max_examples=examples(80), deadline=None)
@given(ROWS)
def test_every_finite_row_keeps_the_bound_of_row_scaled_fp16(rows: Any) -> None:
    back = decode_rows(through_the_wire(encode_rows(rows)))

    assert back.shape == rows.shape
    assert outside_the_bound(rows, back) == 0


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-8, 1e-5, 1.0, 1e5, 1e30])
def test_the_bound_holds_at_every_scale_and_nothing_becomes_zero_or_infinite(scale: float) -> None:
    normal = np.random.default_rng(0).standard_normal((200, 16))
    rows = (np.clip(np.abs(normal), 0.1, 8) * np.sign(normal) * scale).astype(np.float32)

    back = decode_rows(encode_rows(rows))

    assert outside_the_bound(rows, back) == 0
    assert (back != 0).all()


def test_mutant_a_plain_cast_breaks_the_bound() -> None:
    rows = np.random.default_rng(0).standard_normal((200, 16)).astype(np.float32) * np.float32(1e-7)

    assert outside_the_bound(rows, rows.astype(np.float16).astype(np.float32)) > 1000


def test_the_scale_spans_what_fp32_spans_and_goes_in_one_byte_or_two() -> None:
    smallest, largest = np.float32(2.0**-149), np.float32(3.4028235e38)
    rows = np.array([[smallest], [1.0], [largest], [0.0]], np.float32)

    packet = encode_rows(rows)

    assert row_exponents(rows).tolist() == [164, 15, -113, 0]
    assert len(packet.parts[1]) == 8  # 277 apart
    assert len(encode_rows(rows[1:]).parts[1]) == 3
    assert decode_rows(packet)[:2].tolist() == rows[:2].tolist()


def test_powers_of_two_are_exact_within_38_of_the_largest() -> None:
    rows = np.array([[2.0**-n for n in range(39)], [2.0 ** (60 - n) for n in range(39)]])

    back = decode_rows(encode_rows(rows.astype(np.float32)))

    assert (back == rows).all()


@settings(max_examples=examples(40), deadline=None)
@given(ROWS)
def test_int8_is_within_half_a_step(rows: Any) -> None:
    back = decode_rows(through_the_wire(encode_rows(rows, values="int8")))

    step = np.maximum(np.abs(rows).max(axis=1, keepdims=True).astype(np.float64) / 127, 2.0**-126)
    assert (np.abs(back.astype(np.float64) - rows) <= step * 0.5001).all()


@settings(max_examples=examples(40), deadline=None)
@given(ROWS)
def test_fp32_is_itself(rows: Any) -> None:
    back = decode_rows(through_the_wire(encode_rows(rows, values="fp32")))

    assert back.tobytes() == rows.tobytes()


@pytest.mark.parametrize("values", FORMATS)
def test_only_the_mask_travels(values: str) -> None:
    rows = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], np.bool_)

    packet = encode_rows(rows, values=values, mask=mask)
    back = decode_rows(through_the_wire(packet), mask=mask)

    size = {"fp32": 4, "fp16-rowscale": 2, "int8": 1}[values]
    assert memoryview(packet.parts[0]).nbytes == 6 * size
    scale = {"fp32": 0, "fp16-rowscale": 1, "int8": 4}[values]
    assert memoryview(packet.parts[1]).nbytes == 2 * scale  # the second row has no values
    assert (back[~mask] == 0).all()
    assert np.allclose(back[mask], rows[mask], rtol=0.01)


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused_with_their_places(values: str, bad: float) -> None:
    rows = np.ones((4, 3), np.float32)
    rows[2, 1] = bad

    with pytest.raises(NonFiniteRows, match="1 of 4 rows") as caught:
        encode_rows(rows, values=values)

    assert caught.value.rows == (2,)


def test_what_no_encoder_sends_is_refused() -> None:
    packet = encode_rows(np.ones((2, 3), np.float32))

    with pytest.raises(CodecError, match="not 6 values"):
        decode_rows(replace(packet, parts=(b"\0" * 10, packet.parts[1])))
    with pytest.raises(CodecError, match="not finite"):
        decode_rows(replace(packet, parts=(b"\xff" * 12, packet.parts[1])))
    with pytest.raises(ValueError, match="one of"):
        encode_rows(np.ones((2, 3), np.float32), values="fp8")


@pytest.mark.parametrize("values", ["fp16-rowscale", "int8"])
def test_a_scale_of_a_row_without_values_is_refused(values: str) -> None:
    mask = np.array([[1, 1, 1], [0, 0, 0]], np.bool_)
    packet = encode_rows(np.ones((2, 3), np.float32), values=values, mask=mask)
    both = encode_rows(np.ones((2, 3), np.float32), values=values)

    with pytest.raises(CodecError, match="1 rows have as many"):
        decode_rows(replace(packet, parts=(packet.parts[0], both.parts[1])), mask=mask)
