"""The wire's C++ kernels give the bits of their numpy twins, whatever the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples

from compressors import native, wire_kernels
from compressors.wire_kernels import (
    NotFinite,
    dedupe,
    half_rows,
    int8_rows,
    rows_of_half,
    rows_of_int8,
)

ANY = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
SHAPES = st.tuples(st.integers(0, 7), st.integers(0, 19))
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TINY = (0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 2.0**-14, 5.9604645e-08, 2.9802322e-08)
LARGE = (65504, 3.4028235e38, -3.4028235e38, 16384, 32768, 32767, 16384.002)
EDGES = np.array([*TINY, *LARGE, 0.5, 1 / 3, 127, 254.5], np.float32)


def both(work: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """What the two cores answer; an exception is an answer."""
    answers = []
    for core in ("native", "torch"):
        with native.use(core):
            try:
                found = work(*arguments)
            except NotFinite:
                found = "not finite"
        parts = found if isinstance(found, tuple) else (found,)
        answers.append([part if isinstance(part, str) else part.tobytes() for part in parts])
    return answers[0], answers[1]


@settings(max_examples=examples(300), deadline=None)
@given(hnp.arrays(np.float32, SHAPES, elements=ANY))
def test_rows_are_coded_alike_or_refused_alike(rows: Any) -> None:
    for work in (half_rows, int8_rows):
        ours, theirs = both(work, rows)
        assert ours == theirs


@settings(max_examples=examples(300), deadline=None)
@given(hnp.arrays(np.uint16, SHAPES), st.integers(-400, 400), st.integers(0, 2**31))
def test_half_floats_of_any_bits_and_exponents_are_read_alike(
    codes: Any, low: int, seed: int
) -> None:
    exponents = np.random.default_rng(seed).integers(low, low + 256, len(codes)).astype(np.int32)

    ours, theirs = both(rows_of_half, codes.view(np.float16), exponents)

    assert ours == theirs


@settings(max_examples=examples(200), deadline=None)
@given(hnp.arrays(np.int8, SHAPES), st.data())
def test_int8_of_any_codes_and_steps_are_read_alike(codes: Any, data: Any) -> None:
    steps = data.draw(hnp.arrays(np.float32, len(codes), elements=ANY))

    ours, theirs = both(rows_of_int8, codes, steps)

    assert ours == theirs


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.one_of(INT64, st.integers(-3, 3)), max_size=200))
def test_ids_are_found_alike(values: list[int]) -> None:
    ids = np.array(values, np.int64)

    ours, theirs = both(dedupe, ids)

    assert ours == theirs
    with native.use("native"):
        unique, inverse, counts = dedupe(ids)
    assert unique[inverse].tolist() == values
    assert counts.sum() == len(values)


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-100, 1.0, 2.0**60, 2.0**100])
def test_many_rows_of_every_scale_and_all_edges_are_alike(scale: float) -> None:
    generator = np.random.default_rng(0)
    rows = (generator.standard_normal((500, 33)) * scale).astype(np.float32)
    mixed = generator.choice(EDGES, (500, 33)) * generator.choice([1, -1], (500, 33))
    alone = np.zeros((len(EDGES), 33), np.float32)
    alone[:, 5] = EDGES

    for one in (rows, mixed.astype(np.float32), alone, rows[::2, ::3]):
        for work in (half_rows, int8_rows):
            ours, theirs = both(work, one)
            assert ours == theirs
            assert "not finite" not in ours
        codes, exponents = half_rows(one)
        ours, theirs = both(rows_of_half, codes, exponents)
        assert ours == theirs


def test_every_half_float_comes_back_as_numpy_reads_it() -> None:
    finite = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = finite[np.isfinite(finite)].reshape(-1, 1)
    zero = np.zeros(len(finite), np.int32)

    with native.use("native"):
        assert np.array_equal(rows_of_half(finite, zero), finite.astype(np.float32))


def test_the_native_kernels_are_used_where_the_core_is_native(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(rows: Any) -> Any:
        raise AssertionError("the twin")

    monkeypatch.setattr(wire_kernels, "_half_rows", refuse)
    with native.use("native"):
        half_rows(np.ones((2, 2), np.float32))
    with native.use("torch"), pytest.raises(AssertionError, match="the twin"):
        half_rows(np.ones((2, 2), np.float32))


def test_mutant_truncating_instead_of_rounding_to_even_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = wire_kernels._half_rows

    def truncated(rows: Any) -> Any:
        _, exponents = right(rows)
        toward = np.ldexp(rows, exponents[:, None]).view(np.uint32) & np.uint32(0xFFFFE000)
        return toward.view(np.float32).astype(np.float16), exponents

    monkeypatch.setattr(wire_kernels, "_half_rows", truncated)
    rows = np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32)

    ours, theirs = both(half_rows, rows)

    assert ours != theirs
