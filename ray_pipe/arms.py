"""Arms of a run: one codec trained from the same seed on the same batches, summed up and compared.

Path: ray_pipe.metrics -> ray_pipe.arms -> ray_pipe.report

`ArmSummary.as_dict` is the arm of results.json. What needs the fp32 arm (gap, speed-up, time to its
final loss) is filled in by `compare`, and stays null (speed-up: 1.0) where there is no such arm.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from ray_pipe.ledger import Sent
from ray_pipe.metrics import ArmMeter
from ray_pipe.step_row import finite
from ray_pipe.time_share import SHARES, StageTime, add_times, shares
from stages.record import KINDS

REFERENCE = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm of results.json."""

    name: str
    final_window: int
    """Steps in the mean that stands for the loss now, usually an epoch; the same for all arms."""

    final_loss: float | None
    tokens_per_s: float | None
    step_s: float | None
    wall_s: float
    steps: int
    num_tokens: int
    bytes_total: dict[str, int]
    links: Sent
    bytes_last: int
    """Mean bytes of a step in the final window: what a step costs once first visits are over."""

    losses: tuple[tuple[float, int, float | None], ...]
    """(wall_s, step, loss) of every step, and of those run in overtime to reach the target."""

    stage_s: tuple[StageTime, ...]
    """Where each stage's time went, over the steps whose records had spans."""

    stage_steps: int
    """How many steps `stage_s` adds up."""

    predicted_step_s: float | None = None
    loss_gap: float | None = None
    speedup: float | None = 1.0
    time_to_target_s: float | None = None
    time_to_target_speedup: float | None = None
    codec: dict[str, dict[str, float]] = field(default_factory=dict)
    """The codecs' numbers in the last step, by edge."""

    @property
    def bytes_per_step(self) -> int:
        """Mean over all steps, first visits included."""
        return round(sum(self.bytes_total.values()) / self.steps) if self.steps else 0

    @property
    def prediction_error(self) -> float | None:
        """(measured - predicted) / measured step time; positive when the run was slower."""
        if not self.step_s or self.predicted_step_s is None:
            return None
        return (self.step_s - self.predicted_step_s) / self.step_s

    def as_dict(self) -> dict[str, Any]:
        """The arm of results.json: no NaN, all five kinds of bytes, all four shares."""
        arm = {
            "name": self.name,
            "final_loss": self.final_loss,
            "loss_gap": self.loss_gap,
            "tokens_per_s": self.tokens_per_s,
            "step_s": self.step_s,
            "predicted_step_s": self.predicted_step_s,
            "prediction_error": self.prediction_error,
            "bytes_per_step": self.bytes_per_step,
            "bytes_per_step_last": self.bytes_last,
            "bytes_total": {kind: self.bytes_total.get(kind, 0) for kind in KINDS},
            "speedup": self.speedup,
            "time_to_target_s": self.time_to_target_s,
            "time_to_target_speedup": self.time_to_target_speedup,
            "wall_s": self.wall_s,
            "steps": self.steps,
            "num_tokens": self.num_tokens,
            "final_window": self.final_window,
            "time_share": shares(self.stage_s) or dict.fromkeys(SHARES),
            "stages": [
                {"stage": stage, "steps": self.stage_steps, "seconds": time.as_dict()}
                for stage, time in enumerate(self.stage_s)
            ],
            "links": self.links,
            "codec": self.codec,
            "losses": self.losses,
        }
        cleaned: dict[str, Any] = finite(arm)
        return cleaned


