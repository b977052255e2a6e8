"""Deadlines that follow what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.sync.patience import Patience


def seen(*waits: float, **options: float) -> Patience:
    patience = Patience(**options)  # type: ignore[arg-type]
    for waited in waits:
        patience.saw(waited)
    return patience


def test_the_first_waits_get_the_first_limit() -> None:
    assert seen(1.0, 1.0, 1.0, first_s=30.0).limit_s == 30.0


def test_the_limit_is_median_plus_k_deviations() -> None:
    assert seen(8.0, 9.0, 10.0, 11.0, 12.0, k=3.0).limit_s == pytest.approx(10 + 3 * 2.5)
    assert seen(2.0, 6.0, 10.0, 14.0, 18.0, k=3.0).limit_s == pytest.approx(10 + 3 * 1.4826 * 4)


def test_one_hiccup_changes_little() -> None:
    calm = seen(*[1.0, 1.1, 0.9] * 5)
    limit = calm.limit_s
    calm.saw(1000.0)

    assert calm.limit_s < 1.5 * limit


def test_a_peer_that_is_always_slow_is_waited_for() -> None:
    assert seen(*[1.0] * 20, *[40.0] * 32).limit_s > 40.0


def test_waits_that_are_all_alike_leave_room() -> None:
    assert seen(*[2.0] * 10, k=6.0).limit_s == pytest.approx(5.0)
    assert seen(*[0.0] * 10, floor_s=0.5).limit_s == 0.5


def test_giving_up_doubles_the_limit_until_a_wait_ends_well() -> None:
    patience = seen(*[1.0] * 8, k=4.0)
    patience.gave_up()
    patience.gave_up()

    assert patience.limit_s == pytest.approx(8.0)
    patience.saw(1.0)
    assert patience.limit_s == pytest.approx(2.0)


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=40), st.floats(0, 10))
def test_no_limit_is_below_the_floor_or_the_median(waits: list[float], floor_s: float) -> None:
    patience = seen(*waits, floor_s=floor_s)

    assert patience.limit_s >= max(floor_s, sorted(waits[-32:])[(len(waits[-32:]) - 1) // 2])


def test_its_state_is_saved_and_loaded() -> None:
    patience = seen(1.0, 2.0, 3.0, 4.0, 5.0)
    patience.gave_up()
    other = Patience()
    other.load_state_dict(patience.state_dict())

    assert other.limit_s == patience.limit_s


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="first_s > 0"):
        Patience(first_s=0.0)
