"""The keeper: what the box holds equals a saved state; a full disk costs the box, not the run."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_pipeline import DIRECTQ, Bench, acsgd, same_bits, state_of
from torch import nn

from ray_pipe.models.gpt import GPTShape
from stages.black_box import BlackBox
from stages.keeper import Keeper
from stages.lanes import Recorder
from stages.record import StepRecord
from stages.rehearsal import LocalPipeline, StageCosts
from stages.state import StageState

SMALL = Bench(
    num_stages=2,
    shape=GPTShape(layers=2, width=16, heads=1, context=4, vocab=128),
    activation=acsgd(cap_bytes=5 * 4 * 16 * 2),
    gradient=replace(DIRECTQ, rounding="stochastic"),
    num_samples=8,
    micro_batches=2,
)


def equip(pipeline: LocalPipeline, folder: Path) -> list[BlackBox]:
    boxes = []
    for stage in pipeline.stages:
        boxes.append(BlackBox(folder / f"stage-{stage.index}"))
        lane = pipeline.lane(StageCosts(), Recorder())
        stage.keeper = Keeper(stage, boxes[-1], lane)
    return boxes


def digest(state: StageState) -> dict[str, bytes]:
    return {name: array.numpy(force=True).tobytes() for name, array in state.arrays.items()}


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_stage_restored_from_its_box_is_what_was_saved_at_that_step(
    tmp_path: Path, steps: int
) -> None:
    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        boxes = equip(pipeline, tmp_path)
        for stage in pipeline.stages:
            assert stage.keeper is not None
            await stage.keeper.start_over()
        records = await pipeline.run([SMALL.plan(step) for step in range(steps)])
        right = [await stage.save_state() for stage in pipeline.stages]
        before = state_of(pipeline.stages)
        await pipeline.run([SMALL.plan(steps)])  # the box holds this one and the one before
        for stage, saved in zip(pipeline.stages, right):
            assert stage.keeper is not None
            await stage.keeper.settled()
            assert stage.keeper.steps() == [steps - 1, steps]
            await stage.keeper.restore(steps - 1)
            again = await stage.save_state()
            assert {k: v for k, v in again.notes.items() if k != "attempt"} == {
                k: v for k, v in saved.notes.items() if k != "attempt"
            }
            assert digest(again) == digest(saved)
            assert stage.keeper.steps() == [steps - 1]
        assert state_of(pipeline.stages) == before
        for box in boxes:
            box.close()
        return records

    SMALL.drive(main)


def test_loading_a_checkpoint_starts_the_box_over_with_all_rows(tmp_path: Path) -> None:
    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        await pipeline.run([SMALL.plan(step) for step in range(4)])
        boxes = equip(pipeline, tmp_path)
        before = state_of(pipeline.stages)
        for stage in pipeline.stages:
            assert stage.keeper is not None
            await stage.keeper.start_over()
        await pipeline.run([SMALL.plan(4)])
        for stage in pipeline.stages:
            assert stage.keeper is not None
            await stage.keeper.restore(3)
        assert state_of(pipeline.stages) == before
        for box in boxes:
            box.close()
        return []

    SMALL.drive(main)


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    right = os.pwrite

    def no_room(fd: int, data: Any, offset: int) -> int:
        if len(memoryview(data).cast("B")) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", no_room)
    yield
    monkeypatch.setattr(os, "pwrite", right)


def test_a_full_disk_costs_the_box_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        equip(pipeline, tmp_path / "run")
        records = await pipeline.run([SMALL.plan(0)])
        with full_disk(monkeypatch):
            records += await pipeline.run([SMALL.plan(1), SMALL.plan(2)])
        records += await pipeline.run([SMALL.plan(3)])
        for stage in pipeline.stages:
            assert stage.keeper is not None
            assert stage.keeper.is_off
            assert stage.keeper.steps() == []
        return records

    run = SMALL.drive(main)
    unbroken = SMALL.run(4)

    assert run.losses == unbroken.losses
    assert same_bits(run.weights, unbroken.weights)
    told = [event for event in run.events if "was given up" in event]
    assert len(told) == 2
    assert "No space left on device" in told[0]
    assert "faults.black_box" in told[0]
    assert list(tmp_path.iterdir()) == []


def test_an_aborted_step_does_not_touch_what_is_being_written(tmp_path: Path) -> None:
    bench = replace(SMALL, costs=StageCosts(phases={"forward": 0.1, "backward": 0.1}))

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        boxes = []
        for stage in pipeline.stages:
            boxes.append(BlackBox(tmp_path / f"stage-{stage.index}"))
            slow = pipeline.lane(StageCosts(phases={"sync": 5.0}), Recorder())
            stage.keeper = Keeper(stage, boxes[-1], slow)
        await pipeline.run([bench.plan(0)])
        runs = [asyncio.create_task(stage.run(bench.plan(1))) for stage in pipeline.stages]
        await asyncio.sleep(1.0)
        for stage in pipeline.stages:
            stage.abort("a test said so")
        await asyncio.gather(*runs, return_exceptions=True)
        for stage in pipeline.stages:
            assert stage.keeper is not None
            await stage.keeper.settled()
            assert stage.keeper.steps() == [0]
        records = await pipeline.run([bench.plan(step, attempt=1) for step in (1, 2)])
        for stage, box in zip(pipeline.stages, boxes):
            assert stage.keeper is not None
            await stage.keeper.settled()
            box.close()
        return records

    assert bench.drive(main).losses == bench.run(3).losses[1:]


def test_records_of_the_last_steps_lie_in_the_box(tmp_path: Path) -> None:
    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        boxes = equip(pipeline, tmp_path)
        records = await pipeline.run([SMALL.plan(step) for step in range(5)])
        for stage in pipeline.stages:
            assert stage.keeper is not None
            await stage.keeper.settled()
            kept = stage.keeper.records()
            assert [record.step for record in kept] == [1, 2, 3, 4]
            assert kept[-1] == records[4][stage.index]
            for record in kept:
                right = records[record.step][stage.index]
                assert replace(record, spans=()) == replace(right, spans=())
        for box in boxes:
            box.close()
        return records

    SMALL.drive(main)


class Normed(nn.Module):
    """A block and a batch norm, whose running numbers change in the forward pass."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block = block
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Any) -> Any:
        y = self.block(x)
        return self.norm(y.transpose(1, 2)).transpose(1, 2)


