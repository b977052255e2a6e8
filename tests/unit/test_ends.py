"""What goes wrong on the way heals, is told, and leaves the rows of both ends equal: (d)5, (d)8."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from local_pipeline import DIRECTQ, Bench, Run, acsgd, same_bits
from torch import Tensor

from compressors.base import CodecError, NeedCold, Packet, SampleKeys
from compressors.delta_send import Sending
from compressors.frame import RAW, FrameHeader, pack, unpack
from compressors.identity import Identity
from compressors.registry import CodecSpec, make_codec
from netsim.clock import run_virtual
from netsim.faults import FaultyLink
from ray_pipe.models.gpt import GPTShape
from stages.ends import COLD, Edge, SendingEnd, Sent, StageTimeout
from stages.plan import Turn
from stages.receiving import ASK_AT, Opened, ReceivingEnd
from stages.rehearsal import StageCosts
from stages.stage import Stage

STEPS = 4
PLAIN = Bench(
    num_stages=3,
    shape=GPTShape(layers=3, width=32, heads=1, context=4, vocab=128),
    num_samples=6,  # one step is an epoch: from the second on rows are there
    deadline_s=20.0,
)
MEMORY = replace(PLAIN, activation=acsgd(), gradient=replace(DIRECTQ, rounding="stochastic"))
MEMORIES = {
    "acsgd": MEMORY,
    "acsgd+zstd": replace(MEMORY, activation=acsgd(name="acsgd+zstd")),
    "stochastic": replace(MEMORY, activation=acsgd(rounding="stochastic"), schedule="1f1b"),
    # Rows for five of eight samples: every step evicts some, tells it, and has cold visits.
    "evicting": replace(MEMORY, activation=acsgd(cap_bytes=5 * 4 * 32 * 2), num_samples=8),
}
KINDS = ["activation", "gradient", "control"]


def faulty(bench: Bench, *rules: tuple[str, str, dict[str, Any]]) -> Bench:
    """The same bench with faults on all links: (what, kind, which)."""

    def add(link: FaultyLink) -> None:
        for what, kind, options in rules:
            getattr(link, what)(kind, **options)

    return replace(bench, faults=add)


_unbroken: dict[str, Run] = {}


def unbroken(bench: Bench, steps: int = STEPS) -> Run:
    """The same without faults; each is run once."""
    key = f"{steps} {bench}"
    if key not in _unbroken:
        _unbroken[key] = replace(bench, faults=None).run(steps)
    return _unbroken[key]


def injected(run: Run) -> int:
    return sum(len(link.injected) for link in run.links.values())


FAULTS = [
    ("drop", {"nth": 4}),
    ("duplicate", {"nth": 4}),
    ("corrupt", {"nth": 4}),
    ("delay", {"nth": 4, "by_s": 0.3}),
    ("delay", {"nth": 4, "by_s": 15.0}),
]
FAULT_IDS = ["dropped", "duplicated", "corrupted", "delayed", "delayed for long"]


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("what", "options"), FAULTS, ids=FAULT_IDS)
def test_without_memory_a_fault_changes_no_bit(what: str, options: Any, kind: str) -> None:
    run = faulty(PLAIN, (what, kind, options)).run(STEPS)

    assert injected(run) >= 2
    assert run.losses == unbroken(PLAIN).losses
    assert same_bits(run.weights, unbroken(PLAIN).weights)


@pytest.mark.quick(7)
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("what", "options"), FAULTS, ids=FAULT_IDS)
def test_with_memory_a_fault_changes_no_bit(what: str, options: Any, kind: str, name: str) -> None:
    """The fourth frame of a kind belongs to the second step: rows are there."""
    run = faulty(MEMORIES[name], (what, kind, options)).run(STEPS)

    assert injected(run) >= 2
    assert run.losses == unbroken(MEMORIES[name]).losses
    assert same_bits(run.weights, unbroken(MEMORIES[name]).weights)
    assert all(sender == receiver for sender, receiver in run.rows())


def repeat_cold(self: SendingEnd, item: Sent) -> Any:
    """A frame that is merely repeated is encoded anew: 8 bits, a new generation."""
    assert item.packet is not None
    if item.packet.rows is not None:
        codec: Any = self.codec
        item.packet = codec.resend_cold(item.tensor, keys=item.keys)
    return item.seq, self._pack(item, item.packet)


@pytest.mark.parametrize(("what", "options"), [FAULTS[0], FAULTS[2], FAULTS[3]])
def test_mutant_a_cold_resend_of_a_lost_frame_is_caught(
    what: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken(MEMORY)
    monkeypatch.setattr(SendingEnd, "_repeat", repeat_cold)
    run = faulty(MEMORY, (what, "activation", options)).run(STEPS)

    assert run.losses != unbroken(MEMORY).losses


def test_mutant_decoding_ahead_of_a_gap_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample in two micro-batches in flight: its second visit needs the first."""
    right = ReceivingEnd._accept

    def at_once(self: Any, frame: Any, turn: Turn, min_attempt: int, due: int) -> Any:
        header = frame.header if isinstance(frame, Opened) else self._wire.unpack(frame)[0]
        return right(self, frame, turn, min_attempt, header.seq)

    bench = replace(MEMORY, order=TWICE * 2)
    calm = unbroken(bench)
    held = faulty(bench, ("drop", "activation", {"nth": 4})).run(STEPS)
    monkeypatch.setattr(ReceivingEnd, "_accept", at_once)
    hasty = faulty(bench, ("drop", "activation", {"nth": 4})).run(STEPS)

    assert held.losses == calm.losses
    assert hasty.losses != calm.losses


