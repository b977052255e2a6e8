"""What a stage computes, away from any pipeline."""

from __future__ import annotations

import pytest
import torch
from local_pipeline import same_bits
from torch import Tensor, nn

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
