"""Whom the driver tells, once a step, what the cluster should see of the run.

A number travels from the record of a stage through the row of its step to Ray and Prometheus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ray_pipe.monitoring.readings import (
    Reading,
    of_arm_end,
    of_arm_start,
    of_failure,
    of_replay,
    of_step,
)
from ray_pipe.results_table import show_amount

if TYPE_CHECKING:
    from ray_pipe.arms import ArmSummary
    from ray_pipe.ledger import Sent
    from ray_pipe.recovery import Failure
    from ray_pipe.step_row import StepRow
    from stages.record import StepRecord


class Monitor:
    """Turns what happens into readings and a line of status."""

    def __init__(
        self,
        *,
        export: Callable[[str, Iterable[Reading]], None] | None = None,
        show: Callable[[str], None] | None = None,
        failures: Sequence[Failure] = (),
    ) -> None:
        """`export` takes an arm and its readings, `show` a line; without them nothing is told.

        `failures` is the run's own list, which grows. Those that are in it already were told by
        the driver that this one goes on after: its counters, too, began at zero.
        """
        self._export = export or (lambda arm, readings: None)
        self._show = show or (lambda text: None)
        self._failures = failures
        self._num_told = len(failures)
        self._arm = ""
        self._place = ""
        self._num_steps = 0

    def on_arm(
        self, name: str, index: int, num_arms: int, steps: int, predicted_step_s: float | None
    ) -> None:
        """Arm `index` (from 0) begins."""
        self._arm, self._num_steps = name, steps
        self._place = f"arm {index + 1} of {num_arms}"
        self._export(name, of_arm_start(num_steps=steps, predicted_step_s=predicted_step_s))
        self._show(f"{name} begins, {self._place}")

    def on_step(self, row: StepRow, records: Sequence[StepRecord]) -> None:
        """A step of the arm's own ended."""
        self._export(row.arm, of_step(row, records))
        # Ray's list of jobs shows some 25 letters, the rest when it is asked to.
        parts = [f"{row.arm} {row.step + 1}/{self._num_steps}"]
        if row.loss is not None:
            parts.append(f"loss {row.loss:.4f}")
        if row.tokens_per_s is not None:
            unit = "samples" if row.embedding else "tokens"  # of a click model they are samples
            parts.append(f"{show_amount(row.tokens_per_s)} {unit}/s")
        self._show(", ".join([*parts, self._place]))

    def on_eval(self, loss: float | None) -> None:
        """The held-out samples were evaluated."""
        if loss is not None and math.isfinite(loss):
            self._export(self._arm, [Reading("pipe_eval_loss", loss)])

    def on_auc(self, auc: float) -> None:
        """The held-out clicks were scored."""
        self._export(self._arm, [Reading("pipe_auc", auc)])

    def on_replay(self, sent: Sent, records: Sequence[StepRecord]) -> None:
        """A step was run again after a failure; `sent` is what results.json counts of it."""
        self._export(self._arm, of_replay(sent, records))

    def on_failures(self) -> None:
        """There may be failures that have not been told yet."""
        for failure in self._failures[self._num_told :]:
            self._num_told += 1
            self._export(failure.arm or self._arm, of_failure(failure))
            self._show(f"{failure.arm}: {failure}")

    def on_arm_end(self, summary: ArmSummary) -> None:
        """The arm has its final numbers."""
        self._export(summary.name, of_arm_end(summary))
        loss = f", final loss {summary.final_loss:.4f}" if summary.final_loss is not None else ""
        self._show(f"{summary.name} done{loss}, {self._place}")


@contextmanager
def watch(run: str, failures: Sequence[Failure] = ()) -> Iterator[Monitor]:
    """A monitor that tells Ray, which must be connected; `run` is the run's folder.

    The last of `failures`, which ended the run, is told on the way out.
    """
    from ray_pipe.monitoring.exporter import RayExporter
    from ray_pipe.monitoring.job_view import JobMessage, submission_id

    with JobMessage(run, job=submission_id()) as message:
        monitor = Monitor(export=RayExporter(run).export, show=message.show, failures=failures)
        try:
            yield monitor
        finally:
            monitor.on_failures()