@pytest.mark.parametrize(
    ("what", "kind", "event"),
    [
        ("drop", "activation", "edge 0->1: frame 0 was lost on the way"),
        ("drop", "gradient", "edge 1->0: frame 0 was lost on the way"),
        ("corrupt", "activation", "edge 0->1: a damaged frame was dropped: "),
        ("duplicate", "gradient", "edge 1->0: gradient of micro-batch 0, step 1: arrived twice"),
        ("drop", "control", "stage 1: 'norms' of step 3 was told to stage 0 again"),
    ],
)
def test_what_healed_is_told(what: str, kind: str, event: str) -> None:
    run = faulty(MEMORY, (what, kind, {"nth": 4})).run(STEPS)

    assert any(told.startswith(event) for told in run.events), run.events


def test_a_lost_frame_is_sent_again_as_it_was_and_no_row_becomes_cold() -> None:
    run = faulty(MEMORY, ("drop", "activation", {"nth": 8})).run(STEPS)

    counted = [step[0].codec["0->1"] for step in run.records]
    assert [int(codec["resent"]) for codec in counted] == [0, 0, 1, 0]
    assert [int(codec["resends"]) for codec in counted] == [0, 0, 0, 0]
    assert [int(codec["cold"]) for codec in counted] == [6, 0, 0, 0]
    heard = [step[1].codec.get("0->1", {}).get("nacks", 0) for step in run.records]
    assert heard == [0, 0, 1, 0]


def test_the_last_frame_of_a_step_is_asked_for_before_the_deadline() -> None:
    """Nothing behind it shows the gap."""
    run = faulty(PLAIN, ("drop", "gradient", {"nth": 6})).run(2)

    assert "edge 1->0: gradient of micro-batch 2, step 1, was sent again" in run.events
    assert run.losses == unbroken(PLAIN, 2).losses
    assert 5 < run.end_s < 11  # asked for at a quarter of the deadline


def test_a_frame_that_waits_for_a_slow_uplink_is_not_sent_twice() -> None:
    """The receiver asks for it, but it has not left yet: a second copy would only be slower."""
    bench = replace(PLAIN, bandwidth_bps=8e3, deadline_s=40.0)  # about a second for each frame

    run = bench.run(1)

    waits = [record.seconds["wait_backward"] for record in run.records[0][:1]]
    assert max(waits) > 40 / 8
    assert run.events == []
    assert all(record.codec.get("0->1", {}).get("resent", 0) == 0 for record in run.records[0])


