"""Masks that belong to the sample, (d)12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_pipeline import SHAPE, Bench, build_gpt
from torch import Tensor, nn

from ray_pipe.models.gpt import GPTShape
from stages.compute import Compute
from stages.dropout import SampleDropout, sample_ids
from stages.optim import OptimSpec

X = torch.ones(3, 50)


def masked(ids: tuple[int, ...], *, salt: int = 0, probability: float = 0.4) -> Tensor:
    with sample_ids(ids):
        return torch.as_tensor(SampleDropout(probability, salt=salt)(X[: len(ids)]))


def test_a_sample_keeps_its_mask_wherever_it_stands() -> None:
    first, again = masked((7, 8, 9)), masked((9, 7))

    assert torch.equal(first[0], again[1])
    assert torch.equal(first[2], again[0])


def test_samples_and_layers_have_masks_of_their_own() -> None:
    rows = torch.cat([masked((1, 2, 3)), masked((1, 2, 3), salt=1)])

    assert len({tuple(row.tolist()) for row in rows}) == 6


def test_a_mask_drops_its_share_and_keeps_the_mean() -> None:
    wide = SampleDropout(0.25, salt=0)
    with sample_ids((5,)):
        out = wide(torch.ones(1, 40_000))

    assert float((out == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.01)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])


def test_evaluation_and_probability_zero_drop_nothing() -> None:
    layer = SampleDropout(0.5, salt=0).eval()

    assert layer(X) is X
    assert SampleDropout(0.0, salt=0)(X) is X


def test_without_the_ids_of_its_samples_it_refuses_to_guess() -> None:
    layer = SampleDropout(0.5, salt=0)

    with pytest.raises(RuntimeError, match="needs the ids of its 3 samples, got None"):
        layer(X)
    with (
        sample_ids((1, 2)),
        pytest.raises(RuntimeError, match=r"needs the ids of its 3 samples, got \(1, 2\)"),
    ):
        layer(X)


def outputs_of_two_visits(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Two visits of the same samples at lr 0, as a stage computes them."""
    compute = Compute(module, optim=OptimSpec())
    tokens = torch.arange(16).view(2, 8)
    first = compute.forward(0, tokens, ids=(3, 4))
    compute.backward(0, torch.ones_like(first))
    compute.update(lr=0.0, factor=1.0)
    return first, compute.forward(0, tokens, ids=(3, 4))


def gpt(dropout: float) -> nn.Module:
    shape = GPTShape(layers=4, width=32, heads=2, context=8, dropout=dropout)
    return build_gpt(shape, 1, range(2))


def test_a_sample_repeats_its_activation_exactly_at_lr_zero() -> None:
    first, again = outputs_of_two_visits(gpt(0.3))

    assert torch.equal(first, again)
    assert not torch.equal(first, outputs_of_two_visits(gpt(0.0))[0])


def test_mutant_fresh_masks_do_not_repeat() -> None:
    module = build_gpt(SHAPE, 1, range(2))

    first, again = outputs_of_two_visits(nn.Sequential(module, nn.Dropout(0.3)))

    assert not torch.equal(first, again)


@pytest.mark.parametrize("recompute", [False, True])
def test_masks_are_the_same_however_the_model_is_cut(recompute: bool) -> None:
    shape = GPTShape(layers=4, width=32, heads=2, context=8, dropout=0.2)
    losses = [
        Bench(num_stages=k, shape=shape, recompute=recompute).run(2).losses for k in (1, 2, 4)
    ]

    assert losses[0] == losses[1] == losses[2]


def test_recompute_repeats_the_masks_of_torch_too() -> None:
    def build(blocks: Any) -> nn.Module:
        return nn.Sequential(build_gpt(SHAPE, 1, blocks), nn.Dropout(0.3))

    kept = Bench(num_stages=2, build=build)

    again = Bench(num_stages=2, build=build, recompute=True)

    assert again.run(2).losses == kept.run(2).losses
