"""All-reduce: everybody waits for everybody, and all gradients become their mean. The reference.

After a death the survivors repeat the step with the gradients that they kept, and divide by those
who contributed. Some of them may have the result of the step already: then the others fetch it,
so that a step is never made of two different sums.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from compressors.base import Packet
from compressors.frame import FrameHeader
from stages.sync.patience import Patience
from stages.sync.post import Post
from stages.sync.roster import Roster
from stages.sync.strategy import At, Exchanger, MemberEvent, State, SyncPlan, SyncResult


class AllReduce(Roster):
    """Exact where the codec is; `route` is `ring` (the reference) or `direct`."""

    name = "allreduce"
    at: At = "grad"

    def __init__(
        self,
        *,
        post: Post,
        exchanges: Sequence[Exchanger],
        members: Sequence[int],
        route: Literal["ring", "direct"] = "ring",
        patience: Patience | None = None,
    ) -> None:
        super().__init__(post=post, exchanges=exchanges, members=members, patience=patience)
        self.route: Literal["ring", "direct"] = route
        self.num_retries = 0
        self._begun: tuple[int, int] | None = None  # number, epoch of a plan without a result
        self._roll: dict[tuple[int, int], dict[int, bool]] = {}
        self._called = asyncio.Event()
        self._unanswered: list[FrameHeader] = []
        post.handlers["roll"] = self._on_roll
        post.handlers["here"] = self._on_here

    async def plan(self, k: int) -> SyncPlan:
        """All members; or, when the step was cut short by a death, whoever has its result."""
        while True:
            epoch, members = self.epoch, self.members_at(k)
            if self._begun is not None and self._begun[0] == k and self._begun[1] < epoch:
                self.num_retries += 1
                donor = await self._call_the_roll(k, members)
                if epoch != self.epoch:
                    continue
                if donor is not None:
                    return self._make(k, op="fetch", peers=(donor,))
            self._begun = (k, epoch)
            return self._make(k, op="reduce", peers=members)

    def finished(self, plan: SyncPlan, results: Sequence[SyncResult]) -> None:
        self._begun = None
        super().finished(plan, results)

    def on_member(self, event: MemberEvent) -> None:
        super().on_member(event)
        waiting, self._unanswered = self._unanswered, []
        for header in waiting:
            self._on_roll(header, None)
        self._called.set()

    def stats(self) -> dict[str, float]:
        return {"retries": float(self.num_retries)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._begun = None

    def _make(self, k: int, *, op: Literal["reduce", "fetch"], peers: tuple[int, ...]) -> SyncPlan:
        return SyncPlan(
            epoch=self.epoch,
            number=k,
            op=op,
            peers=peers,
            route=self.route,
            deadline_s=self._patience.limit_s,
        )

    # --- who has the result of a step that was cut short ---------------------------------------

    async def _call_the_roll(self, k: int, members: tuple[int, ...]) -> int | None:
        """The lowest replica that has finished `k`; None if nobody has, or the epoch changed."""
        tag, me = (self.epoch, k), self._post.replica
        others = [member for member in members if member != me]
        answers = self._roll.setdefault(tag, {})
        limit_s = self._patience.limit_s
        while tag[0] == self.epoch and not all(other in answers for other in others):
            for other in others:
                if other not in answers:
                    self._post.send(other, "roll", epoch=tag[0], number=k)
            self._called.clear()
            try:
                async with asyncio.timeout(limit_s):
                    while tag[0] == self.epoch and not all(o in answers for o in others):
                        await self._called.wait()
                        self._called.clear()
            except TimeoutError:
                limit_s *= 2  # ask again
        del self._roll[tag]
        return min((other for other in others if answers.get(other)), default=None)

    def _on_roll(self, header: FrameHeader, packet: Packet | None) -> None:
        if header.generation > self.epoch:
            self._unanswered.append(header)  # the news has not come here yet
            return
        self._post.send(
            header.replica,
            "here",
            epoch=header.generation,
            number=header.step,
            body={"has": all(e.last_number >= header.step for e in self._exchanges)},
        )

    def _on_here(self, header: FrameHeader, packet: Packet | None) -> None:
        answers = self._roll.get((header.generation, header.step))
        if answers is not None:
            answers[header.replica] = bool(header.body["has"])
            self._called.set()
