"""How much sooner AC-SGD reaches fp32's final loss, by bandwidth, first visits included.

Finds the bandwidth at which this machine's fp32 arm has the paper's ratio of link time to compute
time (4.9: GPT2-XL on V100s at 100 Mbps), then trains fp32, DirectQ and AC-SGD there and at fixed
rates: same seed, same order, same batches. Beside each figure stands what physics allows.

A shared machine is not equally fast all the time, so the arms take turns: with `--rounds 2` all of
them are trained, then all once more, and an arm's step time and the time it took to fp32's loss
are the medians of its rounds. Losses are the same to the bit in each round.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from bench import arguments, load, markdown, stage_actors, stamp, train_arm, write

PAPER_RATIO = 4.9
SHAPE = {"pipeline.micro_batches": 16, "pipeline.micro_batch_size": 32, "data.num_samples": 1024}
"""Many micro-batches, so that filling and draining the pipeline weigh little; a stage computes some
90 ms on each, forth and back: a message through Ray costs a few."""

SLOW_SHAPE = {"pipeline.micro_batches": 8, "pipeline.micro_batch_size": 16, "data.num_samples": 256}
"""For links on which fp32 would take hours otherwise."""

SLOW_BPS = 20e6
FAST_BPS = 100e6
PROBES = 3


def epochs_at(bps: float) -> int:
    """Of two steps each: long enough for a loss to aim at; fast links are there for their times."""
    return 4 if bps >= FAST_BPS else 12 if bps < SLOW_BPS else 8


def main() -> None:
    parser = arguments("speed", __doc__ or "")
    parser.add_argument("--epochs", type=int, help="by default 12, 8 or 4: fewer on fast links")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rates", default="paper,10e6,100e6,1e9")
    parser.add_argument("--arms", default="fp32,directq,acsgd")
    parser.add_argument("--keep", action="store_true", help="keep other rates of an earlier run")
    args = parser.parse_args()

    from netsim.units import show_bandwidth

    found = []
    with stage_actors(4) as actors:
        probe: dict[str, Any] = {
            **SHAPE,
            "codec.name": "fp32",
            "network.bandwidth_bps": 100e6,
            "steps": 2,
        }
        ratio = median(train_arm(actors, probe)["link_to_compute"] for _ in range(PROBES))
        paper_bps = round(100e6 * ratio / PAPER_RATIO, -5)
        print(
            f"the paper's ratio of {PAPER_RATIO} is at {show_bandwidth(paper_bps)} here", flush=True
        )
        for rate in args.rates.split(","):
            bps = paper_bps if rate == "paper" else float(rate)
            settings: dict[str, Any] = {**(SLOW_SHAPE if bps < SLOW_BPS else SHAPE)}
            settings["epochs"] = args.epochs or epochs_at(bps)
            settings["network.bandwidth_bps"] = bps
            rounds = [
                train_round(actors, args.arms.split(","), settings) for _ in range(args.rounds)
            ]
            arms = [middle(list(turns)) for turns in zip(*rounds, strict=True)]
            compare(arms)
            found.append(
                {
                    "bandwidth_bps": bps,
                    "is_paper_ratio": rate == "paper",
                    **stamp(),
                    "paper_bandwidth_bps": paper_bps,
                    "settings": {**settings, "rounds": args.rounds},
                    "arms": arms,
                }
            )
    if args.keep and args.out.exists():
        found = keep(load(args.out), found)
    rows = []
    for entry in found:
        plain = entry["arms"][0]
        limit = plain["step_s"] / plain["compute_step_s"]
        for arm in entry["arms"][1:]:
            sooner = arm["time_to_target_speedup"]
            rows.append(
                [
                    show_bandwidth(entry["bandwidth_bps"]),
                    f"{plain['link_to_compute']:.1f}",
                    arm["name"],
                    f"{plain['step_s']:.2f} s",
                    f"{arm['step_s']:.2f} s",
                    f"{arm['speedup']:.2f}x",
                    "never" if sooner is None else f"{sooner:.2f}x",
                    f"{limit:.2f}x",
                    f"{100 * arm['compute_efficiency']:.0f} %",
                    f"{arm['final_loss'] - plain['final_loss']:+.4f}",
                ]
            )
    header = ["link", "link/compute", "arm", "fp32 step", "own step", "faster step"]
    header += ["sooner at fp32's loss", "limit", "of compute alone", "loss gap"]
    print("\n" + markdown(header, rows))
    write(args.out, {"paper_ratio": PAPER_RATIO, "rates": found}, stamped=False)


STAMPS = ("commit", "environment", "load_at_start", "paper_bandwidth_bps", "settings")


def keep(older: Mapping[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rates with those of an earlier run that they do not repeat.

    Each rate says by which code, on which machine and with which settings it was measured. In files
    from before that, the header says it of all rates.
    """

    def place(entry: Mapping[str, Any]) -> Any:
        return entry["is_paper_ratio"] or entry["bandwidth_bps"]

    header = {name: older[name] for name in STAMPS if name in older}
    done = {place(entry) for entry in found}
    kept = [{**header, **entry} for entry in older["rates"] if place(entry) not in done]
    return sorted([*found, *kept], key=lambda e: (not e["is_paper_ratio"], e["bandwidth_bps"]))


