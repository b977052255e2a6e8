"""Which coordinates a codec that sends only a few of them speaks of: the same at all who average.

Left to itself top-k names other coordinates at every replica. What only one of them names it gives
away, and the others get it on top of much the same value of their own: replicas that were alike
part by as much as they have come from the start. So one of them picks, everybody sends those, and
elsewhere nothing moves: what is averaged is averaged by all, and no spread ever grows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stages.sync.strategy import State

TURN = 1e30
"""The score of a coordinate whose turn it is: above all changes."""

TINY = 1e-30
"""For 0, where a value was picked: the codec's floats hold it, and no parameter notices it."""


class Picks:
    """The picks of one stage: half go to what changed most since it was last averaged; half go
    round, so that no coordinate waits for more than `2 / density` picks, whoever changed it."""

    def __init__(self, density: float) -> None:
        self._every = math.ceil(2 / density)
        self._count = 0
        self._averaged: Tensor | None = None

    def scores(self, vector: Tensor) -> Tensor:
        """What the codec is given to choose the largest of; its choice is what is not 0 then."""
        before = self._averaged
        scores = vector.abs() if before is None else (vector - before).abs()
        scores[self._count % self._every :: self._every] = TURN
        self._count += 1
        return scores

    def averaged(self, vector: Tensor, picked: Tensor) -> None:
        """These coordinates are what all have agreed on now."""
        before = torch.zeros_like(vector) if self._averaged is None else self._averaged
        self._averaged = torch.where(picked, vector, before)

    def state_dict(self) -> State:
        return {"count": self._count, "averaged": self._averaged}

    def load_state_dict(self, state: State) -> None:
        self._count = int(state["count"])
        self._averaged = state["averaged"]


def only(vector: Tensor, picked: Tensor) -> Tensor:
    """The vector where it was picked, zero elsewhere: of that a top-k sends nothing else. What is
    0 and was picked is told from the rest by being next to nothing."""
    marked = torch.where(vector == 0, TINY, vector)
    return torch.where(picked, marked, torch.zeros_like(vector))
