"""The report's section on what went wrong, and how the run went on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_pipe.report_markup import MISSING, Markup, seconds, table
from ray_pipe.report_page import section

WHAT = {
    "died": "process died",
    "hung": "did not answer",
    "timeout": "waited in vain",
    "error": "error",
    "driver": "ended, and was started again",
}
NAMES = {
    "hear_out": "hearing all out",
    "process": "process",
    "set_up": "becoming the stage",
    "ask": "asking all",
    "restore": "going back",
}
FROM = {"box": "black box", "checkpoint": "checkpoint", "fresh": "the beginning"}


def failures_section(failures: Sequence[Mapping[str, Any]]) -> Markup:
    """A line for each failure; nothing if there was none."""
    if not failures:
        return Markup("")
    lines = [
        (
            f"{failure['arm']}, step {failure['step']}",
            f"{_who(failure)}: {WHAT.get(failure['kind'], failure['kind'])}",
            str(failure["cause"]),
            _went_on(failure),
            _took(failure),
        )
        for failure in failures
    ]
    return section(
        "Failures",
        table(
            ("where", "what", "cause", "went on from", "recovery"),
            lines,
            caption="",
            class_="settings",
        ),
        explain="Steps that were run again gave the same losses, to the bit; their bytes count.",
    )


def _took(failure: Mapping[str, Any]) -> str:
    """The time of a recovery, and what it went to if that can be seen."""
    if failure["recovery_s"] is None:
        return MISSING
    phases = failure.get("phases", {})
    shares = [f"{NAMES.get(name, name)} {seconds(spent)}" for name, spent in phases.items()]
    whole = str(seconds(failure["recovery_s"]))
    return f"{whole}: {', '.join(shares)}" if shares else whole


def _who(failure: Mapping[str, Any]) -> str:
    if failure["kind"] == "driver":
        return "driver"
    replica = failure.get("replica")
    return f"{'' if replica is None else f'replica {replica}, '}stage {failure['stage']}"


def _went_on(failure: Mapping[str, Any]) -> str:
    if failure.get("num_left"):
        return f"the other replicas went on, {failure['num_left']} of them"
    if failure["resumed_from"] is None:
        return "the run ended"
    step = failure["resumed_from"]
    source = FROM.get(failure["source"], "")
    return "the beginning" if step < 0 and source == "the beginning" else f"step {step} ({source})"
