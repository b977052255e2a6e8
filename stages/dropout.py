"""Dropout whose mask belongs to the sample.

AC-SGD codes the change of a sample's activation between visits. A fresh mask on each visit is
noise of the activation's own size (error floor .28 instead of .07), so the mask here depends on
the sample, the layer and nothing else: visiting a sample again with the same weights repeats its
activation exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_samples: ContextVar[tuple[int, ...] | None] = ContextVar("samples", default=None)


@contextmanager
def sample_ids(ids: tuple[int, ...]) -> Iterator[None]:
    """Say which samples the forward passes inside are about."""
    token = _samples.set(ids)
    try:
        yield
    finally:
        _samples.reset(token)


def current_samples() -> tuple[int, ...] | None:
    """The samples of the forward pass that asks, if it was said."""
    return _samples.get()


class SampleDropout(nn.Module):
    """Dropout with a mask fixed per sample; `salt` tells layers apart."""

    def __init__(self, probability: float, *, salt: int) -> None:
        super().__init__()
        self.probability = probability
        self.salt = salt

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x
        ids = _samples.get()
        if ids is None or len(ids) != x.shape[0]:
            raise RuntimeError(
                f"SampleDropout needs the ids of its {x.shape[0]} samples, got {ids}; "
                "run the forward pass inside `stages.dropout.sample_ids(ids)`"
            )
        masks = [self._mask(sample, x.shape[1:]) for sample in ids]
        return x * torch.stack(masks).to(x.device, x.dtype) / (1.0 - self.probability)

    def _mask(self, sample: int, shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(sample * 1_000_003 + self.salt)
        return torch.rand(shape, generator=generator) >= self.probability
