"""The named transactions of the Python twin: the dull version of native/rows/procedures.cpp."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stages.embedding.row_store_twin import (
    CONFLICT,
    FULL,
    NONFINITE,
    OK,
    PENDING,
    Keys,
    RowTable,
)
from stages.embedding.row_twin_rows import F32, Row
from stages.embedding.row_twin_versions import BLIND


@dataclass(slots=True)
class Call:
    """One array of transactions."""

    table: RowTable
    keys: list[int]
    payload: Any
    modes: Any
    expected: Any
    out: Any
    seen: Any
    step: Any
    hops: int
    writes: dict[int, Row | None] = field(default_factory=dict)

    def get(self, key: int) -> Row | None:
        return self.writes[key] if key in self.writes else self.table.at(key)

    def show(self, i: int, row: Row | None) -> None:
        if self.seen is not None:
            self.seen[i] = row is not None
        if self.out is not None:
            self.out[i] = 0 if row is None else self.table.shape.read(row)

    def begin(self, weights: F32) -> Row:
        shape = self.table.shape
        return shape.new_row(weights.copy(), shape.all_chunks, self.table.epoch)


def _spilled(row: Row | None) -> bool:
    return row is not None and row.disk_stamp is not None


def _put(call: Call, i: int, row: Row | None, weights: F32) -> Row:
    fresh = call.begin(weights) if row is None else call.table.shape.rewrite(row, weights)
    call.writes[call.keys[i]] = fresh
    return fresh


def _one(call: Call, name: str, i: int) -> int:
    """What one key of a transaction does; other than OK ends it."""
    shape, key = call.table.shape, call.keys[i]
    if name == "optimize" and not np.isfinite(call.payload[i]).all():
        return NONFINITE
    row = call.get(key)
    if name == "commit_if":
        expected = int(call.expected[i])
        if expected != BLIND and (0 if row is None else row.stamp) != expected:
            return CONFLICT
    if name == "evict":
        if call.seen is not None:
            call.seen[i] = row is not None
        if row is not None:
            call.writes[key] = None
        return OK
    if _spilled(row):
        return PENDING
    match name:
        case "get":
            pass
        case "get_or_init":
            if row is None:
                row = call.writes[key] = call.begin(shape.initial(key))
        case "put":
            row = _put(call, i, row, call.payload[i])
        case "add" | "delta_step":
            if call.modes is None or call.modes[i]:
                if row is None:
                    row = call.begin(shape.initial(key) * (0 if name == "delta_step" else 1))
                row = call.writes[key] = shape.add(row, call.payload[i])
        case "optimize":
            if row is not None:
                one = np.float32(1)
                row = shape.optimize(row, call.payload[i], one, call.step, call.table.epoch)
                call.writes[key] = row
        case "compare_and_put":
            if row is None or shape.read(row).tobytes() != call.payload[2 * i].tobytes():
                return CONFLICT
            row = _put(call, i, row, call.payload[2 * i + 1])
        case "follow":
            for _ in range(call.hops):
                if row is None or not row.alive & 1 or shape.chunk < 2:
                    break
                row = call.get(int(row.chunks[0][:2].view(np.int64)[0]))
                if _spilled(row):
                    return PENDING
        case "prune":
            if call.seen is not None:
                call.seen[i] = row is not None
            alive = int(call.modes[i]) & shape.all_chunks
            if row is not None and row.alive != alive:
                call.writes[key] = shape.reshape(row, alive)
            return OK
        case "commit_if":
            if call.modes[i] == 1:
                _put(call, i, row, call.payload[i])
            elif call.modes[i] == 2 and row is not None:
                call.writes[key] = None
            return OK
        case _:
            raise ValueError(f"no procedure is called '{name}'")
    call.show(i, row)
    return OK


def run_procedure(
    table: RowTable,
    name: str,
    offsets: Keys,
    keys: Keys,
    payload: Any,
    modes: Any,
    expected: Any,
    out: Any,
    seen: Any,
    statuses: Any,
    batch: int,
    inlined: int,
    lr: float,
    hops: int,
) -> None:
    """Runs them one after the other; each installs all of its writes or none."""
    with table.store.lock:
        step = None
        if name == "optimize":
            table.steps += 1
            step = table.shape.numbers(lr, table.steps)
        call = Call(table, keys.tolist(), payload, modes, expected, out, seen, step, hops)
        for t in range(len(statuses)):
            call.writes = {}
            status = OK
            for i in range(int(offsets[t]), int(offsets[t + 1])):
                status = _one(call, name, i)
                if status != OK:
                    break
            if status == OK and not table.fits(call.writes):
                status = FULL
            if status == OK:
                table.commit(call.writes)
            if status in (FULL, PENDING):
                table.store.counters["full" if status == FULL else "pending"] += 1
            statuses[t] = status
