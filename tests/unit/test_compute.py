"""What a stage computes, away from any pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from local_pipeline import Bench, same_bits
from torch import Tensor, nn

from compressors.registry import CodecSpec
from ray_pipe.codec_names import BACKWARD
from stages.compute import Compute
from stages.loss import cross_entropy
from stages.optim import OptimSpec

SGD = OptimSpec(name="sgd", weight_decay=0.0)


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


def test_the_gradient_that_is_sent_back_is_the_input_s() -> None:
    compute = Compute(linear(), optim=SGD)
    x = torch.ones(2, 3)

    compute.forward(0, x, ids=(0, 1))
    sent_back = compute.backward(0, torch.full((2, 3), 2.0))

    assert sent_back is not None
    torch.testing.assert_close(sent_back, 2 * linear().weight.sum(0).expand(2, 3))
    assert x.grad is None
    assert not x.requires_grad


def test_tokens_have_no_gradient_to_send_back() -> None:
    compute = Compute(nn.Embedding(5, 2), optim=SGD)

    compute.forward(0, torch.tensor([[1, 2]]), ids=(0,))

    assert compute.backward(0, torch.ones(1, 2, 2)) is None


def test_an_output_that_ignores_its_input_sends_zeros_back() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * 1

    compute = Compute(Constant(), optim=SGD)
    compute.forward(0, torch.ones(2, 3), ids=(0, 1))

    sent_back = compute.backward(0, torch.ones(2, 3))

    assert sent_back is not None
    assert torch.equal(sent_back, torch.zeros(2, 3))


def test_micro_batches_in_flight_do_not_mix() -> None:
    compute, alone = Compute(linear(), optim=SGD), Compute(linear(), optim=SGD)
    inputs = [torch.full((1, 3), float(i)) for i in range(3)]
    for i, x in enumerate(inputs):
        compute.forward(i, x, ids=(i,))

    for i in (2, 0, 1):
        alone.forward(0, inputs[i], ids=(i,))
        ours, theirs = compute.backward(i, inputs[i] + 1), alone.backward(0, inputs[i] + 1)
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def test_recompute_keeps_no_graph_and_gives_the_same_bits() -> None:
    kept, again = (Compute(linear(), optim=SGD, recompute=r) for r in (False, True))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))

    outputs = [c.forward(0, x, ids=(0, 1, 2, 3)) for c in (kept, again)]
    assert again._in_flight[0].output is None
    backs = [c.backward(0, torch.ones(4, 3)) for c in (kept, again)]

    assert torch.equal(*outputs)
    assert backs[0] is not None
    assert backs[1] is not None
    assert torch.equal(backs[0], backs[1])
    assert same_bits(
        [p.grad for p in kept.parameters if p.grad is not None],
        [p.grad for p in again.parameters if p.grad is not None],
    )


def test_a_factor_of_zero_skips_the_update_but_clears_the_gradients() -> None:
    compute = Compute(linear(), optim=SGD)
    before = [p.detach().clone() for p in compute.parameters]
    compute.forward(0, torch.ones(1, 3), ids=(0,))
    compute.backward(0, torch.full((1, 3), float("nan")))

    compute.update(lr=1.0, factor=0.0)

    assert same_bits([p.detach() for p in compute.parameters], before)
    assert all(p.grad is None for p in compute.parameters)


def test_random_numbers_are_the_stage_s_own() -> None:
    """Neither other stages nor evaluations nor the user's program change them."""
    modules = [nn.Sequential(linear(), nn.Dropout(0.5)) for _ in range(2)]
    quiet, noisy = (Compute(m, optim=SGD, seed=9) for m in modules)
    x = torch.ones(2, 3)

    a = [quiet.forward(i, x, ids=(0, 1)) for i in range(3)]
    b = []
    for i in range(3):
        torch.rand(17)
        noisy.forward(9, x, ids=(0, 1), train=False)
        b.append(noisy.forward(i, x, ids=(0, 1)))

    assert same_bits(a, b)


def test_a_stage_does_not_draw_from_the_program_s_random_numbers() -> None:
    compute = Compute(nn.Dropout(0.5), optim=SGD)
    before = torch.get_rng_state()

    compute.forward(0, torch.ones(2, 3), ids=(0, 1))

    assert torch.equal(torch.get_rng_state(), before)


def test_an_abort_takes_random_numbers_and_gradients_back() -> None:
    compute = Compute(nn.Sequential(linear(), nn.Dropout(0.5)), optim=SGD)
    first = compute.forward(0, torch.ones(2, 3), ids=(0, 1))
    compute.forward(1, torch.ones(2, 3), ids=(0, 1))
    compute.backward(0, torch.ones(2, 3))

    compute.abort()

    assert all(p.grad is None for p in compute.parameters)
    assert torch.equal(compute.forward(0, torch.ones(2, 3), ids=(0, 1)), first)


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    def step(compute: Compute) -> Tensor:
        output = compute.forward(0, torch.ones(2, 3), ids=(0, 1))
        compute.backward(0, torch.ones(2, 3))
        compute.update(lr=0.1, factor=1.0)
        return output

    one = Compute(nn.Sequential(linear(), nn.Dropout(0.5)), optim=OptimSpec())
    step(one)
    saved = one.state_dict()
    other = Compute(nn.Sequential(linear(5), nn.Dropout(0.5)), optim=OptimSpec(), seed=77)
    other.load_state_dict(saved)

    assert torch.equal(step(other), step(one))


