"""The verdict on real links: what is measured against what, and when it is too far."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.real_links import Found, misses, summarize, worst_of


def turn(kernel: bool, step_s: float, predicted_s: float = 1.0) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "warm_step_s": step_s,
        "predicted_step_s": predicted_s,
        "step_times_s": [step_s],
        "losses": [[0.0, 0, 5.0]],
    }


def entry(rate_bps: float, fp32_s: float, acsgd_s: float, *, kernel: float = 1.0) -> Found:
    """Emulated and simulated steps of these lengths, and the kernel's so many times as long."""
    arms = []
    for name, step_s in (("fp32", fp32_s), ("acsgd", acsgd_s)):
        turns = [turn(True, kernel * step_s, step_s), turn(False, step_s)]
        arms.append(summarize(name, turns))
    for arm in arms:
        for way in ("kernel", "emulated", "predicted"):
            arm[f"{way}_speedup"] = arms[0][f"{way}_s"] / arm[f"{way}_s"]
    return [{"rate_bps": rate_bps, "arms": arms}]


def test_deviations_are_relative_to_the_emulation_and_to_the_simulator() -> None:
    arm = summarize("fp32", [turn(True, 1.2, predicted_s=1.5), turn(False, 1.0)])

    assert arm["kernel_to_emulated"] == pytest.approx(0.2)  # of its own it would be 0.167
    assert arm["kernel_to_predicted"] == pytest.approx(-0.2)


def test_what_is_within_the_goals_is_not_missed() -> None:
    assert misses(entry(100e6, 1.4, 1.2) + entry(10e6, 12.0, 1.9, kernel=1.14)) == []
    assert worst_of(entry(10e6, 12.0, 1.9, kernel=1.14)) == pytest.approx(0.14)


@pytest.mark.parametrize("kernel", [1.16, 0.84])
def test_a_step_that_is_too_far_off_is_named(kernel: float) -> None:
    missed = misses(entry(100e6, 1.0, 0.5, kernel=kernel))

    assert len(missed) == 4  # both arms, both references
    assert missed[0].startswith(f"100Mbps fp32: the step took {kernel:.3f} s, ")
    assert "our emulation's 1.000 s; the goal is 15 %" in missed[0]


def test_too_little_speed_up_on_the_slow_link_is_named_and_not_on_the_fast_one() -> None:
    (text,) = misses(entry(10e6, 10.0, 2.0))

    assert text == "10Mbps acsgd: 5.00x faster than fp32, the goal is at least 6x"
    assert misses(entry(100e6, 10.0, 9.0)) == []


def test_a_speed_up_that_only_our_emulation_has_is_named() -> None:
    found = entry(100e6, 1.0, 0.5)
    found[0]["arms"][1]["kernel_speedup"] = 1.6

    assert misses(found) == [
        "100Mbps acsgd: 1.60x faster than fp32, 2.00x under our emulation; the goal is the same "
        "to 15 %"
    ]
