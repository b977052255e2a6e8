"""An aborted step leaves no trace, and its replay gives the bits of a run that never failed."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from local_pipeline import DIRECTQ, WORK, Bench, Run, acsgd, same_bits, state_of
from torch import nn

from netsim.clock import run_virtual
from netsim.loop_thread import LoopThread
from netsim.topology import Topology
from ray_pipe.models.gpt import GPTShape
from stages.assembly import assemble
from stages.lanes import Recorder, ThreadLane
from stages.plan import StepPlan, Turn
from stages.receiving import ReceivingEnd
from stages.record import StepRecord
from stages.rehearsal import LocalPipeline
from stages.stage import Stage, StageAborted
from stages.wiring import Lanes

BUSY = Bench(
    num_stages=3,
    shape=GPTShape(layers=3, width=16, heads=1, context=4, vocab=128),
    schedule="1f1b",
    activation=acsgd(),
    gradient=replace(DIRECTQ, rounding="stochastic"),
    micro_batches=3,
    num_samples=6,
    costs=WORK,
    latency_s=0.03,
    bandwidth_bps=2e6,
)


async def run_and_abort(
    pipeline: LocalPipeline, plan: StepPlan, *, at_s: float, spread_s: float
) -> list[StepRecord | BaseException]:
    """Start a step and, after a while, tell one stage after the other to stop, as a driver does."""
    loop = asyncio.get_running_loop()
    timers = [
        loop.call_later(at_s + stage.index * spread_s, stage.abort, "a test said so")
        for stage in pipeline.stages
    ]
    runs = [asyncio.create_task(stage.run(plan)) for stage in pipeline.stages]
    results = await asyncio.gather(*runs, return_exceptions=True)
    for timer in timers:
        timer.cancel()
    return results


WARM = 2
"""Steps (epochs) before the abort, so that rows exist; one more follows it."""


def abort_and_replay(at_s: float, spread_s: float) -> tuple[Run, str]:
    """Train, abort a step at some moment, replay it as the driver would, train on."""
    outcome = ""

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        nonlocal outcome
        await pipeline.run([BUSY.plan(step) for step in range(WARM)])
        before = state_of(pipeline.stages)
        results = await run_and_abort(pipeline, BUSY.plan(WARM), at_s=at_s, spread_s=spread_s)
        committed = {stage.committed for stage in pipeline.stages}
        if WARM in committed:
            outcome = "all committed" if committed == {WARM} else "in doubt"
        else:
            outcome = "rolled back"
            assert all(isinstance(result, StageAborted) for result in results)
            if all(stage._doubt is None for stage in pipeline.stages):
                assert state_of(pipeline.stages) == before, f"aborted at {at_s:g} s"
        first = WARM + 1 if WARM in committed else WARM
        plans = [BUSY.plan(step, attempt=1) for step in range(first, WARM + 2)]
        return await pipeline.run(plans)

    run = BUSY.drive(main)
    assert all(sender == receiver for sender, receiver in run.rows()), f"aborted at {at_s:g} s"
    return run, outcome


def moments_of(step: list[StepRecord]) -> list[float]:
    """The middle of every action, message and wait of all stages, since the step's start."""
    start = min(record.start_s for record in step)
    middles = {
        round((span.start_s + span.end_s) / 2 - start, 3)
        for record in step
        for span in record.spans
        if span.end_s > span.start_s
    }
    return sorted(middles)


def test_an_abort_at_any_moment_leaves_no_trace_and_the_replay_gives_the_same_bits() -> None:
    unbroken = BUSY.run(WARM + 2)
    moments = moments_of(unbroken.records[WARM])
    assert len(moments) > 40
    outcomes = set()

    for at_s in [*random.Random(4).sample(moments, 10), *moments[-6:]]:
        run, outcome = abort_and_replay(at_s, spread_s=0.002)
        outcomes.add(outcome)
        assert run.losses == unbroken.losses[-len(run.losses) :], f"aborted at {at_s:g} s"
        assert same_bits(run.weights, unbroken.weights), f"aborted at {at_s:g} s"

    assert outcomes == {"rolled back", "in doubt", "all committed"}


def replay_another_batch() -> Run:
    """Abort a step while its frames are on the way, and go on with other samples instead."""
    step = 1

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        await pipeline.run([BUSY.plan(0)])
        await run_and_abort(pipeline, BUSY.plan(step), at_s=0.1, spread_s=0)
        return await pipeline.run([BUSY.plan(step, attempt=1, micro_batches=OTHER)])

    return BUSY.drive(main)


OTHER = ((5, 4), (3, 2), (1, 0))


def test_frames_of_an_aborted_attempt_that_arrive_late_are_dropped() -> None:
    unbroken = BUSY.run(plans=[BUSY.plan(0), BUSY.plan(1, micro_batches=OTHER)])

    run = replay_another_batch()

    assert any("left over from an aborted attempt, dropped" in event for event in run.events)
    assert run.losses == unbroken.losses[1:]
    assert same_bits(run.weights, unbroken.weights)


