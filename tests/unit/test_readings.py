"""Readings: what a step's row and records say, number by number."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from synthetic_records import make_step

from ray_pipe.arms import summarize
from ray_pipe.metrics import ArmMeter
from ray_pipe.monitoring.catalogue import BY_NAME, METRICS, Metric, markdown_table
from ray_pipe.monitoring.readings import Reading, of_arm_end, of_arm_start, of_replay, of_step
from stages.record import KINDS, StepRecord

CODEC = {
    "hits": 12.0,
    "cold": 4.0,
    "error": 0.25,
    "resent": 2.0,
    "fp32_bytes": 4096.0,
    "resident_bytes": 512.0,
    "spilled_bytes": 0.0,
}


def steps(num_steps: int = 3) -> tuple[ArmMeter, list[list[StepRecord]]]:
    meter = ArmMeter("acsgd")
    return meter, [
        make_step(step=step, start_s=float(step), num_stages=2, loss=2.0 - step / 8, codec=CODEC)
        for step in range(num_steps)
    ]


def read(records: list[StepRecord], meter: ArmMeter) -> dict[tuple[str, str], float]:
    return {
        (name, " ".join(value for _, value in labels)): number
        for name, number, labels in of_step(meter.add(records), records)
    }


def test_gradients_lost_with_a_shard_are_counted_where_there_are_any() -> None:
    meter, (records, *_) = steps()
    row = meter.add(records)
    seen = {"tau": 4.0, "staleness": {"1": 3.0}, "new_lost_pushes": 5.0}

    found = {one.name: one.value for one in of_step(replace(row, embedding=seen), records)}
    none = {one.name for one in of_step(replace(row, embedding={**seen, "new_lost_pushes": 0}), [])}

    assert found["pipe_embedding_lost_pushes_total"] == 5
    assert "pipe_embedding_lost_pushes_total" not in none


def test_a_step_gives_the_numbers_of_its_row_and_records() -> None:
    meter, (records, *_) = steps()
    records[1] = replace(
        records[1], seconds={**records[1].seconds, "encode": 0.5, "wait_forward": 0.25}
    )

    found = read(records, meter)

    assert found["pipe_steps_total", ""] == 1
    assert found["pipe_step", ""] == 1
    assert found["pipe_loss", ""] == 2.0
    assert found["pipe_grad_norm", ""] == 1.5
    assert found["pipe_tokens_total", ""] == 1024
    assert found["pipe_link_bytes_total", "0->1 activation"] == 500_000
    assert found["pipe_link_bytes_total", "1->0 gradient"] == 500_000
    assert found["pipe_link_bytes_total", "0->1 control"] == 384
    assert found["pipe_fp32_bytes_total", "0->1"] == 4096
    assert found["pipe_frames_resent_total", "0->1"] == 2
    assert found["pipe_buffer_hits_total", "0->1"] == 12
    assert found["pipe_buffer_misses_total", "0->1"] == 4
    assert found["pipe_buffer_bytes", "0->1 memory"] == 512
    assert found["pipe_buffer_bytes", "0->1 disk"] == 0
    assert found["pipe_codec_error_ratio", "0->1"] == 0.25
    assert found["pipe_codec_seconds_total", "1 encode"] == 0.5
    assert found["pipe_wait_seconds_total", "1 forward"] == 0.25
    assert found["pipe_compute_seconds_total", "0 backward"] == pytest.approx(0.08)
    assert ("pipe_events_total", "") not in found


def test_added_up_counters_equal_the_ledger_and_the_summary() -> None:
    meter, all_records = steps(5)
    totals: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for records in all_records:
        for name, value, labels in of_step(meter.add(records), records):
            totals[name] += value
            if name == "pipe_link_bytes_total":
                kinds[dict(labels)["kind"]] += value
    summary = summarize(meter, final_window=5)

    assert {kind: kinds[kind] for kind in KINDS} == meter.ledger.total() == summary.bytes_total
    assert totals["pipe_steps_total"] == summary.steps == 5
    assert totals["pipe_tokens_total"] == summary.num_tokens
    assert totals["pipe_step_seconds_total"] == pytest.approx(summary.wall_s)
    shares = sum(time.total for time in summary.stage_s)
    assert totals["pipe_stage_seconds_total"] == pytest.approx(shares)


def test_a_row_of_replicas_gives_where_they_are_and_what_they_waited_for() -> None:
    meter, (records, *_) = steps()
    fleet = {
        "iterations": {0: 7, 1: 5}, "gap": 2, "largest_gap": 2, "skipped": 3, "groups": 4,
        "conflicts": 1, "waited_s": {"plan": 0.5, "gate": 2.0},
    }  # fmt: skip
    row = replace(meter.add(records), fleet=fleet)

    readings = list(of_step(row, records))
    found = {(name, " ".join(v for _, v in labels)): value for name, value, labels in readings}

    assert wrong(readings) == []
    assert found["pipe_replica_iterations", "1"] == 5
    assert found["pipe_replica_gap_steps", "0"] == 2
    assert found["pipe_replica_skipped_steps", ""] == 3
    assert (found["pipe_replica_groups", ""], found["pipe_replica_conflicts", ""]) == (4, 1)
    assert found["pipe_replica_waited_seconds", "gate"] == 2.0


def test_what_is_not_finite_is_left_out() -> None:
    meter, (records, *_) = steps()
    records = [
        replace(record, loss=math.nan, grad_norm=math.inf, codec={"0->1": {"error": math.nan}})
        for record in records
    ]

    names = {name for name, _ in read(records, meter)}

    assert not names & {"pipe_loss", "pipe_grad_norm", "pipe_codec_error_ratio"}
    assert "pipe_steps_total" in names


def test_events_are_counted() -> None:
    meter, (records, *_) = steps()
    records = [replace(record, events=("one", "two")) for record in records]

    assert read(records, meter)["pipe_events_total", ""] == 4


def test_a_step_run_again_adds_its_bytes_and_nothing_else() -> None:
    meter, (records, *_) = steps()
    meter.add(records)
    before = meter.ledger.total()
    sent = meter.count_again(records)
    readings = list(of_replay(sent, records))

    after = meter.ledger.total()
    added = sum(value for name, value, _ in readings if name == "pipe_link_bytes_total")
    assert added == sum(after.values()) - sum(before.values()) > 0
    assert {name for name, _, _ in readings} == {"pipe_link_bytes_total", "pipe_fp32_bytes_total"}


def test_a_step_of_overtime_run_again_adds_nothing() -> None:
    meter, (records, later, *_) = steps()
    meter.add(records)
    meter.add(later, overtime=True)

    assert list(of_replay(meter.count_again(later), later)) == []


def test_an_arm_begins_with_its_plan_and_ends_with_its_results() -> None:
    meter, all_records = steps()
    for records in all_records:
        meter.add(records)
    summary = summarize(meter, final_window=2, predicted_step_s=0.5)

    assert list(of_arm_start(num_steps=7, predicted_step_s=None)) == [
        Reading("pipe_planned_steps", 7)
    ]
    assert [name for name, _, _ in of_arm_start(num_steps=7, predicted_step_s=0.5)] == [
        "pipe_planned_steps",
        "pipe_predicted_step_seconds",
    ]
    assert {name: value for name, value, _ in of_arm_end(summary)} == {
        "pipe_final_loss": summary.final_loss,
        "pipe_prediction_error_ratio": summary.prediction_error,
    }


def wrong(readings: list[Reading]) -> list[str]:
    """Readings that do not fit the catalogue."""
    return [
        name
        for name, value, labels in readings
        if name not in BY_NAME
        or tuple(label for label, _ in labels) != BY_NAME[name].labels
        or (BY_NAME[name].kind == "counter" and not value > 0)
    ]


def test_every_reading_fits_the_catalogue_and_a_stranger_would_be_seen() -> None:
    meter, (records, *_) = steps()
    readings = list(of_step(meter.add(records), records))

    assert wrong(readings) == []
    assert wrong([Reading("pipe_stranger", 1)]) == ["pipe_stranger"]
    assert wrong([Reading("pipe_loss", 1, (("link", "0->1"),))]) == ["pipe_loss"]
    assert wrong([Reading("pipe_steps_total", 0)]) == ["pipe_steps_total"]


def faults(metric: Metric) -> list[str]:
    """What breaks the rules of names: ours begin with pipe_, counters end with _total."""
    found = []
    if not metric.name.startswith("pipe_"):
        found.append("prefix")
    if metric.name.endswith("_total") != (metric.kind == "counter"):
        found.append("total")
    if metric.unit == "seconds" and "seconds" not in metric.name:
        found.append("unit")
    if metric.unit == "bytes" and "bytes" not in metric.name:
        found.append("unit")
    if not metric.help.endswith("."):
        found.append("help")
    return found


def test_the_catalogue_keeps_prometheus_rules_of_names() -> None:
    assert {metric.name: faults(metric) for metric in METRICS if faults(metric)} == {}
    assert len(BY_NAME) == len(METRICS)
    assert [m.name for m in METRICS if m.planned] == []
    assert faults(replace(BY_NAME["pipe_loss"], kind="counter", name="loss")) == ["prefix", "total"]
    assert faults(replace(BY_NAME["pipe_buffer_bytes"], name="pipe_buffer")) == ["unit"]


def test_the_table_has_a_line_for_each_metric() -> None:
    lines = markdown_table().splitlines()

    assert len(lines) == 2 + len(METRICS)
    assert lines[2].startswith("| `ray_pipe_steps_total` | counter | steps |")
