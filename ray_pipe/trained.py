"""One arm while and after it is trained: its rows, its records, what it left behind."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_pipe.arms import ArmSummary, summarize
from ray_pipe.checkpoint import Saver
from ray_pipe.delta_watch import DeltaWatch
from ray_pipe.fleet_book import FleetBook
from ray_pipe.ledger import Sent
from ray_pipe.metrics import ArmMeter
from ray_pipe.monitoring.monitor import Monitor
from ray_pipe.planner.cost import Prediction
from ray_pipe.plans import Arm
from ray_pipe.step_row import StepRow
from stages.record import StepRecord

KEPT_STEPS = 100
"""Steps at either end of a run whose spans are kept for the trace."""


@dataclass(kw_only=True)
class Trained:
    """One arm while and after it is trained."""

    arm: Arm
    prediction: Prediction | None
    meter: ArmMeter
    monitor: Monitor = field(default_factory=Monitor)
    first_records: list[StepRecord] = field(default_factory=list)
    last_records: deque[list[StepRecord]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    states: list[dict[str, Any]] = field(default_factory=list)
    """Weights and optimizer of each stage after the arm's own steps, if they were asked for."""

    sees_links: bool = True
    """False on a real network that nothing was said about: the prediction cannot be compared."""

    deltas: DeltaWatch | None = None
    """Looks whether memory is of any use; says so to `on_warning`."""

    has_skipped: bool = False
    """Whether an update was skipped because its gradient was not finite: said once."""

    on_warning: Callable[[str], None] | None = None
    on_evaluated: Callable[[], None] | None = None
    on_replayed: Callable[[Sent], None] | None = None
    """Told the bytes of a step that was run again, which its row does not have."""

    fleet: FleetBook | None = None
    """What the replicas did, if there are several."""

    saver: Saver | None = None
    eval_losses: list[tuple[float, int, float | None]] = field(default_factory=list)
    """(wall_s, step, loss on held-out samples), once an epoch with `--eval`."""

    def add(self, records: list[StepRecord]) -> StepRow:
        """A step's row. The cluster hears of it, and its spans are kept for the trace: of a long
        run those of its beginning and its end."""
        fleet = self.fleet
        if fleet is None:
            row = self.meter.add(records)
        else:
            row = self.meter.add(records, also=fleet.take_sent(), fleet=fleet.now())
        if self.saver is not None:
            self.saver.recorded(row.step)
        self.monitor.on_step(row, records)
        self._look_at_norm(row)
        if self.deltas is not None and self.on_warning is not None:
            for text in self.deltas.look(records):
                self.on_warning(text)
        if len(self.meter.rows) <= KEPT_STEPS:
            self.first_records += records
        else:
            self.last_records.append(records)
        return row

    def _look_at_norm(self, row: StepRow) -> None:
        is_finite = row.grad_norm is None or math.isfinite(row.grad_norm)
        if is_finite or self.has_skipped or self.on_warning is None:
            return
        self.has_skipped = True
        self.on_warning(
            f"{self.meter.name}: the gradient of step {row.step} is not finite, so its update was "
            "skipped; if the loss does not come back, lower --lr (metrics.jsonl names every such "
            "step)"
        )

    def add_again(self, records: list[StepRecord]) -> None:
        """A step that was run again after a failure: its bytes count, its row is there."""
        sent = self.meter.count_again(records)
        self.monitor.on_replay(sent, records)
        if self.on_replayed is not None:
            self.on_replayed(sent)
        if self.saver is not None:
            self.saver.recorded(records[0].step)

    def extra(self) -> dict[str, Any]:
        """What a checkpoint keeps of the arm besides rows and bytes."""
        return {}

    def restore_extra(self, saved: Mapping[str, Any]) -> None:
        """What `extra` gave."""

    @property
    def records(self) -> list[StepRecord]:
        return self.first_records + [record for step in self.last_records for record in step]

    @property
    def predicted_step_s(self) -> float | None:
        return self.prediction.step_s if self.prediction and self.sees_links else None

    @property
    def not_predicted(self) -> str | None:
        """Why there is no prediction to compare with; None if there is one."""
        if self.prediction is None:
            several = "the simulator knows one pipeline, this arm has several replicas"
            return several if self.fleet else "steps with embedding shards are not simulated"
        return None if self.sees_links else "the links are real, and nothing was said of their rate"

    def summary(self) -> ArmSummary:
        """The arm as far as it came; its final loss is the mean of its last epoch."""
        if self.fleet is not None:
            self.meter.ledger.add_late(self.fleet.take_sent())
        window = min(self.arm.order.steps_per_epoch, max(1, self.arm.num_steps))
        return summarize(self.meter, final_window=window, predicted_step_s=self.predicted_step_s)