def test_mutant_frames_that_do_not_know_their_attempt_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(header: Any) -> Turn:
        return Turn(header.step, header.step, 0)  # as if every step were a new attempt

    unbroken = BUSY.run(plans=[BUSY.plan(0), BUSY.plan(1, micro_batches=OTHER)])
    monkeypatch.setattr("stages.receiving.turn_of", blind)
    monkeypatch.setattr(ReceivingEnd, "refuse_before", lambda self, attempt: None)

    run = replay_another_batch()

    assert run.losses != unbroken.losses[1:]


def test_an_abort_before_a_plan_refuses_that_plan_at_once() -> None:
    """The driver sends plans a step ahead: one may come after the abort."""
    bench = Bench(num_stages=2)

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        pipeline.stages[0].abort("stage 1 died")
        with pytest.raises(StageAborted, match=r"refuses step 0: .*stage 1 died.*attempt 1"):
            await pipeline.stages[0].run(bench.plan(0))
        return await pipeline.run([bench.plan(0, attempt=1)])

    assert bench.drive(main).losses == bench.run(1).losses


def test_an_aborted_stage_says_why() -> None:
    async def main() -> None:
        stage = Bench(num_stages=2).pipeline().stages[1]
        asyncio.get_running_loop().call_later(1, stage.abort, "stage 0 died")
        with pytest.raises(StageAborted, match="stage 1 was told to stop: stage 0 died"):
            await stage.run(Bench().plan(0))

    run_virtual(main())


def test_dropout_of_torch_repeats_its_masks_after_an_abort() -> None:
    def build(blocks: Any) -> nn.Module:
        modules = [Bench().module([index]) for index in blocks]
        return nn.Sequential(*modules[:-1], nn.Dropout(0.5), modules[-1])

    bench = Bench(num_stages=2, build=build, costs=WORK)

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        await run_and_abort(pipeline, bench.plan(0), at_s=0.4, spread_s=0)
        return await pipeline.run([bench.plan(step, attempt=1) for step in range(2)])

    assert bench.drive(main).losses == bench.run(2).losses


# --- the same with real threads -------------------------------------------------------------------


class Threads:
    """Stages on real loops with real lanes, pushing frames to each other."""

    def __init__(self, bench: Bench) -> None:
        self.loops = [LoopThread(f"stage-{index}") for index in range(bench.num_stages)]
        self.lanes: list[ThreadLane] = []
        self.stages: list[Stage] = []
        for spec, loop in zip(bench.specs(), self.loops):
            self.stages.append(loop.submit(self._assemble(bench, spec)).result(10))

    async def _assemble(self, bench: Bench, spec: Any) -> Stage:
        recorder = Recorder()
        lanes = [ThreadLane(name, recorder) for name in ("receive", "compute", "transmit")]
        self.lanes += lanes

        def deliver_to(target: int) -> Any:
            def deliver(frame: Any) -> None:
                self.loops[target].call_soon(self.stages[target].on_frame, spec.index, frame)

            return deliver

        return assemble(
            replace(spec, topology=Topology.uniform(spec.num_stages)),
            compute=bench.compute(spec.index),
            samples=bench.data(),
            lanes=Lanes(receive=lanes[0], compute=lanes[1], transmit=lanes[2]),
            recorder=recorder,
            deliver_to=deliver_to,
        )

    def start(self, plan: StepPlan) -> list[Future[StepRecord]]:
        return [loop.submit(stage.run(plan)) for loop, stage in zip(self.loops, self.stages)]

    def run(self, plan: StepPlan) -> list[StepRecord]:
        return [future.result(30) for future in self.start(plan)]

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        for loop in self.loops:
            loop.stop()


@pytest.mark.parametrize("blocked", ["forward", "backward"])
def test_a_thread_that_computes_while_its_step_is_aborted_leaves_no_trace(blocked: str) -> None:
    """The rollback waits in the lane until the pass that runs there is over."""
    bench = Bench(num_stages=2, activation=acsgd(), gradient=DIRECTQ, schedule="1f1b")
    threads = Threads(bench)
    running, go_on = threading.Event(), threading.Event()
    compute = threads.stages[0].compute
    right = getattr(compute, blocked)

    def slow(micro_batch: int, *args: Any, **options: Any) -> Any:
        result = right(micro_batch, *args, **options)
        if micro_batch == 1:
            running.set()
            assert go_on.wait(30)
        return result

    try:
        losses = [threads.run(bench.plan(step))[-1].loss for step in range(3)]
        before = state_of(threads.stages)
        setattr(compute, blocked, slow)
        runs = threads.start(bench.plan(3))
        assert running.wait(30)
        for stage, loop in zip(threads.stages, threads.loops):
            loop.call_soon(stage.abort, "a test said so")
        assert isinstance(runs[1].exception(30), StageAborted)
        assert not runs[0].done()
        go_on.set()
        assert isinstance(runs[0].exception(30), StageAborted)
        setattr(compute, blocked, right)

        assert state_of(threads.stages) == before
        losses += [threads.run(bench.plan(step, attempt=1))[-1].loss for step in (3, 4)]
    finally:
        threads.close()
    assert losses == bench.run(5).losses
