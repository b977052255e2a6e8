"""Rows of steps, summaries of arms, and the rules by which arms are compared."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_pipeline import Bench
from synthetic_records import make_arm, make_step

from netsim import link
from ray_pipe.arms import ArmSummary, compare, running_mean, summarize, time_to_target
from ray_pipe.ledger import LedgerError
from ray_pipe.metrics import ArmMeter, MetricsFile, to_json
from ray_pipe.step_row import finite, row_of_line
from ray_pipe.time_share import SHARES, StageTime, shares, stage_times, union
from stages.record import Span, StepRecord


def record(
    *,
    stage: int = 0,
    step: int = 0,
    start_s: float = 0.0,
    end_s: float = 1.0,
    loss: float | None = None,
    **others: Any,
) -> StepRecord:
    fields: dict[str, Any] = {
        "num_tokens": 100,
        "seconds": {},
        "sent": {},
        "codec": {},
        "grad_norm": None,
    }
    return StepRecord(
        stage=stage, step=step, loss=loss, start_s=start_s, end_s=end_s, **{**fields, **others}
    )


def span(lane: str, name: str, start_s: float, end_s: float) -> Span:
    return Span(lane=lane, name=name, start_s=start_s, end_s=end_s)


def summary_of(
    losses: Sequence[float], *, name: str = "arm", step_s: float = 1.0, window: int = 2
) -> ArmSummary:
    meter = ArmMeter(name)
    for step, loss in enumerate(losses):
        meter.add([record(step=step, start_s=step * step_s, end_s=(step + 1) * step_s, loss=loss)])
    return summarize(meter, final_window=window)


def test_an_evaluation_between_two_steps_is_left_out_of_all_times() -> None:
    meter = ArmMeter("arm")
    meter.add([record(step=0, start_s=10.0, end_s=11.0, loss=2.0)])
    meter.skip([record(step=0, start_s=11.0, end_s=15.0)])

    row = meter.add([record(step=1, start_s=15.0, end_s=17.0, loss=1.0)])

    assert (row.step_s, row.wall_s) == (2.0, 3.0)


# --- rows ---------------------------------------------------------------------------------------


def test_the_records_of_all_stages_make_one_row() -> None:
    meter = ArmMeter("acsgd")
    row = meter.add(
        [
            record(stage=1, start_s=10.5, end_s=12.0, loss=2.5, grad_norm=0.7, events=("b",)),
            record(
                stage=0,
                start_s=10.0,
                end_s=11.5,
                sent={"0->1": {"activation": 1000, "control": 20}},
                codec={"0->1": {"hit_rate": 0.5}},
                events=("a",),
            ),
        ]
    )

    assert row.as_dict() == {
        "arm": "acsgd",
        "step": 0,
        "loss": 2.5,
        "wall_s": 2.0,
        "step_s": 2.0,
        "num_tokens": 100,
        "tokens_per_s": 50.0,
        "grad_norm": 0.7,
        "bytes": {"activation": 1000, "gradient": 0, "replica": 0, "embedding": 0, "control": 20},
        "links": {"0->1": {"activation": 1000, "control": 20}},
        "time_share": None,
        "stages": [],
        "codec": {"0->1": {"hit_rate": 0.5}},
        "events": ["a", "b"],
    }


def test_step_times_add_up_to_the_wall_time_also_when_the_driver_is_slow() -> None:
    meter = ArmMeter("fp32")
    meter.add([record(step=0, start_s=5.0, end_s=6.0)])
    late = meter.add([record(step=1, start_s=9.0, end_s=10.0)])

    assert late.step_s == 4.0
    assert late.wall_s == sum(row.step_s for row in meter.rows) == 5.0


def test_tokens_of_the_batch_are_not_multiplied_by_stages() -> None:
    row = ArmMeter("fp32").add([record(stage=stage) for stage in range(4)])

    assert row.num_tokens == 100


def test_two_records_of_one_stage_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stages \[0, 1, 1\]: one for each stage"):
        ArmMeter("fp32").add([record(stage=1), record(stage=0), record(stage=1)])


def test_records_of_different_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different steps \[3, 4\]"):
        ArmMeter("fp32").add([record(step=3), record(stage=1, step=4)])
    with pytest.raises(ValueError, match="got none"):
        ArmMeter("fp32").add([])


def test_a_step_that_is_added_twice_leaves_the_meter_as_it_was() -> None:
    meter = ArmMeter("fp32")
    step = [record(sent={"0->1": {"activation": 10}})]
    meter.add(step)

    with pytest.raises(LedgerError, match="counted twice"):
        meter.add(step)
    assert len(meter.rows) == 1
    assert meter.ledger.nbytes == 10


def test_where_both_ends_report_a_codec_number_the_senders_stands() -> None:
    row = ArmMeter("acsgd").add(
        [
            record(stage=0, codec={"0->1": {"error": 0.3}, "1->0": {"error": 0.5, "nacks": 2.0}}),
            record(stage=1, codec={"0->1": {"error": 0.9}, "1->0": {"error": 0.1}}),
        ]
    )

    assert row.codec == {"0->1": {"error": 0.3}, "1->0": {"error": 0.1, "nacks": 2.0}}


def test_each_line_of_the_file_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as sink:
        meter = ArmMeter("fp32", sink=sink)
        meter.add([record(step=0, loss=3.0)])
        first = path.read_text(encoding="utf-8")
        meter.add([record(step=1, start_s=1.0, end_s=2.0, loss=math.nan)])

    lines = path.read_text(encoding="utf-8").splitlines()
    assert first.endswith("\n")
    assert first.count("\n") == 1
    assert [json.loads(line)["loss"] for line in lines] == [3.0, None]


def test_a_full_disk_costs_no_line_and_no_training(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        warnings: list[str] = []
        with MetricsFile(tmp_path / "metrics.jsonl", on_warning=warnings.append) as sink:
            meter = ArmMeter("fp32", sink=sink)
            meter.add([record(step=0, loss=3.0)])
            ballast = tmp_path / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            for step in range(1, 40):
                meter.add([record(step=step, start_s=step, end_s=step + 1, loss=2.0)])
            before = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
            ballast.unlink()

        lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert before.endswith("\n")  # whole lines only
        assert before.count("\n") < 40
        assert [json.loads(line)["step"] for line in lines] == list(range(40))
        (text,) = warnings
        assert text.endswith(
            "metrics.jsonl could not be written: no space left on device; training goes on, its "
            "lines wait in memory. Free space on that disk."
        )
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@given(
    st.recursive(
        st.floats() | st.integers() | st.text() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_json_never_holds_nan_or_infinity(value: Any) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(to_json(value), parse_constant=refuse) == finite(value)


# --- where the time went ------------------------------------------------------------------------


def test_each_moment_of_a_stage_counts_once() -> None:
    records = [
        record(stage=0, end_s=10.0, spans=(span("wire", "0->1 F0", 1.0, 6.0),)),
        record(
            stage=1,
            end_s=10.0,
            spans=(
                span("wait", "F0", 0.0, 5.0),
                span("decode", "F0", 4.0, 5.0),  # while the link is busy: encode, not wire
                span("compute", "F0", 5.0, 7.0),  # from 5 to 6 the link is busy too: compute
                span("encode", "B0", 6.5, 7.5),  # half of it hidden behind compute
                span("update", "update", 9.0, 10.0),
            ),
        ),
    ]

    assert stage_times(records, starts={})[1] == StageTime(
        compute=3.0, encode=1.5, wire=3.0, bubble=2.5
    )


def test_an_outgoing_link_is_not_waiting_for_the_wire_while_somebody_works() -> None:
    working = span("compute", "F0", 0.0, 0.75)
    records = [
        record(stage=0, spans=(span("wire", "0->1 F1", 0.0, 1.0),)),
        record(stage=1, spans=(working,)),
    ]

    assert stage_times(records, starts={}) == [
        StageTime(compute=0.0, encode=0.0, wire=0.25, bubble=0.75),
        StageTime(compute=0.75, encode=0.0, wire=0.25, bubble=0.0),
    ]


def test_another_replicas_frames_are_not_what_a_pipeline_waits_for() -> None:
    records = [
        record(stage=0, spans=(span("wire", "0->1 F0", 0.0, 1.0),)),
        record(stage=1),
        record(stage=2, replica=1),
    ]

    assert [time.wire for time in stage_times(records, starts={})] == [1.0, 1.0, 0.0]


def test_a_frame_is_on_the_wire_until_it_has_arrived() -> None:
    flight = span("wire", "0->1 F0", 0.0, 0.25)._replace(arrive_s=0.75)
    records = [record(stage=0, spans=(flight,)), record(stage=1)]

    assert stage_times(records, starts={})[1] == StageTime(
        compute=0.0, encode=0.0, wire=0.75, bubble=0.25
    )


@pytest.mark.parametrize("num_stages", [2, 4])
def test_latency_is_the_wires_time_and_no_bubble(num_stages: int) -> None:
    assert share_of_the_wire(num_stages) > 0.9


def test_mutant_spans_that_end_at_departure_lose_the_latency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drain = link.Link.drain_spans
    monkeypatch.setattr(
        link.Link,
        "drain_spans",
        lambda self: [one._replace(arrive=one.depart) for one in drain(self)],
    )

    assert share_of_the_wire(2) < 0.1


def test_a_links_own_track_ends_when_its_frame_has_left() -> None:
    first = Bench(latency_s=0.2).run(steps=1).records[0][0]
    frames = [one for one in first.spans if one.lane == "wire" and one.arrive_s is not None]

    assert frames
    assert all(one.end_s - one.start_s < 0.01 for one in frames)
    assert all(one.arrive_s - one.end_s == pytest.approx(0.2) for one in frames)


def share_of_the_wire(num_stages: int) -> float:
    """Of a step that computes in no time, over links of 100 Mbit/s and 200 ms."""
    meter = ArmMeter("fp32")
    for step in Bench(num_stages=num_stages, latency_s=0.2).run(steps=2).records:
        row = meter.add(step)
    assert row.time_share is not None
    return row.time_share["wire"]


def test_a_window_starts_where_the_last_step_ended() -> None:
    meter = ArmMeter("fp32")
    meter.add([record(end_s=1.0, spans=(span("compute", "F0", 0.0, 1.0),))])
    row = meter.add(
        [record(step=1, start_s=3.0, end_s=4.0, spans=(span("compute", "F0", 3.0, 4.0),))]
    )

    assert row.time_share == {"compute": 1 / 3, "encode": 0.0, "wire": 0.0, "bubble": 2 / 3}


def test_without_spans_no_share_is_guessed() -> None:
    row = ArmMeter("fp32").add([record(seconds={"forward": 0.5, "wait_forward": 0.5})])

    assert row.time_share is None
    arm = summary_of([1.0, 1.0]).as_dict()
    assert arm["time_share"] == dict.fromkeys(SHARES)


@given(
    bandwidth=st.floats(1e6, 1e10),
    codec_s=st.floats(0, 0.05),
    num_stages=st.integers(1, 5),
    num_micro_batches=st.integers(1, 5),
)
def test_shares_add_up_to_one(
    bandwidth: float, codec_s: float, num_stages: int, num_micro_batches: int
) -> None:
    row = ArmMeter("x").add(
        make_step(
            step=0,
            start_s=1e3,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            bandwidth_bps=bandwidth,
            codec_s=codec_s,
        )
    )

    assert row.time_share is not None
    assert sum(row.time_share.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(0 <= share <= 1 for share in row.time_share.values())


def test_a_slower_link_moves_time_to_the_wire() -> None:
    def wire(bandwidth_bps: float) -> float:
        step = make_step(step=0, start_s=0.0, bandwidth_bps=bandwidth_bps)
        share = ArmMeter("x").add(step).time_share
        assert share is not None
        return share["wire"]

    assert wire(1e6) > 0.4 > wire(100e6) > wire(1e9)


def test_shares_of_no_time_are_none() -> None:
    assert shares([]) is None
    assert union([(1.0, 1.0), (3.0, 4.0), (2.0, 3.0)]) == [(2.0, 4.0)]


# --- arms ---------------------------------------------------------------------------------------


def test_a_summary_has_the_fields_of_results_json() -> None:
    meter = ArmMeter("fp32")
    for records in make_arm("fp32", num_steps=6, num_stages=2, num_micro_batches=2):
        meter.add(records)
    arm = summarize(meter, final_window=3, predicted_step_s=0.5).as_dict()

    assert {
        "name",
        "final_loss",
        "loss_gap",
        "tokens_per_s",
        "step_s",
        "predicted_step_s",
        "bytes_per_step",
        "bytes_total",
        "speedup",
        "time_to_target_s",
        "time_to_target_speedup",
        "wall_s",
        "steps",
        "losses",
        "time_share",
    } <= arm.keys()
    assert arm["bytes_total"] == {
        "activation": 6 * 2 * 262_144,
        "gradient": 6 * 2 * 262_144,
        "replica": 0,
        "embedding": 0,
        "control": 6 * 4 * 96,
    }
    assert arm["bytes_per_step"] == 4 * 262_144 + 4 * 96
    assert arm["steps"] == 6
    assert len(arm["losses"]) == 6
    assert arm["tokens_per_s"] == pytest.approx(6 * 512 / arm["wall_s"])
    assert sum(arm["time_share"].values()) == pytest.approx(1.0)
    assert arm["final_loss"] == pytest.approx(sum(loss for _, _, loss in arm["losses"][-3:]) / 3)


def test_step_time_is_the_median_so_one_slow_first_step_does_not_count() -> None:
    meter = ArmMeter("fp32")
    for step, (start, end) in enumerate([(0.0, 9.0), (9.0, 10.0), (10.0, 11.0)]):
        meter.add([record(step=step, start_s=start, end_s=end, loss=1.0)])

    assert summarize(meter, final_window=1).step_s == 1.0


def test_bytes_at_the_end_leave_out_the_cold_first_visits() -> None:
    meter = ArmMeter("acsgd")
    for step, nbytes in enumerate([800, 800, 100, 100]):
        meter.add(
            [
                record(
                    step=step,
                    start_s=step,
                    end_s=step + 1.0,
                    sent={"0->1": {"activation": nbytes}},
                )
            ]
        )
    arm = summarize(meter, final_window=2).as_dict()

    assert arm["bytes_per_step"] == 450
    assert arm["bytes_per_step_last"] == 100


def test_compare_fills_in_gap_speedup_and_time_to_target() -> None:
    fp32 = summary_of([5.0, 4.0, 3.0, 2.0], name="fp32", step_s=4.0)
    quick = summary_of([5.0, 4.0, 3.0, 2.0, 1.0], name="acsgd", step_s=1.0)

    base, arm = compare([fp32, quick])

    assert (base.final_loss, base.loss_gap, base.speedup) == (2.5, 0.0, 1.0)
    assert (base.time_to_target_s, base.time_to_target_speedup) == (16.0, 1.0)
    assert (arm.final_loss, arm.loss_gap, arm.speedup) == (1.5, -1.0, 4.0)
    assert (arm.time_to_target_s, arm.time_to_target_speedup) == (4.0, 4.0)


def test_without_an_fp32_arm_speedup_is_one_and_the_rest_unknown() -> None:
    (arm,) = compare([summary_of([2.0, 1.0], name="acsgd")])

    assert (arm.speedup, arm.loss_gap) == (1.0, None)
    assert (arm.time_to_target_s, arm.time_to_target_speedup) == (None, None)


def test_a_target_that_is_never_reached_is_null() -> None:
    fp32 = summary_of([3.0, 2.0, 1.0], name="fp32")
    worse = summary_of([3.0, 2.5, 2.0], name="directq", step_s=0.1)

    arm = compare([fp32, worse])[1].as_dict()

    assert arm["time_to_target_s"] is None
    assert arm["time_to_target_speedup"] is None
    assert arm["speedup"] == pytest.approx(10.0)


def test_one_lucky_step_does_not_reach_the_target() -> None:
    losses = [(1.0, 0, 5.0), (2.0, 1, 1.0), (3.0, 2, 5.0), (4.0, 3, 2.0), (5.0, 4, 2.0)]

    assert time_to_target(losses, target=2.5, window=2) == 5.0
    # The mutant judges by single steps, and falls for the second.
    assert time_to_target(losses, target=2.5, window=1) == 2.0


def test_a_window_that_is_not_full_does_not_count() -> None:
    assert time_to_target([(1.0, 0, 1.0), (2.0, 1, 9.0)], target=2.0, window=3) is None


def test_the_reference_reaches_its_own_final_loss_at_the_latest_in_its_last_step() -> None:
    rough = [0.1 * (index % 7) + 1 / (index + 1) for index in range(50)]
    fp32 = summary_of(rough, name="fp32", window=13)

    (base,) = compare([fp32])

    assert base.time_to_target_s is not None
    assert base.time_to_target_s <= base.wall_s


def test_a_run_shorter_than_the_window_compares_over_all_its_steps() -> None:
    fp32 = summary_of([3.0, 1.0], name="fp32", window=100)
    arm = summary_of([3.0, 1.0], name="acsgd", step_s=0.5, window=100)

    assert compare([fp32, arm])[1].time_to_target_speedup == 2.0


def test_an_arm_that_diverged_has_nulls_and_breaks_nothing() -> None:
    fp32 = summary_of([3.0, 2.0, 1.0], name="fp32")
    broken = summary_of([3.0, math.inf, math.nan], name="directq")

    arm = compare([fp32, broken])[1].as_dict()

    assert (arm["final_loss"], arm["loss_gap"], arm["time_to_target_s"]) == (None, None, None)
    assert arm["losses"] == [[1.0, 0, 3.0], [2.0, 1, None], [3.0, 2, None]]
    assert "NaN" not in to_json(arm)


def test_a_reference_that_diverged_sets_no_target() -> None:
    fp32 = summary_of([3.0, math.nan], name="fp32")
    arm = summary_of([3.0, 1.0], name="acsgd")

    assert compare([fp32, arm])[1].time_to_target_s is None


def test_an_arm_stopped_before_its_first_step_is_empty_but_whole() -> None:
    arm = summarize(ArmMeter("fp32"), final_window=5).as_dict()

    assert (arm["steps"], arm["final_loss"], arm["step_s"], arm["losses"]) == (0, None, None, [])
    assert compare([summarize(ArmMeter("fp32"), final_window=5)])[0].speedup is None


def test_arms_with_different_windows_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"final windows of \[2, 3\] steps"):
        compare([summary_of([1.0], name="fp32"), summary_of([1.0], window=3)])
    with pytest.raises(ValueError, match="at least one step"):
        summary_of([1.0], window=0)


def test_the_prediction_error_is_positive_when_the_run_was_slower() -> None:
    arm = replace(summary_of([1.0, 1.0]), predicted_step_s=0.9)

    assert arm.prediction_error == pytest.approx(0.1)
    assert isinstance(arm, ArmSummary)
    assert replace(arm, predicted_step_s=None).prediction_error is None


def test_a_running_mean_starts_with_the_first_full_window() -> None:
    assert running_mean([4.0, 2.0, 6.0], window=2) == [None, 3.0, 4.0]
    assert running_mean([4.0, None, 6.0, 8.0], window=2) == [None, None, None, 7.0]


def test_rows_share_the_names_that_each_record_brings_its_own_copy_of() -> None:
    """Rows are kept for the whole run: 1.4 kB a step of a tiny run were names."""
    meter = ArmMeter("acsgd")
    for step in range(2):
        sent = {"0->1": {"activation": 10}}
        made = record(stage=0, step=step, codec={"0->1": {"hit rate": 0.5}}, sent=sent)
        meter.add([pickle.loads(pickle.dumps(made))])

    first, second = (row.codec for row in meter.rows)
    assert next(iter(first)) is next(iter(second))
    assert next(iter(first["0->1"])) is next(iter(second["0->1"]))
    before, after = (row.sent for row in meter.rows)
    assert next(iter(before)) is next(iter(after))


def test_lines_of_before_stay_until_those_of_the_resumed_run_are_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n")
    row = ArmMeter("a").add(make_step(step=0, start_s=0.0))

    with MetricsFile(path, aside=True) as sink:
        sink.write(row)
        assert path.read_text() == "old\n"
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]  # it failed: as it was
    assert path.read_text() == "old\n"

    with MetricsFile(path, aside=True) as sink:
        sink.write(row)
        sink.publish()
        sink.write(row)
    assert len(path.read_text().splitlines()) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_of_overtime_say_so_and_the_others_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as sink:
        meter = ArmMeter("a", sink=sink)
        meter.add(make_step(step=0, start_s=0.0))
        meter.add(make_step(step=1, start_s=9.0), overtime=True)
        again = ArmMeter("b", sink=sink)
        again.restore(rows=meter.rows, overtime=meter.overtime, sent=meter.ledger.by_link())

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("overtime") for line in lines] == [None, True, None, True]
    assert row_of_line(lines[1]) == meter.overtime[0]
