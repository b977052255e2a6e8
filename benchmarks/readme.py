"""Writes the tables of README and docs from benchmarks/results/*.json: no number typed by hand.

python benchmarks/readme.py           # rewrite the tables
python benchmarks/readme.py --check   # fail if they say anything else
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import row_tables
import sync_tables
from bench import RESULTS, load, markdown
from speed import PAPER_RATIO

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # quality_tables reads its types
README = Path(__file__).parent.parent / "README.md"
FIGURE = README.parent / "docs" / "loss_vs_time.png"


def rate(bps: float | None) -> str:
    """A bandwidth as people write it."""
    if bps is None or bps == float("inf"):
        return "unlimited"
    return f"{bps / 1e9:g} Gbps" if bps >= 1e9 else f"{bps / 1e6:.3g} Mbps"


def speed_table() -> str:
    """How much sooner AC-SGD and DirectQ reach fp32's final loss."""
    rows = []
    for entry in load(RESULTS / "speed.json")["rates"]:
        plain, *others = entry["arms"]
        for arm in others:
            sooner = arm["time_to_target_speedup"]
            rows.append(
                [
                    f"{rate(entry['bandwidth_bps'])}, {entry['what']}",
                    f"{plain['link_to_compute']:.1f}",
                    arm["name"].replace("acsgd", "**AC-SGD**").replace("directq", "DirectQ"),
                    f"{plain['step_s']:.2f} s",
                    f"{arm['step_s']:.2f} s",
                    "not reached" if sooner is None else f"**{sooner:.2f}x**",
                    f"{plain['step_s'] / plain['compute_step_s']:.2f}x",
                    f"{100 * arm['compute_efficiency']:.0f} %",
                    f"{arm['final_loss'] - plain['final_loss']:+.4f}",
                    f"{plain['bytes_per_step'] / arm['bytes_per_step']:.1f}x",
                ]
            )
    header = ["link, job", "link / compute", "arm", "fp32 step", "own step"]
    header += [
        "sooner at fp32's final loss",
        "limit",
        "of compute alone",
        "loss gap",
        "fewer bytes",
    ]
    return markdown(header, rows)


def quality_table() -> str:
    """WikiText-2, three seeds."""
    from quality_tables import table

    rows = load(RESULTS / "quality_wikitext.json")["arms"]
    return table(rows)


def pieces_table() -> str:
    """What was aimed at, what came out, and the script that says so."""
    prediction = load(RESULTS / "prediction.json")
    links = load(RESULTS / "link_rate.json")
    peer = load(RESULTS / "peer_pipelining.json")
    kernels = load(RESULTS / "codec_kernels.json")
    transports = load(RESULTS / "transports.json")
    ratios = ", ".join(f"{row['schedule']} {row['ratio']:.2f}x" for row in peer["schedules"])
    refs = ", ".join(
        f"{row['refs']['step_s'] / row['push']['step_s']:.2f}x at {rate(row['bandwidth_bps'])}"
        for row in transports["links"]
    )
    rows = [
        [
            "`python -m ray_pipe.run --bandwidth 100Mbps`, three arms and the report, two cores",
            "at most 90 s",
            f"{load(RESULTS / 'demo_time.json')['wall_s']:.0f} s",
            "demo_time.py",
        ],
        *speed_goals(load(RESULTS / "speed.json")["rates"]),
        [
            "step time against the simulator's prediction, 24 settings",
            "median 10 %, worst 25 %",
            f"median off by {100 * prediction['median_error']:.1f} %, "
            f"worst {100 * prediction['worst_error']:.1f} %",
            "prediction.py",
        ],
        [
            "emulated link speed against the asked rate, 1 Mbps to 1 Gbps",
            "3 %",
            f"worst off by {100 * links['worst_error']:.2f} %",
            "link_rate.py",
        ],
        *cluster_goals(),
        [
            "step time, no shaping, no compression, against torch.distributed.pipelining (gloo)",
            "at most 1.15x",
            ratios,
            "peer_pipelining.py",
        ],
        [
            "native kernels against their torch twins, one thread",
            "at least 8x",
            kernels_line(kernels),
            "codec_kernels.py",
        ],
        [
            "codec's share of the step's CPU time, AC-SGD at 100 Mbps",
            "below 5 %",
            f"{100 * codec_share(load(RESULTS / 'speed.json')):.1f} %",
            "speed.py",
        ],
        ["transport `refs` against `push`, same losses to the bit", "", refs, "transports.py"],
        *row_tables.pieces(),
    ]
    return markdown(["what", "goal", "measured", "benchmarks/"], rows)


