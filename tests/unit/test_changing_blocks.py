"""Blocks that change things as they run, their input or their buffers, train as in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from local_pipeline import DIRECTQ, Bench, acsgd, plain_loop, same_bits, state_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from ray_pipe.data import DatasetSamples
from stages.compute import Compute
from stages.loss import from_mean
from stages.optim import OptimSpec

SGD = OptimSpec(name="sgd", weight_decay=0.0)
X = torch.linspace(-1, 1, 12).view(4, 3)
IDS = (0, 1, 2, 3)


class AddsInPlace(nn.Module):
    """Draws a mask, then changes its input by a functional operation: no attribute tells."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape) < 0.5
        x += 1.0
        return x * mask


class CountsThenAdds(AddsInPlace):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x)


class MeanSoFar(nn.Module):
    """Its output depends on a buffer that every pass moves, as with spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(dim=0))
        return x * (2.0 + self.mean.clone())


class MakesItsBuffer(nn.Module):
    """Has none before its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((3,), 2.0)
        return torch.as_tensor(self.linear(x) * self.scale)


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(spectral_norm(nn.Linear(3, 3)), MeanSoFar())


def in_place() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))


def adding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(AddsInPlace(), nn.Linear(3, 3))


def steps_of(compute: Compute, steps: int = 2) -> list[Any]:
    """What two micro-batches a step leave, buffers included."""
    found: list[Any] = []
    for step in range(steps):
        sources = [X * (1 + step), X - step]
        found += [compute.forward(i, source, ids=IDS) for i, source in enumerate(sources)]
        found += [compute.backward(i, torch.ones(4, 3)) for i in range(2)]
        assert all(torch.equal(x, y) for x, y in zip(sources, (X * (1 + step), X - step)))
        compute.update(lr=0.1, factor=1.0)
    return [*found, *compute.module.state_dict().values()]


@pytest.mark.parametrize("build", [batch_norm, normed, in_place, adding])
def test_recompute_leaves_what_one_pass_leaves(build: Any) -> None:
    kept, again = (Compute(build(), optim=SGD, recompute=r) for r in (False, True))

    assert same_bits(steps_of(again), steps_of(kept))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_that_changes_its_input_in_place_has_the_gradient_of_one_that_does_not(
    recompute: bool,
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.ReLU(), nn.Linear(3, 3))
    changing = Compute(in_place(), optim=SGD, recompute=recompute)

    assert same_bits(steps_of(changing), steps_of(Compute(plain, optim=SGD)))


def test_a_pass_that_was_begun_twice_draws_and_counts_once() -> None:
    """Torch refuses the first one half-way, with random numbers drawn and a buffer moved."""
    compute = Compute(nn.Sequential(CountsThenAdds()), optim=SGD, seed=5)

    outputs = [compute.forward(i, X, ids=IDS) for i in range(2)]
    passes = float(compute.module.state_dict()["0.passes"])
    compute.abort()
    again = [compute.forward(i, X, ids=IDS) for i in range(2)]

    assert passes == 2.0
    assert same_bits(outputs, again)
    assert not torch.equal(*outputs)  # each has a mask of its own


def test_an_abort_leaves_a_buffer_that_a_block_made_meanwhile() -> None:
    compute = Compute(MakesItsBuffer(), optim=SGD)
    first = compute.forward(0, X, ids=IDS)

    compute.abort()

    assert torch.equal(compute.forward(0, X, ids=IDS), first)


def test_an_abort_takes_buffers_back() -> None:
    compute = Compute(batch_norm(), optim=SGD)
    steps_of(compute, 1)
    before = {name: value.clone() for name, value in compute.module.state_dict().items()}
    compute.forward(0, X, ids=IDS)

    compute.abort()

    assert same_bits(list(compute.module.state_dict().values()), list(before.values()))


# --- whole pipelines of a user's blocks ---------------------------------------------------------


def items() -> DatasetSamples:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, 8, generator=generator)
    return DatasetSamples([(x, x.sum().view(1)) for x in inputs])


def vgg(blocks: Sequence[int], dtype: torch.dtype = torch.float32) -> nn.Module:
    """As torchvision writes it: every activation in place, so that each cut lies before one."""
    torch.manual_seed(7)
    layers = [
        nn.Linear(8, 16),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 1)),
    ]
    return nn.Sequential(*(layers[index] for index in blocks)).to(dtype)


def in_bf16(blocks: Sequence[int]) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)]
    first = [ToBf16()] if 0 in blocks else []
    return nn.Sequential(*first, *(layers[index] for index in blocks)).to(torch.bfloat16)


class ToBf16(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
def test_cuts_before_blocks_that_work_in_place_train_as_a_plain_loop(
    recompute: bool, schedule: str
) -> None:
    bench = Bench(
        num_stages=4, build=vgg, samples=items(), loss=from_mean(squares), recompute=recompute,
        schedule=schedule,
    )  # fmt: skip
    losses, weights = plain_loop(bench)

    run = bench.run(3)

    assert run.losses == losses
    assert same_bits(run.weights, weights)


@pytest.mark.parametrize("activation", [acsgd(), acsgd(rows="int8"), DIRECTQ], ids=str)
def test_blocks_of_bf16_weights_train_and_their_rows_agree(activation: Any) -> None:
    bench = Bench(
        num_stages=2, build=in_bf16, samples=items(), loss=from_mean(squares),
        activation=activation, gradient=DIRECTQ, lr=1e-2,
    )  # fmt: skip
    evaluation = bench.plan(5, train=False, schedule="forward", part=1)

    run = bench.run(plans=[*(bench.plan(step) for step in range(6)), evaluation])

    assert run.losses[5] < run.losses[0]
    assert {weight.dtype for weight in run.weights} == {torch.bfloat16}
    if activation.name == "acsgd":
        assert all(sender == receiver for sender, receiver in run.rows())
    assert state_of(run.stages)
