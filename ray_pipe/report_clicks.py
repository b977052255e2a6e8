"""The report's part about a click model: quality, speed, memory, and how old rows were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_pipe.ctr_table import BASELINE, verdict
from ray_pipe.report_arms import Number, arms_tables
from ray_pipe.report_charts import Bar, bar_chart
from ray_pipe.report_curves import label
from ray_pipe.report_markup import (
    MISSING,
    Markup,
    data,
    join,
    loss,
    percent,
    ratio,
    seconds,
    size,
    table,
    tag,
    three,
)
from ray_pipe.report_page import numbers, section

Arm = Mapping[str, Any]


def headline(results: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    return verdict(results)


def cards(results: Mapping[str, Any]) -> Markup:
    """The last arm in large numbers."""
    arms = list(results.get("arms") or [])
    if not arms:
        return Markup("")
    own = arms[-1]
    best = own.get("best_auc")
    shown = [
        (
            data(own.get("auc"), loss(own.get("auc"))),
            f"AUC, {loss(best)} is the best reachable" if best else "AUC on held-out clicks",
        ),
        (data(own.get("samples_per_s"), three(own.get("samples_per_s"))), "samples per second"),
        (data(own.get("bytes_per_sample"), size(own.get("bytes_per_sample"))), "sent per sample"),
        (data(own.get("rows"), f"{own.get('rows') or 0:,}"), "embedding rows"),
    ]
    if own.get("speedup_samples") and own["name"] != BASELINE:
        faster = own["speedup_samples"]
        shown.insert(1, (data(faster, ratio(faster)), "the speed of synchronous fp32"))
    return tag(
        "div",
        *(tag("div", tag("b", value), tag("span", text), class_="card") for value, text in shown),
        class_="cards",
        aria_label=f"{label(own)} in numbers",
    )


def clicks_section(results: Mapping[str, Any]) -> Markup:
    """All arms side by side."""
    arms = list(results.get("arms") or [])
    of_rows = [
        Number("rows", "rows", lambda value: MISSING if value is None else f"{value:,}"),
        Number("rows’ memory", "row_bytes", size),
        Number("shards’ processes", "resident_bytes", size),
        Number("bound (tau)", "tau", _whole),
        Number("oldest row", "staleness_max", _whole),
    ]
    for name, key in (("lost pushes", "lost_pushes"), ("unsent pushes", "unsent_pushes")):
        if any(arm.get(key) for arm in arms):
            of_rows.append(Number(name, key, _whole))
    of_all = [
        Number("AUC", "auc", loss),
        Number("best reachable", "best_auc", loss),
        Number("log-loss", "log_loss", loss),
        Number("samples/s", "samples_per_s", three),
        Number("speed-up", "speedup_samples", ratio),
        Number("step time", "step_s", seconds),
        Number("bytes per sample", "bytes_per_sample", size),
    ]
    what = (results.get("clicks") or {}).get("text", "")
    return section(
        "The click model",
        arms_tables(arms, [("Quality and speed", of_all), ("Embedding rows", of_rows)]),
        _evaluations(arms),
        explain=f"{what}. fp32 is fully synchronous: rows and gradients in fp32, nothing pulled "
        "ahead. Best reachable: what the planted truth scores on the same held-out clicks.",
    )


def _whole(value: int | None) -> str:
    return MISSING if value is None else str(value)


def _evaluations(arms: Sequence[Arm]) -> Markup:
    rows = [
        (f"{label(arm)}, step {step + 1}", seconds(wall_s), data(auc, loss(auc)), loss(log_loss))
        for arm in arms
        for wall_s, step, auc, log_loss in arm.get("evaluations") or []
    ]
    if not rows:
        return Markup("")
    return numbers(
        table(("after", "wall time", "AUC", "log-loss"), rows, caption="Held-out clicks")
    )


def staleness_section(arms: Sequence[Arm]) -> Markup:
    """How many versions behind rows were when their gradients were applied."""
    bars: list[Bar] = []
    rows: list[tuple[str, ...]] = []
    for arm in arms:
        histogram = {int(k): int(n) for k, n in (arm.get("staleness_histogram") or {}).items()}
        total = sum(histogram.values())
        for age in range(max(histogram, default=-1) + 1):
            num = histogram.get(age, 0)
            share = percent(num / total)
            bars.append(
                Bar(
                    name=f"{age} behind" if age else "fresh",
                    group=f"{label(arm)} (tau {arm.get('tau')})",
                    parts=[("pushes", "--embedding", float(num))],
                    text=f"{num:,} ({share})",
                )
            )
            rows.append((f"{label(arm)}, {age} behind", data(num, f"{num:,}"), share))
    if not bars:
        return Markup("")
    return section(
        "How old rows were",
        bar_chart(bars, title="Gradients applied, by how many versions their rows were behind"),
        numbers(table(("arm", "gradients", "share"), rows, caption="Applied by all shards")),
        explain="Versions of a shard between the pull of rows and the arrival of their gradients. "
        "The bound is never passed; 0 is what a synchronous run would read.",
    )


def clicks_body(results: Mapping[str, Any]) -> Markup:
    """Table and histogram."""
    arms = list(results.get("arms") or [])
    return join([clicks_section(results), staleness_section(arms)])
