"""The default job over the kernel's links, over our emulation and in the simulator: a verdict.

What must be: measured step times within 15 % of the same run under our emulation, and of the
simulator's, each relative to that reference; the same speed-up of AC-SGD over fp32; at 10 Mbps at
least six times. `benchmarks/real_network.py` prints it, `test_default_job.py` asserts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from netsim.units import show_bandwidth
from tests.cluster.rig import GOODPUT, Rig
from tests.cluster.service import COLD_STEPS, Service

NUM_STAGES = 4
GOAL = 0.15
SLOW_BPS = 20e6
MIN_SPEEDUP, MIN_SPEEDUP_BPS = 6.0, 10e6
REFERENCES = {"emulated": "our emulation", "predicted": "the simulator"}
Found = list[dict[str, Any]]


def measure(
    *,
    rates_bps: Sequence[float] = (100e6, 10e6),
    codecs: Sequence[str] = ("fp32", "acsgd"),
    steps: int = 14,
    slow_steps: int = 6,
    rounds: int = 2,
    say: Callable[[str], object] = lambda text: None,
) -> Found:
    """Train every arm over both kinds of links on a rig of its own, in turns.

    `slow_steps` are those of fp32 below 20 Mbps.
    """
    found = []
    with Rig(NUM_STAGES) as rig:
        rig.start_ray()
        service = Service(rig, NUM_STAGES)
        say(f"one stage on each of {', '.join(service.placed['nodes'])}")
        for rate_bps in rates_bps:
            turns: dict[str, list[dict[str, Any]]] = {codec: [] for codec in codecs}
            for _ in range(rounds):
                for codec in codecs:
                    slow = codec == "fp32" and rate_bps < SLOW_BPS
                    settings = {
                        "codec.name": codec,
                        "steps": slow_steps if slow else steps,
                        "data.num_samples": 64 * COLD_STEPS,
                    }
                    for kernel in (True, False):
                        arm = service.train(settings, rate_bps=rate_bps, kernel=kernel)
                        turns[codec].append(arm)
                        say(
                            f"{show_bandwidth(rate_bps):>8} {codec:10} "
                            f"{'kernel  ' if kernel else 'emulated'} {arm['warm_step_s']:.3f} s, "
                            f"predicted {arm['predicted_step_s']:.3f} s"
                        )
            arms = [summarize(codec, turns[codec]) for codec in codecs]
            for arm in arms:
                for way in ("kernel", *REFERENCES):
                    arm[f"{way}_speedup"] = arms[0][f"{way}_s"] / arm[f"{way}_s"]
            found.append({"rate_bps": rate_bps, "goodput_bps": GOODPUT * rate_bps, "arms": arms})
        service.close()
    return found


def summarize(codec: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of an arm's rounds, and how far the kernel's links are from each reference."""
    kernel = [arm for arm in turns if arm["kernel"]]
    emulated = [arm for arm in turns if not arm["kernel"]]
    assert len({tuple(row[2] for row in arm["losses"]) for arm in turns}) == 1, "losses differ"
    arm = {
        "name": codec,
        "kernel_s": median(one["warm_step_s"] for one in kernel),
        "emulated_s": median(one["warm_step_s"] for one in emulated),
        "predicted_s": median(one["predicted_step_s"] for one in kernel),
        "step_times_s": {
            "kernel": [one["step_times_s"] for one in kernel],
            "emulated": [one["step_times_s"] for one in emulated],
        },
        "predictions_s": [one["predicted_step_s"] for one in turns],
    }
    for way in REFERENCES:
        arm[f"kernel_to_{way}"] = arm["kernel_s"] / arm[f"{way}_s"] - 1.0
    return arm


def worst_of(found: Found) -> float:
    """The largest deviation of a step time from a reference."""
    return max(
        abs(arm[f"kernel_to_{way}"])
        for entry in found
        for arm in entry["arms"]
        for way in REFERENCES
    )


def misses(found: Found) -> list[str]:
    """The goals that were not reached, in words; empty if all were."""
    missed = []
    for entry in found:
        rate = show_bandwidth(entry["rate_bps"])
        for arm in entry["arms"]:
            for way, reference in REFERENCES.items():
                off = arm[f"kernel_to_{way}"]
                if abs(off) > GOAL:
                    missed.append(
                        f"{rate} {arm['name']}: the step took {arm['kernel_s']:.3f} s, "
                        f"{100 * off:+.1f} % from {reference}'s {arm[f'{way}_s']:.3f} s; the goal "
                        f"is {100 * GOAL:.0f} %"
                    )
            if not arm["name"].startswith("acsgd"):
                continue
            speedup, same = arm["kernel_speedup"], arm["emulated_speedup"]
            if abs(speedup / same - 1.0) > GOAL:
                missed.append(
                    f"{rate} {arm['name']}: {speedup:.2f}x faster than fp32, {same:.2f}x under our "
                    f"emulation; the goal is the same to {100 * GOAL:.0f} %"
                )
            if entry["rate_bps"] <= MIN_SPEEDUP_BPS and speedup < MIN_SPEEDUP:
                missed.append(
                    f"{rate} {arm['name']}: {speedup:.2f}x faster than fp32, the goal is at least "
                    f"{MIN_SPEEDUP:.0f}x"
                )
    return missed
