"""Strategies that all-reduce something other than the gradient of every step.

LocalSGD and DiLoCo agree after every H local steps on the way from a common anchor, see
`rules.OuterStep`. QuantizedAdam agrees on momenta, exactly in the warm-up and in few bits after
it, see `rules.FrozenAdam`. Both survive a death as all-reduce does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stages.sync.all_reduce import AllReduce
from stages.sync.strategy import At, State, SyncPlan


class Local(AllReduce):
    """LocalSGD (outer learning rate 1, no momentum) or DiLoCo."""

    name = "local"
    at: At = "param"

    def __init__(self, *, every: int = 8, **options: Any) -> None:
        super().__init__(**options)
        self.every = every


class QuantizedAdam(AllReduce):
    """Exact gradients for `warmup` steps, then coded momenta."""

    name = "quantized-adam"

    def __init__(self, *, warmup: int = 20, **options: Any) -> None:
        super().__init__(**options)
        self.warmup = warmup

    async def plan(self, k: int) -> SyncPlan:
        return replace(await super().plan(k), exact=k < self.warmup)

    def state_dict(self) -> State:
        return {**super().state_dict(), "warmup": self.warmup}

    def load_state_dict(self, state: State) -> None:
        """What was saved counts: the variance was, or will be, frozen then."""
        super().load_state_dict(state)
        self.warmup = int(state.get("warmup", self.warmup))
