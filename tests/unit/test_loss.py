"""Losses are sums with a count, so that micro-batches weigh what they should."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stages.loss import IGNORE, checked_sum, count_targets, cross_entropy, from_mean

LOGITS = torch.arange(24.0).reshape(2, 3, 4).sin()
TARGETS = torch.tensor([[0, 1, IGNORE], [3, IGNORE, IGNORE]])


def test_cross_entropy_sums_over_what_is_not_padding() -> None:
    total, count = cross_entropy(LOGITS, TARGETS)

    expected = functional.cross_entropy(LOGITS.reshape(-1, 4)[[0, 1, 3]], torch.tensor([0, 1, 3]))
    assert count == 3
    assert float(total) == pytest.approx(3 * float(expected))


def test_the_count_is_known_from_targets_alone() -> None:
    assert count_targets(cross_entropy, TARGETS) == 3
    assert count_targets(from_mean(functional.mse_loss), torch.ones(5, 2)) == 5


def test_the_count_survives_the_way_to_an_actor() -> None:
    assert count_targets(pickle.loads(pickle.dumps(cross_entropy)), TARGETS) == 3


def test_a_loss_that_averages_becomes_a_sum() -> None:
    output, target = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])

    total, count = from_mean(functional.mse_loss)(output, target)

    assert (float(total), count) == (10.0, 2)


def test_a_loss_that_is_not_a_pair_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="returned Tensor, expected one tensor, the mean"):
        checked_sum(lambda o, t: o.mean(), LOGITS, TARGETS)  # type: ignore[arg-type,return-value]


def test_a_loss_of_several_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\), expected one number"):
        checked_sum(lambda o, t: (torch.ones(2), 2), LOGITS, TARGETS)


def per_token(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return output.sum(), target.numel()


def test_a_count_that_differs_from_what_the_mean_is_divided_by_is_refused() -> None:
    """The gradient would be scaled wrongly, and nobody would see it."""
    with pytest.raises(ValueError, match=r"summed 6 items .* where 2 were expected; .*`count`"):
        checked_sum(per_token, LOGITS, TARGETS)


def test_a_loss_may_say_how_to_count() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return per_token(output, target)

    loss.count = torch.numel  # type: ignore[attr-defined]

    assert float(checked_sum(loss, LOGITS, TARGETS)) == pytest.approx(float(LOGITS.sum()))
