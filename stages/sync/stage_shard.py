"""A stage's parameters and gradients as flat vectors, in the order of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.compute import Compute


class StageShard:
    """What one stage of one replica has to agree on. Calls belong to the compute lane.

    Buffers (of a batch norm) stay the replica's own, as do the optimizer's moments.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.rate = 0.0
        """The running step's learning rate."""

    def parameters(self) -> Tensor:
        """A copy."""
        return _flat([parameter.detach() for parameter in self._compute.parameters])

    def set_parameters(self, vector: Tensor) -> None:
        with torch.no_grad():
            for parameter, part in zip(self._compute.parameters, self._cut(vector), strict=True):
                parameter.copy_(part)

    def gradients(self) -> Tensor:
        """A copy; zeros where a parameter was not used."""
        return _flat(
            [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in self._compute.parameters
            ]
        )

    def set_gradients(self, vector: Tensor) -> None:
        for parameter, part in zip(self._compute.parameters, self._cut(vector), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part)

    def scale_gradients(self, factor: float) -> None:
        """Clip; a factor of 0 stands for a gradient that is not finite, and leaves zeros."""
        for parameter in self._compute.parameters:
            if parameter.grad is not None:
                if factor == 0.0:
                    parameter.grad.zero_()
                elif factor != 1.0:
                    parameter.grad.mul_(factor)

    def decayed(self) -> Tensor:
        """1 where weight decay applies: matrices; 0 for biases and the gains of norms."""
        return _flat(
            [torch.full_like(p, float(p.dim() >= 2)).detach() for p in self._compute.parameters]
        )

    def sizes(self) -> list[int]:
        """Values of each parameter."""
        return [parameter.numel() for parameter in self._compute.parameters]

    def update(self, k: int) -> None:
        """Never asked for: the stage makes the update itself, at its commit."""
        raise AssertionError("a stage updates at its commit")

    def lr(self, k: int) -> float:
        return self.rate

    def _cut(self, vector: Tensor) -> list[Tensor]:
        parts, start = [], 0
        for parameter in self._compute.parameters:
            end = start + parameter.numel()
            parts.append(vector[start:end].view_as(parameter))
            start = end
        return parts


def _flat(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(0)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to("cpu", torch.float32)
