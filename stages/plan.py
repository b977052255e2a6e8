"""What the driver tells a stage about one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Turn(NamedTuple):
    """Which run of which step: frames and messages are matched by it, and it only rises."""

    attempt: int
    step: int
    part: int

    def __str__(self) -> str:
        part = f", part {self.part}" if self.part else ""
        attempt = f", attempt {self.attempt}" if self.attempt else ""
        return f"step {self.step}{part}{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, the same for every stage. Ids travel, not tokens."""

    step: int
    micro_batches: tuple[tuple[int, ...], ...]
    """Sample ids of each micro-batch."""

    schedule: str
    lr: float
    train: bool = True
    """False evaluates: forward only, no codec, no memory touched."""

    coming: tuple[int, ...] = ()
    """Samples of the next step, so that spilled rows can be fetched behind this one."""

    deadline_s: float = 60.0
    """How long to wait for a neighbour before giving up."""

    attempt: int = 0
    """Raised by the driver after every abort, for the rest of the run; what is left on the way
    of an earlier attempt is dropped."""

    part: int = 0
    """Tells runs of one step number apart: training is part 0, evaluations after it 1, 2, …"""

    @property
    def turn(self) -> Turn:
        return Turn(self.attempt, self.step, self.part)
