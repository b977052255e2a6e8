"""Rows of several replicas: by step where they keep together, by work where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from ray_pipe.metrics import ArmMeter
from ray_pipe.replica_rows import RowsByStep, RowsByWork, joined
from stages.record import StepRecord


def record(replica: int, step: int, *, loss: float | None = 2.0, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "stage": replica,
        "step": step,
        "loss": loss,
        "num_tokens": 10,
        "start_s": float(step),
        "end_s": step + 1.0,
        "seconds": {"forward": 0.5},
        "sent": {f"{replica}->9": {"replica": 100}},
        "codec": {},
        "grad_norm": 1.0,
        "replica": replica,
        "sync": {"iteration": step + 1, "fp32_bytes": 400, "waited": {"reduce": 0.1}},
    }
    return StepRecord(**{**values, **changes})


def test_a_row_by_step_waits_for_everybody_who_still_works() -> None:
    rows = RowsByStep(0)
    rows.add(0, 0, [record(0, 0)])
    rows.add(0, 1, [record(0, 1)])

    assert rows.ready({0: 0, 1: 0}) == []
    rows.add(1, 0, [record(1, 0)])
    (first,) = rows.ready({0: 0, 1: 0})
    assert [(r.replica, r.step) for r in first] == [(0, 0), (1, 0)]
    (second,) = rows.ready({0: 0})  # replica 1 has died: nobody waits for it
    assert [(r.replica, r.step) for r in second] == [(0, 1)]


def test_a_newcomer_is_waited_for_from_its_first_step_on() -> None:
    rows = RowsByStep(4)
    for step in (4, 5):
        rows.add(0, step, [record(0, step)])

    (before,) = rows.ready({0: 0, 1: 5})
    assert [r.step for r in before] == [4]
    rows.add(1, 5, [record(1, 5)])
    (after,) = rows.ready({0: 0, 1: 5})
    assert [r.replica for r in after] == [0, 1]


def test_a_row_by_work_is_as_many_steps_as_there_are_replicas_whoever_did_them() -> None:
    rows = RowsByWork(10, 2)
    rows.add(0, 0, [record(0, 0, loss=1.0)])
    rows.add(0, 1, [record(0, 1, loss=2.0)])
    rows.add(1, 0, [record(1, 0, loss=6.0)])

    (first,) = rows.ready({0: 0, 1: 0})
    assert [(r.stage, r.step, r.loss) for r in first] == [(0, 10, 1.5)]
    assert first[0].sent == {"0->9": {"replica": 200}}
    assert first[0].sync["fp32_bytes"] == 800
    assert rows.ready({0: 0, 1: 0}) == []
    (rest,) = rows.rest()
    assert [(r.stage, r.step) for r in rest] == [(1, 11)]
    assert rows.rest() == []


def test_steps_of_one_stage_are_joined_without_losing_a_byte_or_a_second() -> None:
    both = joined([record(0, 3, loss=1.0), record(0, 4, loss=None)], 7)

    assert both.step == 7
    assert both.loss == 1.0  # a skipped step has none
    assert both.num_tokens == 20
    assert both.seconds == {"forward": 1.0}
    assert (both.start_s, both.end_s) == (3.0, 5.0)


def test_the_loss_of_a_row_is_the_mean_of_the_replicas_and_tokens_add_up() -> None:
    meter = ArmMeter("fp32")

    row = meter.add([record(0, 0, loss=1.0), record(1, 0, loss=2.0), record(2, 0, loss=None)])

    assert row.loss == 1.5
    assert row.num_tokens == 30
    assert row.sent["1->9"] == {"replica": 100}
    assert row.replicas[2]["iteration"] == 1
    assert row.as_dict()["replicas"]["1"]["fp32_bytes"] == 400


def test_one_replica_keeps_its_loss_to_the_bit_and_says_nothing_of_replicas() -> None:
    row = ArmMeter("fp32").add([record(0, 0, loss=0.1 + 0.2, sync={})])

    assert row.loss == 0.1 + 0.2
    assert "replicas" not in row.as_dict()
    assert row.replicas == pytest.approx({})
