"""Time per iteration of every sync strategy, homogeneous and with stragglers, in virtual time.

    python benchmarks/sync_strategies.py                      16 replicas, the table and the JSON
    python benchmarks/sync_strategies.py --scale 125,250,500,1000   cost of simulating Ripples

Costs as in the spec's reference: compute U(1, 1.1), the model takes 0.1 on an uplink, latency
0.02. The classes are those that run in earnest; only compute and tensors are priced. With
`--loss` a small network is trained as well and the loss of the mean model is shown.
"""

from __future__ import annotations

import math
import time
from typing import Any

from bench import arguments, markdown, write

from netsim.clock import run_virtual
from stages.sync.fleet import Fleet
from stages.sync.strategies import SyncSpec
from stages.sync.trial import Costs, make_fleet, run_trial, without_collector

COSTS = Costs()

STRATEGIES = {
    "all-reduce, ring": SyncSpec(name="allreduce"),
    "all-reduce, direct": SyncSpec(name="allreduce", route="direct"),
    "local, 8 steps": SyncSpec(name="local", local_steps=8, outer_lr=1.0, outer_momentum=0.0),
    "ripples, static (ruler)": SyncSpec(name="ripples", groups="ruler"),
    "ripples, groups of 4": SyncSpec(name="ripples", slowdown_threshold=0),
    "ripples, groups of 4, filter": SyncSpec(name="ripples"),
    "ripples, pairs, filter": SyncSpec(name="ripples", group_size=2),
    "ad-psgd": SyncSpec(name="ad-psgd"),
    "hop": SyncSpec(name="hop"),
    "hop, backup 1": SyncSpec(name="hop", backup_workers=1),
    "hop, stale 5": SyncSpec(name="hop", staleness=5),
    "hop, backup 1, skip 8": SyncSpec(name="hop", backup_workers=1, skip=8, max_gap=8),
}


def measure(sync: SyncSpec, num: int, slow: str, seconds: float, *, seed: int, loss: bool) -> Any:
    """One run; time per iteration is that of the median replica."""
    trial = run_trial(sync, num_replicas=num, slow=slow, seconds=seconds, seed=seed, train=loss)
    return {
        "iteration_s": trial.iteration_s,
        "slowest_iteration_s": trial.slowest_iteration_s,
        "largest_gap": trial.largest_gap,
        "skipped": trial.num_skipped,
        "waited_s": trial.waited_s,
        "mb_per_iteration": trial.nbytes_per_iteration / 1e6,
        "control_share": trial.control_share,
        "generator": trial.groups,
        "loss": trial.final_loss,
    }


def table(args: Any) -> dict[str, Any]:
    cases = {"homogeneous": "", f"random 6x, p=1/{args.replicas}": f"random:6x@{1 / args.replicas}"}
    cases |= {f"one {f}x": f"2:{f}x" for f in (2, 4, 6)}
    found: dict[str, dict[str, Any]] = {}
    for name, sync in STRATEGIES.items():
        found[name] = {
            case: measure(sync, args.replicas, slow, args.seconds, seed=args.seed, loss=args.loss)
            for case, slow in cases.items()
        }
        print(name, {case: round(row["iteration_s"], 2) for case, row in found[name].items()})
    base = found["all-reduce, ring"]
    rows = []
    for name, row in found.items():
        four = row["one 4x"]
        waits = sorted(four["waited_s"].items(), key=lambda item: -item[1])[:2]
        counts = four["generator"]
        rows.append(
            [
                name,
                *(f"{row[case]['iteration_s']:.2f}" for case in cases),
                f"{base['one 4x']['iteration_s'] / four['iteration_s']:.2f}x",
                str(four["largest_gap"]),
                f"{four['mb_per_iteration']:.2f}",
                ", ".join(f"{cause} {100 * s / args.seconds:.0f} %" for cause, s in waits),
                f"{counts.get('cancelled', 0):.0f}" if counts else "-",
                *([f"{four['loss']:.2g}"] if args.loss else []),
            ]
        )
    head = ["strategy", *cases, "4x: over ring", "gap", "MB/iteration", "waits", "cancelled"]
    print("\n" + markdown(head + (["loss"] if args.loss else []), rows))
    return {"replicas": args.replicas, "seconds": args.seconds, "strategies": found}


def scale(sizes: list[int], num_steps: int, num_rounds: int) -> list[dict[str, float]]:
    """CPU seconds to simulate so many iterations of Ripples; of each size the cheapest round, as
    whoever else is on the machine makes the same work dearer, by caches and clock."""
    best: dict[int, dict[str, float]] = {}
    for _ in range(num_rounds):
        for num in sizes:
            row = scale_one(num, num_steps)
            print({key: round(value, 2) for key, value in row.items()}, flush=True)
            if num not in best or row["cpu_s"] < best[num]["cpu_s"]:
                best[num] = row
    curve = [best[num] for num in sizes]
    first, last = curve[0], curve[-1]
    times, more = last["cpu_s"] / first["cpu_s"], last["replicas"] / first["replicas"]
    fair = more * math.log(last["replicas"]) / math.log(first["replicas"])
    print(f"{more:g} times the replicas cost {times:.1f} times the CPU; n log n is {fair:.1f}")
    return curve


def scale_one(num: int, num_steps: int) -> dict[str, float]:
    """One size, once."""

    async def main() -> Fleet:
        sync = SyncSpec(name="ripples")
        fleet = make_fleet(sync, num, COSTS, COSTS.compute_time(num, "2:4x", 0))
        await fleet.run(num_steps)
        return fleet

    with without_collector():
        start, cpu = time.perf_counter(), time.process_time()
        run_virtual(main())
    row = {
        "replicas": num,
        "iterations": num_steps,
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
    }
    row["cpu_us_per_iteration"] = 1e6 * row["cpu_s"] / num / num_steps
    return row


def main() -> None:
    parser = arguments("sync_strategies", __doc__ or "")
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--scale", default="", help="numbers of replicas, joined by commas")
    parser.add_argument("--steps", type=int, default=100, help="iterations of --scale")
    parser.add_argument("--rounds", type=int, default=3, help="of --scale; the cheapest counts")
    args = parser.parse_args()
    if args.scale:
        sizes = [int(n) for n in args.scale.split(",")]
        curve = scale(sizes, args.steps, args.rounds)
        result: Any = {"scale": curve, "rounds": args.rounds}
        args.out = args.out.with_name("sync_scale.json") if args.out.name else args.out
    else:
        result = table(args)
    write(args.out, result)


if __name__ == "__main__":
    main()
