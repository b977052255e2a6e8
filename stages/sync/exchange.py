"""Moves the shard of one stage as a plan says; knows links, codec and deadlines, no algorithm.

Path: stages.sync.strategy -> stages.sync.exchange -> stages.sync.post

    reduce    the mean over a group                         stages.sync.collective
    mailbox   push to neighbours, mix what they pushed      stages.sync.updates
    swap      meet one peer half way                        stages.sync.swap
    fetch     the result of a finished reduce, from a member that has it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from compressors.base import Packet
from compressors.frame import FrameHeader
from stages.lanes import Lane
from stages.sync.collective import OPS, Collective
from stages.sync.near import Near
from stages.sync.payload import Coder
from stages.sync.picks import Picks
from stages.sync.post import Inbox, Post
from stages.sync.strategy import State, SyncPlan, SyncResult
from stages.sync.swap import Swap
from stages.sync.updates import Updates

T = TypeVar("T")


class AtOnce:
    """A lane without a thread: work happens when it is asked for."""

    async def run(
        self, phase: str, name: str, micro_batch: int, work: Callable[..., T], *args: object
    ) -> T:
        return work(*args)


@dataclass(slots=True)
class Handle:
    """An exchange that has begun."""

    plan: SyncPlan
    task: asyncio.Task[SyncResult]


class Exchange:
    """The exchanges of one stage, one at a time."""

    def __init__(
        self, post: Post, coder: Coder, *, lane: Lane | None = None, history: int = 8
    ) -> None:
        """`history` published updates are kept for neighbours that lost one."""
        self.post = post
        self.coder = coder
        self.inbox = Inbox(post, (*OPS, "gift", "met"))
        self._lane: Lane = AtOnce() if lane is None else lane
        self._picks = Picks(coder.density) if coder.density < 1 else None
        self._near = Near(coder.near_bits) if coder.near_bits else None
        parts: dict[str, Any] = {
            "inbox": self.inbox, "coder": coder, "lane": self._lane, "picks": self._picks,
            "nearness": self._near,
        }  # fmt: skip
        self._collective = Collective(me=post.replica, **parts)
        self.updates = Updates(post=post, coder=coder, lane=self._lane, history=history)
        self.swap = Swap(post=post, **parts)
        self.anchor: Any = None
        """What all replicas started from; lossy codecs code the way from it, which is smaller, as
        long as they do not know how far from here the others are."""

        self._work: dict[str, Callable[[SyncPlan, Any], Coroutine[Any, Any, SyncResult]]] = {
            "reduce": self._collective.reduce,
            "mailbox": self.updates.mix,
            "swap": self.swap.meet,
            "fetch": self._fetch,
        }
        self._last: tuple[int, Any] = (-1, None)
        post.handlers["give"] = self._give
        post.handlers["again"] = self._again

    @property
    def last_number(self) -> int:
        """The last reduce that this stage has the result of."""
        return self._last[0]

    def open(self, vector: Any) -> None:
        """The parameters of this stage that all replicas begin with."""
        self.anchor = None if self.coder.is_exact else vector
        self.swap.open(self._from_anchor(vector))

    def publish(self, plan: SyncPlan, vector: Any) -> None:
        """Push to the mailboxes of `plan.peers`; never waits. `vector` must not change."""
        self.updates.publish(plan, vector)

    def begin(self, plan: SyncPlan, vector: Any) -> Handle:
        """Start at once; `vector` must not change before `finish` returns."""
        return Handle(plan, asyncio.create_task(self._run(plan, vector), name=str(plan.op)))

    async def finish(self, handle: Handle) -> SyncResult:
        """The result; raises `Interrupted` if there will be none."""
        return await handle.task

    def refuse_before(self, epoch: int) -> None:
        """End what belongs to an earlier epoch, running or still to come."""
        self.inbox.refuse_before(epoch)

    def cancel(self, epoch: int, number: int) -> None:
        """End one exchange, running or still to come."""
        self.inbox.cancel((epoch, number))

    def forget(self, replica: int) -> None:
        """A replica is gone: what it might have asked for is not kept."""
        self.inbox.forget_sent(replica)
        self.swap.forget(replica)

    def is_over(self, tag: tuple[int, int]) -> bool:
        """This stage has finished that exchange, or a later one."""
        return self.inbox.is_over(tag)

    def state_dict(self) -> State:
        return {
            "anchor": self.anchor,
            "coder": self.coder.state_dict(),
            "updates": self.updates.state_dict(),
            "swap": self.swap.state_dict(),
            **({} if self._picks is None else {"picks": self._picks.state_dict()}),
            **({} if self._near is None else {"near": self._near.state_dict()}),
        }

    def load_state_dict(self, state: State) -> None:
        self.anchor = state["anchor"]
        self.swap.load_state_dict(state["swap"])
        self.coder.load_state_dict(state["coder"])
        self.updates.load_state_dict(state["updates"])
        if self._picks is not None and "picks" in state:
            self._picks.load_state_dict(state["picks"])
        if self._near is not None and "near" in state:
            self._near.load_state_dict(state["near"])

    def adopt(self, state: State) -> None:
        """Join with what all replicas know, from a donor that has this state."""
        self.anchor = state["anchor"]
        self.swap.open(state["swap"]["base"])
        if self._near is not None and "near" in state:
            self._near.load_state_dict(state["near"])

    async def _run(self, plan: SyncPlan, vector: Any) -> SyncResult:
        start = asyncio.get_running_loop().time()
        if plan.over >= 0:
            self.inbox.release(plan.epoch, plan.over)
        if plan.keep or plan.op == "swap":
            vector = self._from_anchor(vector)
        try:
            result = await self._work[plan.op](plan, vector)
            if plan.op == "mailbox":
                return result
            self.inbox.check((plan.epoch, plan.number))
        except BaseException:
            self.coder.abort()
            raise
        self.coder.commit()
        has_loss = self.inbox.loss_of((plan.epoch, plan.number)) > 0
        self.inbox.close((plan.epoch, plan.number))
        if result.value is not None:
            self._last = (plan.number, result.value)
        waited_s = asyncio.get_running_loop().time() - start
        return SyncResult(
            value=result.value,
            delta=result.delta,
            contributors=result.contributors,
            nbytes=result.nbytes,
            waited_s=waited_s,
            has_loss=has_loss,
        )

    def _from_anchor(self, vector: Any) -> Any:
        """Deltas do not depend on what is subtracted from everybody."""
        if self.anchor is None:
            return vector
        return self.coder.combine([vector, self.anchor], [1.0, -1.0])

    async def _fetch(self, plan: SyncPlan, vector: Any) -> SyncResult:
        (donor,) = plan.peers
        self.post.send(donor, "give", epoch=plan.epoch, number=plan.number)
        (packet,) = await self.inbox.collect(
            "gift", (plan.epoch, plan.number), [(0, donor)], limit_s=plan.deadline_s
        )
        return SyncResult(value=self.coder.decode(packet), contributors=plan.peers)

    def _give(self, header: FrameHeader, packet: Packet | None) -> None:
        number, value = self._last
        if header.step == number:
            gift, _ = self.coder.encode("gift", value, exact=True)
            self.inbox.send(
                header.replica, "gift", (header.generation, number), part=0, packet=gift
            )

    def _again(self, header: FrameHeader, packet: Packet | None) -> None:
        if header.body["what"] == "gift":  # the question may have been lost, not the answer
            self._give(header, packet)
        elif header.body["what"] == "met":
            self.swap.again(header)
        else:
            self.inbox.answer(header, packet)
