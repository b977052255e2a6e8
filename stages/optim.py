"""Optimizer, learning rate and the norm of the whole pipeline's gradient.

Path: stages.loss -> stages.optim -> stages.record

Each stage owns the optimizer of its own parameters. Only the norm is shared: stages report the
squared norm of each parameter in float64 as sums that have lost nothing, so that the clip factor
is the same number, to the last bit, however the model is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSpec:
    """What a stage needs to know to update its parameters."""

    name: str = "adamw"
    weight_decay: float = 0.01
    """Decoupled with either optimizer: matrices shrink by lr times this, whatever the momentum."""

    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0


def make_optimizer(spec: OptimSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer of one stage; the learning rate comes with each step's plan."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},  # norms and biases are not decayed
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        groups = [{"params": [nn.Parameter(torch.zeros(0))]}]  # a stage without parameters
    if spec.name == "adamw":
        return torch.optim.AdamW(
            groups, lr=0.0, betas=(spec.beta1, spec.beta2), eps=spec.eps, foreach=True
        )
    if spec.name == "sgd":
        return DecoupledSGD(groups, lr=0.0, momentum=spec.momentum)
    raise ValueError(f"unknown optimizer {spec.name!r}; known: adamw, sgd")


class DecoupledSGD(torch.optim.SGD):
    """SGD whose weight decay does not enter the momentum, as AdamW's does not.

    torch's own adds it to the gradient. Without momentum that is the same; with it the decay would
    be about 1 / (1 - momentum) times what the option says, and not that of adamw.
    """

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                kept = 1.0 - group["lr"] * group["weight_decay"]
                if kept != 1.0:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.mul_(kept)
        decays = [group["weight_decay"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["weight_decay"] = 0.0
            return super().step(closure)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the step's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def squared_norms(parameters: Iterable[nn.Parameter]) -> list[float]:
    """Squared gradient norm of each parameter, in the model's order."""
    return [
        0.0 if p.grad is None else float(torch.linalg.vector_norm(p.grad, dtype=torch.float64) ** 2)
        for p in parameters
    ]


def exact_sums(values: Iterable[float]) -> list[float]:
    """A few numbers whose exact sum is that of `values` (Shewchuk); a rounded sum is not enough.

    `math.fsum` of them is `math.fsum` of the values. Not finite in, not finite out.
    """
    sums: list[float] = []
    for value in values:
        if not math.isfinite(value):
            return [math.inf]
        rest: list[float] = []
        for other in sums:
            big, small = (value, other) if abs(value) >= abs(other) else (other, value)
            value = big + small
            lost = small - (value - big)
            if lost:
                rest.append(lost)
        sums = [*rest, value]
    return sums if all(map(math.isfinite, sums)) else [math.inf]


def clip_factor(squares: Sequence[float], *, clip: float) -> tuple[float, float]:
    """Global norm, and what every gradient is multiplied by: 0 when the norm is not finite."""
    norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.inf
    if not math.isfinite(norm):
        return norm, 0.0
    if clip <= 0.0 or norm <= clip:
        return norm, 1.0
    return norm, clip / (norm + 1e-6)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply gradients in place; a factor of one leaves every bit alone."""
    if factor == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def lr_at(
    step: int,
    *,
    lr: float,
    warmup_steps: int,
    num_steps: int,
    decay: str,
    min_ratio: float,
) -> float:
    """Linear warm-up, then constant, cosine or linear decay to `min_ratio * lr`."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if decay == "constant":
        return lr
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    left = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))) if decay == "cosine" else 1.0 - done
    return lr * (min_ratio + (1.0 - min_ratio) * max(0.0, left))
