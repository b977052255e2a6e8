"""The simulator: against the closed form, against real tensors, and on cores that are shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from local_pipeline import DIRECTQ, FP32, Bench, acsgd
from torch import nn

from compressors.base import SampleKeys
from compressors.frame import FrameHeader, frame_nbytes, unpack
from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from netsim.faults import FaultyLink
from ray_pipe.data import DatasetSamples
from ray_pipe.models.gpt import GPTShape
from stages.loss import from_mean
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.rehearsal import Home, Shape, SizeOnlyCodec, StageCosts, simulate

Records = list[list[StepRecord]]
GPT2_XL = (1024, 1600)
FORWARD_S, BACKWARD_S = 0.072, 0.144


def step_s(records: Records) -> float:
    """The steady state: from the end of one step to the end of the next."""
    ends = [max(record.end_s for record in step) for step in records]
    return ends[-1] - ends[-2]


def rehearse(
    *,
    stages: int,
    micro_batches: int,
    bandwidth_bps: float,
    phases: dict[str, float] | None = None,
    latency_s: float = 0.0,
    num_cores: float = 1e9,
    homes: tuple[Home, ...] = (),
    sample_shape: tuple[int, ...] = GPT2_XL,
    schedule: str = "gpipe",
    **costs: float,
) -> Records:
    bench = Bench(
        num_stages=stages,
        shape=GPTShape(layers=stages, width=8, heads=1, context=8),
        bandwidth_bps=bandwidth_bps,
        latency_s=latency_s,
    )
    plans = [
        StepPlan(
            step=step,
            micro_batches=tuple((sample,) for sample in range(micro_batches)),
            schedule=schedule,
            lr=0.0,
            deadline_s=1e6,
        )
        for step in range(3)
    ]
    own = StageCosts(phases=phases or {"forward": FORWARD_S, "backward": BACKWARD_S}, **costs)
    records: Records = run_virtual(
        simulate(
            bench.specs(),
            plans,
            costs=[own] * stages,
            cut_shapes=[sample_shape] * (stages - 1),
            num_cores=num_cores,
            homes=homes,
        )
    )
    return records


def closed_form_s(stages: int, micro_batches: int, bandwidth_bps: float) -> float:
    """Section 8 of the specification."""
    link_s = 8 * 4 * 1024 * 1600 / bandwidth_bps
    return (micro_batches + stages - 1) * (max(FORWARD_S, link_s) + max(BACKWARD_S, link_s))


def test_gpt2_xl_at_a_hundred_megabits_takes_about_41_seconds() -> None:
    assert closed_form_s(8, 32, 1e8) == pytest.approx(40.9, abs=0.05)
    records = rehearse(stages=8, micro_batches=32, bandwidth_bps=1e8)
    assert step_s(records) == pytest.approx(flow_shop_s(8, 32, 1e8), rel=0.001)
    assert flow_shop_s(8, 32, 1e8) == pytest.approx(41.574, abs=0.001)


def flow_shop_s(stages: int, micro_batches: int, bandwidth_bps: float) -> float:
    """What GPipe takes exactly, where links send as stages compute.

    Equal micro-batches pass a row of stages and links, each of which works on one at a time: the
    first takes the sum of all times, each further one the longest of them.
    """
    link_s = 8 * 4 * 1024 * 1600 / bandwidth_bps
    return sum(
        stages * own + (stages - 1) * link_s + (micro_batches - 1) * max(own, link_s)
        for own in (FORWARD_S, BACKWARD_S)
    )


PIPELINES = pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 16), (8, 32)])


@pytest.mark.quick(5)
@pytest.mark.parametrize("bandwidth_bps", [1e6, 1e7, 1e8, 3e8, 1e9, 1e10])
@PIPELINES
def test_gpipe_takes_as_long_as_a_flow_shop(
    stages: int, micro_batches: int, bandwidth_bps: float
) -> None:
    """Headers and the norm's messages are all that is missing: a thousandth."""
    records = rehearse(stages=stages, micro_batches=micro_batches, bandwidth_bps=bandwidth_bps)

    exact = flow_shop_s(stages, micro_batches, bandwidth_bps)
    assert exact <= step_s(records) == pytest.approx(exact, rel=0.001)


