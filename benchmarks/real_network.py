"""Real links against our emulation and the simulator: the default job on four hosts. Needs root.

Four hosts in namespaces on this machine, one stage on each, joined by links that the kernel limits
(`tc tbf`, both directions). Each arm is trained over those links unshaped, then by the same actors
over links that only our emulation limits, to the same goodput (95.6 % of the rate: TCP's payload).
Times are medians of steps after all samples have been seen once; rounds take turns, because a
shared machine is not equally fast all the time.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from bench import arguments, markdown, write

NUM_STAGES = 4
GOAL = 0.15
SLOW_BPS = 20e6


def main() -> None:
    parser = arguments("real_network", __doc__ or "")
    parser.add_argument("--rates", default="100e6,10e6")
    parser.add_argument("--arms", default="fp32,directq,acsgd,acsgd+zstd")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--slow-steps", type=int, default=6, help="of fp32 below 20 Mbps")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()

    from netsim.units import show_bandwidth
    from tests.cluster.rig import GOODPUT, Rig
    from tests.cluster.service import COLD_STEPS, Service

    codecs = args.arms.split(",")
    found = []
    with Rig(NUM_STAGES) as rig:
        rig.start_ray()
        service = Service(rig, NUM_STAGES)
        print(f"one stage on each of {', '.join(service.placed['nodes'])}", flush=True)
        for rate_bps in map(float, args.rates.split(",")):
            turns: dict[str, list[dict[str, Any]]] = {codec: [] for codec in codecs}
            for _ in range(args.rounds):
                for codec in codecs:
                    slow = codec == "fp32" and rate_bps < SLOW_BPS
                    settings = {
                        "codec.name": codec,
                        "steps": args.slow_steps if slow else args.steps,
                        "data.num_samples": 64 * COLD_STEPS,
                    }
                    for kernel in (True, False):
                        arm = service.train(settings, rate_bps=rate_bps, kernel=kernel)
                        turns[codec].append(arm)
                        print(
                            f"{show_bandwidth(rate_bps):>8} {codec:10} "
                            f"{'kernel  ' if kernel else 'emulated'} {arm['warm_step_s']:.3f} s, "
                            f"predicted {arm['predicted_step_s']:.3f} s",
                            flush=True,
                        )
            arms = [summarize(codec, turns[codec]) for codec in codecs]
            for arm in arms:
                for way in ("kernel", "emulated", "predicted"):
                    arm[f"{way}_speedup"] = arms[0][f"{way}_s"] / arm[f"{way}_s"]
            found.append({"rate_bps": rate_bps, "goodput_bps": GOODPUT * rate_bps, "arms": arms})
        service.close()
    rows = [
        [
            show_bandwidth(entry["rate_bps"]),
            arm["name"],
            f"{arm['kernel_s']:.3f} s",
            f"{arm['emulated_s']:.3f} s",
            f"{100 * arm['kernel_to_emulated']:+.1f} %",
            f"{arm['predicted_s']:.3f} s",
            f"{100 * arm['kernel_to_predicted']:+.1f} %",
            f"{arm['kernel_speedup']:.2f}x",
            f"{arm['emulated_speedup']:.2f}x",
        ]
        for entry in found
        for arm in entry["arms"]
    ]
    header = ["link", "arm", "kernel's links", "emulated", "off", "simulator", "off"]
    print("\n" + markdown([*header, "faster step, kernel", "emulated"], rows))
    errors = [
        abs(arm[name])
        for entry in found
        for arm in entry["arms"]
        for name in ("kernel_to_emulated", "kernel_to_predicted")
    ]
    print(f"\nworst off by {100 * max(errors):.1f} %, the goal is {100 * GOAL:.0f} %")
    write(args.out, {"goal": GOAL, "worst": max(errors), "rates": found})


def summarize(codec: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of an arm's rounds, and how far the kernel's links are from the other two."""
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
    arm["kernel_to_emulated"] = (arm["kernel_s"] - arm["emulated_s"]) / arm["kernel_s"]
    arm["kernel_to_predicted"] = (arm["kernel_s"] - arm["predicted_s"]) / arm["kernel_s"]
    return arm


if __name__ == "__main__":
    main()
