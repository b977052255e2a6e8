"""What a strategy decides and what an exchange does: the two halves of replica synchronisation.

Path: stages.optim -> stages.sync.strategy -> stages.sync.exchange

A replica is a copy of the pipeline. Its leader runs one `SyncStrategy`: when may I run step k, with
whom and what do I exchange, what if members change. It answers with a `SyncPlan`, which holds no
tensor. Each stage has one `Exchange`, which moves its shard as the plan says and knows no
algorithm. One plan serves all stages of a replica, and it is made at a pipeline flush only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

At = Literal["start", "grad", "param"]
"""When a strategy exchanges: `start` posts parameters before computing and mixes before the
update (Hop), `grad` between the gradient and the update, `param` after the update."""

Op = Literal["reduce", "mailbox", "swap", "fetch", "none"]
State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """One exchange, the same for every stage of the replica. Its id tags every message."""

    epoch: int
    number: int
    """Iteration or group; within an epoch the numbers of one replica's exchanges rise."""

    op: Op
    peers: tuple[int, ...] = ()
    """`reduce`: all members, sorted, self included. Else: those whom it concerns."""

    keep: bool = False
    """Whoever rounds keeps what was lost, so that the sum of all members is exact. Else everybody
    ends with the same value."""

    route: Literal["ring", "direct"] = "direct"
    exact: bool = False
    """Send the bytes as they are, whatever the codec."""

    weights: Mapping[int, float] = field(default_factory=dict)
    versions: Mapping[int, int] = field(default_factory=dict)
    """`mailbox`: which update of each neighbour is mixed; fixed by the leader for all stages."""

    over: int = -1
    """Exchanges of this epoch with lower numbers are over at all their members: nobody will ask for
    letters of them again."""

    deadline_s: float = 60.0
    """After so long without a letter the sender is asked again and suspected."""

    def __str__(self) -> str:
        return f"{self.op} {self.number} of epoch {self.epoch} with replicas {list(self.peers)}"


NOTHING = SyncPlan(epoch=0, number=-1, op="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """What one stage got out of one exchange."""

    value: Any = None
    """The agreed vector, the same bits at every member; None where only a change is known."""

    delta: Any = None
    """What to add to the own vector. Survives local steps made meanwhile."""

    contributors: tuple[int, ...] = ()
    nbytes: int = 0
    waited_s: float = 0.0
    has_loss: bool = False
    """Letters were lost meanwhile: such a wait is no measure of the next ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvent:
    """Somebody came or went, as the one who watches (the driver) says."""

    kind: Literal["dead", "joined"]
    replica: int
    epoch: int
    """Rises with each event; everybody hears all of them in this order."""

    since: int = 0
    """First iteration that a newcomer takes part in."""


class Interrupted(Exception):
    """The exchange will not end: its members changed, or its group was cancelled. Plan again."""


class SyncTimeout(RuntimeError):
    """A peer stayed silent for many deadlines and nobody declared it dead."""


class Exchanger(Protocol):
    """What a strategy may ask of the stages' exchanges besides carrying out plans."""

    @property
    def last_number(self) -> int: ...
    def refuse_before(self, epoch: int) -> None: ...
    def cancel(self, epoch: int, number: int) -> None: ...
    def is_over(self, tag: tuple[int, int]) -> bool: ...
    def forget(self, replica: int) -> None: ...


class SyncStrategy(Protocol):
    """The seam every strategy fits. `tests/contract/` says what it promises."""

    name: str
    at: At
    every: int
    """Exchange after every so many steps."""

    async def gate(self, k: int) -> int: ...
    async def plan(self, k: int) -> SyncPlan: ...
    async def complete(self, plan: SyncPlan) -> SyncPlan: ...
    def refresh(self, k: int) -> SyncPlan: ...
    def entered(self, k: int) -> None: ...
    def finished(self, plan: SyncPlan, results: Sequence[SyncResult]) -> None: ...
    def left(self, k: int) -> None: ...
    def late(self, silent: list[int], waited_s: float) -> None: ...
    def on_member(self, event: MemberEvent) -> None: ...
    def stats(self) -> dict[str, float]: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...
    def resumed(self) -> None: ...
    def adopt(self, state: State, k: int) -> None: ...


class Plain:
    """What a strategy that never gates, jumps or leaves need not write again."""

    every = 1

    async def gate(self, k: int) -> int:
        """May wait; the iteration to run, more than `k` to jump ahead."""
        return k

    async def complete(self, plan: SyncPlan) -> SyncPlan:
        """The plan with what was not known when it was begun (Hop: the versions to mix)."""
        return plan

    def refresh(self, k: int) -> SyncPlan:
        """After a jump to `k`: what to mix before `k` is entered."""
        return NOTHING

    def entered(self, k: int) -> None:
        """`k` has begun."""

    def finished(self, plan: SyncPlan, results: Sequence[SyncResult]) -> None:
        """The exchange went well at every stage."""

    def left(self, k: int) -> None:
        """The replica is done and will run no step from `k` on."""

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError

    def resumed(self) -> None:
        """All replicas go on from a checkpoint: what came from iterations after it never was."""

    def adopt(self, state: State, k: int) -> None:
        """Join as somebody whose donor has this state and is about to enter `k`."""
        self.load_state_dict(state)

    def late(self, silent: list[int], waited_s: float) -> None:
        """Peers have been silent for a whole deadline; they were asked again."""

    def stats(self) -> dict[str, float]:
        """Counters for the report."""
        return {}
