"""AD-PSGD: after its step a replica meets one other half way; nobody waits for more than that.

Every second replica asks, the others answer, so questions never go round in a circle. Who is which
goes by the place among those that live, or nobody might be left to answer. Whom to ask is drawn
from the seed, the replica and the step. If the one who was asked dies, another is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.sync.exchange import Exchange
from stages.sync.patience import Patience, saw_exchange
from stages.sync.post import Post
from stages.sync.slowness import draw
from stages.sync.strategy import At, MemberEvent, Plain, State, SyncPlan, SyncResult


class AdPsgd(Plain):
    """The leader of one replica."""

    name = "ad-psgd"
    at: At = "param"

    def __init__(
        self,
        *,
        post: Post,
        exchanges: Sequence[Exchange],
        members: Sequence[int],
        every: int = 1,
        seed: int = 0,
        patience: Patience | None = None,
    ) -> None:
        self.every = every
        self.epoch = 0
        self.seed = seed
        self.num_met = 0
        self._post = post
        self._exchanges = exchanges
        self._members = tuple(sorted(members))
        self._patience = patience or Patience()
        self._number = 0
        self._open: SyncPlan | None = None

    async def plan(self, k: int) -> SyncPlan:
        """The one to ask; nobody for those who answer, who only take in what was agreed on."""
        self._number += 1
        me = self._post.replica
        living = sorted({*self._members, me})
        passive = living[1::2]
        peers: tuple[int, ...] = ()
        if me not in passive and passive:
            peers = (passive[int(draw(self.seed, me, self._number, "peer") * len(passive))],)
        self._open = SyncPlan(
            epoch=0,
            number=self._number,
            op="swap",
            peers=peers,
            deadline_s=self._patience.limit_s,
        )
        return self._open

    def finished(self, plan: SyncPlan, results: Sequence[SyncResult]) -> None:
        self._open = None
        if plan.peers:
            self.num_met += 1
            saw_exchange(self._patience, results)

    def on_member(self, event: MemberEvent) -> None:
        if event.epoch <= self.epoch:
            return
        self.epoch = event.epoch
        if event.kind == "joined":
            self._members = tuple(sorted({*self._members, event.replica}))
            return
        self._members = tuple(m for m in self._members if m != event.replica)
        for exchange in self._exchanges:
            exchange.forget(event.replica)
            if self._open is not None and event.replica in self._open.peers:
                exchange.cancel(self._open.epoch, self._open.number)

    def stats(self) -> dict[str, float]:
        answered = self._exchanges[0].swap.num_answered
        return {"met": float(self.num_met), "answered": float(answered)}

    def state_dict(self) -> State:
        return {
            "epoch": self.epoch,
            "members": list(self._members),
            "number": self._number,
            "patience": self._patience.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self.epoch = int(state["epoch"])
        self._members = tuple(state["members"])
        self._number = int(state["number"])
        self._patience.load_state_dict(state["patience"])
