"""Where a stage's time went: compute, encode, wire or bubble.

Each moment of a stage's window belongs to exactly one of the four, and they add up to it:

- compute: forward, backward or update was running;
- encode: otherwise, a packet was being encoded or decoded (hidden behind compute it is free);
- wire: otherwise, a frame was on its way to the stage, or one was on its way to another while no
  stage of the pipeline worked: the stage, or all of them, waited for the network. A frame is on its
  way from its first byte until it has arrived: a link's latency counts, however fast the link;
- bubble: the rest. The pipeline's fill and drain, syncs, and waiting for the driver.

A stage's window runs from the end of its last step to the end of this one: no time is lost between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stages.record import StepRecord

Interval = tuple[float, float]

SHARES = ("compute", "encode", "wire", "bubble")
_COMPUTE_LANES = frozenset({"compute", "update"})
_CODEC_LANES = frozenset({"encode", "decode"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one stage in one step (or several), each counted once."""

    compute: float
    encode: float
    wire: float
    bubble: float

    @property
    def total(self) -> float:
        """The window."""
        return self.compute + self.encode + self.wire + self.bubble

    def as_dict(self) -> dict[str, float]:
        """By name, in the order of `SHARES`."""
        return {name: getattr(self, name) for name in SHARES}


def stage_times(records: Sequence[StepRecord], *, starts: dict[int, float]) -> list[StageTime]:
    """Divide each stage's window `[starts[stage], end_s]`; empty when no record has spans.

    Without spans nobody can tell hidden codec time from visible, or wire from bubble: no guess.
    """
    if not any(record.spans for record in records):
        return []
    arriving = _arriving(records)
    halted = _halted(records, arriving)
    times = []
    for record in records:
        start, end = starts.get(record.stage, record.start_s), record.end_s
        compute = _clip(_work(record, _COMPUTE_LANES), start, end)
        codec = _clip(_work(record, _CODEC_LANES), start, end)
        wire = _clip([*arriving.get(record.stage, ()), *halted[record.replica]], start, end)
        worked = union([*compute, *codec])
        touched = union([*worked, *wire])
        window = max(end - start, 0.0)
        times.append(
            StageTime(
                compute=_length(compute),
                encode=_length(worked) - _length(compute),
                wire=_length(touched) - _length(worked),
                bubble=max(window - _length(touched), 0.0),
            )
        )
    return times


def add_times(times: Iterable[StageTime]) -> StageTime:
    """Sum of several windows."""
    times = tuple(times)
    return StageTime(
        compute=sum(time.compute for time in times),
        encode=sum(time.encode for time in times),
        wire=sum(time.wire for time in times),
        bubble=sum(time.bubble for time in times),
    )


def shares(times: Iterable[StageTime]) -> dict[str, float] | None:
    """The four shares of all time in `times`: they add up to 1. None when there is no time."""
    summed = add_times(times)
    if summed.total <= 0:
        return None
    return {name: seconds / summed.total for name, seconds in summed.as_dict().items()}


def link_of(span_name: str) -> str:
    """The link of a wire span: "0->1" of "0->1 F3"."""
    return span_name.split(" ", 1)[0]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _work(record: StepRecord, lanes: frozenset[str]) -> list[Interval]:
    return [(span.start_s, span.end_s) for span in record.spans if span.lane in lanes]


def _halted(
    records: Sequence[StepRecord], arriving: dict[int, list[Interval]]
) -> dict[int, list[Interval]]:
    """By replica: when frames were on their way to its stages and none of those worked."""
    halted = {}
    for replica in {record.replica for record in records}:
        own = [record for record in records if record.replica == replica]
        flying = union(one for record in own for one in arriving.get(record.stage, ()))
        work = union(one for r in own for one in _work(r, _COMPUTE_LANES | _CODEC_LANES))
        halted[replica] = _without(flying, work)
    return halted


def _without(disjoint: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """The moments of `disjoint` that are not in `taken`; both are in order."""
    left: list[Interval] = []
    first = 0
    for start, end in disjoint:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        for a, b in taken[first:]:
            if a >= end:
                break
            left.append((start, a))
            start = max(start, b)
        left.append((start, end))
    return [(a, b) for a, b in left if b > a]


def _arriving(records: Sequence[StepRecord]) -> dict[int, list[Interval]]:
    """When frames were on their way to each stage. The sender records them; the name says whose."""
    busy: dict[int, list[Interval]] = {}
    for record in records:
        for span in record.spans:
            if span.lane != "wire":
                continue
            _, _, target = link_of(span.name).partition("->")
            if target.isdigit():
                there_s = span.end_s if span.arrive_s is None else span.arrive_s
                busy.setdefault(int(target), []).append((span.start_s, there_s))
    return busy


def _clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    return union((max(a, start), min(b, end)) for a, b in intervals)


def _length(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)
