"""A saved pipeline in another number of stages: weights to the bit, rows where the cut remains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_pipeline import DIRECTQ, FP32, Bench, acsgd, plain_loop, same_bits
from torch import nn

from stages.record import StepRecord
from stages.recut import recut, whole_model
from stages.rehearsal import LocalPipeline
from stages.state import StageState, StateError

STEPS = 3


def cuts_of(num_stages: int) -> list[range]:
    return [Bench(num_stages=num_stages).blocks(index) for index in range(num_stages)]


def saved(bench: Bench) -> list[StageState]:
    states: list[StageState] = []

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        records = await pipeline.run(bench.plan(step) for step in range(STEPS))
        states.extend([await stage.save_state() for stage in pipeline.stages])
        return records

    bench.drive(main)
    return states


def going_on(bench: Bench, states: list[StageState]) -> Any:
    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        for stage, state in zip(pipeline.stages, states, strict=True):
            await stage.load_state(StageState.from_bytes(state.to_bytes()))
        return await pipeline.run(bench.plan(step) for step in range(STEPS, 2 * STEPS))

    return bench.drive(main)


@pytest.mark.quick(3)
@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_without_compression_another_cut_goes_on_to_the_same_bits(before: int, after: int) -> None:
    losses, weights = plain_loop(Bench(), 2 * STEPS)
    states, _ = recut(saved(Bench(num_stages=before)), cuts_of(after))

    run = going_on(Bench(num_stages=after), states)

    assert run.losses == losses[STEPS:]
    assert same_bits(run.weights, weights)


def test_a_mutant_that_loses_the_optimizer_is_seen() -> None:
    losses, _ = plain_loop(Bench(), 2 * STEPS)
    states, _ = recut(saved(Bench(num_stages=4)), cuts_of(2))
    for state in states:
        for name in [name for name in state.arrays if name.startswith("optimizer/")]:
            del state.arrays[name]

    assert going_on(Bench(num_stages=2), states).losses != losses[STEPS:]


@pytest.mark.slow
def test_rows_stay_where_the_cut_stays_and_start_cold_where_it_is_new() -> None:
    bench = Bench(num_stages=4, activation=acsgd(), gradient=DIRECTQ)
    fewer, dropped = recut(saved(bench), cuts_of(2))
    two = going_on(Bench(num_stages=2, activation=acsgd(), gradient=DIRECTQ), fewer)
    more, none_dropped = recut(fewer, cuts_of(4))
    four = going_on(bench, more)

    assert dropped == [1, 3]
    assert two.records[0][0].codec["0->1"]["cold"] == 0
    assert two.records[0][0].codec["0->1"]["hits"] == 6
    assert none_dropped == []
    first = [four.records[0][stage].codec[f"{stage}->{stage + 1}"] for stage in range(3)]
    assert [edge["cold"] for edge in first] == [6, 0, 6]


def test_the_same_cut_changes_nothing() -> None:
    bench = Bench(num_stages=2, activation=acsgd(), gradient=DIRECTQ)
    states = saved(bench)
    same, dropped = recut(states, cuts_of(2))

    assert dropped == []
    assert going_on(bench, same).losses == going_on(bench, states).losses


def test_another_number_of_blocks_is_refused() -> None:
    states = saved(Bench(num_stages=2))

    with pytest.raises(StateError, match="hold 4 blocks in a row, the model here has 5"):
        recut(states, [range(3), range(3, 5)])
    with pytest.raises(StateError, match="hold 2 blocks"):
        recut(states[:1], cuts_of(2))


def test_stages_of_different_steps_are_refused() -> None:
    states = saved(Bench(num_stages=2))
    states[1].notes["step"] = 7

    with pytest.raises(StateError, match=r"different steps, \[2, 7\]"):
        recut(states, cuts_of(4))


def test_the_whole_model_has_the_names_of_a_sequential() -> None:
    bench = Bench(num_stages=4, activation=FP32)
    weights = whole_model(saved(bench))
    model = bench.module(range(4))
    assert isinstance(model, nn.Sequential)

    model.load_state_dict(weights)

    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
