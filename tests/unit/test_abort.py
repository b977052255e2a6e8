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
    pipeline: LocalPipeline, *plans: StepPlan, at_s: float, spread_s: float
) -> list[BaseException | None]:
    """Start steps and, after a while, tell one stage after the other to stop, as a driver does."""

    async def work(stage: Stage) -> None:
        for plan in plans:
            await stage.run(plan)

    loop = asyncio.get_running_loop()
    timers = [
        loop.call_later(at_s + stage.index * spread_s, stage.abort, "a test said so")
        for stage in pipeline.stages
    ]
    runs = [asyncio.create_task(work(stage)) for stage in pipeline.stages]
    results = await asyncio.gather(*runs, return_exceptions=True)
    for timer in timers:
        timer.cancel()
    return results


WARM = 2
"""Steps (epochs) before the abort, so that rows exist; one more follows it."""


def abort_and_replay(at_s: float, spread_s: float) -> tuple[Run, str]:
    """Train, abort at some moment, go on as the driver would: a plan is always a step ahead."""
    outcome = ""

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        nonlocal outcome
        await pipeline.run([BUSY.plan(step) for step in range(WARM)])
        before = state_of(pipeline.stages)
        plans = [BUSY.plan(WARM), BUSY.plan(WARM + 1)]
        results = await run_and_abort(pipeline, *plans, at_s=at_s, spread_s=spread_s)
        committed = {stage.committed for stage in pipeline.stages}
        if any(isinstance(result, StageAborted) for result in results):
            assert all(isinstance(result, StageAborted) for result in results)
        outcome = "in doubt" if len(committed) > 1 else f"{max(committed) - WARM + 1} committed"
        if committed == {WARM - 1} and all(stage._doubt is None for stage in pipeline.stages):
            assert state_of(pipeline.stages) == before, f"aborted at {at_s:g} s"
        first = max(committed) + 1
        return await pipeline.run([BUSY.plan(n, attempt=1) for n in range(first, WARM + 3)])

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


@pytest.mark.slow
def test_an_abort_at_any_moment_leaves_no_trace_and_the_replay_gives_the_same_bits() -> None:
    unbroken = BUSY.run(WARM + 3)
    moments = moments_of(unbroken.records[WARM])
    assert len(moments) > 40
    boundary = [moments[-1] + 0.005 * index for index in range(1, 8)]  # the next step has begun
    outcomes = set()

    for at_s in [*random.Random(4).sample(moments, 9), *moments[-5:], *boundary]:
        run, outcome = abort_and_replay(at_s, spread_s=0.002)
        outcomes.add(outcome)
        assert run.losses == unbroken.losses[-len(run.losses) :], f"aborted at {at_s:g} s"
        assert same_bits(run.weights, unbroken.weights), f"aborted at {at_s:g} s"
        assert not any("cold resend" in event for event in run.events), f"aborted at {at_s:g} s"

    assert outcomes == {"0 committed", "in doubt", "1 committed"}


def replay_another_batch() -> Run:
    """Abort a step while its frames are on the way, and go on with other samples instead."""
    step = 1

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        await pipeline.run([BUSY.plan(0)])
        await run_and_abort(pipeline, BUSY.plan(step), at_s=0.1, spread_s=0)
        return await pipeline.run([BUSY.plan(step, attempt=1, micro_batches=OTHER)])

    return BUSY.drive(main)


OTHER = ((5, 4), (3, 2), (1, 0))


@pytest.mark.slow
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


def test_two_aborts_at_once_are_one() -> None:
    bench = replace(BUSY, num_stages=3)

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        await pipeline.run([bench.plan(0)])
        before = state_of(pipeline.stages)
        loop = asyncio.get_running_loop()
        for stage in pipeline.stages:
            for why in ("first", "second"):
                loop.call_later(0.2, stage.abort, why)
        results = await run_and_abort(pipeline, bench.plan(1), at_s=0.2001, spread_s=0)
        assert all(isinstance(result, StageAborted) for result in results)
        assert state_of(pipeline.stages) == before
        return await pipeline.run([bench.plan(1, attempt=1)])

    assert bench.drive(main).losses == bench.run(2).losses[1:]


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
            self.stages.append(loop.submit(self._assemble(bench, spec)).result(60))

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
        return [future.result(60) for future in self.start(plan)]

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        for loop in self.loops:
            loop.stop()


@pytest.mark.parametrize("blocked", ["forward", "backward"])
def test_a_thread_that_computes_while_its_step_is_aborted_leaves_no_trace(blocked: str) -> None:
    """The rollback waits in the lane until the pass that runs there is over.

    Where stage 0 is held the other one still waits for a micro-batch: had it done its part it would
    be in doubt, and keep its gradients until it hears what became of the step.
    """
    bench = Bench(num_stages=2, activation=acsgd(), gradient=DIRECTQ, schedule="1f1b")
    threads = Threads(bench)
    running, go_on = threading.Event(), threading.Event()
    compute = threads.stages[0].compute
    right = getattr(compute, blocked)
    held = {"forward": 1, "backward": 0}[blocked]  # F0 F1 B0 F2 …

    def slow(micro_batch: int, *args: Any, **options: Any) -> Any:
        result = right(micro_batch, *args, **options)
        if micro_batch == held:
            running.set()
            assert go_on.wait(60)
        return result

    try:
        losses = [threads.run(bench.plan(step))[-1].loss for step in range(3)]
        before = state_of(threads.stages)
        setattr(compute, blocked, slow)
        runs = threads.start(bench.plan(3))
        assert running.wait(60)
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
