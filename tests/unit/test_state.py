"""A stage's state, saved, carried as bytes, loaded into new stages: training goes on to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from local_pipeline import DIRECTQ, Bench, Run, acsgd, fingerprint, same_bits, state_of
from torch import nn

from compressors.registry import CodecSpec
from stages import state as state_module
from stages.optim import OptimSpec
from stages.record import StepRecord
from stages.rehearsal import LocalPipeline
from stages.state import StageState, StateError
from stages.state_tree import ARRAY, from_tree, to_tree

SMALL = replace(Bench().shape, layers=2)
ROW_NBYTES = 8 * 32 * 2
CAP = 7 * ROW_NBYTES
"""Of 12 samples 7 fit: rows are given up in every step."""

BEFORE, AFTER = 4, 4
"""Two epochs, then two more."""

Change = Callable[[list[StageState]], None]


def composed() -> dict[str, CodecSpec]:
    """A lossless stage over rows one way, top-k with what it lost the other."""
    return {
        "activation": acsgd(name="acsgd+zstd"),
        "gradient": CodecSpec(name="topk+ef", density=0.3),
    }


def stochastic() -> dict[str, CodecSpec]:
    return {
        "activation": acsgd(rounding="stochastic"),
        "gradient": CodecSpec(name="directq", rounding="stochastic", seed=5),
    }


def spilled(**changes: Any) -> CodecSpec:
    """Two rows stay in memory, all others go to the file."""
    return acsgd(spill_dir="{tmp}", spill_ram_bytes=2 * ROW_NBYTES, **changes)


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "directq": {"activation": DIRECTQ, "gradient": DIRECTQ},
    "acsgd": {"activation": acsgd(), "gradient": DIRECTQ},
    "acsgd evicting": {"activation": acsgd(cap_bytes=CAP), "gradient": DIRECTQ},
    "acsgd spilled": {"activation": spilled(), "gradient": DIRECTQ},
    "acsgd spilled, evicting": {"activation": spilled(cap_bytes=CAP)},
    "composed": composed(),
    "stochastic": stochastic(),
    "sgd with momentum": {"optim": OptimSpec(name="sgd", momentum=0.9)},
    "sgd": {"optim": OptimSpec(name="sgd")},
}


def bench_of(case: str, tmp: Any = "", **changes: Any) -> Bench:
    bench = Bench(**{"num_stages": 2, "shape": SMALL, **CASES[case], **changes})
    spill = bench.activation.spill_dir
    if spill is not None:
        bench = replace(bench, activation=replace(bench.activation, spill_dir=str(tmp)))
    return bench


async def saved(pipeline: LocalPipeline) -> list[StageState]:
    """All stages, over the wire."""
    states = [await stage.save_state() for stage in pipeline.stages]
    return [StageState.from_bytes(state.to_bytes()) for state in states]


@dataclass(frozen=True)
class Whole:
    """A run in one go, and what could be saved on the way."""

    bench: Bench
    run: Run
    saved: dict[int, list[bytes]]
    """By number of steps."""

    def states(self, steps: int) -> list[StageState]:
        return [StageState.from_bytes(raw) for raw in self.saved[steps]]


def whole(bench: Bench, steps: int = BEFORE + AFTER) -> Whole:
    """Saving changes nothing (a test below), so that one run serves as both."""
    kept: dict[int, list[bytes]] = {}

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        records = []
        for step in range(steps):
            records += await pipeline.run([bench.plan(step)])
            kept[step + 1] = [(await stage.save_state()).to_bytes() for stage in pipeline.stages]
        return records

    return Whole(bench, bench.drive(main), kept)


@cache
def whole_case(case: str, schedule: str = "gpipe") -> Whole:
    """Of the cases that need no folder."""
    return whole(bench_of(case, schedule=schedule))


def differences(done: Whole, change: Change | None = None, *, after: int = AFTER) -> list[str]:
    """Where stopping after 4 steps and going on differs from what was done in one go."""
    bench, states = done.bench, done.states(BEFORE)
    if change is not None:
        change(states)

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        for stage, state in zip(pipeline.stages, states, strict=True):
            await stage.load_state(state)
        records = await pipeline.run(bench.plan(step) for step in range(BEFORE, BEFORE + after))
        ends.extend([await stage.save_state() for stage in pipeline.stages])
        return records

    ends: list[StageState] = []
    again = bench.drive(main)
    found = []
    if again.losses != done.run.losses[BEFORE : BEFORE + after]:
        found.append("losses")
    for own, other in zip(ends, done.states(BEFORE + after), strict=True):
        own = StageState.from_bytes(own.to_bytes())
        names = {**own.arrays, **other.arrays}
        found += [n for n in names if _bits(own.arrays.get(n)) != _bits(other.arrays.get(n))]
        if own.notes != other.notes:
            found.append(f"notes of stage {own.notes['stage']}")
    ours = [(r.sent, _steady(r.codec)) for step in again.records for r in step]
    steps = done.run.records[BEFORE : BEFORE + after]
    if ours != [(r.sent, _steady(r.codec)) for step in steps for r in step]:
        found.append("bytes or codec numbers")
    return found


def _bits(tensor: torch.Tensor | None) -> str:
    return fingerprint(tensor)


def _steady(codec: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Without what depends on how far the disk has come."""
    loose = ("resident_bytes", "spilled_bytes")
    return {e: {k: n for k, n in own.items() if k not in loose} for e, own in codec.items()}