def summarize(
    meter: ArmMeter, *, final_window: int, predicted_step_s: float | None = None
) -> ArmSummary:
    """Sum up an arm, also one that was stopped early."""
    if final_window < 1:
        raise ValueError(f"final_window is {final_window}: a mean needs at least one step")
    rows, num_tokens = meter.rows, meter.num_tokens
    last = rows[-final_window:]
    wall_s = rows[-1].wall_s if rows else 0.0
    step_s, losses = array("d"), []
    totals: dict[int, tuple[int, tuple[StageTime, ...]]] = {}
    """By how many stages told their times: steps, and the sum of each stage's."""
    for row in rows:  # once: those of a long run come from a file
        step_s.append(row.step_s)
        losses.append((row.wall_s, row.step, row.loss))
        steps, sums = totals.get(len(row.stage_s), (0, ()))
        added = (
            tuple(add_times(pair) for pair in zip(sums, row.stage_s, strict=True))
            if steps
            else row.stage_s
        )
        totals[len(row.stage_s)] = (steps + 1, added)
    losses += [(row.wall_s, row.step, row.loss) for row in meter.overtime]
    num_stages = max(totals, default=0)
    stage_steps, stage_s = totals.get(num_stages, (0, ()))
    return ArmSummary(
        name=meter.name,
        final_window=final_window,
        final_loss=_mean([row.loss for row in last]),
        tokens_per_s=num_tokens / wall_s if wall_s > 0 else None,
        # Not the mean: the first step also warms caches and sends all rows cold.
        step_s=median(step_s) if rows else None,
        predicted_step_s=predicted_step_s,
        wall_s=wall_s,
        steps=len(rows),
        num_tokens=num_tokens,
        bytes_total=meter.ledger.total(),
        links=meter.ledger.by_link(),
        bytes_last=round(sum(row.nbytes for row in last) / len(last)) if last else 0,
        losses=tuple(losses),
        stage_s=stage_s,
        stage_steps=stage_steps if num_stages else 0,
        codec=rows[-1].codec if rows else {},
    )


def compare(arms: Sequence[ArmSummary], *, reference: str = REFERENCE) -> list[ArmSummary]:
    """The same arms with gap, speed-up and time to the reference arm's final loss filled in."""
    base = next((arm for arm in arms if arm.name == reference), None)
    if base is None:
        return list(arms)
    windows = sorted({arm.final_window for arm in arms})
    if len(windows) > 1:
        raise ValueError(f"arms with final windows of {windows} steps cannot be compared: use one")
    # A run shorter than an epoch still has a final loss: the mean of all its steps.
    window = min(base.final_window, base.steps)
    target = base.final_loss
    base_time = time_to_target(base.losses, target=target, window=window)
    compared = []
    for arm in arms:
        own_time = time_to_target(arm.losses, target=target, window=window)
        compared.append(
            replace(
                arm,
                loss_gap=_difference(arm.final_loss, target),
                speedup=_ratio(base.step_s, arm.step_s),
                time_to_target_s=own_time,
                time_to_target_speedup=_ratio(base_time, own_time),
            )
        )
    return compared


def time_to_target(
    losses: Sequence[tuple[float, int, float | None]], *, target: float | None, window: int
) -> float | None:
    """When the mean of the last `window` losses first was at or below `target`; None if never.

    A mean over fewer steps does not count: one lucky batch is not a trained model. Steps without
    a finite loss never reach anything.
    """
    if target is None or not math.isfinite(target) or window < 1:
        return None
    values = [loss for _, _, loss in losses]
    for end in range(window, len(values) + 1):
        mean = _mean(values[end - window : end])
        if mean is not None and mean <= target:
            return losses[end - 1][0]
    return None


def running_mean(values: Sequence[float | None], *, window: int) -> list[float | None]:
    """Mean of the last `window` values at each position; None where there are not as many yet."""
    return [
        _mean(values[end - window : end]) if end >= window else None
        for end in range(1, len(values) + 1)
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    """None if there is no value, or one that is missing or not finite."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers or len(numbers) < len(values):
        return None
    # fsum is exact, so the reference arm's last running mean equals its final loss to the bit.
    return math.fsum(numbers) / len(numbers)


def _ratio(base: float | None, own: float | None) -> float | None:
    return base / own if base is not None and own else None


def _difference(own: float | None, base: float | None) -> float | None:
    return own - base if own is not None and base is not None else None
