"""What a stage sends of its shard, and what it does with the answer.

Path: stages.sync.exchange -> stages.sync.rules -> stages.record

The arithmetic of a strategy at one stage; whatever must be remembered between exchanges (anchor,
momentum) lives here, one part at every stage of every replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stages.sync.strategy import State, SyncResult

FLOOR = 0.04
"""Of its tensor's mean the variance that a coordinate gets which the warm-up has not seen: it moves
at most 5 times as fast as others with the same gradient, not `1 / eps` times."""

UNSEEN = 1e-5
"""Of its tensor's mean: a variance below this says nothing. One above is the coordinate's own,
however small; raising those too cost 3.6 % of a small GPT's loss."""


class Shard(Protocol):
    """One stage's part of the model, as flat vectors."""

    def parameters(self) -> Any: ...
    def set_parameters(self, vector: Any) -> None: ...
    def gradients(self) -> Any: ...
    def set_gradients(self, vector: Any) -> None: ...
    def update(self, k: int) -> None: ...
    def lr(self, k: int) -> float: ...


class Rule(Protocol):
    """How one stage takes part in a strategy's exchanges."""

    updates: bool
    """The rule makes the update itself; the shard's own optimizer rests."""

    def open(self, anchor: Any) -> None: ...
    def outgoing(self, shard: Shard, k: int) -> Any: ...
    def incoming(self, shard: Shard, k: int, result: SyncResult) -> None: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


class Forgetful:
    """A rule that remembers nothing."""

    updates = False

    def open(self, anchor: Any) -> None:
        """The parameters that all replicas start from."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got keys {sorted(state)}")


class GradientMean(Forgetful):
    """Gradients become their mean; the optimizer does the rest, alike everywhere."""

    def outgoing(self, shard: Shard, k: int) -> Any:
        return shard.gradients()

    def incoming(self, shard: Shard, k: int, result: SyncResult) -> None:
        shard.set_gradients(result.value)


class ParameterMove(Forgetful):
    """Parameters move by the delta, which leaves alone what a local step did meanwhile.

    Moments of the optimizer stay the replica's own.
    """

    def outgoing(self, shard: Shard, k: int) -> Any:
        return shard.parameters()

    def incoming(self, shard: Shard, k: int, result: SyncResult) -> None:
        if result.delta is not None:
            shard.set_parameters(shard.parameters() + result.delta)


class OuterStep:
    """DiLoCo: the mean way from the anchor is a gradient for an outer Nesterov step.

    With `lr` 1 and no momentum this is parameter averaging, LocalSGD. Anchors and momenta are the
    same bits at every replica, because the mean is.
    """

    updates = False

    def __init__(self, *, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.lr = lr
        self.momentum = momentum
        self.anchor: Any = None
        self._velocity: Any = None

    def open(self, anchor: Any) -> None:
        """The parameters that all replicas start from."""
        self.anchor = anchor
        self._velocity = 0.0 * self.anchor

    def outgoing(self, shard: Shard, k: int) -> Any:
        return self.anchor - shard.parameters()

    def incoming(self, shard: Shard, k: int, result: SyncResult) -> None:
        self._velocity = self.momentum * self._velocity + result.value
        step = result.value + self.momentum * self._velocity
        self.anchor = self.anchor - self.lr * step
        shard.set_parameters(self.anchor)

    def state_dict(self) -> State:
        return {"anchor": self.anchor.clone(), "velocity": self._velocity.clone()}

    def load_state_dict(self, state: State) -> None:
        self.anchor = state["anchor"].clone()
        self._velocity = state["velocity"].clone()


class FrozenAdam:
    """QuantizedAdam: after a warm-up the variance is frozen and momenta are what is agreed on.

        warm-up:  u = b1 u + (1 - b1) g;  v = b2 v + (1 - b2) g g     with the exact mean g
        after:    y = b1 u + (1 - b1) g_local;  u = mean of y, coded twice with error feedback
        always:   p -= lr (u' / (sqrt(v') + eps) + weight_decay p)

    Both errors, the worker's and the owner's, are kept by the codec (`+ef`). In the warm-up u' and
    v' are corrected for their start at zero; v' then stays, u' needs no correction any more. Where
    nothing was seen until then v' is next to nothing, and would stay it: see `FLOOR`.
    """

    updates = True

    def __init__(
        self,
        *,
        warmup: int,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.warmup = warmup
        self._beta1 = beta1
        self._beta2 = beta2
        self._eps = eps
        self._decay: Any = weight_decay
        self.count = 0
        self._mean: Any = None
        self._variance: Any = None
        self._sizes: Sequence[int] = ()

    def open(self, anchor: Any) -> None:
        """Momenta start at zero, wherever the parameters do."""

    def decay_only(self, mask: Any) -> None:
        """Weight decay where `mask` is 1, none where it is 0."""
        self._decay = self._decay * mask

    def cut_at(self, sizes: Sequence[int]) -> None:
        """How many values of the vector belong to each tensor; else it is one tensor."""
        self._sizes = tuple(sizes)

    def outgoing(self, shard: Shard, k: int) -> Any:
        gradient = shard.gradients()
        if self.count < self.warmup:
            return gradient
        return self._beta1 * self._mean + (1 - self._beta1) * gradient

    def incoming(self, shard: Shard, k: int, result: SyncResult) -> None:
        parameters, value = shard.parameters(), result.value
        if self._mean is None:
            self._mean = self._variance = 0.0 * parameters
        self.count += 1
        if self.count <= self.warmup:
            self._mean = self._beta1 * self._mean + (1 - self._beta1) * value
            self._variance = self._beta2 * self._variance + (1 - self._beta2) * value * value
            if self.count == self.warmup:
                self._freeze()
        else:
            self._mean = value
        steps = min(self.count, self.warmup)
        mean = self._mean / (1 - self._beta1**self.count)
        root = (self._variance / (1 - self._beta2**steps)) ** 0.5
        step = mean / (root + self._eps) + self._decay * parameters
        shard.set_parameters(parameters - shard.lr(k) * step)

    def _freeze(self) -> None:
        variance = self._variance
        if not isinstance(variance, Tensor) or not variance.numel():
            return  # in a simulation it may be nothing but a size
        whole = variance.mean()
        parts = torch.split(variance, list(self._sizes) or [variance.numel()])
        means = [part.mean() if part.numel() else whole for part in parts]
        # A tensor that was not used at all has no scale of its own.
        scales = [mean if mean > 0 else whole for mean in means]
        self._variance = torch.cat(
            [
                torch.where(part < UNSEEN * scale, FLOOR * scale, part)
                for part, scale in zip(parts, scales, strict=True)
            ]
        )

    def state_dict(self) -> State:
        if self._mean is None:
            return {"count": 0, "warmup": self.warmup}
        return {
            "count": self.count,
            "warmup": self.warmup,
            "mean": self._mean.clone(),
            "variance": self._variance.clone(),
        }

    def load_state_dict(self, state: State) -> None:
        self.count = int(state["count"])
        self._mean = state["mean"].clone() if self.count else None
        self._variance = state["variance"].clone() if self.count else None
        if "warmup" in state:  # a run with more steps than before would have another
            self.warmup = int(state["warmup"])
        elif self.count >= self.warmup:  # saved by a version without a floor
            self._freeze()