@pytest.mark.quick(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", CASES)
def test_going_on_after_loading_is_the_same_to_the_bit(
    case: str, schedule: str, tmp_path: Any
) -> None:
    done = whole(bench_of(case, tmp_path, schedule=schedule))

    assert differences(done) == []


@pytest.mark.slow
def test_stages_in_the_middle_too() -> None:
    assert differences(whole(bench_of("acsgd evicting", num_stages=4, shape=Bench().shape))) == []


def test_random_masks_go_on_where_they_were() -> None:
    def build(blocks: Any) -> nn.Module:
        plain = Bench(shape=SMALL).module(blocks)
        assert isinstance(plain, nn.Sequential)
        if 0 in blocks:
            plain[0] = nn.Sequential(plain[0], nn.Dropout(0.1))
        return plain

    done = whole(bench_of("directq", build=build))

    assert differences(done) == []
    assert differences(done, reset_random) != []


def test_evictions_were_really_going_on(tmp_path: Any) -> None:
    run = bench_of("acsgd spilled, evicting", tmp_path).run(BEFORE)

    assert run.records[-1][0].codec["0->1"]["evictions"] > 0
    assert run.records[-1][0].codec["0->1"]["hits"] > 0
    assert run.records[-1][0].codec["0->1"]["spilled_bytes"] > 0
    assert any(s.wiring.activation_out.codec.pending_evictions for s in run.stages[:1])  # type: ignore[union-attr]


# --- mutants: a state that forgets one thing -------------------------------------------------


def forget_codec(end: str, key: str, value: Any) -> Change:
    def change(states: list[StageState]) -> None:
        for state in states:
            if end in state.notes["codec"]:
                tree = state.notes["codec"][end]["state"]
                assert key in tree, f"{key} not in {sorted(tree)}"
                if isinstance(tree[key], dict) and ARRAY in tree[key]:
                    name = tree[key][ARRAY]
                    state.arrays[name] = value(state.arrays[name])
                else:
                    tree[key] = value(tree[key])

    return change


def reverse_lru(states: list[StageState]) -> None:
    """The same rows, oldest last."""
    for state in states:
        for end in state.notes["codec"].values():
            if "ids" not in end["state"]:
                continue
            names = {k: v[ARRAY] for k, v in end["state"].items() if isinstance(v, dict)}
            arrays = state.arrays
            rows = len(arrays[names["ids"]])
            for key in ("ids", "generations", "visits", "kept", "num_dims"):
                arrays[names[key]] = arrays[names[key]].flip(0)
            for key in ("dims", "values"):
                arrays[names[key]] = arrays[names[key]].view(rows, -1).flip(0).reshape(-1)


def reset_random(states: list[StageState]) -> None:
    for state in states:
        state.arrays["random/0"] = torch.Generator().manual_seed(7).get_state()


def forget_arrays(part: str) -> Change:
    def change(states: list[StageState]) -> None:
        for state in states:
            chosen = [name for name in state.arrays if part in name]
            assert chosen or state is not states[0]
            for name in chosen:
                del state.arrays[name]

    return change


def reset_arrays(part: str) -> Change:
    def change(states: list[StageState]) -> None:
        for state in states:
            chosen = [name for name in state.arrays if part in name]
            assert chosen
            for name in chosen:
                state.arrays[name] = torch.zeros_like(state.arrays[name])

    return change


MUTANTS: dict[str, tuple[str, Change]] = {
    "rows": ("acsgd", forget_codec("activation_out", "values", torch.zeros_like)),
    "visits of one end": ("acsgd", forget_codec("activation_in", "visits", torch.ones_like)),
    "the order of use": ("acsgd evicting", reverse_lru),
    "evictions not yet told": (
        "acsgd evicting", forget_codec("activation_out", "pending_evictions", lambda old: [])
    ),
    "generations": ("acsgd evicting", forget_codec("activation_out", "generation", lambda old: 0)),
    "residuals": ("composed", forget_codec("gradient_out", "residuals", lambda old: {})),
    "draws": ("stochastic", forget_codec("gradient_out", "num_draws", lambda old: 0)),
    "draws under rows": (
        "stochastic", forget_codec("activation_out", "inner.num_draws", lambda old: 0)
    ),
    "bytes before zstd": (
        "composed", forget_codec("activation_out", "zstd.nbytes", lambda old: [0, 0])
    ),
    "all of the optimizer": ("fp32", forget_arrays("optimizer/")),
    "the optimizer's step": ("fp32", reset_arrays("/step")),
    "momentum": ("sgd with momentum", forget_arrays("momentum_buffer")),
    "weights": ("fp32", reset_arrays("weights/")),
}  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize("what", MUTANTS)
def test_forgetting_any_part_is_seen(what: str) -> None:
    case, change = MUTANTS[what]
    try:
        found = differences(whole_case(case), change, after=1)
    except ExceptionGroup as trouble:  # old generations: the receiver takes all for duplicates
        found = [str(trouble.exceptions[0])]

    assert found != []


# --- a copy, taken and loaded only between steps ---------------------------------------------


def test_what_was_saved_does_not_change_when_training_goes_on() -> None:
    bench = bench_of("acsgd")
    seen: list[str] = []

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        await pipeline.run([bench.plan(0), bench.plan(1)])
        states = [await stage.save_state() for stage in pipeline.stages]
        seen.append(fingerprint([s.arrays for s in states]))
        records = await pipeline.run([bench.plan(2), bench.plan(3)])
        seen.append(fingerprint([s.arrays for s in states]))
        return records

    bench.drive(main)

    assert seen[0] == seen[1]


def test_saving_changes_nothing() -> None:
    bench = bench_of("acsgd evicting")
    plain = bench.run(6)

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        records = []
        for step in range(6):
            records += await pipeline.run([bench.plan(step)])
            await saved(pipeline)
        return records

    saving = bench.drive(main)

    assert saving.losses == plain.losses
    assert state_of(saving.stages) == state_of(plain.stages)


def refused(
    work: Callable[[LocalPipeline], Awaitable[Any]], bench: Bench, error: type[Exception]
) -> str:
    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        with pytest.raises(error) as caught:
            await work(pipeline)
        texts.append(str(caught.value))
        return []

    texts: list[str] = []
    bench.drive(main)
    return texts[0]


def test_no_state_is_taken_inside_a_step() -> None:
    bench = bench_of("fp32")

    async def work(pipeline: LocalPipeline) -> None:
        task = asyncio.create_task(pipeline.run([bench.plan(0)]))
        await asyncio.sleep(0.015)
        try:
            await pipeline.stages[0].save_state()
        finally:
            await task

    assert "stage 0 is running in step 0" in refused(work, bench, RuntimeError)


@pytest.mark.slow
def test_a_stage_that_was_stopped_goes_back_to_its_last_state() -> None:
    """Abort in the middle of step 4, load the state after step 3, run it again."""
    bench = bench_of("acsgd evicting")
    whole = bench.run(8)

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        await pipeline.run(bench.plan(step) for step in range(4))
        states = await saved(pipeline)
        tasks = [asyncio.create_task(stage.run(bench.plan(4))) for stage in pipeline.stages]
        await asyncio.sleep(0.02)
        for stage in pipeline.stages:
            stage.abort("the test says so")
        await asyncio.wait(tasks)
        assert all(task.exception() is not None for task in tasks)
        for stage, state in zip(pipeline.stages, states):
            await stage.load_state(state)
        return await pipeline.run(bench.plan(step, attempt=1) for step in range(4, 8))

    again = bench.drive(main)

    assert again.losses == whole.losses[4:]
    assert same_bits(again.weights, whole.weights)


@pytest.mark.slow
def test_going_back_several_steps_needs_only_a_higher_attempt() -> None:
    bench = bench_of("composed")
    whole = bench.run(6)

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        await pipeline.run(bench.plan(step) for step in range(2))
        states = await saved(pipeline)
        await pipeline.run(bench.plan(step) for step in range(2, 5))
        for stage, state in zip(pipeline.stages, states):
            await stage.load_state(state)
        return await pipeline.run(bench.plan(step, attempt=1) for step in range(2, 6))

    again = bench.drive(main)

    assert again.losses == whole.losses[2:]
    assert same_bits(again.weights, whole.weights)
    assert again.events == []


# --- what does not fit is refused by name, and nothing is touched ------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": Bench().shape}, "stage 0 has blocks 0 to 1"),
        ({"shape": replace(SMALL, width=64)}, "of another model"),
        ({"optim": OptimSpec(name="sgd")}, "resume with the same optim.name"),
        ({"activation": DIRECTQ}, "resume with the same codec"),
        ({"activation": acsgd(rows="fp32")}, "resume with rows='bf16'"),
        ({"num_samples": 11}, "the saved rows belong to"),
    ],
)  # fmt: skip
def test_a_state_of_something_else_is_refused(changes: dict[str, Any], words: str) -> None:
    states = whole_case("acsgd").states(BEFORE)

    async def work(pipeline: LocalPipeline) -> None:
        await pipeline.stages[0].load_state(states[0])

    assert words in refused(work, bench_of("acsgd", **changes), ValueError)


