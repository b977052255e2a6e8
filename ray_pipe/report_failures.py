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
}
FROM = {"box": "black box", "checkpoint": "checkpoint", "fresh": "the beginning"}


def failures_section(failures: Sequence[Mapping[str, Any]]) -> Markup:
    """A line for each failure; nothing if there was none."""
    if not failures:
        return Markup("")
    lines = [
        (
            f"{failure['arm']}, step {failure['step']}",
            f"stage {failure['stage']}: {WHAT.get(failure['kind'], failure['kind'])}",
            str(failure["cause"]),
            _went_on(failure),
            seconds(failure["recovery_s"]) if failure["recovery_s"] is not None else MISSING,
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


def _went_on(failure: Mapping[str, Any]) -> str:
    if failure["resumed_from"] is None:
        return "the run ended"
    step = failure["resumed_from"]
    source = FROM.get(failure["source"], "")
    return "the beginning" if step < 0 and source == "the beginning" else f"step {step} ({source})"
