"""The simulator: against the closed form, against real tensors, and on cores that are shared."""

from __future__ import annotations

from typing import Any

import pytest
from local_pipeline import DIRECTQ, FP32, Bench, acsgd

from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from ray_pipe.models.gpt import GPTShape
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.rehearsal import StageCosts, simulate

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
            sample_shape=sample_shape,
            num_cores=num_cores,
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
    assert step_s(records) == pytest.approx(40.9, rel=0.05)


@pytest.mark.parametrize("bandwidth_bps", [1e7, 1e8, 3e8, 1e9, 1e10])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 16), (8, 32)])
def test_gpipe_meets_the_closed_form(stages: int, micro_batches: int, bandwidth_bps: float) -> None:
    records = rehearse(stages=stages, micro_batches=micro_batches, bandwidth_bps=bandwidth_bps)

    expected = closed_form_s(stages, micro_batches, bandwidth_bps)
    assert step_s(records) == pytest.approx(expected, rel=0.15)


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
            sample_shape=(32, 64),
            num_cores=1e9,
        )
    )

    ours, theirs = sent(simulated[-1]), sent(real)
    assert set(ours) == set(theirs) == {"activation", "gradient", "control"}
    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=0.01)
    assert ours["activation"] == pytest.approx(theirs["activation"], rel=0.01)
    assert ours["gradient"] == pytest.approx(theirs["gradient"], rel=0.01)


def test_bytes_on_the_wire_are_bits_and_scales_and_a_small_header() -> None:
    shape = GPTShape(layers=2, width=64, heads=1, context=32, vocab=128)
    bench = Bench(num_stages=2, shape=shape, activation=acsgd(checksum=False), gradient=DIRECTQ)

    counted = sent(bench.run(3).records[-1])

    elements = 3 * 2 * 32 * 64
    assert counted["gradient"] == pytest.approx(elements * 4.5 / 8, rel=0.05)
    assert counted["activation"] == pytest.approx(elements * 4.5 / 8, rel=0.07)


def test_1f1b_takes_as_long_as_gpipe_when_all_costs_are_equal() -> None:
    options: Any = {"stages": 4, "micro_batches": 8, "bandwidth_bps": 1e15}

    one, other = (step_s(rehearse(**options, schedule=name)) for name in ("1f1b", "gpipe"))

    assert one == pytest.approx(other, rel=1e-6)
