"""What the driver tells a stage about one step."""

from __future__ import annotations

from dataclasses import dataclass


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
