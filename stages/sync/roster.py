"""Strategies in which everybody must know who takes part in an iteration, and change at the same.

Whoever dies is gone from the next plan on; whoever comes takes part from an iteration that all hear
of in time, so that nothing that runs need be cut short.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.sync.patience import Patience, saw_exchange
from stages.sync.post import Post
from stages.sync.strategy import Exchanger, MemberEvent, Plain, State, SyncPlan, SyncResult


class Roster(Plain):
    """The members of a lock-step strategy, and how long to wait for them."""

    def __init__(
        self,
        *,
        post: Post,
        exchanges: Sequence[Exchanger],
        members: Sequence[int],
        patience: Patience | None = None,
    ) -> None:
        self.epoch = 0
        self._post = post
        self._exchanges = exchanges
        self._members = tuple(sorted(members))
        self._coming: dict[int, int] = {}  # newcomers and their first iteration
        self._patience = patience or Patience()

    def members_at(self, k: int) -> tuple[int, ...]:
        """Who takes part in iteration `k`."""
        coming = [replica for replica, since in self._coming.items() if since <= k]
        return tuple(sorted({*self._members, *coming}))

    def finished(self, plan: SyncPlan, results: Sequence[SyncResult]) -> None:
        saw_exchange(self._patience, results)

    def on_member(self, event: MemberEvent) -> None:
        """From the next plan on the others go on with the members that are left, or come."""
        if event.epoch <= self.epoch:
            return
        if event.kind == "joined":
            self._coming[event.replica] = event.since
            return
        self.epoch = event.epoch
        self._members = tuple(m for m in self._members if m != event.replica)
        self._coming.pop(event.replica, None)
        for exchange in self._exchanges:
            exchange.refuse_before(event.epoch)
            exchange.forget(event.replica)

    def state_dict(self) -> State:
        return {
            "epoch": self.epoch,
            "members": list(self._members),
            "coming": {str(replica): since for replica, since in self._coming.items()},
            "patience": self._patience.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self.epoch = int(state["epoch"])
        self._members = tuple(state["members"])
        self._coming = {int(replica): since for replica, since in state["coming"].items()}
        self._patience.load_state_dict(state["patience"])
