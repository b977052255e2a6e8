"""Numbers of a run: a row for each step, written as a line of metrics.jsonl.

Path: stages.record -> ray_pipe.metrics -> ray_pipe.arms

The K records of a step (one for each stage) become one `StepRow`. A step lasts from the end of the
step before to its own last end, so that step times add up to the wall time and a slow driver shows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ray_pipe.ledger import Ledger, Sent
from ray_pipe.step_log import StepLog
from ray_pipe.step_row import StepRow, finite
from ray_pipe.time_share import stage_times
from stages.record import StepRecord


class ArmMeter:
    """Turns the records of an arm into rows, and keeps the rows and the arm's ledger."""

    def __init__(self, name: str, *, sink: MetricsFile | None = None) -> None:
        self.name = name
        self.rows = StepLog()
        self.num_tokens = 0
        """Of all rows."""

        self.overtime = StepLog()
        """Steps beyond the arm's own number, run only to see when it reaches fp32's loss."""

        self.ledger = Ledger()
        self._overtime_ledger = Ledger()
        self._sink = sink
        self._origin_s: float | None = None
        self._wall_before_s = 0.0
        self._stage_end: dict[int, float] = {}

    def add(
        self,
        records: Sequence[StepRecord],
        *,
        overtime: bool = False,
        also: Sent | None = None,
        fleet: dict[str, Any] | None = None,
    ) -> StepRow:
        """The row of one step, from one record of each stage; also written to the sink.

        `also` are bytes of somebody who is no stage, `fleet` is where all replicas are.
        """
        ledger = self._overtime_ledger if overtime else self.ledger
        records = _one_for_each_stage(records)
        origin = min(record.start_s for record in records)
        if self._origin_s is None:
            self._origin_s = origin - self._wall_before_s
        previous_end = max(self._stage_end.values(), default=origin)
        end = max(record.end_s for record in records)
        row = StepRow(
            arm=self.name,
            step=records[0].step,
            loss=_mean_of(records, lambda record: record.loss),
            grad_norm=_mean_of(records, lambda record: record.grad_norm),
            wall_s=end - self._origin_s,
            step_s=max(end - previous_end, 0.0),
            # Every stage sees every micro-batch: the batch is counted once, not once a stage.
            num_tokens=sum(
                max(record.num_tokens for record in own) for own in _by_replica(records)
            ),
            sent=ledger.add(records, also=also),
            stage_s=tuple(stage_times(records, starts=self._stage_end)),
            codec=_codec_of(records),
            events=tuple(event for record in records for event in record.events),
            replicas=_replicas_of(records),
            fleet=fleet or {},
            embedding=records[0].embedding,
        )
        self._stage_end |= {record.stage: record.end_s for record in records}
        self._keep(row, overtime=overtime)
        if self._sink is not None:
            self._sink.write(row, overtime=overtime)
        return row

    def restore(
        self, *, rows: Iterable[StepRow], overtime: Iterable[StepRow] = (), sent: Sent
    ) -> None:
        """Begin with the rows of before the run was stopped; wall time goes on after them."""
        self.ledger.restore(sent)
        for is_over, some in ((False, rows), (True, overtime)):
            for row in some:
                self._keep(row, overtime=is_over)
                self._wall_before_s = max(self._wall_before_s, row.wall_s)
                if self._sink is not None:
                    self._sink.write(row, overtime=is_over)

    def _keep(self, row: StepRow, *, overtime: bool) -> None:
        if overtime:
            self.overtime.append(row)
        else:
            self.rows.append(row)
            self.num_tokens += row.num_tokens

    def count_again(self, records: Sequence[StepRecord]) -> Sent:
        """Count the bytes of a step that a failure made run again; its row stays as it was.

        Returns what was added to the arm's own bytes: nothing for a step in overtime.
        """
        step = records[0].step
        is_overtime = any(row.step == step for row in self.overtime)
        ledger = self._overtime_ledger if is_overtime else self.ledger
        ledger.rewind(step)
        sent = ledger.add(records)
        return {} if is_overtime else sent

    def skip(self, records: Sequence[StepRecord]) -> None:
        """Leave a stretch that was no training (an evaluation) out of all times."""
        before = max(self._stage_end.values(), default=0.0)
        self._stage_end = {record.stage: record.end_s for record in records}
        if self._origin_s is not None:
            self._origin_s += max(self._stage_end.values()) - before