def test_a_batch_norm_forgets_the_forward_passes_of_an_aborted_step() -> None:
    def build(blocks: Any) -> nn.Module:
        modules = [Bench().module([index]) for index in blocks]
        if 0 in blocks:
            modules[0] = Normed(modules[0], Bench().shape.width)
        return nn.Sequential(*modules)

    bench = Bench(num_stages=2, build=build)

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        compute = pipeline.stages[0].compute
        before = [buffer.clone() for buffer in compute.module.buffers()]
        compute.forward(0, bench.data().batch((0, 1)).inputs, ids=(0, 1))
        assert not same_bits(list(compute.module.buffers()), before)
        compute.abort()
        assert same_bits(list(compute.module.buffers()), before)
        return await pipeline.run([bench.plan(0)])

    assert bench.drive(main).losses == bench.run(1).losses


def test_a_box_is_left_to_another_stage_only_if_that_is_said(tmp_path: Path) -> None:
    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        boxes = equip(pipeline, tmp_path)
        for stage, keep_box in zip(pipeline.stages, (True, False), strict=True):
            assert stage.keeper is not None
            await stage.keeper.start_over()
            stage.keeper.close(keep_box=keep_box)
        assert [box.folder.exists() for box in boxes] == [True, False]
        BlackBox(boxes[0].folder).close()  # nobody holds it any more
        return []

    SMALL.drive(main)
