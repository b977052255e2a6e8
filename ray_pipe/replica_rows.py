"""Steps of several replicas made into rows: one row is as much work as one step of all of them.

Where replicas keep in step, or may skip (`by step`), row k holds step k of everybody. Where a fast
replica may do more steps than a slow one (`by work`), a row is the next so many steps to end,
whoever did them, as many as there are replicas; so a row is the same number of samples either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from stages.record import StepRecord

Records = list[StepRecord]


class Rows(Protocol):
    """Takes steps as they end and gives rows, in order."""

    num_given: int

    def add(self, replica: int, step: int, records: Records) -> None: ...
    def ready(self, alive: Mapping[int, int]) -> list[Records]: ...


class RowsByStep:
    """Row k is step k of every replica that was alive to do it."""

    def __init__(self, first: int) -> None:
        self.num_given = 0
        self._next = first
        self._steps: dict[int, dict[int, Records]] = {}

    def add(self, replica: int, step: int, records: Records) -> None:
        """A replica has done, or skipped, a step."""
        if step >= self._next:  # a newcomer may repeat nothing, but a late one comes too late
            self._steps.setdefault(step, {})[replica] = records

    def ready(self, alive: Mapping[int, int]) -> list[Records]:
        """Rows that nobody is missing from: `alive` are those who still have steps to do, and the
        first one that each takes part in."""
        found: list[Records] = []
        while True:
            parts = self._steps.get(self._next, {})
            waiting = {replica for replica, first in alive.items() if first <= self._next}
            if not parts or waiting - parts.keys():
                return found
            del self._steps[self._next]
            self._next += 1
            self.num_given += 1
            found.append([record for replica in sorted(parts) for record in parts[replica]])


class RowsByWork:
    """A row is the next `len(alive)` steps that end."""

    def __init__(self, first: int, num_rows: int) -> None:
        self.num_given = 0
        self.num_rows = num_rows
        self._first = first
        self._done: list[tuple[int, Records]] = []

    @property
    def num_waiting(self) -> int:
        """Steps that have ended and are in no row yet."""
        return len(self._done)

    def add(self, replica: int, step: int, records: Records) -> None:
        """A replica has done a step."""
        self._done.append((replica, records))

    def ready(self, alive: Mapping[int, int]) -> list[Records]:
        """Rows that are full; the last one takes what is left when the round is over."""
        size = max(1, len(alive))
        found: list[Records] = []
        while len(self._done) >= size and self.num_given < self.num_rows:
            part, self._done = self._done[:size], self._done[size:]
            found.append(self._row([records for _, records in part]))
        return found

    def rest(self) -> list[Records]:
        """What is left over, as one row; nothing if there is nothing."""
        if not self._done or self.num_given >= self.num_rows:
            self._done = []
            return []
        part, self._done = self._done, []
        return [self._row([records for _, records in part])]

    def _row(self, steps: Sequence[Records]) -> Records:
        row = self._first + self.num_given
        self.num_given += 1
        by_stage: dict[int, Records] = {}
        for records in steps:
            for record in records:
                by_stage.setdefault(record.stage, []).append(record)
        return [joined(by_stage[stage], row) for stage in sorted(by_stage)]


def joined(records: Sequence[StepRecord], step: int) -> StepRecord:
    """Several steps of one stage as one record: bytes and times add up, the loss is their mean."""
    seconds: Counter[str] = Counter()
    sent: dict[str, Counter[str]] = {}
    codec: dict[str, dict[str, float]] = {}
    for record in records:
        seconds.update(record.seconds)
        codec |= record.codec
        for link, kinds in record.sent.items():
            sent.setdefault(link, Counter()).update(kinds)
    losses = [record.loss for record in records if record.loss is not None]
    last = records[-1]
    return replace(
        last,
        step=step,
        loss=sum(losses) / len(losses) if losses else None,
        num_tokens=sum(record.num_tokens for record in records),
        start_s=min(record.start_s for record in records),
        end_s=max(record.end_s for record in records),
        seconds=dict(seconds),
        sent={link: dict(kinds) for link, kinds in sent.items()},
        codec=codec,
        spans=tuple(span for record in records for span in record.spans),
        events=tuple(event for record in records for event in record.events),
        sync={
            **last.sync,
            "fp32_bytes": sum(record.sync.get("fp32_bytes", 0) for record in records),
        },
    )
