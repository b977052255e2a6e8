"""End-to-end compression: activations, their gradients and replica traffic, all in few bits.

Two replicas of two stages. The script sees how long the busiest stage computes in a step and what
the busiest uplink carries, and takes the bandwidth at which uncompressed traffic takes 8 times the
compute *of that very arm*: stages that wait for the network leave their cores to others and compute
faster, so it tries again until the ratio holds. There it trains uncompressed, with compressed
activations only, and end to end (AC-SGD and quantized-adam): same seed, order, batches and
optimizer (a frozen variance learns faster than AdamW in a short run, which is no merit of bits;
all-reduce with AdamW is the last arm). An arm trains on until it has reached the uncompressed run's
final loss, the mean of its last epoch. `--runs 3` does all of it three times and shows the medians.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from bench import arguments, markdown, write

RATIO, TOLERANCE, NUM_TRIES = 8.0, 0.04, 5
GOAL_SOONER, GOAL_GAP = 4.9, 0.02
COMPUTE = ("load", "forward", "backward", "update")

SHAPE: dict[str, Any] = {
    "compare": [],
    "model.name": "gpt-nano",
    "pipeline.stages": 2,
    "pipeline.micro_batches": 8,
    "pipeline.micro_batch_size": 8,
    "sync.replicas": 2,
}


def arms(args: Any) -> dict[str, dict[str, Any]]:
    """What is compared: one optimizer in all arms but the last, so that bits alone differ."""
    adam = {"sync.name": "quantized-adam", "sync.warmup": args.warmup, "sync.codec": "fp32"}
    coded = {"codec.name": args.codec, "codec.fw_bits": args.fw_bits, "codec.bw_bits": args.bw_bits}
    few = {"sync.codec": "directq", "sync.bits": args.sync_bits}
    return {
        "uncompressed": {"codec.name": "fp32", **adam},
        "activations only": {**coded, **adam},
        "end to end": {**coded, **adam, **few},
        "uncompressed, all-reduce and AdamW": {"codec.name": "fp32", "sync.name": "allreduce"},
    }


def train(actors: Any, settings: dict[str, Any], *, target: float | None = None) -> dict[str, Any]:
    """One arm; its entry of results.json, and what its stages computed and sent."""
    from ray_pipe.arms import time_to_target
    from ray_pipe.config import RunConfig
    from ray_pipe.driver import train_on
    from ray_pipe.metrics import ArmMeter
    from ray_pipe.plans import arms_of
    from ray_pipe.replicas import ReplicaPipeline
    from ray_pipe.trained import Trained
    from ray_pipe.workload import gpt_workload

    config = RunConfig.from_dict({**SHAPE, **settings})
    config.validate()
    arm = arms_of(config, gpt_workload(config))[0]
    pipeline = ReplicaPipeline(actors, arm, epoch_s=time.time())
    one = Trained(arm=arm, prediction=None, meter=ArmMeter(arm.name))
    rows = []
    for records in pipeline.train():
        one.meter.add(records)
        rows.append(list(records))
    summary = one.summary()
    if target is not None and not time_to_target(
        summary.losses, target=target, window=summary.final_window
    ):
        train_on(pipeline, one, target)
    stages = range(len(rows[0]))
    compute_s = [
        median(sum(row[s].seconds.get(phase, 0.0) for phase in COMPUTE) for row in rows[1:])
        for s in stages
    ]
    sent = [sum(n for kinds in rows[-1][s].sent.values() for n in kinds.values()) for s in stages]
    return {
        **one.summary().as_dict(),
        "compute_s": max(compute_s),
        "uplink_nbytes": max(sent),
        "losses": one.summary().losses,
    }


def find_bandwidth(actors: Any, settings: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Where the uncompressed arm sends `RATIO` times as long as it computes, and what it did."""
    bps: Any = "unlimited"
    for _ in range(NUM_TRIES):
        seen = train(actors, {**settings, "network.bandwidth_bps": bps})
        ratio = ratio_of(seen, bps) if bps != "unlimited" else 0.0
        print(
            f"at {bps} bit/s: compute {seen['compute_s']:.3f} s a step, "
            f"{seen['uplink_nbytes'] / 1e6:.2f} MB on the busiest uplink, ratio {ratio:.2f}",
            flush=True,
        )
        if abs(ratio / RATIO - 1) < TOLERANCE:
            break
        bps = round(8 * seen["uplink_nbytes"] / (RATIO * seen["compute_s"]), -4)
    return float(bps), seen


