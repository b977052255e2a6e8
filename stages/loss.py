"""The loss at the end of the pipeline.

Path: stages.receiving -> stages.loss -> stages.optim

A loss function returns the *sum* over a micro-batch and how many items it summed. The last stage
divides by the count of the whole batch, so micro-batches of unequal size weigh what they should
and M micro-batches give the gradient of one batch. It must know that count before the first
backward pass, from targets alone: an item is a sample, unless the function has an attribute
`count`, a function of the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORE = -100
"""Targets with this value are padding and count nowhere."""

LossFn = Callable[[Tensor, Tensor], tuple[Tensor, int]]


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Next-token loss: the sum over all targets that are not padding, in fp32."""
    flat = logits.reshape(-1, logits.shape[-1]).float()
    total = functional.cross_entropy(
        flat, targets.reshape(-1), ignore_index=IGNORE, reduction="sum"
    )
    return total, count_valid(targets)


def count_valid(targets: Tensor) -> int:
    """How many targets are not padding."""
    return int((targets != IGNORE).sum())


cross_entropy.count = count_valid  # type: ignore[attr-defined]


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Click loss: the sum over samples of one logit each, in fp32; targets from 0 to 1."""
    if logits.numel() != targets.numel():
        raise ValueError(
            f"{tuple(logits.shape)} logits for {tuple(targets.shape)} labels, expected one each"
        )
    total = functional.binary_cross_entropy_with_logits(
        logits.reshape(-1).float(), targets.reshape(-1).float(), reduction="sum"
    )
    return total, int(targets.shape[0])


def from_mean(loss: Callable[[Tensor, Tensor], Tensor]) -> LossFn:
    """Adapt a usual loss, which averages over samples, to the sum that a pipeline needs.

    A loss that returns the pair (sum, count) already is passed on as it is.
    """

    def summed(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        result: Any = loss(output, target)
        if isinstance(result, tuple):
            return result  # checked by `checked_sum`
        count = int(output.shape[0])
        return result * count, count

    if hasattr(loss, "count"):
        summed.count = loss.count  # type: ignore[attr-defined]
    return summed


def count_targets(loss: LossFn, targets: Tensor) -> int:
    """How many items a micro-batch adds to the batch's mean, without its outputs."""
    count = getattr(loss, "count", None)
    return int(targets.shape[0]) if count is None else int(count(targets))


def checked_sum(loss: LossFn, output: Tensor, target: Tensor) -> Tensor:
    """The summed loss, refused when it is not one number over as many items as expected."""
    result = loss(output, target)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise ValueError(
            f"the loss returned {type(result).__name__}, expected one tensor, the mean over the "
            "samples, or the pair (sum as a tensor, count)"
        )
    total, counted = result
    if total.dim() != 0 or not torch.is_floating_point(total):
        raise ValueError(f"the loss has shape {tuple(total.shape)}, expected one number")
    expected = count_targets(loss, target)
    if counted != expected:
        raise ValueError(
            f"the loss summed {counted} items of a micro-batch where {expected} were expected; "
            "give the loss function an attribute `count` that tells the number of items from "
            "the targets, as in `my_loss.count = lambda targets: targets.numel()`"
        )
    return total
