"""What a run found, for the eye: a table of the arms, one sentence of verdict, where the files are.

Reads results.json's names and forgives what is missing, so that a stopped run shows too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ray_pipe.replica_table import replica_parts
from ray_pipe.results_format import NONE, number, show_amount, show_clock, show_seconds

__all__ = ["NONE", "number", "show_amount", "show_clock", "show_results", "show_seconds"]

Arm = Mapping[str, Any]
REFERENCE = "fp32"
WIDE = 112
"""Columns from which arms are rows; below, arms are columns and the numbers are rows."""

CLOSE_LOSS = 0.02
"""A gap in nats up to which we say that the loss was kept: the limit of test T2."""

FILES = {
    "report.html": "the report: loss over time, where the time went, bytes, Gantt picture",
    "loss_vs_time.png": "loss against wall-clock time",
    "trace.json": "open it in ui.perfetto.dev or chrome://tracing",
    "metrics.jsonl": "one line per step",
    "results.json": "these numbers",
}


def _when(value: Any, show: Callable[[float], str]) -> str:
    known = number(value)
    return NONE if known is None else show(known)


def _target(arm: Arm) -> str:
    seconds, sooner = number(arm.get("time_to_target_s")), number(arm.get("time_to_target_speedup"))
    if seconds is None:
        return "not reached" if arm.get("loss_gap") is not None else NONE
    if sooner is None or arm.get("name") == REFERENCE:
        return show_seconds(seconds)
    ratio = f"{sooner:.2f}x sooner" if sooner >= 1 or not sooner else f"{1 / sooner:.2f}x later"
    return f"{show_seconds(seconds)} ({ratio})"


def _error(arm: Arm) -> str:
    """How far the measured step is from the predicted one; + is slower than predicted."""
    error = number(arm.get("prediction_error"))
    if error is None:
        step_s, predicted = number(arm.get("step_s")), number(arm.get("predicted_step_s"))
        if not step_s or predicted is None:
            return "not predicted" if arm.get("not_predicted") else NONE
        error = (step_s - predicted) / step_s
    return f"{100 * error:+.1f} %"


COLUMNS: tuple[tuple[str, Callable[[Arm], str]], ...] = (
    ("final\ntrain loss", lambda arm: _when(arm.get("final_loss"), "{:.4f}".format)),
    (f"gap to\n{REFERENCE}", lambda arm: _when(arm.get("loss_gap"), "{:+.4f}".format)),
    ("tokens\nper s", lambda arm: _when(arm.get("tokens_per_s"), show_amount)),
    ("step\ntime", lambda arm: _when(arm.get("step_s"), show_seconds)),
    ("sent\nper step", lambda arm: _when(arm.get("bytes_per_step"), lambda n: show_amount(n, "B"))),
    ("speed-\nup", lambda arm: _when(arm.get("speedup"), "{:.2f}x".format)),
    (f"time to {REFERENCE}'s\nfinal loss", _target),
    ("predicted\nstep", lambda arm: _when(arm.get("predicted_step_s"), show_seconds)),
    ("prediction\noff by", _error),
)


HELD_OUT: tuple[str, Callable[[Arm], str]] = (
    "held-out\nloss",
    lambda arm: _when(arm.get("eval_loss"), "{:.4f}".format),
)
"""With `--eval` a column more, behind the training loss and its gap."""

HELD_OUT_WIDTH = 11


def _columns(results: Mapping[str, Any]) -> tuple[tuple[str, Callable[[Arm], str]], ...]:
    if "clicks" not in results:
        return (*COLUMNS[:2], HELD_OUT, *COLUMNS[2:]) if _is_evaluated(results) else COLUMNS
    from ray_pipe import ctr_table  # it uses what is here

    return ctr_table.COLUMNS


def _is_evaluated(results: Mapping[str, Any]) -> bool:
    return any("eval_loss" in arm for arm in results.get("arms", ()))


def results_table(results: Mapping[str, Any], *, wide: bool) -> Table:
    """The arms; as rows where there is room, else as columns."""
    arms = list(results.get("arms", ()))
    if all(arm.get("name") != REFERENCE for arm in arms):
        arms = [{**arm, "speedup": None} for arm in arms]  # results.json has 1.0, over nothing
    columns = _columns(results)
    best = None if "clicks" in results else _best(arms)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    if wide:
        table.add_column("arm", vertical="bottom")
        for title, _ in columns:
            table.add_column(Text(title, justify="right"), justify="right", no_wrap=True)
        for arm in arms:
            cells = [show(arm) for _, show in columns]
            style = "bold green" if arm is best else ""
            table.add_row(str(arm.get("name", "?")), *cells, style=style)
        return table
    table.add_column("")
    for arm in arms:
        style = "bold green" if arm is best else ""
        name = Text(str(arm.get("name", "?")), justify="right", style=style)
        table.add_column(name, justify="right", style=style)
    for title, show in columns:
        label = title.replace("-\n", "-").replace("\n", " ")
        table.add_row(label, *(show(arm) for arm in arms))
    return table


def verdict(results: Mapping[str, Any]) -> str:
    """One sentence: where compression pays here, or why it does not."""
    if "clicks" in results:
        from ray_pipe import ctr_table

        return ctr_table.verdict(results)
    arms = [arm for arm in results.get("arms", ()) if number(arm.get("final_loss")) is not None]
    others = [arm for arm in arms if arm.get("name") != REFERENCE]
    if not arms:
        return "No arm came to a final loss, so there is nothing to compare."
    if len(arms) == 1:
        return "One arm tells nothing about gain: --compare fp32,directq,acsgd puts them together."
    if len(arms) == len(others):
        names = ",".join(str(arm.get("name", "?")) for arm in others)
        return (
            f"There is no {REFERENCE} arm with a final loss to compare with, so what compression "
            f"gains is not known: --compare {REFERENCE},{names} adds one."
        )
    if not any(arm.get("bytes_per_step", 1) for arm in arms):
        return (
            "Nothing was sent, so nothing could be compressed: all arms are the same training, and "
            "their times differ by chance. --stages 2 has a link."
        )
    best = _best(arms)
    fastest = max(others, key=lambda arm: number(arm.get("speedup")) or 0.0)
    where = _where(results)
    if best is None:
        gain = number(fastest.get("speedup")) or 0.0
        gap = number(fastest.get("loss_gap")) or 0.0
        if gain > 1.05:
            return (
                f"Compression makes steps up to {gain:.2f}x faster{where}, but no arm came to "
                f"{REFERENCE}'s final loss sooner ({fastest['name']} ends {gap:.4f} above it): "
                "give it more bits (--fw-bits, --bw-bits) or more epochs."
            )
        return (
            f"Compression does not pay{where}: {fastest['name']}'s steps are {gain:.2f}x as fast "
            f"as {REFERENCE}'s; it pays where the link takes longer than the compute."
        )
    sooner = number(best.get("time_to_target_speedup")) or 0.0
    gaps = [(str(arm["name"]), number(arm.get("loss_gap"))) for arm in others if arm is not best]
    behind = [
        f"{name} ends {gap:.3f} above it"
        for name, gap in gaps
        if gap is not None and gap > CLOSE_LOSS
    ]
    text = (
        f"Compression pays{where}: {best['name']} reaches {REFERENCE}'s final loss "
        f"{sooner:.2f}x sooner"
    )
    return f"{text}, while {' and '.join(behind)}." if behind else f"{text}."


def show_results(console: Console, results: Mapping[str, Any], path: str | Path | None) -> None:
    """Table, verdict and files, on a terminal or as plain text."""
    room = WIDE + (HELD_OUT_WIDTH if _is_evaluated(results) else 0)
    parts: list[RenderableType] = [
        results_table(results, wide=console.width >= room),
        *replica_parts(results),
        Text(verdict(results)),
    ]
    if path is not None:
        found = [name for name in FILES if (Path(path) / name).exists()]
        files = Table.grid(padding=(0, 2))
        for name in found:
            files.add_row(Text(str(Path(path) / name), style="cyan", overflow="fold"), FILES[name])
        parts.extend(["", files if found else Text(f"files: {path}")])
    if console.is_terminal:
        console.print(Group(*parts))
        return
    with console.capture() as capture:
        console.print(Group(*parts))
    lines = (line.rstrip() for line in capture.get().splitlines())
    console.file.write("\n".join(lines) + "\n")


def _best(arms: list[Arm]) -> Arm | None:
    """The arm that came to fp32's final loss soonest, if any was clearly sooner than fp32."""
    arms = [arm for arm in arms if arm.get("bytes_per_step", 1)]  # who sent nothing gained nothing
    sooner = [(number(arm.get("time_to_target_speedup")) or 0.0, arm) for arm in arms]
    gains = [pair for pair in sooner if pair[0] > 1.05 and pair[1].get("name") != REFERENCE]
    return max(gains, key=lambda pair: pair[0])[1] if gains else None


def _where(results: Mapping[str, Any]) -> str:
    """` at 100Mbps (link time is 2.1x compute time; the limit is a gain of 3.1x)`."""
    from netsim.units import show_bandwidth, show_duration

    network = results.get("config", {}).get("network", {})
    rate = network.get("bandwidth_bps")
    place = ""
    if network.get("topology"):
        place = " on this topology"
    elif rate == "unlimited":
        place = " at unlimited bandwidth" if network.get("latency_s") else " on unshaped links"
    elif (bps := number(rate)) is not None:
        place = f" at {show_bandwidth(bps)}"
    if place and (latency_s := number(network.get("latency_s"))):
        place += f" and {show_duration(latency_s)} of latency"
    limits = results.get("limits") or {}
    ratio, limit = number(limits.get("link_to_compute")), number(limits.get("max_speedup"))
    notes = []
    if ratio is not None:
        notes.append(f"{REFERENCE}'s link time is {ratio:.2g}x its compute time")
    if limit is not None:
        notes.append(f"no codec can gain more than {limit:.2g}x")
    return f"{place} ({'; '.join(notes)})" if notes else place