def test_a_row_that_the_receiver_lost_heals() -> None:
    """One-sided loss: the sender codes changes against a row that is gone."""

    async def main(pipeline: Any) -> Any:
        records = await pipeline.run([MEMORY.plan(step) for step in range(2)])
        end = pipeline.stages[1].wiring.activation_in
        end.codec = make_codec(MEMORY.activation, namespace=end.codec.namespace)
        return records + await pipeline.run([MEMORY.plan(step) for step in range(2, 4)])

    run = MEMORY.drive(main)

    assert any("cold resend needed" in event for event in run.events)
    assert any("was sent again, cold" in event for event in run.events)
    counted = [step[0].codec["0->1"] for step in run.records]
    assert [int(codec["resends"]) for codec in counted] == [0, 0, 3, 0]
    assert all(sender == receiver for sender, receiver in run.rows())
    assert run.losses == pytest.approx(unbroken(MEMORY).losses, abs=2e-3)


@pytest.mark.slow
def test_a_lost_row_heals_while_frames_are_lost_too() -> None:
    """The cold answer is lost as well, and so is what was sent behind it."""
    for nth in range(7, 14):
        bench = faulty(MEMORY, ("drop", "activation", {"nth": nth}))

        async def main(pipeline: Any, bench: Bench = bench) -> Any:
            records = await pipeline.run([bench.plan(step) for step in range(2)])
            end = pipeline.stages[1].wiring.activation_in
            end.codec = make_codec(bench.activation, namespace=end.codec.namespace)
            return records + await pipeline.run([bench.plan(step) for step in range(2, 4)])

        run = bench.drive(main)

        assert injected(run) >= 1
        assert all(sender == receiver for sender, receiver in run.rows()), nth
        assert run.losses == pytest.approx(unbroken(MEMORY).losses, abs=2e-3), nth


def storm(bench: Bench, *, share: float) -> tuple[Run, Run]:
    """Faults of all sorts, then a calm epoch; and the same without faults."""
    actions = [("drop", {}), ("duplicate", {}), ("corrupt", {}), ("delay", {"by_s": 0.2})]
    rules = [(what, kind, {"share": share, **x}) for what, x in actions for kind in KINDS]

    async def main(pipeline: Any) -> Any:
        records = await pipeline.run([bench.plan(step) for step in range(STEPS)])
        for stage in pipeline.stages:
            for link in stage.wiring.links.values():
                link._rules.clear()
        return records + await pipeline.run([bench.plan(step) for step in (STEPS, STEPS + 1)])

    return faulty(bench, *rules).drive(main), unbroken(bench, STEPS + 2)


@pytest.mark.quick(2)
@pytest.mark.parametrize("bench", [MEMORIES["stochastic"], PLAIN], ids=["memory", "plain"])
@pytest.mark.parametrize("seed", range(5))
def test_a_storm_of_faults_changes_no_bit(seed: int, bench: Bench) -> None:
    run, calm = storm(replace(bench, seed=seed), share=0.05)

    assert injected(run) > 5
    assert run.losses == calm.losses
    assert same_bits(run.weights, calm.weights)
    if bench is not PLAIN:
        assert all(sender == receiver for sender, receiver in run.rows())


# --- the same sample in two micro-batches in flight, (d)5 --------------------------------------

TWICE = (((0, 1), (1, 0), (0, 2)), ((2, 0), (0, 1), (1, 1)))
UNEVEN = StageCosts(phases={"forward": 0.02, "backward": 0.05, "encode": 0.03, "decode": 0.04})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_sample_in_several_micro_batches_is_applied_in_send_order(schedule: str) -> None:
    bench = replace(MEMORY, schedule=schedule, order=TWICE * 2, costs=UNEVEN)

    run = bench.run(4)

    assert run.events == []
    assert all(sender == receiver for sender, receiver in run.rows())


