"""The tables about replicas, made from benchmarks/results/*.json for the README and docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import RESULTS, load, markdown

SHORT = ("all-reduce", "quantized-adam", "local, 8 steps", "ripples", "ad-psgd", "hop, skip 8")
"""Strategies of the README's table."""


def compared() -> list[dict[str, Any]]:
    """Rows of `python -m ray_pipe.compare_sync`, every number of replicas that was tried."""
    found = [load(path) for path in sorted(RESULTS.glob("compare_sync*.json"))]
    rows = [{**row, "slow": one["slow"]} for one in found for row in one["rows"]]
    return sorted(rows, key=lambda row: (row["real"], row["replicas"]))


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = []
    for case in ("homogeneous", row["slow"]):
        trial, gain = row["cases"][case], row["speedups"][case]
        sooner = gain["sooner"]
        cells += [
            f"{trial['iteration_s']:.2f} s",
            f"{gain['iteration']:.2f}x",
            "not reached" if sooner is None else f"{sooner:.2f}x",
        ]
    return cells


def _comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "Not measured yet."
    head = ["replicas", "strategy", "alike", "over all-reduce", "sooner"]
    head += ["one 4x slower", "over all-reduce", "sooner"]
    lines = []
    for row in rows:
        mark = r"\*" if row["cases"]["homogeneous"]["is_computed"] else ""
        lines.append([str(row["replicas"]), row["strategy"] + mark, *_cells(row)])
    return markdown(head, lines)


def virtual() -> str:
    """All strategies in virtual time."""
    return _comparison([row for row in compared() if not row["real"]])


def real() -> str:
    """Four replicas on Ray."""
    return _comparison([row for row in compared() if row["real"]])


def short() -> str:
    """A few strategies with many replicas, for the README."""
    rows = [row for row in compared() if not row["real"] and row["strategy"] in SHORT]
    rows = [row for row in rows if row["replicas"] > 4]  # four are there to be set beside Ray's
    return _comparison(rows)


def _found(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return load(path) if path.exists() else None


def like_table(found: Mapping[str, Any]) -> str:
    """One optimizer's table."""
    seeds = [f"seed {i}" for i in range(len(found["all-reduce"]["losses"]))]
    rows = [
        [
            name,
            f"{row['lr']:g}",
            *(f"{x:.4f}" for x in row["losses"]),
            f"{100 * sum(row['apart']) / len(row['apart']):+.2f} %",
            f"{100 * max(row['apart'], key=abs):+.2f} %",
        ]
        for name, row in found.items()
    ]
    return markdown(["strategy", "peak rate", *seeds, "mean", "furthest"], rows)


def unlike_table(found: Mapping[str, Any]) -> str:
    """Gaps, and as multiples of standard Hop's."""
    cases = list(found["hop"])

    def cell(name: str, case: str) -> str:
        own, standard = found[name][case], found["hop"][case]["gap"]
        text = f"{own['gap']:.2g} ({own['gap'] / standard:.2g}x)"
        return text if own["steady"] else f"{text}, still falling"

    names = sorted(found, key=lambda name: "trap" in name)
    return markdown(["strategy", *cases], [[n, *(cell(n, c) for c in cases)] for n in names])


def like(optimizer: str) -> str:
    """Held-out losses of a tiny GPT."""
    quality = _found("sync_quality.json")
    if quality is None or optimizer not in quality.get("like", {}):
        return "Not measured yet."
    return like_table(quality["like"][optimizer])


def like_sgd() -> str:
    """With SGD and momentum."""
    return like("sgd")


def like_adam() -> str:
    """With AdamW."""
    return like("adam")


def unlike() -> str:
    """Steady-state gaps on unlike data."""
    quality = _found("sync_quality.json")
    if quality is None or "unlike" not in quality:
        return "Not measured yet."
    return unlike_table(quality["unlike"])


def peer() -> str:
    """All-reduce against gloo and hivemind."""
    found, rows = _found("peer_allreduce.json"), []
    if found is None:
        return "Not measured yet."
    for run in found["runs"]:
        middle, ratio = run["median_s"], run["over_gloo"]
        cells = [
            f"{1e3 * middle[name]:.0f} ms, {ratio[name]:.2f}x" if name in middle else "-"
            for name in ("ring", "direct", "refs", "hivemind")
        ]
        rows.append([str(run["replicas"]), f"{1e3 * middle['gloo']:.0f} ms", *cells])
    head = ["processes", "torch.distributed, gloo", "ours, ring", "ours, direct"]
    return markdown([*head, "plain Ray refs", "hivemind"], rows)


def scale() -> str:
    """What it costs to simulate Ripples."""
    rows = [
        [
            str(row["replicas"]),
            f"{row['cpu_s']:.1f} s",
            f"{row['cpu_us_per_iteration']:.0f} us",
        ]
        for row in load(RESULTS / "sync_scale.json")["scale"]
    ]
    return markdown(["replicas", "CPU for 100 iterations", "per replica and iteration"], rows)


def end_to_end() -> str:
    """Everything in few bits."""
    found = _found("end_to_end.json")
    if found is None:
        return "Not measured yet."
    plain, rows = found["arms"]["uncompressed"], []
    for name, arm in found["arms"].items():
        fewer = [
            f"{plain['bytes_total'][kind] / max(1, arm['bytes_total'][kind]):.1f}x"
            for kind in ("activation", "gradient", "replica")
        ]
        sooner = "not reached" if arm["sooner"] is None else f"{arm['sooner']:.2f}x"
        rows.append([name, f"{arm['step_s']:.2f} s", sooner, f"{arm['gap']:+.4f}", *fewer])
    head = ["arm", "step", "sooner at its final loss", "loss gap", "fewer bytes: activations"]
    return markdown([*head, "their gradients", "replicas"], rows)