def test_the_state_of_a_neighbour_is_refused() -> None:
    bench = bench_of("acsgd")
    states = whole_case("acsgd").states(BEFORE)

    async def work(pipeline: LocalPipeline) -> None:
        await pipeline.stages[1].load_state(states[0])

    assert "stage 1 has blocks 1 to 1" in refused(work, bench, StateError)


@pytest.mark.parametrize("cut", [0, 4, 100, 2000])
def test_a_truncated_state_is_refused(cut: int) -> None:
    raw = whole_case("acsgd").saved[1][0]

    with pytest.raises(StateError, match="saved stage"):
        StageState.from_bytes(raw[:cut])
    with pytest.raises(StateError):
        StageState.from_bytes(raw[:-1])


def test_another_format_is_refused() -> None:
    state = whole_case("fp32").states(1)[0]
    state.notes["format"] = 99

    with pytest.raises(StateError, match="format 99, this version reads 1"):
        StageState.from_bytes(state.to_bytes())


def test_a_tree_keeps_every_name() -> None:
    arrays: dict[str, torch.Tensor] = {}
    state = {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, "n": [1, (2, "x")], "none": None}

    tree = to_tree(state, "codec", arrays)
    back = from_tree(tree, arrays)

    assert torch.equal(back["a/b"], torch.ones(1))
    assert torch.equal(back["a"]["b"], torch.zeros(2))
    assert back["n"] == [1, [2, "x"]]
    assert back["none"] is None


def test_tied_weights_have_all_their_names() -> None:
    block = nn.Linear(4, 4)
    module = nn.Sequential(block, block)

    names = state_module._parameters(module, 3)

    assert sorted(names) == ["3.bias", "3.weight", "4.bias", "4.weight"]
    assert names["3.weight"] is names["4.weight"]