def test_bf16_computes_in_bf16_and_hands_on_fp32() -> None:
    seen = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    compute = Compute(Spy(3, 3), optim=SGD, precision="bf16")
    output = compute.forward(0, torch.ones(1, 3), ids=(0,))

    assert seen == [torch.bfloat16]
    assert output.dtype == torch.float32
    sent_back = compute.backward(0, torch.ones(1, 3))
    assert sent_back is not None
    assert sent_back.dtype == torch.float32


def test_the_shares_of_micro_batches_add_up_to_the_mean() -> None:
    compute = Compute(nn.Linear(3, 4), optim=SGD, loss=cross_entropy)
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(10).view(5, 2) % 4

    shares = [
        compute.forward_loss(i, x[part], targets[part], ids=(0,) * len(x[part]), num_items=10)
        for i, part in enumerate([slice(0, 2), slice(2, 4), slice(4, 5)])
    ]

    mean = torch.nn.functional.cross_entropy(
        compute.module(x).detach().reshape(-1, 4), targets.reshape(-1)
    )
    assert sum(shares) == pytest.approx(float(mean), rel=1e-6)


# --- what a user's blocks hand on -----------------------------------------------------------


class Gives(nn.Module):
    """Returns what it is told to."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a tuple": (lambda x: (x, x), "a tuple of 2"),
    "a dict": (lambda x: {"y": x}, "a dict of 1"),
    "nothing": (lambda x: None, "a NoneType"),
    "whole numbers": (lambda x: x.long(), r"a torch.int64 tensor of shape \(2, 3\)"),
    "time first": (lambda x: x.transpose(0, 1), r"a torch.float32 tensor of shape \(3, 2\)"),
    "one number": (lambda x: x.sum(), r"a torch.float32 tensor of shape \(\)"),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", WRONG)
def test_a_block_that_cannot_be_cut_behind_is_named(case: str, precision: str) -> None:
    make, words = WRONG[case]
    module = nn.Sequential(linear(), Gives(make))
    compute = Compute(module, optim=SGD, precision=precision, first_block=4)
    words = words.replace("float32", "bfloat16") if precision == "bf16" else words

    with pytest.raises(
        ValueError,
        match=rf"^block 5 \(Gives\) returned {words} for a micro-batch of 2 samples, expected one "
        "floating-point tensor whose first dimension is the micro-batch's samples$",
    ):
        compute.forward(0, torch.ones(2, 3), ids=(0, 1))


def test_a_block_whose_output_the_next_block_cannot_take_is_named() -> None:
    module = nn.Sequential(linear(), nn.LSTM(3, 3), linear())
    compute = Compute(module, optim=SGD, loss=cross_entropy)

    with pytest.raises(ValueError, match=r"^block 1 \(LSTM\) returned a tuple of 2, expected one"):
        compute.forward_loss(0, torch.ones(2, 3), torch.zeros(2), ids=(0, 1), num_items=2)


def test_blocks_of_one_stage_may_hand_each_other_anything() -> None:
    module = nn.Sequential(Gives(lambda x: (x, x)), Gives(lambda pair: pair[0] + pair[1]))

    output = Compute(module, optim=OptimSpec(), seed=1)._run(
        torch.ones(2, 3), (0, 1), num_samples=2
    )

    assert torch.equal(output, torch.full((2, 3), 2.0))


def test_an_error_of_the_blocks_own_is_left_alone() -> None:
    def fail(x: Tensor) -> Tensor:
        raise TypeError("mine")

    compute = Compute(nn.Sequential(linear(), Gives(fail)), optim=SGD)

    with pytest.raises(TypeError, match="mine"):
        compute.forward(0, torch.ones(2, 3), ids=(0, 1))


def test_what_goes_to_the_loss_may_have_any_shape_but_must_be_a_tensor() -> None:
    targets = torch.zeros(2, 3, dtype=torch.long)
    flat = Compute(Gives(lambda x: x.reshape(-1, 4)), optim=SGD, loss=cross_entropy)
    pair = Compute(Gives(lambda x: (x, x)), optim=SGD, loss=cross_entropy)
    x = torch.ones(2, 3, 4)

    assert flat.forward_loss(0, x, targets, ids=(0, 1), num_items=6, train=False) > 0
    with pytest.raises(ValueError, match=r"block 0 \(Gives\) returned a tuple of 2 for a micro-ba"):
        pair.forward_loss(0, x, targets, ids=(0, 1), num_items=6, train=False)


@pytest.mark.parametrize("name", BACKWARD)
def test_samples_that_do_not_exist_reach_no_codec(name: str) -> None:
    def build(blocks: Sequence[int]) -> nn.Module:
        made = [nn.Embedding(256, 32), Gives(lambda x: x.transpose(0, 1)), linear(), linear()]
        return nn.Sequential(*(made[index] for index in blocks))

    bench = Bench(num_stages=2, build=build, activation=CodecSpec(name=name))

    with pytest.raises(ExceptionGroup) as caught:
        bench.run(1)

    assert (
        "block 1 (Gives) returned a torch.float32 tensor of shape (8, 2, 32) for a micro-"
        in str(caught.value.exceptions[0])
    )
