"""trace.json: the run as Perfetto and chrome://tracing show it.

A process for each stage of each arm, a thread for each lane, a track for each link, counters for
loss and bytes. Times are those of the records, in microseconds, on the run's common clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_pipe.ledger import total_by_kind
from ray_pipe.step_row import finite
from ray_pipe.time_share import link_of
from stages.record import LANES, Span, StepRecord

Event = dict[str, Any]

MAX_EVENTS = 300_000
"""About 40 MB: more than that makes the viewer slow. The middle steps are left out first."""

_LANE_ORDER = ("compute", "update", "wait", "decode", "encode")
_PROCESSES_PER_ARM = 1000


def chrome_trace(
    arms: Mapping[str, Sequence[StepRecord]], *, max_events: int = MAX_EVENTS
) -> dict[str, Any]:
    """The trace as an object. `arms` maps an arm's name to its records, all stages and steps."""
    events: list[Event] = []
    skipped: dict[str, int] = {}
    for index, (name, records) in enumerate(arms.items()):
        kept, num_left_out = _thin(records, max_events=max_events // max(len(arms), 1))
        if num_left_out:
            skipped[name] = num_left_out
        prefix = f"{name} · " if len(arms) > 1 else ""
        first_pid = index * _PROCESSES_PER_ARM + 1
        events += _arm_events(kept, prefix=prefix, pid=first_pid)
        for stage in sorted({record.stage for record in kept}):
            own = [record for record in kept if record.stage == stage]
            pid = first_pid + 1 + stage
            events += _process(pid, f"{prefix}stage {stage}")
            events += _stage_events(own, pid=pid)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "ray_pipe", "arms": list(arms), "steps_left_out": skipped},
    }


def write_trace(
    path: Path | str,
    arms: Mapping[str, Sequence[StepRecord]],
    *,
    max_events: int = MAX_EVENTS,
) -> None:
    """Write trace.json: compact, standard JSON."""
    trace = chrome_trace(arms, max_events=max_events)
    text = json.dumps(trace, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    Path(path).write_text(text, encoding="utf-8")


def _stage_events(records: Sequence[StepRecord], *, pid: int) -> list[Event]:
    tracks: dict[str, list[tuple[int, Span]]] = {}
    for record in records:
        for span in record.spans:
            tracks.setdefault(_track_of(span), []).append((record.step, span))
    events: list[Event] = []
    tid = 0
    for track in sorted(tracks, key=_track_order):
        for row, spans in enumerate(_rows_without_overlap(tracks[track])):
            tid += 1
            events += _thread(pid, tid, track if row == 0 else f"{track} ({row + 1})")
            events += [_complete(span, step=step, pid=pid, tid=tid) for step, span in spans]
    return events


def _arm_events(records: Sequence[StepRecord], *, prefix: str, pid: int) -> list[Event]:
    """The arm as a whole: its steps as a track, loss and bytes as counters."""
    by_step: dict[int, list[StepRecord]] = {}
    for record in records:
        by_step.setdefault(record.step, []).append(record)
    events = [*_process(pid, f"{prefix}pipeline"), *_thread(pid, 1, "steps")]
    end = float("-inf")
    for step in sorted(by_step):
        group = by_step[step]
        # Stages start early on the next plan; on the track of steps one follows the other.
        start = max(end, min(record.start_s for record in group))
        end = max(start, max(record.end_s for record in group))
        span = Span(lane="compute", name=f"step {step}", start_s=start, end_s=end)
        events.append(_complete(span, step=step, pid=pid, tid=1))
        loss = finite(next((r.loss for r in group if r.loss is not None), None))
        if loss is not None:
            events.append(_counter(pid, "loss", end, {"loss": loss}))
        sent: dict[str, int] = {}
        for record in group:
            for kind, nbytes in total_by_kind(record.sent).items():
                sent[kind] = sent.get(kind, 0) + nbytes
        events.append(_counter(pid, "bytes sent in step", end, sent))
    return events


def _track_of(span: Span) -> str:
    return f"link {link_of(span.name)}" if span.lane == "wire" else span.lane


def _track_order(track: str) -> tuple[int, str]:
    if track in _LANE_ORDER:
        return (_LANE_ORDER.index(track), track)
    return (len(LANES), track)


def _rows_without_overlap(spans: Sequence[tuple[int, Span]]) -> list[list[tuple[int, Span]]]:
    """Spread spans over rows so that none overlap: a viewer would nest them, wrongly.

    Frames on one link do overlap where latency is longer than a transfer.
    """
    rows: list[list[tuple[int, Span]]] = []
    for step, span in sorted(spans, key=lambda item: (item[1].start_s, item[1].end_s)):
        for row in rows:
            if row[-1][1].end_s <= span.start_s:
                row.append((step, span))
                break
        else:
            rows.append([(step, span)])
    return rows


def _thin(records: Sequence[StepRecord], *, max_events: int) -> tuple[list[StepRecord], int]:
    """First and last steps within `max_events` spans, and the number of steps left out between."""
    sizes: dict[int, int] = {}
    for record in records:
        sizes[record.step] = sizes.get(record.step, 0) + len(record.spans) + 1
    if sum(sizes.values()) <= max_events:
        return list(records), 0
    steps = sorted(sizes)
    kept: set[int] = set()
    room = max_events
    for first, last in zip(steps, reversed(steps), strict=True):
        for step in (last, first):
            if step not in kept and sizes[step] <= room:
                kept.add(step)
                room -= sizes[step]
        if first >= last:
            break
    return [record for record in records if record.step in kept], len(steps) - len(kept)


def _complete(span: Span, *, step: int, pid: int, tid: int) -> Event:
    args: dict[str, Any] = {"step": step}
    if span.micro_batch >= 0:
        args["micro_batch"] = span.micro_batch
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "ts": _micros(span.start_s),
        "dur": max(_micros(span.end_s) - _micros(span.start_s), 0),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _counter(pid: int, name: str, at_s: float, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "name": name, "ts": _micros(at_s), "pid": pid, "args": dict(values)}


def _process(pid: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {
            "ph": "M",
            "name": "process_sort_index",
            "pid": pid,
            "tid": 0,
            "args": {"sort_index": pid},
        },
    ]


def _thread(pid: int, tid: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}},
        {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": tid,
            "args": {"sort_index": tid},
        },
    ]


def _micros(seconds: float) -> int:
    """Whole microseconds: spans that touch stay touching."""
    return round(seconds * 1e6)
