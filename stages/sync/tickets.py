"""What the Group Generator remembers of replicas and groups, and what it tells them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

SOLO = -1
"""Number of the ticket that says: go on alone."""

NUM_STEPS = 5
"""Steps by whose median a replica's time is judged."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What the generator tells one replica."""

    to: int
    kind: Literal["ticket", "cancel"]
    gid: int
    members: tuple[int, ...] = ()
    request: int = 0
    deadline_s: float = 0.0
    over: int = -1
    """Of the groups that it was in those with lower numbers are over for all their members."""


@dataclass(slots=True)
class Member:
    """A replica as the generator knows it."""

    counter: int
    request: int = 0
    """The latest; earlier ones are repeats that came late."""

    satisfied: int = 0
    group: int | None = None
    unfinished: set[int] = field(default_factory=set)
    """Groups that it was put into and that are not over for all their members."""

    free_s: float | None = None
    """When it went on to the step that it computes now, less what it had sent before."""

    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_STEPS))
    """What its last steps took, with its own sending and without its waiting for others."""

    step_s: float | None = None
    """Their median."""

    held_s: float | None = None
    """Since when the guard lets it wait for somebody to be free whom it is apart from."""

    is_late: bool = False
    """The lease of its group ran out before it came: until it asks, no group is made with it."""


@dataclass(slots=True)
class Group:
    """Replicas that are to average, from the decision to the last report."""

    members: tuple[int, ...]
    arrived: dict[int, float] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    assumed: set[int] = field(default_factory=set)
    """Went on without a word: have they applied it? If not, the others wait in vain."""

    missed: dict[int, float] = field(default_factory=dict)
    """Who waits in vain for one of those, and since when."""

    is_bridge: bool = False
    """Joins replicas that were apart: a slow one is waited for, the lease is longer."""

    @property
    def is_complete(self) -> bool:
        return len(self.arrived) == len(self.members)