def speed_goals(rates: list[dict[str, Any]]) -> list[list[str]]:
    """AC-SGD against fp32 and against compute alone, where the table above has a goal."""
    rows = []
    for entry in rates:
        arms = [arm for arm in entry["arms"] if arm["name"].startswith("acsgd")]
        where = "the paper's ratio" if entry["is_paper_ratio"] else rate(entry["bandwidth_bps"])
        if entry["is_paper_ratio"] or entry["bandwidth_bps"] == 10e6:
            goal = "4.3x" if entry["is_paper_ratio"] else "6x"
            what = f"AC-SGD sooner at fp32's final loss, {where}"
            shown = ", ".join(_sooner(arm) for arm in arms)
            if entry["is_paper_ratio"]:
                shown += _at_just_the_ratio(entry, arms)
            rows.append([what, f"at least {goal}", shown, "speed.py"])
        else:
            shown = f"{100 * arms[0]['compute_efficiency']:.0f} %"
            what = f"AC-SGD's throughput of what compute alone allows, {where}"
            rows.append([what, "at least 85 %", shown, "speed.py"])
    return rows


def _sooner(arm: dict[str, Any]) -> str:
    bits = arm["name"].partition(" ")[2] or "fw4/bw4"
    sooner = arm["time_to_target_speedup"]
    return f"{bits} not reached" if sooner is None else f"{bits} {sooner:.2f}x"


def _at_just_the_ratio(entry: dict[str, Any], arms: list[dict[str, Any]]) -> str:
    """What the arms would gain at the paper's ratio, where the probes did not find it to the digit.

    There fp32 waits for its links and nothing else: its time goes with the ratio. The others wait
    for their cores.
    """
    found = entry["arms"][0]["link_to_compute"]
    gains = [arm["time_to_target_speedup"] for arm in arms]
    shown = ", ".join(f"{gain * PAPER_RATIO / found:.2f}x" for gain in gains if gain is not None)
    return f", at a ratio of {found:.2f}; scaled to {PAPER_RATIO}, not measured: {shown}"


def cluster_goals() -> list[list[str]]:
    """Real links of the kernel's, and how long a stage's death costs."""
    network = load(RESULTS / "real_network.json")
    slow = min(network["rates"], key=lambda entry: float(entry["rate_bps"]))
    acsgd = next(arm for arm in slow["arms"] if arm["name"] == "acsgd")
    worst = max(
        abs(arm["kernel_s"] / arm[reference] - 1)
        for entry in network["rates"]
        for arm in entry["arms"]
        for reference in ("emulated_s", "predicted_s")
    )
    recovery = load(RESULTS / "recovery.json")["summary"]
    warm, cold = recovery["warm"], recovery["cold"]
    return [
        [
            "four hosts on kernel-limited links against emulation and simulator",
            "15 %, 6x at 10 Mbps",
            f"worst off by {100 * worst:.1f} %, AC-SGD's steps at "
            f"{rate(slow['rate_bps'])} {acsgd['kernel_speedup']:.2f}x as fast",
            "real_network.py",
        ],
        [
            "a lost stage replaced, from notice to work: by its warm spare; by a new process",
            "below 5 s",
            f"median {warm['median_s']:.2f} s, worst {warm['worst_s']:.1f} s of "
            f"{warm['recoveries']}; {cold['median_s']:.1f} s, {cold['worst_s']:.1f} s of "
            f"{cold['recoveries']}",
            "`make test-chaos`",
        ],
    ]


def codec_share(speed: dict[str, Any]) -> float:
    """Encoding and decoding over all CPU time of a step."""
    entry = next(entry for entry in speed["rates"] if entry["bandwidth_bps"] == 100e6)
    arm = next(arm for arm in entry["arms"] if arm["name"] == "acsgd")
    return float(arm["codec_share"])


def kernels_line(kernels: dict[str, Any]) -> str:
    """Ranges of ratios: of encoders, of decoders, and of those that memory keeps below the goal."""
    rows, target = kernels["rows"], kernels["target_ratio"]
    encoders = [row for row in rows if row["limit"] is None]
    reached = [row for row in rows if row["limit"] and row["ratio_to_twin"] >= target]
    missed = [row for row in rows if row["limit"] and row["ratio_to_twin"] < target]

    def span(group: list[dict[str, Any]], key: str = "ratio_to_twin") -> str:
        found = [row[key] for row in group]
        return f"{min(found):.1f}x to {max(found):.1f}x"

    line = f"encode {span(encoders)}, decode {span(reached)}"
    if missed:
        line += (
            f"; {len(missed)} of {len(rows)} below the goal, {span(missed)}: nothing but their "
            f"reads and writes would be {span(missed, 'limit')}"
        )
    return line