@pytest.mark.slow
def test_a_sample_in_several_micro_batches_survives_faults_in_between() -> None:
    for seed in range(4):
        bench = replace(MEMORY, schedule="1f1b", order=TWICE * 2, costs=UNEVEN, seed=seed)
        delay = {"share": 0.3, "by_s": 0.1}
        run = faulty(
            bench, ("drop", "activation", {"share": 0.15}), ("delay", "activation", delay)
        ).run(4)

        assert injected(run) > 3
        assert run.losses == unbroken(bench).losses, seed
        assert all(sender == receiver for sender, receiver in run.rows()), seed


def test_frames_that_overtake_each_other_are_decoded_in_the_order_of_sending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: dict[int, tuple[Any, Any]] = {}

    class Swapping(FaultyLink):
        """Sends the second activation of a pair before the first."""

        def send(self, frame: Any, *, kind: str) -> None:
            if kind != "activation":
                super().send(frame, kind=kind)
            elif id(self) in held:
                first = held.pop(id(self))
                super().send(frame, kind=kind)
                super().send(first, kind=kind)
            else:
                held[id(self)] = frame
                asyncio.get_running_loop().call_later(1.0, self._flush)

        def _flush(self) -> None:
            if id(self) in held:
                super().send(held.pop(id(self)), kind="activation")

    monkeypatch.setattr("local_pipeline.FaultyLink", Swapping)
    run = replace(MEMORY, order=TWICE * 2).run(4)

    assert not any("cold" in event for event in run.events)
    assert run.losses == unbroken(replace(MEMORY, order=TWICE * 2)).losses


def test_mutant_storing_h_is_caught_by_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender remembers what it meant instead of what it sent: (d)1."""
    right = Sending._cold

    def stores_h(self: Any, positions: Any, matrices: Any, draft: Any) -> Any:
        packets = right(self, positions, matrices, draft)
        for position in positions:
            mark, _ = draft.visits[position]
            row = self.end.row_format.pack(matrices[position])
            draft.visits[position] = (mark, row)
        return packets

    monkeypatch.setattr(Sending, "_cold", stores_h)
    bench = replace(MEMORY, activation=acsgd(checksum=False))

    run = bench.run(2)

    assert any(sender != receiver for sender, receiver in run.rows())


def stop_in_the_flush(monkeypatch: pytest.MonkeyPatch, *, hasty: bool) -> Run:
    """Abort all stages when the middle one reaches its flush, then replay the step."""
    right = Stage._flush
    pipelines: list[Any] = []

    async def flush(self: Stage, plan: Any) -> float:
        if self.index == 1 and plan.attempt == 0 and plan.step == 1:
            if hasty:
                assert self.wiring.activation_out is not None
                self.wiring.activation_out.codec.commit()
            for stage in pipelines[0].stages:
                stage.abort("now")
        return await right(self, plan)

    monkeypatch.setattr(Stage, "_flush", flush)

    async def main(pipeline: Any) -> Any:
        pipelines.append(pipeline)
        await pipeline.run([MEMORY.plan(0)])
        runs = [asyncio.create_task(stage.run(MEMORY.plan(1))) for stage in pipeline.stages]
        await asyncio.gather(*runs, return_exceptions=True)
        assert [stage.committed for stage in pipeline.stages] == [0, 0, 0]
        return await pipeline.run([MEMORY.plan(1, attempt=1)])

    return MEMORY.drive(main)


def test_a_stage_stopped_in_its_flush_replays_without_a_resend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = stop_in_the_flush(monkeypatch, hasty=False)

    assert not any("cold resend" in event for event in run.events)
    assert run.losses == unbroken(MEMORY).losses[1:2]


def test_mutant_committing_before_the_answer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that commits on its own has rows that its neighbour took back."""
    run = stop_in_the_flush(monkeypatch, hasty=True)

    assert any("cold resend needed" in event for event in run.events)
    assert run.losses != unbroken(MEMORY).losses[1:2]


# --- the ends by themselves ----------------------------------------------------------------------


