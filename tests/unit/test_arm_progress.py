"""An arm's numbers, saved and restored: nothing is counted twice and no time is made up."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from ray_pipe.arm_progress import prediction_of, progress_of, restore_meter
from ray_pipe.arms import summarize
from ray_pipe.checkpoint_files import pack, unpack
from ray_pipe.metrics import ArmMeter, MetricsFile
from ray_pipe.planner.cost import Prediction
from stages.record import Span, StepRecord
from stages.rehearsal import StageCosts


def record(step: int, start: float, loss: float) -> StepRecord:
    return StepRecord(
        stage=0,
        step=step,
        loss=loss,
        num_tokens=8,
        start_s=start,
        end_s=start + 1.0,
        seconds={},
        sent={"0->1": {"activation": 10 + step}},
        codec={"0->1": {"hits": 2.0}},
        grad_norm=1.5,
        spans=(Span(lane="compute", name="F0", start_s=start, end_s=start + 0.5),),
        events=("something",),
    )


def through_json(meter: ArmMeter) -> dict:  # type: ignore[type-arg]
    return unpack(pack(progress_of(meter, [], None, num_steps=4)))


def test_a_restored_meter_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = ArmMeter("a")
    for step in range(4):
        whole.add([record(step, float(step), 5.0 - step)])
    first = ArmMeter("a")
    for step in range(2):
        first.add([record(step, float(step), 5.0 - step)])

    with MetricsFile(tmp_path / "metrics.jsonl") as sink:
        second = ArmMeter("a", sink=sink)
        restore_meter(second, through_json(first))
        for step in (2, 3):
            second.add([record(step, 100.0 + step, 5.0 - step)])  # a later process, another clock

    assert second.rows == whole.rows
    assert second.ledger.by_link() == {"0->1": {"activation": 10 + 11 + 12 + 13}}
    assert summarize(second, final_window=2).as_dict() == summarize(whole, final_window=2).as_dict()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_losses_that_are_no_numbers_stay_so() -> None:
    meter = ArmMeter("a")
    meter.add([record(0, 0.0, math.nan)])
    meter.add([record(1, 1.0, math.inf)])
    other = ArmMeter("a")
    restore_meter(other, through_json(meter))

    losses = [row.loss for row in other.rows]
    assert losses[0] is not None
    assert math.isnan(losses[0])
    assert losses[1] == math.inf


def test_a_prediction_comes_back_whole() -> None:
    prediction = Prediction(
        step_s=1.0, compute_step_s=0.5, link_step_s=0.25, cut_shapes=((4, 8),), num_cores=2.0,
        costs=(StageCosts(phases={"forward": 0.1}, push_s=0.01, deliver_s=0.02),),
        is_shaped=True, link_to_compute=4.9, homes=(("a", 2.0),),
    )  # fmt: skip
    numbers = unpack(pack(progress_of(ArmMeter("a"), [], prediction, num_steps=1)))

    assert prediction_of(numbers) == prediction
    assert prediction_of({**numbers, "prediction": None}) is None

    old = {k: v for k, v in numbers["prediction"].items() if k != "cut_shapes"}
    old |= {"sample_shape": [4, 8]}  # as it was written when all cuts were taken for equal
    assert prediction_of({**numbers, "prediction": old}) == replace(prediction, cut_shapes=())
