"""What `--slow` says, and that everybody meets the same slowness."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.sync.slowness import Slowness, SlownessError, parse_slow, slow_factor


def test_a_named_replica_is_always_slow() -> None:
    slow = parse_slow("2:4x", num_replicas=4)

    assert slow == (Slowness(factor=4.0, replica=2),)
    assert [slow_factor(slow, r, 7, seed=0) for r in range(4)] == [1.0, 1.0, 4.0, 1.0]


def test_random_slowness_strikes_as_often_as_it_says() -> None:
    slow = parse_slow("random:6x@0.06", num_replicas=4)
    factors = [slow_factor(slow, r, k, seed=3) for r in range(4) for k in range(2500)]

    assert set(factors) == {1.0, 6.0}
    assert factors.count(6.0) / len(factors) == pytest.approx(0.06, abs=0.01)
    assert factors == [slow_factor(slow, r, k, seed=3) for r in range(4) for k in range(2500)]


def test_several_causes_multiply() -> None:
    slow = parse_slow(["1:2x, random:3x@100%", "1:1.5x"], num_replicas=2)

    assert slow_factor(slow, 1, 0, seed=0) == 9.0
    assert slow_factor(slow, 0, 0, seed=0) == 3.0


def test_nothing_said_is_nothing_slow() -> None:
    assert parse_slow("", num_replicas=1) == ()
    assert slow_factor((), 0, 0, seed=0) == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2:4", "'2:4' is not understood: expected '2:4x'"),
        ("4x", "is not understood"),
        ("-1:4x", "is not understood"),
        ("2:0.5x", "0.5x is a speed-up"),
        ("7:4x", "no replica 7, with 4 replicas they are 0 to 3"),
        ("random:6x", "lacks how often: write 'random:6x@0.06'"),
        ("random:6x@2", "2 is no probability"),
        ("random:6x@0", "0 is no probability"),
        ("2:4x@0.5", "always slow; leave out '@0.5'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(text: str, message: str) -> None:
    with pytest.raises(SlownessError, match=message):
        parse_slow(text, num_replicas=4)


@given(
    st.one_of(
        st.builds(
            Slowness,
            factor=st.sampled_from([1.0, 1.5, 4.0, 12.25]),
            replica=st.integers(0, 7),
        ),
        st.builds(
            Slowness,
            factor=st.sampled_from([2.0, 6.0]),
            chance=st.sampled_from([0.0625, 0.5, 1.0]),
        ),
    )
)
def test_what_is_shown_reads_back(slow: Slowness) -> None:
    assert parse_slow(str(slow), num_replicas=8) == (slow,)
