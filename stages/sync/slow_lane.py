"""A compute lane made slow on purpose, for `--slow`: what took t takes `factor` times t."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from stages.lanes import Lane

T = TypeVar("T")
SLOWED = ("load", "forward", "backward")


class SlowLane:
    """Wraps the compute lane of an actor. The lane is busy meanwhile, the core is not."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.factor = 1.0

    async def run(
        self, phase: str, name: str, micro_batch: int, work: Callable[..., T], *args: object
    ) -> T:
        factor = self.factor
        if factor <= 1.0 or phase not in SLOWED:
            return await self._lane.run(phase, name, micro_batch, work, *args)

        def slowly() -> T:
            start = time.monotonic()
            result = work(*args)
            time.sleep((factor - 1.0) * (time.monotonic() - start))
            return result

        return await self._lane.run(phase, name, micro_batch, slowly)
