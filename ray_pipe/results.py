"""What a run leaves in its folder: results.json, the trace, the report, the figure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compressors import kernels
from ray_pipe.arms import REFERENCE, ArmSummary
from ray_pipe.config import RunConfig
from ray_pipe.errors import TrainingError
from ray_pipe.machine import environment
from ray_pipe.metrics import to_json
from ray_pipe.progress import Observer
from ray_pipe.recovery import Failure
from ray_pipe.report import write_report
from ray_pipe.report_figure import write_loss_figure
from ray_pipe.step_row import StepRow
from ray_pipe.timeline import write_trace
from ray_pipe.trained import Trained
from ray_pipe.workload import Workload
from stages.rehearsal import StageCosts

RESULTS_SCHEMA = 1


def results_of(
    config: RunConfig,
    summaries: Sequence[ArmSummary],
    trained: Sequence[Trained],
    failures: Sequence[Failure] = (),
    own: Workload | None = None,
) -> dict[str, Any]:
    """The object of results.json. `own` is a user's model and dataset; the settings' are unused."""
    by_name = {one.arm.name: one for one in trained}
    limits = limits_of(trained)
    arms = []
    for summary in summaries:
        prediction = by_name[summary.name].prediction
        arm = summary.as_dict()
        if evaluations := by_name[summary.name].eval_losses:
            arm["eval_loss"] = evaluations[-1][2]
            arm["eval_losses"] = evaluations
        fleet = by_name[summary.name].fleet
        if fleet is not None:
            arm["replicas"] = fleet.as_dict()
        if prediction is not None and prediction.is_shaped:
            arm["link_compute_ratio"] = prediction.link_to_compute
        if summary.name != REFERENCE and "max_speedup" in limits:
            arm["speedup_limit"] = limits["max_speedup"]
        if (reason := by_name[summary.name].not_predicted) is not None:
            arm["not_predicted"] = reason
        arms.append(arm)
    settings = replace(config, checkpoint=replace(config.checkpoint, resume=None)).to_dict()
    results: dict[str, Any] = {
        "schema": RESULTS_SCHEMA,
        "name": config.name,
        "config": settings,
        "native": kernels.core() == "native",
        "arms": arms,
        "limits": limits,
        "failures": [failure.as_dict() for failure in failures],
        "environment": environment(),
    }
    if own is not None:
        del settings["model"], settings["data"]
        results["own"] = {
            "model": own.name,
            "num_blocks": own.num_blocks,
            "dataset": own.dataset,
            "num_samples": len(own.samples),
        }
    if (command := command_of(sys.argv)) is not None:
        results["command"] = command
    return results


def command_of(argv: Sequence[str]) -> str | None:
    """What to type to do it again; None where no command of ours started the run."""
    started = Path(argv[0]) if argv else Path()
    if started.name == "ray-pipe" or started.parts[-2:] == ("ray_pipe", "run.py"):
        return shlex.join(["python", "-m", "ray_pipe.run", *argv[1:]])
    return None


def limits_of(trained: Sequence[Trained]) -> dict[str, Any]:
    """What physics allows: how much longer the fp32 arm's links work than compute takes."""
    by_arm = {one.arm.name: one.prediction for one in trained if one.prediction is not None}
    limits: dict[str, Any] = {
        "arms": {
            name: {
                "link_to_compute": prediction.link_to_compute,
                "compute_step_s": prediction.compute_step_s,
                "link_step_s": prediction.link_step_s,
                "costs": [vars_of(costs) for costs in prediction.costs],
            }
            for name, prediction in by_arm.items()
        }
    }
    plain = by_arm.get(REFERENCE)
    if plain is not None and plain.is_shaped and plain.link_step_s > 0:  # one stage has no links
        limits["link_to_compute"] = plain.link_to_compute
        limits["compute_step_s"] = plain.compute_step_s
        limits["max_speedup"] = plain.step_s / plain.compute_step_s
    return limits


def vars_of(costs: StageCosts) -> dict[str, Any]:
    """Measured costs as plain numbers."""
    return {**asdict(costs), "phases": dict(costs.phases)}


def write_all(
    path: Path, results: Mapping[str, Any], trained: Sequence[Trained], observer: Observer
) -> None:
    """Everything that a run leaves in its folder; the numbers first, pictures if they can be.

    A full disk is a `TrainingError`, or a warning where the run has failed already. Of a run that
    was stopped or has failed the folder is told here: nobody will show its results.
    """
    has_failed = sys.exception() is not None
    aside = path / "results.json.part"
    try:
        aside.write_text(to_json(results, indent=1), encoding="utf-8")
        aside.replace(path / "results.json")
    except OSError as error:
        aside.unlink(missing_ok=True)
        text = (
            f"{path / 'results.json'} could not be written: "
            f"{(error.strerror or str(error)).lower()}; free space there. With --checkpoint-every "
            "the run can be repeated from its end by --resume, which writes it."
        )
        if not has_failed:
            raise TrainingError(text) from error
        observer.on_warning(text)
        return
    if has_failed:
        observer.on_note(f"what was done until then is in {path}")
    rows: dict[str, Sequence[StepRow]] = {one.arm.name: one.meter.rows for one in trained}
    records = {one.arm.name: one.records for one in trained if one.records}
    if not records:
        return
    try:
        write_trace(path / "trace.json", records)
        write_report(path / "report.html", results, rows=rows, steps=records)
        write_loss_figure(path / "loss_vs_time.png", results["arms"])
    except Exception as error:  # whatever it is, the numbers are written and the run is what it was
        observer.on_warning(f"the run's pictures could not be written: {error!r}")
