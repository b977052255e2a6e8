"""Real links against our emulation and the simulator: the default job on four hosts. Needs root.

Four hosts in namespaces on this machine, one stage on each, joined by links that the kernel limits
(`tc tbf`, both directions). Each arm is trained over those links unshaped, then by the same actors
over links that only our emulation limits, to the same goodput (99.3 % of the rate: TCP's payload
in large packets). Times are medians of steps after all samples have been seen once; rounds take
turns, because a shared machine is not equally fast all the time. Deviations are relative to the
emulation, and to the simulator. Ends with status 1 if a goal was missed
(`tests/cluster/real_links.py` has them).
"""

from __future__ import annotations

import sys

from bench import arguments, markdown, write


def main() -> int:
    parser = arguments("real_network", __doc__ or "")
    parser.add_argument("--rates", default="100e6,10e6")
    parser.add_argument("--arms", default="fp32,directq,acsgd,acsgd+zstd")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--slow-steps", type=int, default=6, help="of fp32 below 20 Mbps")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()

    from netsim.units import show_bandwidth
    from tests.cluster.real_links import GOAL, measure, misses, worst_of

    found = measure(
        rates_bps=[float(rate) for rate in args.rates.split(",")],
        codecs=args.arms.split(","),
        steps=args.steps,
        slow_steps=args.slow_steps,
        rounds=args.rounds,
        say=lambda text: print(text, flush=True),
    )
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
    missed = misses(found)
    print(f"\nworst off by {100 * worst_of(found):.1f} %, the goal is {100 * GOAL:.0f} %")
    for text in missed:
        print(f"missed: {text}")
    write(args.out, {"goal": GOAL, "worst": worst_of(found), "missed": missed, "rates": found})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
