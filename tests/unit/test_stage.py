"""Stages against a plain loop, to the last bit; evaluation, aborts and deadlines leave no trace."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from local_pipeline import (
    DIRECTQ,
    FP32,
    WORK,
    Bench,
    acsgd,
    plain_loop,
    rows_of,
    same_bits,
    state_of,
)
from torch import Tensor, nn

from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from stages.actions import Actions
from stages.compute import Compute
from stages.ends import StageTimeout
from stages.loss import cross_entropy
from stages.optim import OptimSpec, clip_factor
from stages.passes import Passes
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.rehearsal import LocalPipeline
from stages.stage import Stage

# --- equal to a plain loop ------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_pipeline_trains_as_a_plain_loop_to_the_last_bit(num_stages: int, schedule: str) -> None:
    bench = Bench(num_stages=num_stages, schedule=schedule)

    run = bench.run(3)
    losses, weights = plain_loop(bench, 3)

    assert run.losses == losses
    assert same_bits(run.weights, weights)
    assert run.events == []


def test_the_loop_is_one_in_which_clipping_happened() -> None:
    run = Bench().run(3)

    assert all(record.grad_norm > 0.5 for step in run.records for record in step)


def test_work_that_takes_time_changes_no_bit() -> None:
    quick = Bench(num_stages=4, schedule="1f1b")
    slow = replace(quick, costs=WORK, num_cores=2, bandwidth_bps=1e6)

    assert slow.run(2).losses == quick.run(2).losses


def test_a_first_visit_at_32_bits_is_bit_identical_to_no_codec() -> None:
    """T4. Later visits are not, by the maths: m + (h - m) rounds twice, and that is not h."""
    codec = acsgd(first_visit_bits=32, rows="fp32")
    bench = Bench(num_stages=4, activation=codec, num_samples=12)

    first_epoch = bench.run(2)
    losses, weights = plain_loop(bench, 2)

    assert first_epoch.losses == losses
    assert same_bits(first_epoch.weights, weights)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_all_schedules_train_to_the_same_bits_with_acsgd(schedule: str) -> None:
    bench = Bench(num_stages=4, activation=acsgd(), gradient=DIRECTQ)

    assert replace(bench, schedule=schedule).run(5).losses == bench.run(5).losses


def test_bf16_precision_trains_close_to_fp32() -> None:
    bench = Bench(num_stages=2)

    exact, rough = bench.run(3).losses, replace(bench, precision="bf16").run(3).losses

    assert rough != exact
    assert rough == pytest.approx(exact, abs=0.02)


# --- weights of micro-batches, (d)17 ----------------------------------------------------------


def one_step_gradient(order: tuple[tuple[int, ...], ...], num_stages: int = 2) -> list[Tensor]:
    """SGD without clipping at rate 1: the change of the weights is the gradient."""
    optim = OptimSpec(name="sgd", clip=0.0, weight_decay=0.0)
    bench = Bench(num_stages=num_stages, order=(order,), optim=optim, lr=1.0)
    before = [p.detach().clone() for s in range(num_stages) for p in bench.compute(s).parameters]
    after = bench.run(1).weights
    return [old - new for old, new in zip(before, after)]


WHOLE = ((0, 1, 2, 3, 4, 5, 6),)
EVEN_BUT_LAST = ((0, 1), (2, 3), (4, 5), (6,))


def test_micro_batches_give_the_gradient_of_one_batch() -> None:
    whole, parts = one_step_gradient(WHOLE), one_step_gradient(EVEN_BUT_LAST)

    for ours, theirs in zip(parts, whole):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_mutant_averaging_each_micro_batch_by_itself_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = one_step_gradient(WHOLE)
    right = Compute.forward_loss

    def per_micro_batch(self: Compute, index: int, source: Any, target: Any, **k: Any) -> float:
        return right(self, index, source, target, **k | {"num_items": target.numel() * 4})

    monkeypatch.setattr(Compute, "forward_loss", per_micro_batch)
    parts = one_step_gradient(EVEN_BUT_LAST)

    worst = max(float((ours - theirs).abs().max()) for ours, theirs in zip(parts, whole))
    assert worst > 1e-3


def test_clipping_is_by_the_norm_of_the_whole_model() -> None:
    bench = Bench(num_stages=4, optim=OptimSpec(name="sgd", clip=0.3, weight_decay=0.0), lr=1.0)

    run = bench.run(1)

    model, change, norm = torch_clip(bench, 0.3)
    assert run.records[0][0].grad_norm == pytest.approx(norm, rel=1e-5)
    for new, old, clipped in zip(run.weights, model, change):
        torch.testing.assert_close(new, old - clipped, rtol=1e-5, atol=1e-7)


def test_mutant_clipping_each_stage_by_itself_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Stage,
        "finish",
        lambda self, plan, factor: self.compute.update(
            lr=plan.lr, factor=clip_factor(self.compute.squared_norms(), clip=0.3)[1]
        ),
    )
    bench = Bench(num_stages=4, optim=OptimSpec(name="sgd", clip=0.3, weight_decay=0.0), lr=1.0)

    run = bench.run(1)

    model, change, _ = torch_clip(bench, 0.3)
    worst = max(
        float((new - old + clipped).abs().max())
        for new, old, clipped in zip(run.weights, model, change)
    )
    assert worst > 1e-3


def torch_clip(bench: Bench, clip: float) -> tuple[list[Tensor], list[Tensor], float]:
    """Weights, gradients clipped by torch over the whole model, and the norm before."""
    model = bench.module(range(4))
    batches = [bench.data().batch(ids) for ids in bench.plan(0).micro_batches]
    num_items = sum(batch.targets.numel() for batch in batches)
    for batch in batches:
        (cross_entropy(model(batch.inputs), batch.targets)[0] / num_items).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
    found = [p for p in model.parameters() if p.grad is not None]
    return [p.detach() for p in found], [p.grad for p in found if p.grad is not None], norm


def test_many_parameters_fit_the_message_that_carries_their_norms() -> None:
    """Their norms once made a control message that was too long to be taken for one."""

    def build(blocks: Any) -> nn.Module:
        torch.manual_seed(blocks[0])
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(150 * len(blocks))))

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return output.sum(), len(target)

    class Points:
        digest = "points"

        def __len__(self) -> int:
            return 12

        def batch(self, ids: Any) -> Any:
            from ray_pipe.data import Batch

            return Batch(inputs=torch.ones(len(ids), 2), targets=torch.ones(len(ids)))

    run = Bench(num_stages=2, build=build, loss=loss, samples=Points(), deadline_s=1).run(1)

    assert len(run.weights) == 1200
    assert run.records[0][1].sent["1->0"]["control"] < 1000


def test_a_gradient_that_is_not_finite_skips_the_update_everywhere_and_says_so() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return cross_entropy(output, target)[0] * float("inf"), target.numel()

    loss.count = torch.numel  # type: ignore[attr-defined]
    bench = Bench(num_stages=2, loss=loss)

    run = bench.run(1)

    assert same_bits(run.weights, [p for s in range(2) for p in bench.compute(s).parameters])
    assert run.events == ["step 0: the gradient is not finite, the update was skipped"] * 2


# --- recompute, (d)7, and evaluation, (d)6 -----------------------------------------------------


@pytest.mark.parametrize("codec", [FP32, acsgd()], ids=["fp32", "acsgd"])
def test_recompute_gives_the_same_bits_and_rows(codec: CodecSpec) -> None:
    bench = Bench(num_stages=2, activation=codec, schedule="1f1b")

    kept, again = bench.run(5), replace(bench, recompute=True).run(5)

    assert again.losses == kept.losses
    assert same_bits(again.weights, kept.weights)
    if codec.name == "acsgd":
        assert again.rows() == kept.rows()


@pytest.mark.slow
def test_evaluation_changes_no_row_counter_weight_or_random_number() -> None:
    bench = Bench(num_stages=4, activation=acsgd(), gradient=DIRECTQ)
    evaluation = bench.plan(0, train=False, schedule="forward", part=1)
    train = [bench.plan(step) for step in range(6)]

    plain = bench.run(plans=train)
    random = torch.get_rng_state()
    mixed = bench.run(
        plans=[
            replace(evaluation, step=-1),
            train[0],
            evaluation,
            replace(evaluation, part=2),
            *train[1:],
            replace(evaluation, step=5),
        ]
    )

    losses = mixed.losses
    assert losses[1:2] + losses[4:9] == plain.losses
    assert losses[2] == losses[3]  # nothing moved between two evaluations
    assert same_bits(mixed.weights, plain.weights)
    assert mixed.rows() == plain.rows()
    assert torch.equal(torch.get_rng_state(), random)


def test_mutant_an_evaluation_that_remembers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Passes.keys
    monkeypatch.setattr(
        Passes, "keys", lambda *args, **where: replace(right(*args, **where), remember=True)
    )
    bench = Bench(num_stages=2, activation=acsgd())
    evaluation = bench.plan(0, train=False, schedule="forward", part=1)
    train = [bench.plan(step) for step in range(4)]

    plain, mixed = bench.run(plans=train), bench.run(plans=[train[0], evaluation, *train[1:]])

    assert mixed.rows() != plain.rows()


def test_mutant_a_recompute_that_encodes_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """(d)7: the sender's rows run ahead of the receiver's."""
    right = Actions._backward

    async def encodes_again(self: Actions, plan: StepPlan, micro_batch: int, sends: Any) -> None:
        end = self._wiring.activation_out
        if end is not None:
            output = torch.zeros(2, 8, 32)
            end.codec.encode(output, keys=self._passes.keys(plan, micro_batch))
        await right(self, plan, micro_batch, sends)

    monkeypatch.setattr(Actions, "_backward", encodes_again)

    run = Bench(num_stages=2, activation=acsgd()).run(4)

    assert any("cold resend needed" in event for event in run.events)
    assert any(sender != receiver for sender, receiver in run.rows())


@pytest.mark.parametrize("name", ["acsgd", "acsgd+zstd", "directq", "bf16", "topk", "reference"])
def test_evaluation_is_uncompressed_and_exact(name: str) -> None:
    codec = CodecSpec(name=name, bits=2, first_visit_bits=2)
    bench = Bench(num_stages=4, activation=codec)
    evaluation = bench.plan(0, train=False, schedule="forward", part=1)

    loss = bench.run(plans=[evaluation]).losses[0]

    model = bench.module(range(4)).eval()
    with torch.no_grad():
        batches = [bench.data().batch(ids) for ids in evaluation.micro_batches]
        expected = sum(float(cross_entropy(model(b.inputs), b.targets)[0] / 48) for b in batches)
    assert loss == expected


def test_evaluation_keeps_no_tensor_once_it_is_over() -> None:
    bench = Bench(num_stages=2)
    plans = [bench.plan(0, train=False, schedule="forward", part=n) for n in (1, 2, 3)]

    run = bench.run(plans=plans)

    end = run.stages[0].wiring.activation_out
    assert end is not None
    assert end._sent == {}


def test_an_evaluation_may_take_longer_than_a_deadline_while_it_moves() -> None:
    """Stage 0 is done at once and waits for the rest to crawl over the link."""
    bench = Bench(num_stages=2, micro_batches=6, bandwidth_bps=8e3, deadline_s=5.0)

    run = bench.run(plans=[bench.plan(0, train=False, schedule="forward", part=1)])

    assert run.end_s > 10
    assert run.events == []


def test_a_turn_that_does_not_rise_is_refused() -> None:
    bench = Bench(num_stages=1)

    with pytest.raises(ValueError, match="was given step 0 after step 0; turns must rise"):
        bench_run_alone(bench, [bench.plan(0), bench.plan(0)])


def bench_run_alone(bench: Bench, plans: list[StepPlan]) -> None:
    async def main() -> None:
        stage = bench.pipeline().stages[0]
        for plan in plans:
            await stage.run(plan)

    run_virtual(main())


# --- deadlines ------------------------------------------------------------------------------------


def run_alone(bench: Bench, index: int) -> tuple[BaseException, float]:
    """One stage whose neighbours never answer."""

    async def main() -> tuple[BaseException, float]:
        stage = bench.pipeline().stages[index]
        try:
            await stage.run(bench.plan(0))
        except StageTimeout as error:
            return error, asyncio.get_running_loop().time()
        raise AssertionError("it ended")

    return run_virtual(main())


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            0,
            "stage 0 waited 60.0 s for the gradient of micro-batch 0, step 0 from stage 1; "
            "if the link is that slow, raise `deadline_s`",
        ),
        (1, "stage 1 waited 60.0 s for the activation of micro-batch 0, step 0 from stage 0"),
    ],
)
def test_a_silent_neighbour_is_named_after_the_deadline(index: int, message: str) -> None:
    error, at_s = run_alone(Bench(num_stages=2), index)

    assert message in str(error)
    assert at_s == pytest.approx(60.0)


def test_a_stage_that_timed_out_has_rolled_back() -> None:
    async def main() -> None:
        stage = Bench(num_stages=2, activation=acsgd()).pipeline().stages[0]
        before = state_of([stage])
        with pytest.raises(StageTimeout):
            await stage.run(Bench().plan(0))
        assert state_of([stage]) == before

    run_virtual(main())


def test_a_dead_link_raises_a_timeout_and_never_hangs() -> None:
    bench = Bench(
        num_stages=4,
        faults=lambda link: link.drop("activation") if link.name == "1->2" else None,
    )

    with pytest.raises(ExceptionGroup) as caught:
        bench.run(1)

    assert caught.group_contains(StageTimeout, match="stage 2 waited 60.0 s for the activation")


def test_a_dead_control_channel_raises_a_timeout_that_names_what_was_missing() -> None:
    bench = Bench(
        num_stages=2,
        deadline_s=20,
        faults=lambda link: link.drop("control") if link.name == "0->1" else None,
    )

    with pytest.raises(ExceptionGroup) as caught:
        bench.run(2)

    expected = "stage 1 waited 20.0 s for 'go' of step 0 from stage 0"
    assert caught.group_contains(StageTimeout, match=expected)


def test_rows_of_both_ends_stay_equal_step_by_step() -> None:
    bench = Bench(num_stages=4, activation=acsgd(), gradient=DIRECTQ)

    async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
        records = []
        for step in range(6):
            records += await pipeline.run([bench.plan(step)])
            assert all(a == b for a, b in rows_of(pipeline.stages)), f"after step {step}"
        return records

    assert len(bench.drive(main).losses) == 6
