"""The deadline of waits follows the measured step times between a floor and a ceiling."""

from __future__ import annotations

import pytest

from ray_pipe.deadlines import Deadlines, transfer_s
from stages.crowding import crowding


def fed(
    *steps: float, start_s: float = 60.0, floor_s: float = 10.0, crowding: float = 1.0
) -> Deadlines:
    deadlines = Deadlines(start_s=start_s, floor_s=floor_s, crowding=lambda: crowding)
    for step_s in steps:
        deadlines.add(step_s)
    return deadlines


def test_before_anything_was_measured_it_is_as_configured() -> None:
    assert fed().value_s == 60.0
    assert fed(1.0, 1.0).value_s == 60.0
    assert Deadlines(start_s=60.0, floor_s=1.0, expected_s=20.0).value_s == 200.0


def test_steady_steps_give_four_of_them() -> None:
    assert fed(*[5.0] * 10).value_s == 20.0


def test_fast_steps_meet_the_floor() -> None:
    assert fed(*[0.1] * 10).value_s == 10.0


def test_steps_that_vary_get_more_time() -> None:
    assert fed(4.0, 5.0, 6.0, 4.0, 6.0).value_s == pytest.approx(4 * 5 + 10 * 1)


def test_one_slow_step_changes_nothing() -> None:
    assert fed(*[5.0] * 9, 500.0).value_s == 20.0


def test_slow_steps_raise_the_ceiling_too() -> None:
    assert fed(*[100.0] * 5).value_s == 400.0
    assert fed(1.0, 30.0, 60.0).value_s == pytest.approx(min(4 * 30 + 10 * 29, 300))


def test_only_the_latest_steps_count() -> None:
    assert fed(*[100.0] * 40, *[5.0] * 32).value_s == 20.0


def test_after_a_wait_in_vain_it_is_doubled() -> None:
    deadlines = fed(*[5.0] * 10)

    deadlines.stretch()

    assert deadlines.value_s == 40.0


def test_where_many_threads_want_a_core_the_floor_rises_up_to_the_start() -> None:
    assert fed(*[0.1] * 10, crowding=3.0).value_s == 30.0
    assert fed(*[0.1] * 10, crowding=17.0).value_s == 60.0
    assert fed(*[0.1] * 10, start_s=3.0, floor_s=3.0, crowding=17.0).value_s == 3.0
    assert fed(*[5.0] * 10, crowding=1.5).value_s == 20.0  # such steps were measured under load


@pytest.mark.parametrize(("load", "expected"), [(0.5, 1.0), (4.0, 1.0), (34.0, 8.5)])
def test_crowding_is_the_load_of_a_core(
    monkeypatch: pytest.MonkeyPatch, load: float, expected: float
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 99.0, 99.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)

    assert crowding() == expected


def test_a_transfer_has_five_minutes_or_four_times_what_the_slowest_link_needs() -> None:
    assert transfer_s(1000, 1e9) == 300.0
    assert transfer_s(3_600_000_000, 100e6) == pytest.approx(4 * 288)
    assert transfer_s(3_600_000_000) == pytest.approx(4 * 2880)  # nobody knows: 10 Mbit/s