def ratio_of(arm: dict[str, Any], bps: float) -> float:
    """How many times as long as it computes an arm sends."""
    return float(8 * arm["uplink_nbytes"] / (bps * arm["compute_s"]))


def main() -> None:
    parser = arguments("end_to_end", __doc__ or "")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--codec", default="acsgd")
    parser.add_argument("--fw-bits", type=int, default=3)
    parser.add_argument("--bw-bits", type=int, default=4)
    parser.add_argument("--sync-bits", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--runs", type=int, default=1, help="of all arms; medians are shown")
    parser.add_argument("--bandwidth-bps", type=float, help="instead of finding it")
    parser.add_argument("--only", default="", help="some arms besides the first, with commas")
    args = parser.parse_args()

    from netsim.units import show_bandwidth
    from ray_pipe.arms import time_to_target
    from ray_pipe.cluster import connect
    from ray_pipe.replica_actors import ReplicaActors

    chosen = {
        name: own
        for name, own in arms(args).items()
        if not args.only or name == "uncompressed" or name in args.only.split(",")
    }
    all_runs: list[dict[str, dict[str, Any]]] = []
    with connect(None), ReplicaActors(2, 2, label="end-to-end") as actors:
        base: dict[str, Any] = {"data.num_samples": args.samples, "epochs": args.epochs}
        short = {**base, "epochs": None, "steps": args.warmup + 4, **chosen["uncompressed"]}
        if args.bandwidth_bps:
            bps = args.bandwidth_bps
        else:
            bps, _ = find_bandwidth(actors, short)
        print(f"bandwidth {show_bandwidth(bps)}", flush=True)
        for run in range(args.runs):
            found: dict[str, dict[str, Any]] = {}
            for name, own in chosen.items():
                target = found["uncompressed"]["final_loss"] if found else None
                settings = {**base, **own, "network.bandwidth_bps": bps}
                arm = found[name] = train(actors, settings, target=target)
                plain = found["uncompressed"]
                arm["time_to_target_s"] = time_to_target(
                    arm["losses"], target=plain["final_loss"], window=plain["final_window"]
                )
                own_s, base_s = arm["time_to_target_s"], plain["time_to_target_s"]
                arm["sooner"] = base_s / own_s if own_s else None
                arm["gap"] = arm["final_loss"] - plain["final_loss"]
                arm["ratio"] = ratio_of(arm, bps)
                print(
                    f"run {run} {name:17} step {arm['step_s']:.3f} s, "
                    f"loss {arm['final_loss']:.4f}, reached after {arm['time_to_target_s']} s, "
                    f"traffic {arm['ratio']:.1f} times the compute, bytes {arm['bytes_total']}",
                    flush=True,
                )
            all_runs.append(found)
    # The run whose end-to-end arm is the median one: all its numbers belong together.
    judged = "end to end" if "end to end" in chosen else "uncompressed"
    ranked = sorted(all_runs, key=lambda one: one[judged]["sooner"] or 0.0)
    found = ranked[(len(ranked) - 1) // 2]
    plain, rows = found["uncompressed"], []
    for name, arm in found.items():
        kinds = [
            f"{plain['bytes_total'][kind] / max(1, arm['bytes_total'][kind]):.1f}x"
            for kind in ("activation", "gradient", "replica")
        ]
        rows.append(
            [
                name,
                f"{arm['step_s']:.2f} s",
                f"{plain['step_s'] / arm['step_s']:.2f}x",
                "never" if arm["sooner"] is None else f"{arm['sooner']:.2f}x",
                f"{arm['gap']:+.4f}",
                *kinds,
            ]
        )
    head = ["arm", "step", "faster step", "sooner at its final loss", "loss gap"]
    head += ["fewer bytes: activations", "their gradients", "replicas"]
    print("\n" + markdown(head, rows))
    whole = found.get("end to end")
    if whole is not None:
        met = (whole["sooner"] or 0) >= GOAL_SOONER and whole["gap"] < GOAL_GAP
        print(f"goal (4.9x sooner, gap below 0.02 nats): {'met' if met else 'not met'}")
    write(
        args.out,
        {"ratio": plain["ratio"], "bandwidth_bps": bps, "compute_s": plain["compute_s"],
         "uplink_nbytes": plain["uplink_nbytes"], "arms": found,
         "runs": [{n: [a["sooner"], a["gap"], a["ratio"]] for n, a in one.items()}
                  for one in all_runs],
         "settings": {key: str(value) for key, value in vars(args).items() if key != "out"}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
