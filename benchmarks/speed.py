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
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench import arguments, load, markdown, stage_actors, stamp, train_arm, write

PAPER_RATIO = 4.9
LARGE = {"pipeline.micro_batches": 16, "pipeline.micro_batch_size": 32, "data.num_samples": 1024}
"""Many micro-batches, so that filling and draining the pipeline weigh little; a stage computes some
90 ms on each, forth and back: a message through Ray costs a few."""

SLOW = {"pipeline.micro_batches": 8, "pipeline.micro_batch_size": 16, "data.num_samples": 256}
"""For links on which fp32 would take hours otherwise."""

PROBES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rate of the table, and the job that is trained at it."""

    bps: float | None
    """None: where this machine has the paper's ratio."""

    job: Mapping[str, Any]
    epochs: int
    what: str
    """The job in words."""

    arms: str = "fp32,directq,acsgd"
    """Codecs, with bits where they are not 4 forth and 4 back: acsgd:2/4."""

    schedule: str = "gpipe"
    """Of all arms."""


ROWS = {
    "paper": Row(
        bps=None,
        job=LARGE,
        epochs=8,
        what="16 micro-batches of 32",
        arms="fp32,directq,acsgd,acsgd:2/4",
        schedule="eager-1f1b",
    ),
    "10Mbps": Row(bps=10e6, job=SLOW, epochs=12, what="8 micro-batches of 16"),
    "100Mbps": Row(bps=100e6, job=LARGE, epochs=4, what="16 micro-batches of 32"),
    "1Gbps": Row(bps=1e9, job=LARGE, epochs=4, what="16 micro-batches of 32"),
}
"""Fast links are there for their times: fewer epochs."""


def main() -> None:
    parser = arguments("speed", __doc__ or "")
    parser.add_argument("--epochs", type=int, help="instead of the rows' own")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rows", default=",".join(ROWS), help="by default all")
    parser.add_argument(
        "--arms", help="instead of the rows' own; acsgd:2/4 has 2 bits forth, 4 back"
    )
    parser.add_argument("--schedule", help="of all arms, instead of the rows' own")
    parser.add_argument("--keep", action="store_true", help="keep other rows of an earlier run")
    args = parser.parse_args()
    wanted = args.rows.split(",")
    if unknown := [name for name in wanted if name not in ROWS]:
        parser.error(f"--rows {','.join(unknown)}: there are {', '.join(ROWS)}")

    from netsim.units import show_bandwidth

    found = []
    with stage_actors(4) as actors:
        for name in wanted:
            row = ROWS[name]
            bps = row.bps or bandwidth_of_the_paper(actors, row.job)
            settings = {**row.job, "epochs": args.epochs or row.epochs}
            settings["network.bandwidth_bps"] = bps
            settings["pipeline.schedule"] = args.schedule or row.schedule
            what = f"{row.what}, {settings['pipeline.schedule']}"
            print(f"{name}: {what} at {show_bandwidth(bps)}", flush=True)
            rounds = [
                train_round(actors, (args.arms or row.arms).split(","), settings)
                for _ in range(args.rounds)
            ]
            arms = [middle(list(turns)) for turns in zip(*rounds, strict=True)]
            compare(arms)
            found.append(
                {
                    "row": name,
                    "what": what,
                    "bandwidth_bps": bps,
                    "is_paper_ratio": row.bps is None,
                    **stamp(),
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


def bandwidth_of_the_paper(actors: Any, job: Mapping[str, Any]) -> float:
    """At which fp32's time on the wire is the paper's multiple of its compute, for this job.

    The middle one of some probes counts, as in the table: the fastest would give links that are too
    fast for what the machine then does, and a ratio below the paper's.
    """
    probe = {**job, "codec.name": "fp32", "network.bandwidth_bps": 100e6, "steps": 2}
    ratio = median(train_arm(actors, probe)["link_to_compute"] for _ in range(PROBES))
    return round(100e6 * ratio / PAPER_RATIO, -5)


def keep(older: Mapping[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rows with those of an earlier run that they do not repeat, in the table's order.

    Each row says by which code, on which machine and with which settings it was measured.
    """
    done = {entry["row"] for entry in found}
    kept = [entry for entry in older["rates"] if entry["row"] not in done]
    return sorted([*found, *kept], key=lambda entry: list(ROWS).index(entry["row"]))


def train_round(actors: Any, codecs: list[str], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Every arm once, fp32 first: its final loss is the target of the others."""
    from netsim.units import show_bandwidth
    from ray_pipe.arms import time_to_target

    arms: list[dict[str, Any]] = []
    for codec in codecs:
        target = arms[0]["final_loss"] if arms else None
        name, _, bits = codec.partition(":")
        own = (
            dict(zip(("codec.fw_bits", "codec.bw_bits"), map(int, bits.split("/")))) if bits else {}
        )
        arm = train_arm(actors, {**settings, "codec.name": name, **own}, target=target)
        arm["name"] = f"{name} fw{bits.replace('/', '/bw')}" if bits else name
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
        arm["link_to_compute"] *= arm["compute_step_s"] / compute_s
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
