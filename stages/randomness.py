"""A stage's own random numbers.

torch has one generator for a whole process. A stage that drew from it would depend on who else
draws: other stages in the same process, a measurement, an evaluation. Each stage has a state of
its own instead, put in place while it computes, so that a pipeline gives the same numbers in one
process and in many, and an aborted step can be taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

State = tuple[Tensor, ...]


class Randomness:
    """The states of the CPU's generator and, on a GPU, of the device's."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self.state = self._seeded(seed)

    @contextmanager
    def drawing(self, state: State | None = None) -> Iterator[None]:
        """Draw from the own state and advance it; with `state`, from that, advancing nothing."""
        outer = self._get()
        self._set(self.state if state is None else state)
        try:
            yield
        finally:
            if state is None:
                self.state = self._get()
            self._set(outer)

    def _seeded(self, seed: int) -> State:
        states = [torch.Generator().manual_seed(seed).get_state()]
        if self._device.type == "cuda":
            states.append(torch.Generator(self._device).manual_seed(seed).get_state())
        return tuple(states)

    def _get(self) -> State:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return tuple(states)

    def _set(self, state: State) -> None:
        torch.set_rng_state(state[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state[1], self._device)
