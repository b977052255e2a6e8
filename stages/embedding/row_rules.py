"""How rows of a table begin and how they learn.

Each rule is the formula of its torch namesake, in torch's order of operations and in fp32; scalars
are rounded to fp32 where torch rounds them. What a rule does not do (momentum, weight decay) it
does not accept either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NONE, SGD_RULE, ADAGRAD_RULE, ROW_ADAGRAD_RULE, ADAM_RULE = range(5)
ZEROS_INIT, UNIFORM_INIT, NORMAL_INIT = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """w - lr·g. No state."""

    lr: float

    def __post_init__(self) -> None:
        _check("Sgd", lr=self.lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """`torch.optim.Adagrad`: a sum of squares for each weight."""

    lr: float
    eps: float = 1e-10
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        _check("Adagrad", lr=self.lr, eps=self.eps, initial_accumulator=self.initial_accumulator)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdagrad:
    """Adagrad with one sum for each row: it grows by the mean square of the row's gradient.

    Pruned chunks add nothing to the sum; it is still divided by the whole dimension.
    """

    lr: float
    eps: float = 1e-10
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        _check("RowAdagrad", lr=self.lr, eps=self.eps, initial_accumulator=self.initial_accumulator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """`torch.optim.SparseAdam`: rows that a step does not touch keep their moments.

    Bias correction counts the optimizer steps of the table, not of the row.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check("Adam", lr=self.lr, eps=self.eps)
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"Adam's betas are in [0, 1), got {self.beta1} and {self.beta2}")


Optimizer = Sgd | Adagrad | RowAdagrad | Adam


@dataclass(frozen=True, slots=True)
class Uniform:
    """Between mean - scale and mean + scale."""

    scale: float
    mean: float = 0.0


@dataclass(frozen=True, slots=True)
class Normal:
    """Nearly normal: a sum of twelve uniform numbers, within six standard deviations of the mean.

    Chosen because it is exact integer arithmetic: the same bits on every machine.
    """

    std: float
    mean: float = 0.0


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value everywhere."""

    value: float = 0.0


Init = Uniform | Normal | Constant


def rule_of(optimizer: Optimizer | None) -> tuple[int, tuple[float, float, float, float]]:
    """The rule's number in the core, and (eps, beta1, beta2, initial accumulator)."""
    match optimizer:
        case None:
            return NONE, (0.0, 0.0, 0.0, 0.0)
        case Sgd():
            return SGD_RULE, (0.0, 0.0, 0.0, 0.0)
        case Adagrad():
            return ADAGRAD_RULE, (optimizer.eps, 0.0, 0.0, optimizer.initial_accumulator)
        case RowAdagrad():
            return ROW_ADAGRAD_RULE, (optimizer.eps, 0.0, 0.0, optimizer.initial_accumulator)
        case Adam():
            return ADAM_RULE, (optimizer.eps, optimizer.beta1, optimizer.beta2, 0.0)
    raise ValueError(
        f"optimizer is Sgd, Adagrad, RowAdagrad, Adam or None, got {type(optimizer).__name__}"
    )


def init_of(init: Init) -> tuple[int, float, float]:
    """The kind's number in the core, the mean and the scale."""
    match init:
        case Constant():
            return ZEROS_INIT, init.value, 0.0
        case Uniform():
            return UNIFORM_INIT, init.mean, init.scale
        case Normal():
            return NORMAL_INIT, init.mean, init.std
    raise ValueError(f"init is Uniform, Normal or Constant, got {type(init).__name__}")


def _check(rule: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{rule}'s {name} must be finite and not negative, got {value}")
