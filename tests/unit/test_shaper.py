"""Booking an uplink; jitter and loss as draws."""

from __future__ import annotations

import math
from statistics import fmean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netsim.shaper import SEGMENT_NBYTES, Delays, Uplink


def test_bulk_leaves_first_come_first_served_at_the_rate() -> None:
    uplink = Uplink(8e6)

    assert uplink.book(0.0, 1_000_000) == 1.0
    assert uplink.book(0.0, 500_000) == 1.5
    assert uplink.book(1.0, 500_000) == 2.0


def test_an_idle_uplink_saves_nothing_up() -> None:
    uplink = Uplink(8e6)

    uplink.book(0.0, 1_000_000)

    assert uplink.book(10.0, 1_000_000) == 11.0


def test_even_the_smallest_message_is_shaped() -> None:
    assert Uplink(8000).book(0.0, 1) == 0.001


def test_control_leaves_after_its_own_time_and_delays_later_bulk() -> None:
    uplink = Uplink(8e6)
    uplink.book(0.0, 10_000_000)

    assert uplink.book(1.0, 1_000, control=True) == 1.001
    assert uplink.book(1.0, 1_000_000) == 11.001


def test_control_waits_for_control_before_it() -> None:
    uplink = Uplink(8e6)

    assert uplink.book(0.0, 1_000_000, control=True) == 1.0
    assert uplink.book(0.0, 1_000_000, control=True) == 2.0


def test_an_unlimited_uplink_takes_no_time() -> None:
    uplink = Uplink()

    assert uplink.book(3.0, 10**12) == 3.0


@pytest.mark.parametrize("rate_bps", [0, -1, math.nan])
def test_an_impossible_rate_is_refused(rate_bps) -> None:
    with pytest.raises(ValueError, match="must be more than 0"):
        Uplink(rate_bps)


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 10**6), st.booleans()), min_size=1, max_size=50
    )
)
def test_the_uplink_is_never_booked_above_its_rate(messages) -> None:
    uplink = Uplink(8e6)
    now = 0.0
    booked = 0.0
    for wait_s, nbytes, control in messages:
        now += wait_s
        depart = uplink.book(now, nbytes, control=control)
        booked = max(booked, now) + nbytes / 1e6

        assert depart >= now + nbytes / 1e6 - 1e-9
        assert uplink.free == pytest.approx(booked)


def test_without_jitter_and_loss_nothing_is_drawn() -> None:
    delays = Delays(latency_s=0.1, jitter_s=0, loss_rate=0, seed=1)

    assert [delays.draw(10**6) for _ in range(3)] == [(0, 0.0)] * 3


def test_the_same_seed_draws_the_same_delays() -> None:
    one, two, other = (
        Delays(latency_s=0.1, jitter_s=0.05, loss_rate=0.1, seed=seed) for seed in (7, 7, 8)
    )

    drawn = [one.draw(100_000) for _ in range(20)]

    assert drawn == [two.draw(100_000) for _ in range(20)]
    assert drawn != [other.draw(100_000) for _ in range(20)]


def test_jitter_is_uniform_up_to_its_bound() -> None:
    delays = Delays(latency_s=0.1, jitter_s=0.05, loss_rate=0, seed=1)

    late = [delays.draw(1000)[1] for _ in range(10_000)]

    assert min(late) >= 0
    assert max(late) <= 0.05
    assert fmean(late) == pytest.approx(0.025, rel=0.03)


def test_losses_are_binomial() -> None:
    delays = Delays(latency_s=0.1, jitter_s=0, loss_rate=0.02, seed=1)

    counts = [delays._num_lost(500) for _ in range(20_000)]

    assert fmean(counts) == pytest.approx(10.0, rel=0.02)
    assert pvariance(counts) == pytest.approx(9.8, rel=0.05)


def test_what_is_lost_is_sent_again_until_it_arrives() -> None:
    delays = Delays(latency_s=0.05, jitter_s=0, loss_rate=0.2, seed=1)
    nbytes = 1000 * SEGMENT_NBYTES

    draws = [delays.draw(nbytes) for _ in range(1000)]

    # Each segment is sent 1 / (1 - p) times on average: a quarter again at p = 0.2.
    assert fmean(resent for resent, _ in draws) == pytest.approx(nbytes / 4, rel=0.02)
    rounds = [late_s / 0.1 for _, late_s in draws]
    assert all(count == pytest.approx(round(count)) for count in rounds)
    assert min(rounds) >= 1


def test_a_frame_that_loses_nothing_is_not_late() -> None:
    delays = Delays(latency_s=0.05, jitter_s=0, loss_rate=0.001, seed=1)

    draws = [delays.draw(1000) for _ in range(10_000)]

    lost = [draw for draw in draws if draw != (0, 0.0)]
    assert len(lost) == pytest.approx(10, abs=9)
    assert set(lost) <= {(1000, 0.1), (2000, 0.2)}


@pytest.mark.parametrize("loss_rate", [0.5, 1e-9, 5e-324])
def test_extreme_losses_end(loss_rate) -> None:
    delays = Delays(latency_s=0.05, jitter_s=0, loss_rate=loss_rate, seed=1)

    assert all(delays.draw(10_000)[1] < 10 for _ in range(100))
    assert delays.draw(0) == (0, 0.0)