class Inline:
    """A lane that works at once."""

    async def run(self, phase: str, name: str, micro_batch: int, work: Any, *args: Any) -> Any:
        await asyncio.sleep(0)
        return work(*args)


class Wire:
    """A link that keeps what it is given."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.busy_until = 0.0

    def send(self, frame: Any, *, kind: str) -> None:
        self.frames.append(frame)


EDGE = Edge(source=0, target=1, kind="activation")
TURN = Turn(0, 0, 0)
X = torch.arange(8.0).view(2, 4)


def frame_of(
    micro_batch: int, *, turn: Turn = TURN, seq: int | None = None, x: Tensor = X
) -> bytes:
    header = FrameHeader(
        kind="activation", source=0, target=1, step=turn.step, attempt=turn.attempt,
        micro_batch=micro_batch, seq=micro_batch if seq is None else seq,
    )  # fmt: skip
    return pack(header, Identity().encode(x, keys=SampleKeys(ids=(0, 1))))


def receiver(codec: Any = None) -> tuple[ReceivingEnd, list[Any]]:
    told: list[Any] = []
    lane: Any = Inline()
    end = ReceivingEnd(EDGE, codec or Identity(), lane, lambda turn, body: told.append(body))
    return end, told


def test_frames_are_matched_by_micro_batch_not_by_arrival() -> None:
    async def main() -> None:
        end, told = receiver()
        end.begin(TURN)
        end.on_frame(frame_of(1, seq=0, x=X + 1))
        end.on_frame(frame_of(0, seq=1))

        assert torch.equal((await end.take(TURN, 0, deadline_s=1))[0], X)
        assert torch.equal((await end.take(TURN, 1, deadline_s=1))[0], X + 1)
        assert told == []

    run_virtual(main())


def test_a_frame_of_a_later_turn_waits_for_it_and_keeps_its_place() -> None:
    async def main() -> None:
        end, _ = receiver()
        end.begin(TURN)
        later = Turn(0, 1, 0)
        for index in range(3):
            end.on_frame(frame_of(index, turn=later, seq=index, x=X * index))
            await asyncio.sleep(0.01)
        assert not end._ready
        end.begin(later)

        for index in range(3):
            assert torch.equal((await end.take(later, index, deadline_s=1))[0], X * index)

    run_virtual(main())


def test_a_new_attempt_drops_what_waited_of_the_old_one() -> None:
    """A stage may learn of an abort only by the next plan: its own step had just committed."""
    decoded: list[float] = []

    class Counting(Identity):
        def decode(self, packet: Packet) -> Tensor:
            decoded.append(1)
            return super().decode(packet)

    async def main() -> None:
        end, _ = receiver(Counting())
        end.begin(TURN)
        end.on_frame(frame_of(0, turn=Turn(0, 1, 0)))
        await asyncio.sleep(1)
        again = Turn(1, 1, 0)
        end.begin(again)
        end.on_frame(frame_of(0, turn=again, x=X + 1))

        assert torch.equal((await end.take(again, 0, deadline_s=1))[0], X + 1)
        assert len(decoded) == 1

    run_virtual(main())


def test_each_missing_frame_is_asked_for_once() -> None:
    async def main() -> None:
        end, told = receiver()
        end.begin(TURN)
        end.on_frame(frame_of(0, seq=0))
        end.on_frame(frame_of(3, seq=3))
        end.on_frame(frame_of(4, seq=4))
        await asyncio.sleep(1)

        assert told == [
            {"op": "nack", "seq": 1, "why": "lost"},
            {"op": "nack", "seq": 2, "why": "lost"},
        ]
        assert end.num_nacks == 2

    run_virtual(main())


def test_a_codec_that_cannot_decode_fails_whoever_waits_and_whoever_comes() -> None:
    class Broken(Identity):
        def decode(self, packet: Packet) -> Tensor:
            raise CodecError("other namespace")

    async def main() -> None:
        end, _ = receiver(Broken())
        end.begin(TURN)
        asyncio.get_running_loop().call_later(1, end.on_frame, frame_of(0))
        for index in range(2):
            with pytest.raises(CodecError, match="other namespace"):
                await end.take(TURN, index, deadline_s=60)
        assert asyncio.get_running_loop().time() == 1

    run_virtual(main())


class Counted(Identity):
    """A codec of the user's own around the identity."""

    num_decoded = 0

    def decode(self, packet: Packet) -> Tensor:
        self.num_decoded += 1
        return super().decode(packet)


