"""The loss of a step that may still be under way."""

from __future__ import annotations

from collections.abc import Callable


class StepLoss:
    """The loss of a step that may still be under way. `float(loss)` waits for it."""

    def __init__(self, step: int, look_up: Callable[[int], float]) -> None:
        self.step = step
        self._look_up = look_up

    def item(self) -> float:
        """The mean over the batch, as the last stage saw it."""
        return self._look_up(self.step)

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"StepLoss(step={self.step})"
