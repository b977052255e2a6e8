"""An arm while it is trained: what its user hears before the end."""

from __future__ import annotations

import math
from typing import Any

from ray_pipe.metrics import ArmMeter
from ray_pipe.trained import Trained
from stages.record import StepRecord


def record(step: int, norm: float | None) -> StepRecord:
    return StepRecord(
        stage=0, step=step, loss=1.0, num_tokens=1, start_s=float(step), end_s=step + 1.0,
        seconds={}, sent={}, codec={}, grad_norm=norm,
    )  # fmt: skip


def heard_of(norms: list[float | None]) -> list[str]:
    heard: list[str] = []
    arm: Any = None
    one = Trained(arm=arm, prediction=None, meter=ArmMeter("acsgd"), on_warning=heard.append)
    for step, norm in enumerate(norms):
        one.add([record(step, norm)])
    return heard


def test_a_gradient_that_is_not_finite_is_told_once_with_what_to_do() -> None:
    (text,) = heard_of([1.0, math.inf, 1.0, math.inf])

    assert text.startswith("acsgd: the gradient of step 1 is not finite, so its update was skipped")
    assert "lower --lr" in text


def test_of_finite_gradients_and_of_steps_without_one_nothing_is_said() -> None:
    assert heard_of([1.0, None, 1e30]) == []
