"""Stages that die, in one process and in virtual time: a driver without Ray, and its chaos.

A kill drops a stage as a process drops: its links, frames in flight, rows and weights are gone,
and what it had begun to write stays half written. What comes back is made from its black box by
the same keeper, policy and turns as in earnest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from local_pipeline import Bench, Run

from compressors.row_log import row_store
from ray_pipe.recovery import Decision, Status, common_step
from stages.black_box import BlackBox
from stages.keeper import Keeper
from stages.lanes import Recorder
from stages.mishap import Deed, Mishap, Mishaps
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.rehearsal import LocalPipeline, StageCosts
from stages.schedule import actions_of
from stages.stage import Stage

BOX_COSTS = StageCosts(phases={"sync": 0.15})
"""Writing a box takes a while: the next step has begun."""


class Killed(BaseException):
    """Kill -9: nothing inside the process may catch it and go on."""


@dataclass(kw_only=True)
class Survived:
    """What came of a run in which stages died."""

    records: dict[int, list[StepRecord]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    replay_differs: list[int] = field(default_factory=list)
    num_injected: int = 0
    """Frames that went wrong, of links that were not cut by a death."""

    @property
    def losses(self) -> list[float | None]:
        return [self.records[step][-1].loss for step in sorted(self.records)]


class Rehearsal:
    """Runs plans like the driver does, and recovers like it."""

    def __init__(
        self,
        bench: Bench,
        pipeline: LocalPipeline,
        folder: Path,
        mishaps: Sequence[tuple[int, Mishap]],
    ) -> None:
        self.bench, self.pipeline, self.folder = bench, pipeline, folder
        self.mishaps = mishaps
        self.found = Survived()
        self.boxes: dict[int, BlackBox] = {}
        self.dead: set[int] = set()
        self.attempt = 0
        for index in range(len(pipeline.stages)):
            self._equip(index)

    async def run(self, steps: int) -> Survived:
        for stage in self.stages:
            assert stage.keeper is not None
            await stage.keeper.start_over()
        first = 0
        for _ in range(10):
            plans = [self.bench.plan(n, attempt=self.attempt) for n in range(first, steps)]
            if await self._train(plans):
                break
            first = await self._recover(steps) + 1
        else:
            raise AssertionError("still failing after ten attempts")
        for stage in self.stages:
            assert stage.keeper is not None
            await stage.keeper.settled()
        self.found.weights = [
            p.detach().clone() for stage in self.stages for p in stage.compute.parameters
        ]
        return self.found

    @property
    def stages(self) -> list[Stage]:
        return self.pipeline.stages

    async def _train(self, plans: list[StepPlan]) -> bool:
        """Every stage runs all plans; when one fails the others are told to stop."""

        async def work(stage: Stage) -> None:
            for plan in plans:
                self._note(await stage.run(plan))

        tasks = {asyncio.create_task(work(stage)): stage for stage in self.stages}
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            for stage in tasks.values():
                if stage.index not in self.dead:
                    stage.abort("somebody died")
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        return ends == [None] * len(ends)

    def _note(self, record: StepRecord) -> None:
        own = self.found.records.setdefault(record.step, [])
        before = next((r for r in own if r.stage == record.stage), None)
        if before is None:
            own.append(record)
            own.sort(key=lambda r: r.stage)
        elif before.loss != record.loss:
            self.found.replay_differs.append(record.step)

    async def _recover(self, steps: int) -> int:
        self.attempt += 1
        for index in self.dead:
            await asyncio.sleep(5.0)  # what was on the way is lost
            self.boxes[index].close()
            self.pipeline.stages[index] = self.pipeline.make(index)
            self._equip(index)
        statuses = []
        for stage in self.stages:
            assert stage.keeper is not None
            if stage.index not in self.dead:
                await stage.settle()
                await stage.keeper.settled()
            statuses.append(
                Status(
                    index=stage.index,
                    live=None if stage.index in self.dead else stage.intact,
                    box=tuple(stage.keeper.steps()),
                )
            )
        self.dead.clear()
        decision = common_step(statuses)
        self.found.decisions.append(decision)
        for stage, source in zip(self.stages, decision.sources):
            assert stage.keeper is not None
            assert source in ("live", "box")
            if source == "box":
                await stage.keeper.restore(decision.step)
            for record in stage.keeper.records():
                if record.step <= decision.step:
                    self._note(record)
        return decision.step

    def _equip(self, index: int) -> None:
        stage = self.pipeline.stages[index]
        box = self.boxes[index] = BlackBox(self.folder / f"stage-{index}")
        stage.keeper = Keeper(stage, box, self.pipeline.lane(BOX_COSTS, Recorder()))
        own = tuple(mishap for stage_index, mishap in self.mishaps if stage_index == index)

        def strike(deed: Deed) -> None:
            self._kill(stage, box)
            raise Killed(f"stage {index}")

        watch = Mishaps(own, strike=strike)
        stage.on_point, box.on_write = watch.on_point, watch.on_write

    def _kill(self, stage: Stage, box: BlackBox) -> None:
        self.dead.add(stage.index)

        def die(*_: Any) -> None:
            raise Killed(f"stage {stage.index}")

        stage.on_point = box.on_write = die
        stage.on_frame = lambda *_: None  # type: ignore[method-assign]
        for link in stage.wiring.links.values():
            link.close()
            link.send = lambda *_, **__: None  # type: ignore[method-assign]
        assert stage.keeper is not None
        if stage.keeper._writing is not None:
            stage.keeper._writing.add_done_callback(_forget)
        if stage._running not in (None, asyncio.current_task()):
            stage._running.cancel()


def _forget(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


def survive(
    bench: Bench, folder: Path, mishaps: Sequence[tuple[int, Mishap]], *, steps: int
) -> Survived:
    """Train with stages dying as told."""
    found: list[Survived] = []

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        rehearsal = Rehearsal(bench, pipeline, folder, mishaps)
        found.append(await rehearsal.run(steps))
        found[0].rows = rows_at_both_ends(pipeline.stages)
        for box in rehearsal.boxes.values():
            box.close()
        return []

    ran = bench.drive(main)
    found[0].num_injected = sum(len(link.injected) for link in ran.links.values())
    return found[0]


def rows_at_both_ends(stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """Digests at the two ends of each edge, without rows whose eviction is still to be told."""
    found = []
    for sender, receiver in pairwise(stages):
        assert sender.wiring.activation_out is not None
        assert receiver.wiring.activation_in is not None
        ours = row_store(sender.wiring.activation_out.codec)
        theirs = row_store(receiver.wiring.activation_in.codec)
        if ours is not None and theirs is not None:
            found.append((ours.digest(), theirs.digest(without=ours.pending_evictions)))
    return found


def points_of(bench: Bench, stage: int) -> list[str]:
    """Every place of a step where a stage can die, in its order."""
    points: list[str] = []
    last = bench.num_stages - 1
    for action in actions_of(
        bench.schedule,
        stage=stage,
        num_stages=bench.num_stages,
        num_micro_batches=bench.micro_batches,
    ):
        forward = action.kind == "F"
        has_source, has_target = (stage > 0, stage < last) if forward else (stage < last, stage > 0)
        points += [f"recv {action}"] * has_source + [str(action)] + [f"send {action}"] * has_target
    points += ["norm"] + ["prepared"] * (stage > 0) + ["update", "commit", "committed"]
    return [*points, "box rows", "box arrays", "box mark"]


def unbroken(bench: Bench, steps: int) -> Run:
    """The same training without boxes, kills or attempts."""
    return bench.run(steps)
