"""Calls to the stages of a pipeline: those of one step, what they gave, and how they fail.

Path: ray_pipe.pipeline -> ray_pipe.calls
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from stages.plan import StepPlan
from stages.record import StepRecord

Records = list[StepRecord]


@dataclass(kw_only=True)
class Item:
    """A plan that stages were or will be given."""

    plan: StepPlan
    calls: dict[Any, int] = field(default_factory=dict)
    """Stage by call; empty before it was sent."""

    results: dict[int, StepRecord] = field(default_factory=dict)
    is_replay: bool = False
    """Its records were handed out before."""


class CallsFailed(Exception):
    """Some calls of one item failed; the others may still run."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__(errors)
        self.errors = errors


def lend(raw: bytes) -> list[Any]:
    """A large argument of a call to an actor, which fetches it in the thread that needs it.

    Ray holds back all later calls to an actor while an argument is on its way: over a slow link no
    ping would be answered.
    """
    return [ray.put(np.frombuffer(raw, dtype=np.uint8))]


class Silence(RayError):
    """Nobody answered for longer than any step takes."""

    def __init__(self, stages: list[int], timeout_s: float, doing: str) -> None:
        super().__init__(
            f"stages {stages} did not answer for {timeout_s:.0f} s {doing}; their logs are in "
            "Ray's session folder, and `deadline_s` can be raised if they are that slow"
        )
