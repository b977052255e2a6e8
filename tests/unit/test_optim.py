"""Optimizers, the learning rate, and a norm that does not depend on where the model is cut."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stages.optim import (
    OptimSpec,
    clip_factor,
    exact_sums,
    lr_at,
    make_optimizer,
    scale_gradients,
    set_lr,
    squared_norms,
)

SQUARES = st.lists(st.floats(min_value=0, max_value=1e200, allow_nan=False), max_size=60)


@given(SQUARES, st.integers(0, 60))
def test_sums_made_on_two_stages_are_the_sum_made_on_one(values: list[float], cut: int) -> None:
    apart = exact_sums([*exact_sums(values[cut:]), *exact_sums(values[:cut])])

    assert math.fsum(apart) == math.fsum(values)


def test_mutant_rounded_sums_depend_on_the_cut() -> None:
    source = random.Random(1)
    differ = 0
    for _ in range(50):
        values = [source.random() * 10 ** source.randint(-8, 0) for _ in range(40)]
        differ += math.fsum([math.fsum(values[:13]), math.fsum(values[13:])]) != math.fsum(values)

    assert differ > 0


def test_sums_of_many_values_are_few_numbers() -> None:
    source = random.Random(2)
    values = [source.random() * 10 ** source.randint(-12, 3) for _ in range(5000)]

    assert len(exact_sums(values)) < 10


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    assert exact_sums([1.0, bad, 2.0]) == [math.inf]
    assert clip_factor(exact_sums([1.0, bad]), clip=1.0) == (math.inf, 0.0)


def test_the_norm_is_clipped_only_above_the_limit() -> None:
    assert clip_factor([9.0, 16.0], clip=10.0) == (5.0, 1.0)
    assert clip_factor([9.0, 16.0], clip=5.0) == (5.0, 1.0)
    assert clip_factor([9.0, 16.0], clip=0.0) == (5.0, 1.0)
    norm, factor = clip_factor([9.0, 16.0], clip=1.0)
    assert (norm, factor) == (5.0, 1.0 / (5.0 + 1e-6))


def test_the_clip_factor_is_the_one_of_torch() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in [(3, 4), (5,), (2, 2, 2)]]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    norm, factor = clip_factor(squared_norms(parameters), clip=0.7)
    ours = [p.grad * factor for p in parameters if p.grad is not None]

    theirs = torch.nn.utils.clip_grad_norm_(parameters, 0.7)

    assert norm == pytest.approx(float(theirs), rel=1e-6)
    for our, parameter in zip(ours, parameters):
        assert parameter.grad is not None
        torch.testing.assert_close(our, parameter.grad, rtol=1e-6, atol=1e-8)


def test_a_norm_beyond_single_precision_is_finite() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 1e30)

    assert squared_norms([parameter]) == pytest.approx([2e60], rel=1e-6)


def test_a_parameter_without_gradient_counts_nothing() -> None:
    assert squared_norms([nn.Parameter(torch.ones(3))]) == [0.0]


def test_a_factor_of_one_leaves_every_bit_alone() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([math.nan, 1e-45])
    before = parameter.grad.clone()

    scale_gradients([parameter], 1.0)

    assert torch.equal(parameter.grad.view(torch.int32), before.view(torch.int32))


def test_norms_and_biases_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(OptimSpec(weight_decay=0.5), model.parameters())

    decays = {
        tuple(p.shape): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]
    }

    assert decays == {(2, 2): 0.5, (2,): 0.0}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_stage_without_parameters_has_an_optimizer_too(name: str) -> None:
    optimizer = make_optimizer(OptimSpec(name=name), [])

    optimizer.step()

    assert optimizer.state_dict()["param_groups"]


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'adam'; known: adamw, sgd"):
        make_optimizer(OptimSpec(name="adam"), [nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_is_decoupled_with_momentum_too(name: str) -> None:
    """Without a gradient's push, a matrix shrinks by lr times the decay in each step, no more."""
    weight = nn.Parameter(torch.full((2, 2), 8.0))
    spec = OptimSpec(name=name, weight_decay=0.5, momentum=0.9)
    optimizer = make_optimizer(spec, [weight])
    set_lr(optimizer, 0.5)

    for _ in range(3):
        weight.grad = torch.zeros(2, 2)
        optimizer.step()

    assert weight.tolist() == [[8 * 0.75**3] * 2] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5]


def test_sgd_without_momentum_decays_as_torchs_own() -> None:
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [
        make_optimizer(OptimSpec(name="sgd", weight_decay=0.1), [ours]),
        torch.optim.SGD([theirs], lr=0.0, weight_decay=0.1),
    ]
    for step in range(5):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_lr(optimizer, 0.1)
            parameter.grad = torch.full((3, 4), float(step))
            optimizer.step()

    assert torch.allclose(ours, theirs, atol=1e-6)


def test_mutant_torchs_own_sgd_puts_the_decay_into_the_momentum() -> None:
    weight = nn.Parameter(torch.full((2, 2), 8.0))
    optimizer = torch.optim.SGD([weight], lr=0.5, weight_decay=0.5, momentum=0.9)
    for _ in range(3):
        weight.grad = torch.zeros(2, 2)
        optimizer.step()

    assert float(weight[0, 0].detach()) < 0.5 * 8 * 0.75**3


def test_momentum_reaches_sgd() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer(OptimSpec(name="sgd", momentum=0.5), [parameter])
    set_lr(optimizer, 1.0)
    for _ in range(2):
        parameter.grad = torch.ones(1)
        optimizer.step()

    assert parameter.item() == -2.5


def rates(decay: str, steps: list[int]) -> list[float]:
    return [
        lr_at(s, lr=1.0, warmup_steps=4, num_steps=12, decay=decay, min_ratio=0.1) for s in steps
    ]


def test_the_rate_warms_up_then_decays_to_its_floor() -> None:
    assert rates("constant", [0, 1, 3, 4, 11]) == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert rates("cosine", [4, 8, 12, 99]) == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert rates("linear", [4, 8, 12, 99]) == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    full = lr_at(0, lr=0.3, warmup_steps=0, num_steps=5, decay="cosine", min_ratio=0.0)

    assert full == 0.3


def test_the_norm_does_not_depend_on_the_order_in_which_squares_are_added() -> None:
    squares = [1e16] + [1.0] * 1000

    norms = {clip_factor(order, clip=1.0)[0] for order in (squares, squares[::-1])}

    assert norms == {math.sqrt(1e16 + 1000)}