def train_round(actors: Any, codecs: list[str], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Every arm once, fp32 first: its final loss is the target of the others."""
    from netsim.units import show_bandwidth
    from ray_pipe.arms import time_to_target

    arms: list[dict[str, Any]] = []
    for codec in codecs:
        target = arms[0]["final_loss"] if arms else None
        arm = train_arm(actors, {**settings, "codec.name": codec}, target=target)
        arms.append(arm)
        plain = arms[0]
        arm["time_to_target_s"] = time_to_target(
            arm["losses"], target=plain["final_loss"], window=plain["final_window"]
        )
        print(
            f"{show_bandwidth(settings['network.bandwidth_bps']):>10}  {codec:10} "
            f"step {arm['step_s']:.3f} s (predicted {arm['predicted_step_s']:.3f}, compute alone "
            f"{arm['compute_step_s']:.3f}, links alone {arm['link_step_s']:.3f}) "
            f"loss {arm['final_loss']:.4f}",
            flush=True,
        )
    return arms


MIDDLE = ("step_s", "predicted_step_s", "compute_step_s", "link_to_compute", "time_to_target_s")


def middle(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """One arm out of its rounds: the medians, and every round's figures beside them."""
    arm = dict(turns[0])
    for name in MIDDLE:
        values = [turn[name] for turn in turns]
        arm[f"{name}_of_rounds"] = values
        arm[name] = None if None in values else median(values)
    return arm


def compare(arms: list[dict[str, Any]]) -> None:
    """Add what an arm gains over fp32, and how near it is to what compute alone allows.

    That is measured before each arm and the same for all of them: the median is less noisy.
    """
    plain = arms[0]
    compute_s = median(arm["compute_step_s"] for arm in arms)
    for arm in arms:
        own, fp32_s = arm["time_to_target_s"], plain["time_to_target_s"]
        arm["time_to_target_speedup"] = fp32_s / own if own else None
        arm["speedup"] = plain["step_s"] / arm["step_s"]
        arm["compute_step_s"] = compute_s
        arm["compute_efficiency"] = compute_s / arm["step_s"]
        arm["codec_share"] = codec_share(arm)


def codec_share(arm: Mapping[str, Any]) -> float:
    """CPU time of encoding and decoding over all CPU time that the stages used in the arm's steps,
    both measured while it trained."""
    cpu = arm["cpu_per_step_s"]
    return float((cpu.get("encode", 0.0) + cpu.get("decode", 0.0)) / cpu["process"])


if __name__ == "__main__":
    main()