@pytest.mark.quick(5)
@pytest.mark.parametrize("bandwidth_bps", [1e6, 1e7, 1e8, 3e8, 1e9, 1e10])
@PIPELINES
def test_the_closed_form_is_off_by_how_it_counts_the_bubble(
    stages: int, micro_batches: int, bandwidth_bps: float
) -> None:
    """(d)19, second part. Section 8 gives each of the K-1 slots of the bubble the longer of compute
    and link; in truth a micro-batch spends both in it, but the last stage has no link."""
    link_s = 8 * 4 * 1024 * 1600 / bandwidth_bps
    bubble_s = sum(
        max(own, link_s) * stages - (stages * own + (stages - 1) * link_s)
        for own in (FORWARD_S, BACKWARD_S)
    )

    records = rehearse(stages=stages, micro_batches=micro_batches, bandwidth_bps=bandwidth_bps)
    simulated = step_s(records)

    closed = closed_form_s(stages, micro_batches, bandwidth_bps)
    assert closed - simulated == pytest.approx(bubble_s, abs=0.001 * simulated)
    assert simulated == pytest.approx(closed, rel=0.15)


def test_without_links_gpipe_takes_exactly_its_slots() -> None:
    records = rehearse(stages=4, micro_batches=8, bandwidth_bps=1e15)

    assert step_s(records) == pytest.approx(11 * (FORWARD_S + BACKWARD_S), rel=1e-6)


def test_latency_adds_a_way_there_and_back_not_one_for_each_micro_batch() -> None:
    quick = step_s(rehearse(stages=4, micro_batches=8, bandwidth_bps=1e15))

    slow = step_s(rehearse(stages=4, micro_batches=8, bandwidth_bps=1e15, latency_s=0.1))

    assert slow - quick == pytest.approx(2 * 3 * 0.1, rel=1e-3)


def test_four_stages_on_two_cores_share_them() -> None:
    """As many micro-batches as hide the bubble: then the cores are the limit."""
    options: Any = {"stages": 4, "micro_batches": 32, "bandwidth_bps": 1e15}
    many, two = (step_s(rehearse(**options, num_cores=n)) for n in (4, 2))

    work_s = 4 * 32 * (FORWARD_S + BACKWARD_S)
    assert many == pytest.approx(35 * (FORWARD_S + BACKWARD_S), rel=1e-3)
    assert two == pytest.approx(work_s / 2, rel=0.05)
    assert two > 1.8 * many


@pytest.mark.slow
def test_only_stages_of_one_node_share_its_cores() -> None:
    """Three stages on one core are slow, whatever idle cores the other node has."""
    options: Any = {"stages": 4, "micro_batches": 32, "bandwidth_bps": 1e15}
    crowded = (("a", 1.0), ("a", 1.0), ("a", 1.0), ("b", 3.0))
    even = (("a", 2.0), ("a", 2.0), ("b", 2.0), ("b", 2.0))
    pooled, apart, spread = (
        step_s(rehearse(**options, **where))
        for where in ({"num_cores": 4}, {"homes": crowded}, {"homes": even})
    )

    assert apart == pytest.approx(3 * 32 * (FORWARD_S + BACKWARD_S), rel=0.05)
    assert apart > 2.5 * pooled
    assert spread == pytest.approx(pooled)


def test_a_message_costs_each_end_its_own_cores() -> None:
    """Between nodes the sender pays for pushing and the receiver for taking."""
    options: Any = {
        "stages": 2, "micro_batches": 16, "bandwidth_bps": 1e15,
        "phases": {"forward": 0.0, "backward": 0.0}, "push_s": 0.1, "deliver_s": 0.3,
    }  # fmt: skip
    together = step_s(rehearse(**options, homes=(("a", 1.0), ("a", 1.0))))
    apart = step_s(rehearse(**options, homes=(("a", 1.0), ("b", 1.0))))

    assert together > 2 * 16 * 0.4
    assert 2 * 16 * 0.3 < apart < 0.9 * together


