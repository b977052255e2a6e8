"""How values meet a grid: to the nearest level, or by lot in proportion to the distance.

Random numbers depend on the seed and on how many tensors went before, nothing else: a step that is
repeated draws the same, and a resumed run goes on where it was.
"""

from __future__ import annotations

import torch

from compressors.base import SampleKeys, State, Stateless


class Rounding(Stateless):
    """What a quantiser keeps of its rounding: nothing, or how many tensors have drawn."""

    def __init__(self, rounding: str, seed: int) -> None:
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f'rounding is "nearest" or "stochastic", got {rounding!r}')
        self.rounding = rounding
        self.seed = seed
        self._num_draws = 0  # committed and staged; each encoding has random numbers of its own
        self._num_committed = 0

    def commit(self) -> None:
        self._num_committed = self._num_draws

    def abort(self) -> None:
        self._num_draws = self._num_committed

    def state_dict(self) -> State:
        return {"num_draws": self._num_committed} if self.rounding == "stochastic" else {}

    def load_state_dict(self, state: State) -> None:
        if self.rounding != "stochastic":
            super().load_state_dict(state)
            return
        if set(state) != {"num_draws"}:
            raise ValueError(f"stochastic rounding saves num_draws, got keys {sorted(state)}")
        self._num_draws = self._num_committed = int(state["num_draws"])

    def _draw(self, keys: SampleKeys) -> torch.Generator | None:
        """The random numbers of the next tensor; None where rounding needs none."""
        if self.rounding == "nearest":
            return None
        number = self._num_draws
        if keys.remember:
            self._num_draws += 1
        mixed = (self.seed + 1) * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9
        return torch.Generator().manual_seed(mixed % 2**63)
