"""What the two transports cost: stages pushing to each other against refs through the driver."""

from __future__ import annotations

from bench import PHYSICS, arguments, markdown, physics, stage_actors, train_arm, write


def main() -> None:
    parser = arguments("transports", __doc__ or "")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    from netsim.units import show_bandwidth

    found, rows = [], []
    with stage_actors(4) as actors:
        for bps in (float("inf"), 100e6, 20e6):
            arms = {}
            for transport in ("push", "refs"):
                settings = {
                    "codec.name": "acsgd",
                    "pipeline.transport": transport,
                    "network.bandwidth_bps": bps,
                    "network.latency_s": 0.0 if bps == float("inf") else 0.02,
                    "steps": args.steps,
                    "data.num_samples": 128,
                }
                arms[transport] = train_arm(actors, settings)
            push, refs = arms["push"], arms["refs"]
            assert [loss for *_, loss in push["losses"]] == [loss for *_, loss in refs["losses"]]
            found.append({"bandwidth_bps": bps, **arms})
            rows.append(
                [
                    show_bandwidth(bps) + ("" if bps == float("inf") else ", 20 ms"),
                    f"{push['step_s']:.3f} s",
                    f"{refs['step_s']:.3f} s",
                    f"{refs['step_s'] / push['step_s']:.2f}x",
                    *physics(push),
                    "yes",
                ]
            )
            print(" ".join(rows[-1]), flush=True)
    header = ["link", "push", "refs", "refs/push", *PHYSICS, "same losses to the bit"]
    print("\n" + markdown(header, rows))
    write(args.out, {"links": found})


if __name__ == "__main__":
    main()