def draw_figure() -> None:
    """Loss against time at the paper's ratio of link to compute."""
    from ray_pipe.report_figure import write_loss_figure

    rates = load(RESULTS / "speed.json")["rates"]
    entry = next(entry for entry in rates if entry["row"] == "paper")
    arms = [arm for arm in entry["arms"] if arm["name"] in ("fp32", "directq", "acsgd")]
    write_loss_figure(
        FIGURE, arms, title=f"gpt-tiny in 4 stages over {rate(entry['bandwidth_bps'])} links"
    )


EMBEDDING_ARMS = {
    "torch": "plain torch, one process",
    "sync": "**ours, synchronous**, 2 shards",
    "tau8": "**ours, rows 8 steps late**",
    "tau256": "control: rows 256 steps late",
    "dense64": "control: rows and dense network 64 steps late",
    "pruned": "**pruned by 70 % of real bytes**",
    "uniform": "control: a smaller dimension, no fewer bytes",
    "random": "control: as many chunks, drawn by lot",
}


def embeddings_table() -> str:
    """AUC of late and pruned rows, three seeds, with the controls."""
    found = load(RESULTS / "embedding_quality.json")
    rows = []
    titles = {
        "adult": "Adult",
        "movielens": "MovieLens-100k",
        "books": "Book-Crossing",
        "longtail": "planted, long tail",
    }
    for which, title in titles.items():
        arms = found.get(which, {}).get("arms", {})
        base = arms.get("sync")
        for name, shown in EMBEDDING_ARMS.items():
            if name not in arms or base is None:
                continue
            arm = arms[name]
            seeds = arm["seeds"] if "pruned" in arms else []  # the others have few rows
            resident = [seed["resident_bytes"] for seed in seeds if "resident_bytes" in seed]
            rows.append(
                [
                    title,
                    shown,
                    f"{arm['auc']:.4f} ± {arm['auc_sd']:.4f}",
                    f"{100 * (arm['auc'] - base['auc']):+.2f}",
                    f"{sum(resident) / len(resident) / 1e6:.0f} MB" if resident else "",
                ]
            )
    return markdown(["set", "arm", "AUC, 3 seeds", "points", "resident"], rows)


def hybrid_table() -> str:
    """Hybrid training against synchronous fp32 over slow links, a row for each seed."""
    import hybrid

    return hybrid.table(load(RESULTS / "hybrid.json")["rows"])


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {
        "speed": speed_table,
        "quality": quality_table,
        "pieces": pieces_table,
        "embeddings": embeddings_table,
        "hybrid": hybrid_table,
        "sync": sync_tables.short,
    },
    README.parent / "docs" / "embeddings.md": {
        "row_store": row_tables.speed,
        "capacity": row_tables.capacity,
    },
    README.parent / "docs" / "replicas.md": {
        "sync_virtual": sync_tables.virtual,
        "sync_real": sync_tables.real,
        "sync_like": sync_tables.like_sgd,
        "sync_like_adam": sync_tables.like_adam,
        "sync_unlike": sync_tables.unlike,
        "sync_peer": sync_tables.peer,
        "sync_scale": sync_tables.scale,
        "sync_end_to_end": sync_tables.end_to_end,
    },
}


def rewritten(page: Path) -> str:
    """The page with every table made anew."""
    text = page.read_text(encoding="utf-8")
    for name, make in PAGES[page].items():
        block = f"<!-- table: {name} -->\n{make()}\n<!-- end -->"
        pattern = rf"<!-- table: {name} -->\n.*?<!-- end -->"
        text, count = re.subn(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
        assert count == 1, f"{page.name} has {count} places for table {name}"
    return text


def main() -> int:
    for page in PAGES:
        new = rewritten(page)
        if "--check" not in sys.argv[1:]:
            page.write_text(new, encoding="utf-8")
        elif new != page.read_text(encoding="utf-8"):
            print(f"{page.name} does not match benchmarks/results; run benchmarks/readme.py")
            return 1
    if "--check" not in sys.argv[1:]:
        draw_figure()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
