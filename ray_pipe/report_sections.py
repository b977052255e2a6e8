"""The sections of report.html: what each shows, as markup from results.json's arms."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ray_pipe import report_gantt
from ray_pipe.arms import REFERENCE
from ray_pipe.ledger import link_table
from ray_pipe.report_arms import Number, arms_tables
from ray_pipe.report_charts import Bar, bar_chart, legend
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
from ray_pipe.report_page import numbers, section, views
from ray_pipe.step_row import StepRow
from ray_pipe.time_share import SHARES
from stages.record import KINDS, StepRecord

Arm = Mapping[str, Any]


SHOWN_EVENTS = 50
_COMPARISONS = ("loss_gap", "speedup", "time_to_target_s", "time_to_target_speedup")

ARM_NUMBERS: tuple[tuple[str, tuple[Number, ...]], ...] = (
    (
        "Loss and speed",
        (
            Number("final loss", "final_loss", loss),
            Number("gap to fp32", "loss_gap", lambda value: loss(value, sign=True)),
            Number("held-out loss", "eval_loss", loss),
            Number("tokens/s", "tokens_per_s", three),
            Number("step time", "step_s", seconds),
            Number("step speed-up", "speedup", ratio),
            Number("time to fp32’s loss", "time_to_target_s", seconds),
            Number("sooner by", "time_to_target_speedup", ratio),
        ),
    ),
    (
        "Bytes, what the links allow, what was predicted",
        (
            Number("bytes per step", "bytes_per_step", size),
            Number("link : compute", "link_compute_ratio", three),
            Number("possible speed-up", "speedup_limit", ratio),
            Number("predicted step", "predicted_step_s", seconds),
            Number("off by", "prediction_error", lambda value: percent(value, sign=True)),
            Number("wall time", "wall_s", seconds),
            Number("steps", "steps", lambda value: MISSING if value is None else f"{value:,}"),
        ),
    ),
)


def arm_table(arms: Sequence[Arm], *, best: str | None) -> Markup:
    """All arms side by side."""
    compared = len(arms) > 1 and any(arm["name"] == REFERENCE for arm in arms)
    halves = [
        (title, [one for one in numbers if compared or one.key not in _COMPARISONS])
        for title, numbers in ARM_NUMBERS
    ]
    return section(
        "The arms" if len(arms) > 1 else "The arm",
        arms_tables(arms, halves, best=best),
        explain=""
        if len(arms) < 2
        else "Same seed, same order, same batches; only what crosses the links differs. Time to "
        "fp32’s loss: until the running mean met fp32’s final loss; a dash means never.",
    )


def time_section(arms: Sequence[Arm]) -> Markup:
    """Where the time of a mean step went, stage by stage."""
    bars: list[Bar] = []
    rows: list[tuple[str, ...]] = []
    for arm in arms:
        for entry in arm.get("stages") or []:
            spent = {name: float(entry["seconds"].get(name) or 0.0) for name in SHARES}
            total = sum(spent.values())
            if total <= 0:
                continue
            per_step = total / max(int(entry.get("steps") or arm.get("steps") or 1), 1)
            part = {name: spent[name] / total for name in SHARES}
            name = f"stage {entry['stage']}"
            bars.append(
                Bar(
                    name=name,
                    group=label(arm),
                    parts=[(share, f"--{share}", part[share] * per_step) for share in SHARES],
                    text=seconds(per_step),
                    inside={share: percent(part[share]) for share in SHARES},
                )
            )
            rows.append(
                (
                    f"{label(arm)} · {name}",
                    *(data(part[share], percent(part[share])) for share in SHARES),
                    seconds(per_step),
                )
            )
    if not bars:
        return Markup("")
    return section(
        "Where the time went",
        legend([(share, f"--{share}") for share in SHARES]),
        bar_chart(bars, title="Mean seconds of a step by stage: compute, encode, wire and bubble"),
        numbers(table(("stage", *SHARES, "per step"), rows, caption="Share of each stage’s time")),
        explain="Seconds of a mean step. Each moment counts once: compute; else encode or decode; "
        "else wire, when a frame was on its way to the stage, latency included, or to any stage "
        "while none worked; else bubble (fill, drain, sync).",
    )


def gantt_section(arms: Sequence[Arm], steps: Mapping[str, Sequence[StepRecord]]) -> Markup:
    """One step of the pipeline for each arm, on one scale and each on its own."""
    chosen = {
        str(arm["name"]): records
        for arm in arms
        if (records := _chosen_step(steps, str(arm["name"])))
    }
    longest = max((report_gantt.step_length(records) for records in chosen.values()), default=0.0)
    if longest <= 0:
        return Markup("")

    def pictures(span_s: float | None) -> Markup:
        parts: list[str] = []
        for arm in arms:
            records = chosen.get(str(arm["name"]))
            if records:
                took = report_gantt.step_length(records)
                text = f"{label(arm)}: step {records[0].step}, {seconds(took)}"
                parts.append(tag("h3", text))
                parts.append(report_gantt.gantt(records, title=text, span_s=span_s))
        return join(parts)

    fitted = pictures(None)
    drawn = (
        views("scale", ("one scale", pictures(longest)), ("fit each", fitted))
        if len(chosen) > 1
        else fitted
    )
    return section(
        "The pipeline in one step",
        drawn,
        legend(report_gantt.LEGEND),
        explain="Rows are stages, numbers are micro-batches. Under each stage: its codecs, then "
        "its outgoing links.",
    )


def bytes_section(arms: Sequence[Arm]) -> Markup:
    """Bytes by link and kind."""
    bars: list[Bar] = []
    rows: list[tuple[str, ...]] = []
    used = [kind for kind in KINDS if any((arm.get("bytes_total") or {}).get(kind) for arm in arms)]
    for arm in arms:
        for row in link_table(arm.get("links") or {}):
            bars.append(
                Bar(
                    name=row.link.replace("->", " → "),
                    group=label(arm),
                    parts=[(kind, f"--{kind}", float(row.kinds[kind])) for kind in used],
                    text=size(row.total),
                    inside={kind: size(row.kinds[kind]) for kind in used},
                )
            )
        total = arm.get("bytes_total") or {}
        rows.append(
            (
                label(arm),
                *(data(total.get(kind, 0), size(total.get(kind, 0))) for kind in used),
                data(sum(total.values()), size(sum(total.values()))),
                data(arm.get("bytes_per_step"), size(arm.get("bytes_per_step"))),
                data(arm.get("bytes_per_step_last"), size(arm.get("bytes_per_step_last"))),
            )
        )
    if not used:
        return Markup("")
    totals = table(
        ("arm", *used, "all", "per step", "per step at the end"),
        rows,
        caption="Bytes of the whole arm. At the end: mean of the final window, first visits over.",
    )
    return section(
        "Bytes on the wire",
        legend([(kind, f"--{kind}") for kind in used]),
        bar_chart(bars, title="Bytes by link and kind") if bars else "",
        totals,
        explain="What each link carried over the whole arm.",
    )


def prediction_section(arms: Sequence[Arm]) -> Markup:
    """What the simulator said beforehand, and what happened."""
    known = [arm for arm in arms if arm.get("predicted_step_s") is not None and arm.get("step_s")]
    unknown = [
        tag("p", f"{label(arm)}: not predicted, {arm['not_predicted']}.")
        for arm in arms
        if arm.get("not_predicted")
    ]
    if not known and not unknown:
        return Markup("")
    bars = [
        Bar(
            name=name,
            group=label(arm),
            parts=[(name, color, float(arm[key]))],
            text=seconds(arm[key])
            + (f"  ({percent(arm.get('prediction_error'), sign=True)})" if key == "step_s" else ""),
        )
        for arm in known
        for name, key, color in (
            ("predicted", "predicted_step_s", "--bubble"),
            ("measured", "step_s", "--compute"),
        )
    ]
    return section(
        "Prediction against measurement",
        bar_chart(bars, title="Predicted and measured step time of each arm") if bars else "",
        *unknown,
        explain="The simulator runs the same schedule over the same links with measured costs. "
        "In brackets: by how much the run was slower (+) or faster (−), of the measured time.",
    )


def events_section(arms: Sequence[Arm], rows: Mapping[str, Sequence[StepRow]]) -> Markup:
    """Things an operator would act on, the first fifty."""
    found: list[tuple[str, str]] = []
    num_more = 0
    for arm in arms:
        for row in rows.get(str(arm["name"]), ()):
            fit = max(0, SHOWN_EVENTS - len(found))
            found += [(f"{label(arm)}, step {row.step}", event) for event in row.events[:fit]]
            num_more += len(row.events[fit:])
    if not found:
        return Markup("")
    more = [tag("p", f"… and {num_more:,} more in metrics.jsonl.")] if num_more else []
    return section(
        "Events",
        *(tag("p", tag("b", where), " ", event, class_="note") for where, event in found),
        *more,
    )


def run_section(results: Mapping[str, Any]) -> Markup:
    """The command, the config and the environment: enough to do it again."""
    command = results.get("command")
    if isinstance(command, (list, tuple)):
        command = shlex.join(str(word) for word in command)
    environment = dict(results.get("environment") or {})
    if "native" in results:
        native = results["native"]
        environment["native core"] = "yes" if native else "no: the slow twin was used"
    parts: list[str] = []
    if command:
        parts += [tag("h3", "Do it again"), tag("pre", tag("code", str(command)))]
    tables = [
        tag("div", tag("h3", title), table((), pairs, caption="", class_="settings"))
        for title, values in (
            ("Environment", environment),
            ("Own model and data", results.get("own") or {}),
            ("Config", results.get("config") or {}),
        )
        if (pairs := [(key, _plain(key, value)) for key, value in flatten(values).items()])
    ]
    if tables:
        parts.append(tag("div", *tables, class_="two"))
    return section("The run", *parts) if parts else Markup("")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as "a.b.c" -> value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _chosen_step(steps: Mapping[str, Sequence[StepRecord]], name: str) -> list[StepRecord]:
    """The last whole step that every arm has, or else the arm's own: alike compares with alike.

    The last step of an epoch may have fewer micro-batches than the others.
    """
    own = [record for record in steps.get(name, ()) if record.spans]
    if not own:
        return []
    common = set.intersection(
        *({r.step for r in records if r.spans} for records in steps.values() if records)
    )
    size: dict[int, int] = {}
    for record in own:
        if not common or record.step in common:
            last = max(span.micro_batch for span in record.spans)
            size[record.step] = max(last, size.get(record.step, -1))
    step = max(size, key=lambda step: (size[step], step))
    return [record for record in own if record.step == step]


def _plain(key: str, value: object) -> str:
    if key.endswith("_bps") and isinstance(value, (int, float)):
        return f"{three(value / 1e6)} Mbit/s"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return MISSING if value is None or value in ("", {}) else str(value)
