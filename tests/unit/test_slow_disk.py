"""Rows on a disk that is late at both ends of an edge: the loss curve is the same, (d)20."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from local_pipeline import Bench, Run, acsgd, same_bits
from torch import Tensor

from compressors import spill
from compressors.spill_file import ChunkFile, Slot

STEPS = 10
"""Five epochs: each row is read back four times, after the delta that was sent against it."""


class LateFile(ChunkFile):
    """A disk on which every access takes long beside a step of this bench, unequally so.

    The shelf's own threads wait here, in real time; the pipeline's time is virtual.
    """

    accesses: ClassVar[list[str]] = []

    def write(self, slot: Slot, raw: Tensor) -> None:
        self.accesses.append("write")
        time.sleep(0.001 * (len(self.accesses) % 5))
        super().write(slot, raw)

    def read(self, slot: Slot, nbytes: int) -> Tensor:
        self.accesses.append("read")
        time.sleep(0.001 * (len(self.accesses) % 3))
        return super().read(slot, nbytes)


class ForgetfulFile(ChunkFile):
    """A disk that loses what was written a second time."""

    def write(self, slot: Slot, raw: Tensor) -> None:
        if not bool(torch.any(self.read(slot, raw.numel()))):
            super().write(slot, raw)


def train(monkeypatch: pytest.MonkeyPatch, file: type[ChunkFile], folder: Path, **more: Any) -> Run:
    monkeypatch.setattr(spill, "ChunkFile", file)
    options = {"bits": 2, "spill_dir": str(folder), "spill_ram_bytes": 0, **more}
    run = Bench(num_stages=4, schedule="1f1b", activation=acsgd(**options), micro_batches=2).run(
        STEPS
    )
    rows = run.rows()  # before the files are gone
    for stage in run.stages:
        for end in stage.wiring.ends():
            end.codec.close()
    run.rows = lambda: rows  # type: ignore[method-assign]
    return run


@pytest.fixture
def in_memory() -> Run:
    bench = Bench(num_stages=4, schedule="1f1b", activation=acsgd(bits=2), micro_batches=2)
    return bench.run(STEPS)


@pytest.mark.quick(1)
@pytest.mark.parametrize("ram_bytes", [0, 1000], ids=["all on disk", "a part on disk"])
def test_a_late_disk_at_both_ends_leaves_the_loss_curve_as_it_is(
    in_memory: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ram_bytes: int
) -> None:
    LateFile.accesses.clear()

    late = train(monkeypatch, LateFile, tmp_path, spill_ram_bytes=ram_bytes)

    assert late.losses == in_memory.losses
    assert same_bits(late.weights, in_memory.weights)
    assert late.rows() == in_memory.rows()
    assert all(sender == receiver for sender, receiver in late.rows())
    assert LateFile.accesses.count("read") > 40  # the disk was asked, again and again
    assert LateFile.accesses.count("write") > 40


@pytest.mark.slow
def test_mutant_a_disk_that_loses_writes_changes_the_curve(
    in_memory: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = train(monkeypatch, ForgetfulFile, tmp_path)

    assert forgetful.losses != in_memory.losses
