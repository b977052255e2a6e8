"""Rows of a long arm: read back to the bit, in memory that does not grow with them."""

from __future__ import annotations

import json
import math
import random
import tempfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_pipe import step_log
from ray_pipe.checkpoint_files import FINISHED, CheckpointStore, pack, unpack
from ray_pipe.step_log import BLOCK, StepLog
from ray_pipe.step_row import StepRow, row_to
from ray_pipe.time_share import StageTime
from stages.storage import Folder

SOME = 3 * BLOCK + 7
"""Rows of which some are packed."""


def row(step: int, **changes: Any) -> StepRow:
    time = StageTime(compute=step / 3, encode=0.1, wire=1e-17 * step, bubble=math.pi * step)
    values: dict[str, Any] = {
        "arm": "acsgd",
        "step": step,
        "loss": 5 / (step + 1),
        "grad_norm": None,
        "wall_s": 0.1 * step,
        "step_s": 0.1,
        "num_tokens": 96,
        "sent": {"0->1": {"activation": 10 + step}},
        "stage_s": (time, time),
        "codec": {"0->1": {"hits": 2.0, "error": 1 / (step + 7)}},
        "events": ("lost",) if step % 5 == 0 else (),
        "replicas": {1: {"iteration": step}},
    }
    return StepRow(**values | changes)


def test_every_row_comes_back_as_it_was_added() -> None:
    rows = [row(step) for step in range(SOME)]
    log = StepLog(rows)

    assert len(log) == SOME
    assert list(log) == rows
    assert [log[0], log[BLOCK - 1], log[BLOCK], log[-1]] == [
        rows[0], rows[BLOCK - 1], rows[BLOCK], rows[-1],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "part",
    [slice(-9, None), slice(None, 3), slice(100, 300, 7), slice(SOME - 300, None), slice(9, 3)],
)
def test_a_part_is_that_of_a_list(part: slice) -> None:
    rows = [row(step) for step in range(SOME)]

    assert StepLog(rows)[part] == rows[part]


@pytest.mark.parametrize("index", [SOME, -SOME - 1])
def test_a_row_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        StepLog(map(row, range(SOME)))[index]


def test_losses_that_are_no_numbers_stay_so() -> None:
    log = StepLog(row(step, loss=math.nan if step == 1 else math.inf) for step in range(SOME))

    first, second, *_ = (one.loss for one in log)
    assert first == math.inf
    assert second is not None
    assert math.isnan(second)


def test_numbers_of_numpy_and_whatever_else_a_codec_reports_end_no_run() -> None:
    codec: Any = {"0->1": {"hits": np.int64(3), "error": np.float32(0.5), "what": set}}
    log = StepLog(row(step, codec=codec) for step in range(SOME))

    assert log[0].codec == {"0->1": {"hits": 3, "error": 0.5, "what": "<class 'set'>"}}


def test_memory_does_not_grow_with_the_rows() -> None:
    tracemalloc.start()
    try:
        log = StepLog(row(step) for step in range(4 * BLOCK))
        before = tracemalloc.get_traced_memory()[0]
        for step in range(4 * BLOCK, 24 * BLOCK):
            log.append(row(step))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    # Some bytes each, and what other threads of the process did; a list has two thousand for each.
    assert grown < 400 * 20 * BLOCK


def test_a_full_disk_costs_memory_and_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tempfile.TemporaryFile

    class Full:
        """Takes two blocks, then half of one."""

        def __init__(self) -> None:
            self.file = real(buffering=0)
            self.writes = 0

        def write(self, raw: bytes) -> int | None:
            self.writes += 1
            return self.file.write(raw if self.writes <= 2 else raw[: len(raw) // 2])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    monkeypatch.setattr(step_log.tempfile, "TemporaryFile", lambda **options: Full())
    rows = [row(step) for step in range(5 * BLOCK)]

    assert list(StepLog(rows)) == rows


def test_without_a_temporary_folder_rows_are_kept_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**options: object) -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(step_log.tempfile, "TemporaryFile", refuse)
    rows = [row(step) for step in range(SOME)]

    assert list(StepLog(rows)) == rows


@pytest.mark.parametrize("count", [0, 1, SOME])
def test_a_checkpoint_has_the_rows_as_if_they_were_a_list(count: int) -> None:
    rows = [row(step) for step in range(count)]
    packed = pack({"arm": "a", "rows": StepLog(rows), "overtime": StepLog(), "last": [1.5, None]})

    plain = {"arm": "a", "rows": [row_to(one) for one in rows], "overtime": [], "last": [1.5, None]}
    assert unpack(packed) == json.loads(json.dumps(plain))


@pytest.mark.parametrize("count", [0, 1, SOME])
def test_rows_as_they_were_stay_so_while_the_log_grows(count: int) -> None:
    rows = [row(step) for step in range(SOME + 2 * BLOCK)]
    log = StepLog(rows[:count])
    then = log.then()
    for one in rows[count:]:
        log.append(one)

    for _ in range(2):
        assert json.loads(f"[{', '.join(then.texts())}]") == through_json(rows[:count])
    assert list(log) == rows


def test_whoever_reads_in_another_thread_does_not_get_in_the_way_of_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = tempfile.TemporaryFile
    read: list[str] = []

    class Busy:
        """Somebody reads the first rows whenever the writer has found its place."""

        def __init__(self) -> None:
            self.file = real(buffering=0)

        def write(self, raw: bytes) -> int | None:
            read.append(next(log.then().texts()))
            return self.file.write(raw)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    monkeypatch.setattr(step_log.tempfile, "TemporaryFile", lambda **options: Busy())
    log = StepLog()
    rows = [row(step) for step in range(5 * BLOCK)]
    for one in rows:
        log.append(one)

    assert list(log) == rows
    assert len(read) == 4
    assert json.loads(f"[{read[-1]}]") == through_json(rows[:BLOCK])


def test_a_file_of_numbers_takes_no_memory_for_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a checkpoint has them: what is held of it grows the process with every one."""
    monkeypatch.setattr(step_log, "BLOCK", 4)
    noise = random.Random(0)
    log = StepLog(row(step, events=(noise.randbytes(8_000).hex(),)) for step in range(600))
    store = CheckpointStore(Folder(tmp_path))
    store.finish("a", {"rows": StepLog()})  # whatever is loaded or kept by the first
    tracemalloc.start()
    try:
        store.finish("a", {"rows": log})
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert most < (tmp_path / "a" / FINISHED).stat().st_size / 2
    saved = store.finished("a")
    assert saved is not None
    assert saved["rows"] == through_json(log)


def through_json(rows: Iterable[StepRow]) -> Any:
    return json.loads(json.dumps([row_to(one) for one in rows]))