def test_a_codec_around_the_identity_decodes_its_own_packets_and_raw_ones_pass_it_by() -> None:
    x = torch.randn(2, 4)
    packet = Identity().encode(x, keys=SampleKeys(ids=(0, 1)))

    async def main() -> None:
        wrapped, quantised = Counted(), make_codec(DIRECTQ, namespace=("edge",))
        end = receiver(wrapped)[0]
        head = FrameHeader(kind="activation", source=0, target=1, step=0)

        assert torch.equal(end.decode(pack(head, packet))[0], x)
        assert wrapped.num_decoded == 1
        assert torch.equal(end.decode(pack(replace(head, flags=RAW), packet))[0], x)
        assert wrapped.num_decoded == 1

        end = receiver(quantised)[0]
        assert torch.equal(end.decode(pack(replace(head, flags=RAW), packet))[0], x)
        with pytest.raises(CodecError):  # nobody said that it is raw
            end.decode(pack(head, packet))

    run_virtual(main())


def test_a_tensor_that_was_taken_is_not_kept() -> None:
    async def main() -> None:
        end, _ = receiver()
        end.begin(TURN)
        end.on_frame(frame_of(0))
        await end.take(TURN, 0, deadline_s=1)
        end.on_frame(frame_of(0))
        await asyncio.sleep(1)

        assert end._ready == {}
        assert end.events == ["edge 0->1: activation of micro-batch 0, step 0: arrived twice"]

    run_virtual(main())


def test_only_what_was_sent_in_this_attempt_is_sent_again() -> None:
    async def main() -> None:
        wire, lane = Wire(), Inline()
        end = SendingEnd(EDGE, Identity(), wire, lane)  # type: ignore[arg-type]
        keys = SampleKeys(ids=(0, 1))
        await end.send(TURN, 0, X, keys)
        await end.send(TURN, 1, X, keys)

        assert await end.resend(TURN, seq=1)
        assert await end.resend(TURN, micro_batch=0)
        assert not await end.resend(TURN, seq=9)
        assert not await end.resend(Turn(1, 0, 0), seq=0)
        assert not await end.resend(Turn(0, 1, 0), micro_batch=0)
        assert end.num_resent == 2
        end.forget()
        assert not await end.resend(TURN, seq=1)

    run_virtual(main())


def test_what_is_sent_again_is_the_same_frame_and_cold_is_a_new_one() -> None:
    async def main() -> list[Any]:
        wire, lane = Wire(), Inline()
        codec = make_codec(acsgd(), namespace=("e",))
        end = SendingEnd(EDGE, codec, wire, lane)  # type: ignore[arg-type]
        await end.send(TURN, 0, torch.randn(2, 3, 32), SampleKeys(ids=(0, 1)))
        await end.resend(TURN, seq=0)
        await end.resend(TURN, seq=0, cold=True)
        await end.resend(TURN, micro_batch=0)
        await end.resend(TURN, seq=0)
        return [bytes(frame) for frame in wire.frames]

    first, again, cold, newest, oldest = run_virtual(main())

    assert first == again == oldest
    assert cold == newest
    assert unpack(cold)[0].seq == 1
    packets = [unpack(frame)[1] for frame in (first, cold)]
    assert [packet.rows.generations for packet in packets] == [(1, 2), (3, 4)]  # type: ignore[union-attr]