def test_encoding_hides_behind_compute_when_there_are_cores_for_it() -> None:
    options: Any = {"stages": 4, "micro_batches": 16, "bandwidth_bps": 1e15, "num_cores": 64}
    phases = {"forward": FORWARD_S, "backward": BACKWARD_S}
    bare = step_s(rehearse(**options, phases=phases))

    coded = step_s(rehearse(**options, phases=phases | {"encode": 0.03, "decode": 0.03}))

    assert coded < bare + 2 * 3 * 0.06 + 0.01


def test_messages_cost_what_they_are_said_to_cost() -> None:
    options: Any = {"stages": 2, "micro_batches": 4, "bandwidth_bps": 1e15}
    bare = step_s(rehearse(**options))

    priced = step_s(rehearse(**options, push_s=0.02, deliver_s=0.03))

    assert bare < priced < bare + 10 * 0.05


ARMS = {
    "fp32": (FP32, FP32),
    "directq": (DIRECTQ, DIRECTQ),
    "acsgd": (acsgd(checksum=False), DIRECTQ),
    "acsgd 2 bit": (acsgd(checksum=False, bits=2), CodecSpec(name="directq", bits=8)),
    "fp16": (CodecSpec(name="fp16"), CodecSpec(name="bf16")),
    "topk": (CodecSpec(name="topk"), DIRECTQ),
}


def sent(step: list[StepRecord]) -> dict[str, int]:
    total: dict[str, int] = {}
    for record in step:
        for kinds in record.sent.values():
            for kind, nbytes in kinds.items():
                total[kind] = total.get(kind, 0) + nbytes
    return total


@pytest.mark.parametrize("arm", ARMS)
def test_the_simulator_sends_as_many_bytes_as_real_tensors_do(arm: str) -> None:
    """(d)19, first part: frames are payload, scales and headers, all of them counted."""
    activation, gradient = ARMS[arm]
    shape = GPTShape(layers=2, width=64, heads=1, context=32, vocab=128)
    bench = Bench(num_stages=2, shape=shape, activation=activation, gradient=gradient)
    plans = [bench.plan(step) for step in range(3)]

    real = bench.run(plans=plans).records[-1]
    simulated: Records = run_virtual(
        simulate(
            bench.specs(),
            plans,
            costs=[StageCosts()] * 2,
            cut_shapes=[(32, 64)],
            num_cores=1e9,
        )
    )

    ours, theirs = sent(simulated[-1]), sent(real)
    assert set(ours) == set(theirs) == {"activation", "gradient", "control"}
    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=0.01)
    assert ours["activation"] == pytest.approx(theirs["activation"], rel=0.01)
    assert ours["gradient"] == pytest.approx(theirs["gradient"], rel=0.01)


def funnel(blocks: Sequence[int]) -> nn.Module:
    """A user's model whose cuts differ: 256 values of a sample behind the first block, then 32."""
    layers = [nn.Linear(8, 256), nn.Linear(256, 32), nn.Linear(32, 64), nn.Linear(64, 1)]
    return nn.Sequential(*(layers[index] for index in blocks))


@pytest.mark.parametrize("arm", ARMS)
def test_cuts_of_different_width_are_simulated_each_with_its_own(arm: str) -> None:
    activation, gradient = ARMS[arm]
    items = DatasetSamples([(torch.full((8,), i / 12), torch.ones(1)) for i in range(12)])
    bench = Bench(
        num_stages=4, build=funnel, samples=items, loss=from_mean(nn.functional.mse_loss),
        activation=activation, gradient=gradient,
    )  # fmt: skip
    plans = [bench.plan(step) for step in range(3)]
    shapes = [(256,), (32,), (64,)]

    real = bench.run(plans=plans).records[-1]
    records: Records = run_virtual(
        simulate(bench.specs(), plans, costs=[StageCosts()] * 4, cut_shapes=shapes)
    )

    for ours, theirs in zip(records[-1], real):
        assert ours.sent.keys() == theirs.sent.keys()
        for link, kinds in theirs.sent.items():
            for kind in kinds.keys() - {"control"}:
                # Parts are aligned each by itself: up to two times seven bytes of each frame.
                assert ours.sent[link][kind] == pytest.approx(kinds[kind], abs=3 * 14), link


