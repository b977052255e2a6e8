"""trace.json is what Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from synthetic_records import make_arm, make_step

from ray_pipe.timeline import chrome_trace, write_trace
from stages.record import Span, StepRecord


def flat(steps: list[list[StepRecord]]) -> list[StepRecord]:
    return [record for records in steps for record in records]


def names(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == kind
    }


def one_record(*spans: Span) -> StepRecord:
    return replace(make_step(step=0, start_s=0.0, num_stages=1)[0], spans=spans)


def test_a_span_becomes_a_complete_event_in_microseconds() -> None:
    span = Span(lane="compute", name="F3", start_s=1.5, end_s=1.75, micro_batch=3)
    trace = chrome_trace({"fp32": [one_record(span)]})

    (event,) = [e for e in trace["traceEvents"] if e["name"] == "F3"]
    assert event == {
        "ph": "X",
        "name": "F3",
        "cat": "compute",
        "ts": 1_500_000,
        "dur": 250_000,
        "pid": 2,
        "tid": 1,
        "args": {"step": 0, "micro_batch": 3},
    }


def test_stages_are_processes_and_lanes_and_links_are_named_threads() -> None:
    records = make_step(step=0, start_s=0.0, num_stages=3, codec_s=0.001)
    trace = chrome_trace({"acsgd": records})

    assert list(names(trace, "process_name").values()) == [
        "pipeline",
        "stage 0",
        "stage 1",
        "stage 2",
    ]
    middle = [name for (pid, _), name in names(trace, "thread_name").items() if pid == 3]
    assert middle == ["compute", "update", "wait", "decode", "encode", "link 1->0", "link 1->2"]


def test_arms_are_groups_of_processes() -> None:
    arms = {name: flat(make_arm(name, num_steps=2, num_stages=2)) for name in ("fp32", "acsgd")}
    trace = chrome_trace(arms)

    assert list(names(trace, "process_name").values()) == [
        "fp32 · pipeline",
        "fp32 · stage 0",
        "fp32 · stage 1",
        "acsgd · pipeline",
        "acsgd · stage 0",
        "acsgd · stage 1",
    ]


def test_events_of_one_thread_never_overlap_so_that_viewers_do_not_nest_them() -> None:
    # Two frames are in flight at once where latency is longer than a transfer.
    flight = (
        Span(lane="wire", name="0->1 F0", start_s=0.0, end_s=1.0),
        Span(lane="wire", name="0->1 F1", start_s=0.5, end_s=1.5),
        Span(lane="wire", name="0->1 F2", start_s=1.0, end_s=2.0),
    )
    trace = chrome_trace({"fp32": [one_record(*flight)]})

    assert [n for (pid, _), n in names(trace, "thread_name").items() if pid == 2] == [
        "link 0->1",
        "link 0->1 (2)",
    ]
    assert_sound(trace)


def test_loss_and_bytes_are_counters() -> None:
    steps = make_arm("fp32", num_steps=3, num_stages=2, num_micro_batches=1)
    trace = chrome_trace({"fp32": flat(steps)})

    losses = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "loss"]
    sent = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] != "loss"]
    assert [e["args"]["loss"] for e in losses] == [records[-1].loss for records in steps]
    assert sent[0]["args"] == {
        "activation": 262_144,
        "gradient": 262_144,
        "replica": 0,
        "embedding": 0,
        "control": 192,
    }


def test_a_loss_that_is_not_a_number_leaves_no_counter() -> None:
    record = replace(make_step(step=0, start_s=0.0, num_stages=1)[0], loss=math.nan)
    trace = chrome_trace({"fp32": [record]})

    assert not [e for e in trace["traceEvents"] if e["name"] == "loss"]


def test_the_file_is_standard_json_with_a_sound_structure(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, {n: flat(make_arm(n, num_steps=4)) for n in ("fp32", "directq", "acsgd")})

    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    assert_sound(trace)


def test_a_long_run_keeps_its_first_and_last_steps_and_says_what_is_left_out() -> None:
    records = flat(make_arm("fp32", num_steps=50, num_stages=2, num_micro_batches=1))
    trace = chrome_trace({"fp32": records}, max_events=130)

    steps = {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert {0, 1, 48, 49} <= steps
    assert trace["otherData"]["steps_left_out"] == {"fp32": 50 - len(steps)}
    assert len([e for e in trace["traceEvents"] if e["ph"] == "X"]) <= 130


def test_a_run_without_records_is_an_empty_trace() -> None:
    assert chrome_trace({})["traceEvents"] == []


def assert_sound(trace: dict[str, Any]) -> None:
    """What Perfetto needs: known phases, whole times, named tracks, no partial overlap."""
    processes, threads = names(trace, "process_name"), names(trace, "thread_name")
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in {"X", "M", "C"}
        assert (event["pid"], 0) in processes
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in threads
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start