def test_an_answer_that_cannot_be_applied_either_is_not_asked_for_in_a_circle() -> None:
    """Only `take` asks again, a few times within the deadline."""

    class NeverThere(Identity):
        def decode(self, packet: Packet) -> Tensor:
            raise NeedCold("no row", (0,))

    async def main() -> None:
        end, told = receiver(NeverThere())
        end.begin(TURN)
        for seq in range(3):
            end.on_frame(frame_of(0, seq=seq))
        with pytest.raises(StageTimeout):
            await end.take(TURN, 0, deadline_s=8)

        assert told == [
            {"op": "nack", "seq": 0, "why": "cold"},
            *[{"op": "want", "mb": 0, "why": "cold"}] * len(ASK_AT),
        ]

    run_virtual(main())


def test_asking_again_asks_for_all_that_is_held_up() -> None:
    async def main() -> None:
        end, told = receiver()
        end.begin(TURN)
        end.on_frame(frame_of(2, seq=2))
        with pytest.raises(StageTimeout):
            await end.take(TURN, 2, deadline_s=8)

        missing = [{"op": "nack", "seq": seq, "why": "lost"} for seq in (0, 1)]
        asked = [{"op": "want", "mb": 2, "why": "lost"}, *missing]
        assert told == [*missing, *asked * len(ASK_AT)]

    run_virtual(main())


def test_numbers_start_again_with_each_turn() -> None:
    async def main() -> list[int]:
        wire, lane = Wire(), Inline()
        end = SendingEnd(EDGE, Identity(), wire, lane)  # type: ignore[arg-type]
        for turn in (TURN, Turn(0, 1, 0), Turn(1, 1, 0), Turn(1, 2, 0), Turn(1, 2, 0)):
            await end.send(turn, 0, X, SampleKeys(ids=(0, 1)))
        return [unpack(frame)[0].seq for frame in wire.frames]

    assert run_virtual(main()) == [0, 0, 0, 0, 1]


@pytest.mark.slow
def test_random_interleavings_of_lossy_delivery_end_with_equal_rows() -> None:
    """Sender and receiver of one edge, without a pipeline: any order of arrival heals."""
    for seed in range(25):
        assert run_virtual(_one_edge(random.Random(seed))), f"seed {seed}"


async def _one_edge(source: random.Random) -> bool:
    spec = CodecSpec(name="acsgd", checksum=True)
    sender, receiver_codec = (make_codec(spec, namespace=("e",)) for _ in range(2))
    lane: Any = Inline()
    requests: list[Any] = []
    end = ReceivingEnd(EDGE, receiver_codec, lane, lambda turn, body: requests.append((turn, body)))
    loop = asyncio.get_running_loop()

    class Lossy(Wire):
        calm = False

        def send(self, frame: Any, *, kind: str) -> None:
            if self.calm:
                end.on_frame(frame)
                return
            for _ in range(source.choice([0, 1, 1, 1, 1, 2])):
                loop.call_later(source.choice([0.0, 0.0, 0.5, 2.0]), end.on_frame, frame)

    wire = Lossy()
    out = SendingEnd(EDGE, sender, wire, lane)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(source.randrange(1000))
    for step in range(5):
        wire.calm = step == 4
        turn = Turn(0, step, 0)
        end.begin(turn)
        for index in range(4):
            ids = (index, 4) if wire.calm else tuple(source.choices(range(5), k=2))
            x = torch.randn(2, 3, 32, generator=generator)
            await out.send(turn, index, x, SampleKeys(ids=ids))
        takes = [loop.create_task(end.take(turn, m, deadline_s=2000)) for m in range(4)]
        while not all(task.done() for task in takes):
            await asyncio.sleep(1)
            asked, requests[:] = list(requests), []
            for asked_turn, body in asked:
                seq, index = body.get("seq"), body.get("mb", -1)
                cold = body["why"] == COLD
                await out.resend(asked_turn, seq=seq, micro_batch=index, cold=cold)
        await asyncio.sleep(10)  # what is late arrives
        sender.commit()
        receiver_codec.commit()
        out.forget()
    both: Any = (sender, receiver_codec)
    return bool(both[0].row_digest() == both[1].row_digest())
