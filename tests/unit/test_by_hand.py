"""The dull twin: a driver that orders every pass gets the bits of stages that run by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from local_pipeline import DIRECTQ, FP32, Bench, acsgd, same_bits

from compressors.registry import CodecSpec
from netsim.loop_thread import LoopThread
from netsim.topology import Topology
from stages.assembly import assemble
from stages.by_hand import StageByHand
from stages.ends import StageTimeout
from stages.lanes import Recorder, ThreadLane
from stages.optim import clip_factor
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.schedule import Action, actions_of
from stages.stage import Stage
from stages.wiring import Lanes


class Hands:
    """Stages in real threads on real loops, and who moves them."""

    def __init__(self, bench: Bench, *, connected: bool = True) -> None:
        self.bench = bench
        self.loops = [LoopThread(f"stage-{i}") for i in range(bench.num_stages)]
        self.hands: list[StageByHand] = []
        self.stages: list[Stage] = []
        self.lanes: list[ThreadLane] = []
        for spec, loop in zip(bench.specs(), self.loops):
            self.stages.append(loop.submit(self._assemble(spec, connected)).result(60))
            self.hands.append(StageByHand(self.stages[-1], loop))

    async def _assemble(self, spec: Any, connected: bool) -> Stage:
        recorder = Recorder()
        lanes = [ThreadLane(name, recorder) for name in ("receive", "compute", "transmit")]
        self.lanes += lanes
        arrived = (lambda f: self.hands[spec.index].arrived(f)) if connected else (lambda f: None)
        return assemble(
            replace(spec, topology=Topology.uniform(spec.num_stages)),
            compute=self.bench.compute(spec.index),
            samples=self.bench.data(),
            lanes=Lanes(receive=lanes[0], compute=lanes[1], transmit=lanes[2]),
            recorder=recorder,
            deliver_to=lambda target: arrived,
        )

    def step(self, plan: StepPlan) -> list[StepRecord]:
        """One step, in an order in which every pass finds what it needs."""
        for hand in self.hands:
            hand.begin(plan)
        frames: dict[tuple[int, Action], Any] = {}
        last = len(self.hands) - 1
        rows = [
            actions_of(plan.schedule, stage=s, num_stages=last + 1,
                       num_micro_batches=len(plan.micro_batches))
            for s in range(last + 1)
        ]  # fmt: skip
        while any(rows):
            for stage, row in enumerate(rows):
                source = -1 if not row else stage + (1 if row[0].kind == "B" else -1)
                if not row or (0 <= source <= last and (stage, row[0]) not in frames):
                    continue
                action = row.pop(0)
                hand = self.hands[stage]
                act, to, kind = (
                    (hand.forward, stage + 1, "activation")
                    if action.kind == "F"
                    else (hand.backward, stage - 1, "gradient")
                )
                out = act(action.micro_batch, frames.pop((stage, action), None))
                if 0 <= to <= last:
                    frames[to, action] = hand.carry(to, kind, out)
        squares = [s for hand in self.hands for s in hand.squared_norms()] if plan.train else []
        norm, factor = clip_factor(squares, clip=self.bench.optim.clip)
        return [hand.finish(factor, norm) for hand in self.hands]

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        for loop in self.loops:
            loop.stop()


@pytest.fixture
def hands_of() -> Iterator[Any]:
    made: list[Hands] = []

    def make(bench: Bench, **options: Any) -> Hands:
        made.append(Hands(bench, **options))
        return made[-1]

    yield make
    for hands in made:
        hands.close()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("codec", [FP32, acsgd()], ids=["fp32", "acsgd"])
def test_stages_moved_by_hand_train_to_the_same_bits(
    codec: CodecSpec, schedule: str, hands_of: Any
) -> None:
    bench = Bench(num_stages=2, activation=codec, gradient=DIRECTQ, schedule=schedule)
    hands = hands_of(bench)

    records = [hands.step(bench.plan(step)) for step in range(4)]

    run = bench.run(4)
    weights = [p.detach() for stage in hands.stages for p in stage.compute.parameters]
    assert [step[-1].loss for step in records] == run.losses
    assert [step[0].grad_norm for step in records] == [r[0].grad_norm for r in run.records]
    assert same_bits(weights, run.weights)


def test_the_bytes_of_both_are_the_same_but_for_control(hands_of: Any) -> None:
    bench = Bench(num_stages=2, activation=acsgd(), gradient=DIRECTQ)
    hands = hands_of(bench)

    by_hand = [hands.step(bench.plan(step))[0].sent["0->1"]["activation"] for step in range(3)]

    run = bench.run(3)
    assert by_hand == [step[0].sent["0->1"]["activation"] for step in run.records]


def test_evaluation_by_hand_changes_nothing(hands_of: Any) -> None:
    bench = Bench(num_stages=2, activation=acsgd())
    hands = hands_of(bench)
    evaluation = bench.plan(0, train=False, schedule="forward", part=1)

    losses = [hands.step(bench.plan(0))[-1].loss]
    evaluated = hands.step(evaluation)
    losses += [hands.step(bench.plan(step))[-1].loss for step in (1, 2)]

    assert losses == bench.run(3).losses
    assert evaluated[-1].grad_norm is None
    assert evaluated[-1].loss is not None


def test_a_link_that_delivers_nothing_is_named_and_does_not_hang(hands_of: Any) -> None:
    bench = Bench(num_stages=2, deadline_s=0.05)
    hands = hands_of(bench, connected=False)
    for hand in hands.hands:
        hand.begin(bench.plan(0))
    frame = hands.hands[0].forward(0, None)

    with pytest.raises(StageTimeout, match=r"waited 0\.1 s for its link to carry the activation"):
        hands.hands[0].carry(1, "activation", frame)


def test_an_abort_by_hand_leaves_no_trace(hands_of: Any) -> None:
    bench = Bench(num_stages=2, activation=acsgd())
    hands = hands_of(bench)
    hands.step(bench.plan(0))
    for hand in hands.hands:
        hand.begin(bench.plan(1))
    frame = hands.hands[0].forward(0, None)
    hands.hands[1].forward(0, frame)
    for stage, loop in zip(hands.stages, hands.loops):
        loop.call_soon(stage.abort, "a test said so")

    losses = [hands.step(bench.plan(step, attempt=1))[-1].loss for step in (1, 2)]

    assert losses == bench.run(3).losses[1:]


def test_carrying_waits_for_each_frame_by_itself(hands_of: Any) -> None:
    bench = Bench(num_stages=2)
    hands = hands_of(bench)
    for hand in hands.hands:
        hand.begin(bench.plan(0))
    frames = [hands.hands[0].forward(index, None) for index in range(3)]

    with ThreadPoolExecutor(3) as pool:
        carried = list(pool.map(lambda f: hands.hands[0].carry(1, "activation", f), frames))

    assert carried == frames