class MetricsFile:
    """metrics.jsonl: a line for each step, on disk as soon as it is written.

    A disk that is full costs no training: lines wait in memory until there is room again.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        on_warning: Callable[[str], None] = lambda text: None,
        aside: bool = False,
    ) -> None:
        """`aside`: the old file stays until `publish`; its lines may be needed once more."""
        self.path = Path(path)
        self._aside = self.path.with_name(f"{self.path.name}.part") if aside else None
        self._file = (self._aside or self.path).open("wb", buffering=0)
        self._end = 0
        self._waiting = b""
        self._on_warning = on_warning

    def write(self, row: StepRow, *, overtime: bool = False) -> None:
        """Append one line; a reader who follows the file never sees half of it.

        A line of `overtime` says so: the totals of results.json are without it.
        """
        was_waiting = bool(self._waiting)
        line = row.as_dict() | ({"overtime": True} if overtime else {})
        self._waiting += (to_json(line) + "\n").encode()
        try:
            self._put()
        except OSError as error:
            if not was_waiting:
                self._on_warning(
                    f"{self.path} could not be written: {(error.strerror or str(error)).lower()}; "
                    "training goes on, its lines wait in memory. Free space on that disk."
                )

    def publish(self) -> None:
        """What was written aside takes the old file's place; from now on lines go there."""
        if self._aside is not None:
            self._aside.replace(self.path)
            self._aside = None

    def close(self) -> None:
        """May be called twice. What was not published goes."""
        if self._file.closed:
            return
        if self._aside is not None:
            self._file.close()
            self._aside.unlink(missing_ok=True)
            return
        try:
            self._put()
        except OSError as error:
            lines = self._waiting.count(b"\n")
            self._on_warning(f"{self.path} lacks its last {lines} lines: {error.strerror}.")
        finally:
            self._file.close()

    def _put(self) -> None:
        """All that waits, or nothing of it."""
        left = memoryview(self._waiting)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            self._file.seek(self._end)
            self._file.truncate()
            raise
        self._end += len(self._waiting)
        self._waiting = b""

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Standard JSON: NaN and infinity become null, anything unknown its string."""
    return json.dumps(
        finite(value), allow_nan=False, ensure_ascii=False, indent=indent, default=str
    )


def _one_for_each_stage(records: Sequence[StepRecord]) -> list[StepRecord]:
    if not records:
        raise ValueError("a step needs the record of at least one stage, got none")
    ordered = sorted(records, key=lambda record: record.stage)
    steps = sorted({record.step for record in ordered})
    if len(steps) > 1:
        raise ValueError(f"records of different steps {steps} cannot make one row")
    stages = [record.stage for record in ordered]
    if len(set(stages)) < len(stages):
        raise ValueError(
            f"step {steps[0]} has records of stages {stages}: one for each stage, or its bytes and "
            f"times would be counted twice"
        )
    return ordered


def _by_replica(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    found: dict[int, list[StepRecord]] = {}
    for record in records:
        found.setdefault(record.replica, []).append(record)
    return list(found.values())


def _mean_of(
    records: Sequence[StepRecord], read: Callable[[StepRecord], float | None]
) -> float | None:
    """What the last stage of each replica says, as a mean; of one replica its very number."""
    found = []
    for own in _by_replica(records):
        value = next((v for record in reversed(own) if (v := read(record)) is not None), None)
        if value is not None:
            found.append(value)
    if len(found) < 2:
        return found[0] if found else None
    return math.fsum(found) / len(found)


def _replicas_of(records: Sequence[StepRecord]) -> dict[int, dict[str, Any]]:
    """The leaders' numbers; what tensors between replicas would take in fp32 is of all stages."""
    found: dict[int, dict[str, Any]] = {}
    for own in _by_replica(records):
        leader = next((record for record in own if "iteration" in record.sync), None)
        if leader is not None:
            nbytes = sum(record.sync.get("fp32_bytes", 0) for record in own)
            found[leader.replica] = {**leader.sync, "fp32_bytes": nbytes}
    return found


def _codec_of(records: Sequence[StepRecord]) -> dict[str, dict[str, float]]:
    """Codec numbers by edge. Where both ends report one, the sender's wins: it saw the input."""
    merged: dict[str, dict[str, float]] = {}
    for record in records:
        for edge, numbers in record.codec.items():
            # A record that came through Ray brings its own copy of every name: rows are kept for
            # the whole run, so they share them.
            own = merged.setdefault(sys.intern(edge), {})
            sender = edge.partition("->")[0] == str(record.stage)
            for name, number in numbers.items():
                if sender or name not in own:
                    own[sys.intern(name)] = number
    return merged
