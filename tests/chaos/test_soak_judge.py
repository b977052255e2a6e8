"""The soak's judge: a leak that was planted is found, a process that is well is left alone."""

from __future__ import annotations

import random

import pytest
from soak_judge import Limits, Points, counts_that_grew, judge

LIMITS = Limits(mb=16.0, mb_per_hour=30.0)
STEPS_PER_S = 10.0


def memory(
    minutes: float, *, kb_per_step: float = 0.0, jump_mb: float = 0.0, noise: float = 1.0
) -> Points:
    """RSS every two seconds: warm-up is over, allocators breathe, perhaps something leaks."""
    source = random.Random(1)
    found = []
    for second in range(0, int(60 * minutes), 2):
        leak = kb_per_step * STEPS_PER_S * second / 1024
        jump = jump_mb if second > 20 * minutes else 0.0
        found.append((float(second), 300 + leak + jump + source.gauss(0, noise)))
    return found


@pytest.mark.parametrize("minutes", [2, 10, 20])
def test_a_process_that_is_well_is_left_alone(minutes: float) -> None:
    growth = judge(memory(minutes), LIMITS)

    assert growth is not None
    assert not growth.leaks, growth


@pytest.mark.parametrize(("minutes", "kb_per_step"), [(20, 2.0), (20, 1.0), (10, 2.0), (3, 16.0)])
def test_a_planted_leak_is_found(minutes: float, kb_per_step: float) -> None:
    """A small record kept each step: 2 kB of it is 70 MB an hour at ten steps a second."""
    growth = judge(memory(minutes, kb_per_step=kb_per_step), LIMITS)

    assert growth is not None
    assert growth.leaks, growth


def test_what_is_kept_on_purpose_is_not_a_leak_but_more_than_it_is() -> None:
    kept = 2.0 * STEPS_PER_S * 3600 / 1024

    right = judge(memory(20, kb_per_step=2.0), LIMITS, explained_mb_per_hour=kept)
    more = judge(memory(20, kb_per_step=4.0), LIMITS, explained_mb_per_hour=kept)

    assert right is not None
    assert not right.leaks, right
    assert more is not None
    assert more.leaks, more


def test_one_jump_of_an_allocator_is_no_slope_but_a_large_one_is_told() -> None:
    small, large = judge(memory(20, jump_mb=12.0), LIMITS), judge(memory(20, jump_mb=40.0), LIMITS)

    assert small is not None
    assert not small.leaks, small
    assert large is not None
    assert large.leaks, large


def test_a_process_that_lived_for_seconds_says_nothing() -> None:
    assert judge(memory(0.3), LIMITS) is None


def looks(*refs: int) -> list[dict[str, int]]:
    return [{"refs": number, "threads": 40} for number in refs]


def test_counts_that_come_and_go_are_no_leak_and_those_that_stay_are() -> None:
    limits = {"refs": 4, "threads": 0}

    assert counts_that_grew(looks(20, 31, 20, 44, 22, 20, 38, 21, 20), limits) == {}
    # One for each of fifteen failures.
    assert counts_that_grew(looks(*range(20, 35)), limits) == {"refs": (24, 30)}
