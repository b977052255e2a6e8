"""report.html: the run on one page that opens offline.

Path: ray_pipe.arms -> ray_pipe.report

Every number comes from results.json (`results`); rows and spans only add pictures. What is missing
is left out or shown as a dash, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_pipe import report_clicks
from ray_pipe import report_curves as curves
from ray_pipe import report_sections as sections
from ray_pipe.arms import REFERENCE
from ray_pipe.report_failures import failures_section
from ray_pipe.report_markup import Markup, data, join, loss, percent, ratio, seconds, tag, three
from ray_pipe.report_page import page
from ray_pipe.report_replicas import replicas_section
from ray_pipe.step_row import StepRow, finite
from stages.record import StepRecord

Arm = Mapping[str, Any]


def write_report(
    path: Path | str,
    results: Mapping[str, Any],
    *,
    rows: Mapping[str, Sequence[StepRow]] | None = None,
    steps: Mapping[str, Sequence[StepRecord]] | None = None,
) -> None:
    """Write the page.

    `results` is the object of results.json, `rows` the steps of each arm (for the codecs' curves),
    `steps` the records of a few chosen steps of each arm, with spans (for the pipeline's picture;
    the last step that all arms have is drawn).
    """
    text = render_report(results, rows=rows, steps=steps)
    Path(path).write_text(text, encoding="utf-8")


def render_report(
    results: Mapping[str, Any],
    *,
    rows: Mapping[str, Sequence[StepRow]] | None = None,
    steps: Mapping[str, Sequence[StepRecord]] | None = None,
) -> str:
    """The page as text."""
    results = finite(results)
    arms: list[Arm] = list(results.get("arms") or [])
    config = results.get("config") or {}
    hero = best_arm(arms)
    clicks = "clicks" in results
    name = str(results.get("name") or "run")
    body = [
        tag(
            "p",
            tag("b", "ray_pipe"),
            " · ",
            _subtitle(name, config, results.get("own")),
            class_="kicker",
        ),
        tag("h1", report_clicks.headline(results) if clicks else headline(arms)),
        report_clicks.cards(results) if clicks else _cards(arms, hero),
        report_clicks.clicks_body(results)
        if clicks
        else sections.arm_table(arms, best=hero["name"] if hero else None),
        curves.loss_section(arms),
        sections.time_section(arms),
        sections.gantt_section(arms, steps or {}),
        sections.bytes_section(arms),
        curves.codec_section(arms, rows or {}),
        sections.prediction_section(arms),
        replicas_section(arms),
        failures_section(results.get("failures") or []),
        sections.events_section(arms, rows or {}),
        sections.run_section(results),
        tag(
            "footer",
            "Every number on this page is from results.json beside it; hover for exact values. "
            "Bytes are counted once, by the sender, headers included.",
        ),
    ]
    return page(
        title=f"{name} · ray_pipe",
        body=[part for part in body if part],
        curves=curves.hover_curves(arms),
    )


def headline(arms: Sequence[Arm]) -> str:
    """The result in one sentence, good or bad."""
    if not arms:
        return "The run ended before its first step."
    hero = best_arm(arms)
    if hero is None:
        arm = arms[0]
        return (
            f"{curves.label(arm)} trained {_steps(arm)} in "
            f"{seconds(arm.get('wall_s'))} to a loss of {loss(arm.get('final_loss'))}."
        )
    base = next(arm for arm in arms if arm["name"] == REFERENCE)
    who = curves.label(hero)
    sooner, faster = hero.get("time_to_target_speedup"), hero.get("speedup")
    less = _bytes_ratio(base, hero)
    if sooner is not None and sooner > 1:
        saved = f", sending {ratio(less)} fewer bytes" if less and less > 1 else ""
        return (
            f"{who} reached fp32’s final loss of {loss(base.get('final_loss'))} in "
            f"{seconds(hero.get('time_to_target_s'))}, {ratio(sooner)} sooner than fp32{saved}."
        )
    if sooner is not None:
        return (
            f"Compression did not pay here: {who}, the best arm, took "
            f"{seconds(hero.get('time_to_target_s'))} to fp32’s final loss, fp32 itself "
            f"{seconds(base.get('time_to_target_s'))}."
        )
    if faster is not None and faster > 1:
        return (
            f"{who} ran {ratio(faster)} faster steps than fp32 and ended at "
            f"{loss(hero.get('loss_gap'), sign=True)} from its final loss, which it did not reach "
            f"in {_steps(hero)}."
        )
    return (
        f"Compression did not pay here: {who}, the fastest arm, ran at {ratio(faster)} the speed "
        f"of fp32."
    )


def best_arm(arms: Sequence[Arm]) -> Arm | None:
    """The arm that reached fp32's final loss soonest; None without fp32, without others, or where
    nothing was sent that could be compressed.

    If none reached it: the fastest of those that ended within 1 % of it, else the fastest.
    """
    others = [arm for arm in arms if arm["name"] != REFERENCE]
    base = next((arm for arm in arms if arm["name"] == REFERENCE), None)
    if base is None or not others or base.get("bytes_per_step") == 0:
        return None
    allowed = 0.01 * abs(base.get("final_loss") or 0.0)

    def merit(arm: Arm) -> tuple[float, bool, float]:
        gap = arm.get("loss_gap")
        close = gap is not None and gap <= allowed
        return (arm.get("time_to_target_speedup") or 0.0, close, arm.get("speedup") or 0.0)

    return max(others, key=merit)


def _cards(arms: Sequence[Arm], hero: Arm | None) -> Markup:
    if not arms:
        return Markup("")
    if hero is None:
        arm = arms[0]
        return tag(
            "div",
            _card(data(arm.get("final_loss"), loss(arm.get("final_loss"))), "final training loss"),
            _card(
                data(arm.get("tokens_per_s"), three(arm.get("tokens_per_s"))), "tokens per second"
            ),
            _card(data(arm.get("step_s"), seconds(arm.get("step_s"))), "per step (median)"),
            class_="cards",
        )
    base = next(arm for arm in arms if arm["name"] == REFERENCE)
    less = _bytes_ratio(base, hero)
    error = hero.get("prediction_error")
    gap = hero.get("loss_gap")
    sooner = hero.get("time_to_target_speedup")
    cards = [
        _card(data(sooner, ratio(sooner)), "sooner at fp32’s final loss"),
        _card(data(hero.get("speedup"), ratio(hero.get("speedup"))), "faster steps than fp32"),
        _card(tag("span", ratio(less)) if less is None else ratio(less), "fewer bytes than fp32"),
        _card(data(gap, loss(gap, sign=True)), "final loss against fp32"),
    ]
    if error is not None:
        cards.append(_card(data(error, percent(error, sign=True)), "step time against prediction"))
    return tag("div", *cards, class_="cards", aria_label=f"{curves.label(hero)} in numbers")


def _steps(arm: Arm) -> str:
    steps = arm.get("steps") or 0
    return f"{steps:,} step" if steps == 1 else f"{steps:,} steps"


def _card(number: str, text: str) -> Markup:
    return tag("div", tag("b", number), tag("span", text), class_="card")


def _bytes_ratio(base: Arm, own: Arm) -> float | None:
    """Of means per step, so that arms of different lengths compare."""
    theirs, ours = base.get("bytes_per_step"), own.get("bytes_per_step")
    return theirs / ours if theirs and ours else None


def _subtitle(name: str, config: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Markup:
    """The few settings that decide the result, where the config has them; a user's `own` model."""
    flat = sections.flatten(config)
    if own:
        flat["model.name"] = f"{own.get('model')} on {own.get('dataset')}"
    facts = [name]
    for ending, text in (
        ("model.name", "{}"),
        ("stages", "{} stages"),
        ("micro_batches", "{} micro-batches"),
        ("schedule", "{}"),
        ("seed", "seed {}"),
    ):
        value = next((v for k, v in flat.items() if k == ending or k.endswith("." + ending)), None)
        if ending == "model.name" and flat.get("task") == "ctr":
            value = "click model"
        if value not in (None, ""):
            words = text.format(value)
            facts.append(words.removesuffix("s") if value == 1 else words)
    bandwidth = next((v for k, v in flat.items() if k.split(".")[-1] == "bandwidth_bps"), None)
    latency_s = next((v for k, v in flat.items() if k.split(".")[-1] == "latency_s"), None)
    late = f" with {seconds(latency_s)} of latency" if latency_s else ""
    if isinstance(bandwidth, (int, float)):
        facts.insert(1, f"{three(bandwidth / 1e6)} Mbit/s links{late}")
    elif late:
        facts.insert(1, f"links{late}")
    return join([" · ".join(facts)])
