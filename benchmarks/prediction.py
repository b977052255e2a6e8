"""Measured step time against the simulator's prediction, over links, codecs, stages, schedules."""

from __future__ import annotations

from itertools import pairwise, product
from statistics import median

from bench import PHYSICS, arguments, markdown, physics, stage_actors, train_arm, write


def main() -> None:
    parser = arguments("prediction", __doc__ or "")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()

    from netsim.units import show_bandwidth

    cases = []
    with stage_actors(4) as actors:
        for bps, codec, stages, schedule in product(
            (10e6, 100e6, 1e9), ("fp32", "acsgd"), (2, 4), ("gpipe", "1f1b")
        ):
            # Samples of two batches, so that all but the first two steps of AC-SGD are warm.
            settings = {
                "codec.name": codec,
                "network.bandwidth_bps": bps,
                "pipeline.stages": stages,
                "pipeline.schedule": schedule,
                "steps": args.steps if bps > 10e6 or codec != "fp32" else 6,
                "data.num_samples": 128,
            }
            arm = train_arm(actors, settings)
            times = [b[0] - a[0] for a, b in pairwise(arm["losses"][1:])]
            measured = median(times)
            error = (measured - arm["predicted_step_s"]) / measured
            cases.append(
                {
                    **{key: value for key, value in arm.items() if key != "losses"},
                    "bandwidth_bps": bps,
                    "stages": stages,
                    "schedule": schedule,
                    "measured_step_s": measured,
                    "error": error,
                }
            )
            print(
                f"{show_bandwidth(bps):>8} {codec:6} {stages} stages {schedule:6} "
                f"measured {measured:.3f} s, predicted {arm['predicted_step_s']:.3f} s, "
                f"off by {100 * error:+.1f} %",
                flush=True,
            )
    errors = sorted(abs(case["error"]) for case in cases)
    print(f"\nmedian error {100 * median(errors):.1f} %, worst {100 * errors[-1]:.1f} %\n")
    rows = [
        [
            show_bandwidth(case["bandwidth_bps"]),
            case["name"],
            str(case["stages"]),
            case["schedule"],
            f"{case['measured_step_s']:.3f} s",
            f"{case['predicted_step_s']:.3f} s",
            f"{100 * case['error']:+.1f} %",
            *physics(case),
        ]
        for case in cases
    ]
    header = ["link", "codec", "stages", "schedule", "measured", "predicted", "off", *PHYSICS]
    print(markdown(header, rows))
    write(args.out, {"median_error": median(errors), "worst_error": errors[-1], "cases": cases})


if __name__ == "__main__":
    main()
