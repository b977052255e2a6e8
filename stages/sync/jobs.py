"""A training job small enough for a thousand copies of it, and large enough to have a loss curve.

A network of one hidden layer learns a rule with a product in it from examples that replicas hold
in fixed shards. Its gradient is written out: autograd would cost ten times the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from stages.sync.problems import ComputeTime, VectorShard

FEATURES, HIDDEN = 10, 16
SIZES = [FEATURES * HIDDEN, HIDDEN, HIDDEN, 1]
NUM_VALUES = sum(SIZES)
NUM_HELD_OUT = 2048


class Classify:
    """The job: examples, a start that all replicas share, gradients and the loss."""

    def __init__(
        self, num_replicas: int, *, seed: int = 0, batch: int = 16, lr: float = 0.5
    ) -> None:
        generator = torch.Generator().manual_seed(seed * 2 + 1)
        self.num_replicas = num_replicas
        self.batch = batch
        self.lr = lr
        self._shard = max(64, 8192 // num_replicas)
        num = self._shard * num_replicas + NUM_HELD_OUT
        self._inputs = torch.randn(num, FEATURES, generator=generator)
        rule = self._inputs[:, :3].sum(1) + self._inputs[:, 3] * self._inputs[:, 4]
        self._targets = (rule > 0).float()
        w1, b1, w2, b2 = (torch.randn(size, generator=generator) for size in SIZES)
        self.start = torch.cat([w1 * FEATURES**-0.5, 0 * b1, w2 * HIDDEN**-0.5, 0 * b2])

    def rows(self, replica: int, k: int) -> slice:
        """The examples of a replica's step: its shard, over and over."""
        start = replica * self._shard + (k * self.batch) % (self._shard - self.batch + 1)
        return slice(start, start + self.batch)

    def gradient(self, vector: Tensor, rows: slice | Tensor) -> Tensor:
        """Of the mean loss over some examples."""
        w1, b1, w2, b2 = vector.split_with_sizes(SIZES)
        x, y = self._inputs[rows], self._targets[rows]
        hidden = torch.tanh(torch.addmm(b1, x, w1.view(FEATURES, HIDDEN)))
        error = (torch.sigmoid(hidden @ w2 + b2) - y) / len(y)
        back = torch.outer(error, w2) * (1 - hidden * hidden)
        return torch.cat([(x.T @ back).view(-1), back.sum(0), error @ hidden, error.sum()[None]])

    def mean_gradient(self, vector: Tensor, k: int) -> Tensor:
        """Of all replicas' examples of a step at once: what an all-reduce agrees on."""
        starts = torch.tensor([self.rows(r, k).start for r in range(self.num_replicas)])
        return self.gradient(vector, (starts[:, None] + torch.arange(self.batch)).view(-1))

    def loss(self, vector: Tensor) -> float:
        """On examples that nobody trains on."""
        w1, b1, w2, b2 = vector.split_with_sizes(SIZES)
        x, y = self._inputs[-NUM_HELD_OUT:], self._targets[-NUM_HELD_OUT:]
        hidden = torch.tanh(torch.addmm(b1, x, w1.view(FEATURES, HIDDEN)))
        return float(torch.nn.functional.binary_cross_entropy_with_logits(hidden @ w2 + b2, y))

    def trainers(self, compute_s: ComputeTime, *, lr: float | None = None) -> list[JobTrainer]:
        """One for each replica."""
        return [JobTrainer(self, r, compute_s, lr or self.lr) for r in range(self.num_replicas)]


class JobTrainer:
    """One replica of the job, in a single shard."""

    def __init__(self, job: Classify, replica: int, compute_s: ComputeTime, lr: float) -> None:
        self._job = job
        self._replica = replica
        self._compute_s = compute_s
        self.shards = [VectorShard(job.start, lr=lr)]

    @property
    def x(self) -> Tensor:
        return self.shards[0].x

    async def compute(self, k: int) -> None:
        """The gradient at the parameters of the moment when the step began."""
        gradient = self._job.gradient(self.x, self._job.rows(self._replica, k))
        await asyncio.sleep(self._compute_s(self._replica, k))
        self.shards[0].gradient = gradient


def mean_model(trainers: Sequence[JobTrainer]) -> Tensor:
    """What is left when training ends: the mean of all replicas."""
    return torch.stack([trainer.x for trainer in trainers]).mean(0)