@pytest.mark.parametrize(
    ("activation", "fw_bits"),
    [(acsgd(checksum=False), 4), (acsgd(checksum=False, bits=2), 2), (DIRECTQ, 4)],
)
def test_bytes_on_the_wire_are_bits_and_scales_and_headers(
    activation: CodecSpec, fw_bits: int
) -> None:
    """(d)19, first part: exactly, not within a percent."""
    arrived: list[bytes] = []

    def tap(faulty: FaultyLink) -> None:
        deliver = faulty.link.deliver

        def deliver_and_note(frame: Any) -> None:
            arrived.append(bytes(frame))
            deliver(frame)

        faulty.link.deliver = deliver_and_note

    shape = GPTShape(layers=2, width=64, heads=1, context=32, vocab=128)
    bench = Bench(num_stages=2, shape=shape, activation=activation, gradient=DIRECTQ, faults=tap)

    counted = sent(bench.run(3).records[-1])  # the third step begins the second epoch

    headers: dict[str, list[int]] = {"activation": [], "gradient": []}
    for frame in arrived:
        header, packet = unpack(frame)
        if header.step == 2 and packet is not None:
            headers[header.kind].append(len(frame) - packet.nbytes)
    elements = 3 * 2 * 32 * 64
    for kind, bits in (("activation", fw_bits), ("gradient", 4)):
        codes, scales = elements * bits // 8, elements // 32 * 2
        assert counted[kind] == codes + scales + sum(headers[kind])
        assert len(headers[kind]) == 3
        assert max(headers[kind]) < 160


def test_at_the_papers_size_headers_are_a_thousandth() -> None:
    """(d)19 at its own tolerance, of bits and scales alone."""
    for bits in (2, 3, 4, 8):
        codec = SizeOnlyCodec(acsgd(checksum=False, bits=bits), ("edge", 0))
        packet = codec.encode(Shape((1, *GPT2_XL)), keys=SampleKeys(ids=(123_456,)))
        header = FrameHeader(kind="activation", source=0, target=1, step=1000, seq=50_000)

        payload = 1024 * 1600 * (bits + 16 / 32) / 8
        assert frame_nbytes(header, packet) == pytest.approx(payload, rel=0.001)


def test_1f1b_takes_as_long_as_gpipe_when_all_costs_are_equal() -> None:
    options: Any = {"stages": 4, "micro_batches": 8, "bandwidth_bps": 1e15}

    one, other = (step_s(rehearse(**options, schedule=name)) for name in ("1f1b", "gpipe"))

    assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(
    ("link_s", "times"), [(0.05, (4.40, 5.50, 4.40)), (0.1, (5.12, 6.93, 4.76))]
)
def test_eager_1f1b_gains_where_a_transfer_takes_as_long_as_a_pass(
    link_s: float, times: tuple[float, ...]
) -> None:
    """The gradient that 1F1B needs next is on its way; gpipe's wires are idle in one direction."""
    bits = 8 * 4 * 1024 * 1600
    options: Any = {"stages": 4, "micro_batches": 16, "bandwidth_bps": bits / link_s}

    found = [step_s(rehearse(**options, schedule=n)) for n in ("gpipe", "1f1b", "eager-1f1b")]

    assert found == pytest.approx(times, abs=0.01)


def test_black_boxes_take_their_share_of_the_cores() -> None:
    job = {"stages": 2, "micro_batches": 4, "bandwidth_bps": 1e12, "num_cores": 1.0}
    without = step_s(rehearse(**job))
    assert step_s(rehearse(**job, box_s=0.05)) == pytest.approx(without + 2 * 0.05, rel=1e-3)


def test_a_step_is_not_committed_before_the_box_holds_the_one_before() -> None:
    job = {"stages": 2, "micro_batches": 4, "bandwidth_bps": 1e12}
    without = step_s(rehearse(**job))
    assert step_s(rehearse(**job, box_s=without / 2)) == pytest.approx(without, rel=1e-3)
    assert step_s(rehearse(**job, box_s=3 * without)) == pytest.approx(3 * without, rel=1e-3)
