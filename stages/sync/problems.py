"""Small things to train in a rehearsal: a quadratic, any torch module, or nothing but its price."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ComputeTime = Callable[[int, int], float]
"""Seconds that step k of a replica takes: `(replica, k)`."""


def no_time(replica: int, k: int) -> float:
    return 0.0


class VectorShard:
    """A vector that follows its gradient; the model of the quadratic."""

    def __init__(self, start: Tensor, *, lr: float) -> None:
        self.x = start.clone()
        self.gradient = torch.zeros_like(start)
        self._lr = lr

    def parameters(self) -> Tensor:
        return self.x

    def set_parameters(self, vector: Tensor) -> None:
        self.x = vector

    def gradients(self) -> Tensor:
        return self.gradient

    def set_gradients(self, vector: Tensor) -> None:
        self.gradient = vector

    def update(self, k: int) -> None:
        self.x = self.x - self.lr(k) * self.gradient

    def lr(self, k: int) -> float:
        return self._lr


class Quadratic:
    """Half the squared distance to the replica's own optimum, with noise in the gradient."""

    def __init__(
        self,
        replica: int,
        *,
        start: Tensor,
        optimum: Tensor,
        lr: float,
        noise: float = 0.0,
        num_shards: int = 1,
        compute_s: ComputeTime = no_time,
        seed: int = 0,
    ) -> None:
        self._replica = replica
        self._optimum = optimum
        self._noise = noise
        self._compute_s = compute_s
        self._seed = seed
        size = start.numel()
        self._bounds = [
            (size * i // num_shards, size * (i + 1) // num_shards) for i in range(num_shards)
        ]
        self.shards = [VectorShard(start[low:high], lr=lr) for low, high in self._bounds]

    @property
    def x(self) -> Tensor:
        """The whole vector."""
        return torch.cat([shard.x for shard in self.shards])

    async def compute(self, k: int) -> None:
        """The gradient at the parameters of the moment when the step began."""
        gradient = self.x - self._optimum
        if self._noise:
            seed = (self._seed * 1009 + self._replica) * 1_000_003 + k
            generator = torch.Generator().manual_seed(seed)
            gradient += self._noise * torch.randn(
                gradient.shape, generator=generator, dtype=gradient.dtype
            )
        await asyncio.sleep(self._compute_s(self._replica, k))
        for shard, (low, high) in zip(self.shards, self._bounds, strict=True):
            shard.gradient = gradient[low:high]


class ModuleShard:
    """The parameters of a torch module as one vector."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, lr: float) -> None:
        self.module = module
        self.optimizer = optimizer
        self._own = [p for p in module.parameters() if p.requires_grad]
        self._lr = lr

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._own])

    def set_parameters(self, vector: Tensor) -> None:
        with torch.no_grad():
            for parameter, piece in self._pieces(vector):
                parameter.copy_(piece)

    def gradients(self) -> Tensor:
        return torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self._own]
        )

    def set_gradients(self, vector: Tensor) -> None:
        for parameter, piece in self._pieces(vector):
            parameter.grad = piece.clone()

    def update(self, k: int) -> None:
        self.optimizer.step()

    def lr(self, k: int) -> float:
        return self._lr

    def _pieces(self, vector: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        pieces = torch.split(vector, [p.numel() for p in self._own])
        return [(p, piece.view_as(p)) for p, piece in zip(self._own, pieces, strict=True)]


class ModuleTrainer:
    """Trains a torch module; `loss_at(module, replica, k)` is the loss of the step's batch."""

    def __init__(
        self,
        replica: int,
        module: nn.Module,
        *,
        loss_at: Callable[[nn.Module, int, int], Tensor],
        optimizer: torch.optim.Optimizer,
        lr: float,
        compute_s: ComputeTime = no_time,
    ) -> None:
        self._replica = replica
        self.module = module
        self._loss_at = loss_at
        self._compute_s = compute_s
        self.shards = [ModuleShard(module, optimizer, lr=lr)]

    async def compute(self, k: int) -> None:
        """The gradient at the parameters of the moment when the step began."""
        self.module.zero_grad(set_to_none=True)
        self._loss_at(self.module, self._replica, k).backward()  # type: ignore[no-untyped-call]
        await asyncio.sleep(self._compute_s(self._replica, k))


class PricedShard:
    """A model that is nothing but its size."""

    def parameters(self) -> Any:
        return 0

    def set_parameters(self, vector: Any) -> None: ...

    def gradients(self) -> Any:
        return 0

    def set_gradients(self, vector: Any) -> None: ...

    def update(self, k: int) -> None: ...

    def lr(self, k: int) -> float:
        return 0.0


class Priced:
    """Costs instead of tensors."""

    def __init__(self, replica: int, *, num_shards: int = 1, compute_s: ComputeTime) -> None:
        self._replica = replica
        self._compute_s = compute_s
        self.shards: Sequence[PricedShard] = [PricedShard() for _ in range(num_shards)]

    async def compute(self, k: int) -> None:
        """Takes its time."""
        await asyncio.sleep(self._compute_s(self._replica, k))
