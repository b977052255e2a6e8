"""Ripples: partial all-reduce. After its step a replica averages with a small group of others.

The group comes as a ticket from the Group Generator (`stages.sync.generator`), or, without one,
from a schedule that is a pure function of rank and step. Within a group parameters move by deltas
whose sum is zero, so the mean of all replicas stays where it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from compressors.base import Packet
from compressors.frame import FrameHeader
from stages.sync.patience import Patience
from stages.sync.post import GENERATOR, Post
from stages.sync.roster import Roster
from stages.sync.strategy import (
    NOTHING,
    At,
    Exchanger,
    MemberEvent,
    Plain,
    State,
    SyncPlan,
    SyncResult,
)
from stages.sync.tickets import SOLO

NUM_ASKS = 3
"""A request is repeated so often; then the replica goes on alone until the next one. A generator
that did not answer then is asked once a step, until it does."""


class Ripples(Plain):
    """The leader of one replica, with tickets of the Group Generator."""

    name = "ripples"
    at: At = "param"

    def __init__(
        self,
        *,
        post: Post,
        exchanges: Sequence[Exchanger],
        every: int = 1,
        patience: Patience | None = None,
    ) -> None:
        self.every = every
        self.epoch = 0
        self.num_orphaned = 0
        """Steps without a group because the generator did not answer."""

        self._post = post
        self._exchanges = exchanges
        self._patience = patience or Patience()
        self._request = 0
        self._asked_for = -1
        self._wanted: asyncio.Future[FrameHeader] | None = None
        self._open: tuple[int, int] | None = None  # epoch, gid that is being executed
        self._cancelled: set[tuple[int, int]] = set()
        self._is_silent = False
        post.handlers["ticket"] = self._on_ticket
        post.handlers["cancel"] = self._on_cancel

    async def plan(self, k: int) -> SyncPlan:
        """The group that the generator says; nobody, if it says nothing."""
        if k != self._asked_for:
            self._asked_for = k
            self._request += 1
        self._open = None
        header = await self._ask()
        if header is None:
            self.num_orphaned += 1
            return NOTHING
        if header.step == SOLO:
            return NOTHING
        self._open = (header.generation, header.step)
        return SyncPlan(
            epoch=header.generation,
            number=header.step,
            op="reduce",
            peers=tuple(header.body["members"]),
            keep=True,
            over=int(header.body["over"]),
            deadline_s=float(header.body["limit"]),
        )

    def finished(self, plan: SyncPlan, results: Sequence[SyncResult]) -> None:
        self._open = None
        self._done(plan.epoch, plan.number, ok=True)

    def left(self, k: int) -> None:
        self._post.send(GENERATOR, "leave", epoch=self.epoch)

    def late(self, silent: list[int], waited_s: float) -> None:
        """The group does not get on: does the generator still know it?"""
        if self._open is not None:
            epoch, gid = self._open
            self._post.send(GENERATOR, "lost", epoch=epoch, number=gid)

    def on_member(self, event: MemberEvent) -> None:
        """The generator hears of it too, and cancels what must be."""
        if event.kind == "dead":
            for exchange in self._exchanges:
                exchange.forget(event.replica)

    def stats(self) -> dict[str, float]:
        return {"orphaned": float(self.num_orphaned), "requests": float(self._request)}

    def state_dict(self) -> State:
        return {
            "epoch": self.epoch,
            "request": self._request,
            "asked_for": self._asked_for,
            "patience": self._patience.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self.epoch = int(state["epoch"])
        self._request = int(state["request"])
        self._asked_for = int(state["asked_for"])
        self._patience.load_state_dict(state["patience"])

    def resumed(self) -> None:
        """The Group Generator begins its first life again."""
        self.epoch = 0

    async def _ask(self) -> FrameHeader | None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        limit_s = self._patience.limit_s
        for count in range(1 if self._is_silent else NUM_ASKS):
            wanted: asyncio.Future[FrameHeader] = loop.create_future()
            self._wanted = wanted
            body = {"req": self._request, "count": self._request - 1}
            self._post.send(GENERATOR, "request", epoch=self.epoch, body=body)
            timer = loop.call_later(limit_s, _give_up, wanted)
            try:
                header = await wanted
            except TimeoutError:
                limit_s *= 2
                continue
            finally:
                timer.cancel()
                self._wanted = None
            self._is_silent = False
            if count:  # which of the questions was answered? Karn: no measure, but a longer limit
                self._patience.gave_up()
            else:
                self._patience.saw(loop.time() - start)
            return header
        self._is_silent = True
        return None

    def _on_ticket(self, header: FrameHeader, packet: Packet | None) -> None:
        tag = (header.generation, header.step)
        if header.generation < self.epoch or tag in self._cancelled:
            return
        if header.generation > self.epoch:  # the generator was restarted
            self.epoch = header.generation
            for exchange in self._exchanges:
                exchange.refuse_before(header.generation)
        wanted = self._wanted
        if header.body["req"] == self._request and wanted is not None and not wanted.done():
            wanted.set_result(header)
        elif header.step != SOLO and tag != self._open and not self._is_satisfied_by(header):
            self._done(*tag, ok=False)

    def _is_satisfied_by(self, header: FrameHeader) -> bool:
        """A ticket that comes a second time, of a group that is over."""
        return any(e.is_over((header.generation, header.step)) for e in self._exchanges)

    def _on_cancel(self, header: FrameHeader, packet: Packet | None) -> None:
        tag = (header.generation, header.step)
        over = {old for old in self._cancelled if any(e.is_over(old) for e in self._exchanges)}
        self._cancelled = (self._cancelled - over) | {tag}
        for exchange in self._exchanges:
            exchange.cancel(*tag)

    def _done(self, epoch: int, gid: int, *, ok: bool) -> None:
        body: dict[str, Any] = {"req": self._request}
        if ok:
            body["sent_s"], self._post.sending_s = self._post.sending_s, 0.0
        else:
            body["ok"] = False
        self._post.send(GENERATOR, "done", epoch=epoch, number=gid, body=body)


def _give_up(wanted: asyncio.Future[FrameHeader]) -> None:
    if not wanted.done():
        wanted.set_exception(TimeoutError("the Group Generator did not answer"))


# --- without a generator -------------------------------------------------------------------------


def ruler(rank: int, step: int, num: int) -> tuple[int, ...]:
    """The ranks that average after step `step`: the aligned block as long as its lowest bit.

    1, 2, 1, 4, 1, 2, 1, 8, …: everybody knows everybody's group, and every block meets in time.
    """
    size = min((step + 1) & -(step + 1), 1 << (num - 1).bit_length())
    start = rank - rank % size
    return tuple(range(start, min(start + size, num)))


def by_node(rank: int, step: int, num: int, per_node: int = 4) -> tuple[int, ...]:
    """Ripples' published schedule for nodes of four: across nodes, within, across, within.

    A last node with fewer takes part as far as it goes: its heads meet the others' as well.
    """
    node, local = divmod(rank, per_node)
    phase = step % 4
    if phase in (1, 3):
        return tuple(range(node * per_node, min((node + 1) * per_node, num)))
    heads = {0: 0, 2: 1}[phase]
    pairs = {0: {2: 3, 3: 2}, 2: {0: 3, 3: 0}}[phase]
    if local == heads:
        return tuple(range(heads, num, per_node))
    other = node * per_node + pairs.get(local, local)
    return tuple(sorted({rank, other})) if other < num else (rank,)


SCHEDULES = {"ruler": ruler, "by-node": by_node}


class StaticRipples(Roster):
    """Groups by schedule: no coordinator, but everybody keeps in step.

    A death moves the ranks, and finds replicas at different iterations: whoever is behind then
    plans groups with some who are past them. Those answer that they are, and the group is skipped.
    """

    name = "ripples-static"
    at: At = "param"

    def __init__(
        self,
        *,
        post: Post,
        exchanges: Sequence[Exchanger],
        members: Sequence[int],
        schedule: str = "ruler",
        every: int = 1,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(post=post, exchanges=exchanges, members=members, patience=patience)
        self.every = every
        self.num_skipped = 0
        """Exchanges given up because a member died in the midst of them."""

        self._schedule = SCHEDULES[schedule]
        self._begun = -1
        self._planned = -1
        self._past = -1
        """The last iteration that was planned before this epoch: it will not be again."""

        self._unanswered: list[FrameHeader] = []
        self._put, self._answer = post.handlers["up"], post.handlers["again"]
        first = dict.fromkeys(("pick", "up", "again"), self._on_letter)
        post.handlers |= {**first, "skip": self._on_skip}

    async def plan(self, k: int) -> SyncPlan:
        self._planned = k
        members = self.members_at(k)
        place = members.index(self._post.replica)
        group = self._schedule(place, k // self.every, len(members))
        peers = tuple(members[rank] for rank in group)
        if k == self._begun:  # it was interrupted: some may have applied it, so nobody repeats it
            self.num_skipped += 1
            for peer in peers:
                if peer != self._post.replica:
                    self._post.send(peer, "skip", epoch=self.epoch, number=k)
            return NOTHING
        if len(peers) < 2:
            return NOTHING
        self._begun = k
        return SyncPlan(
            epoch=self.epoch,
            number=k,
            op="reduce",
            peers=peers,
            keep=True,
            deadline_s=self._patience.limit_s,
        )

    def finished(self, plan: SyncPlan, results: Sequence[SyncResult]) -> None:
        self._begun = -1
        super().finished(plan, results)

    def on_member(self, event: MemberEvent) -> None:
        before = self.epoch
        super().on_member(event)
        if self.epoch > before:
            self._past = self._planned
        waiting, self._unanswered = self._unanswered, []
        for header in waiting:
            self._on_letter(header, None)

    def stats(self) -> dict[str, float]:
        return {"skipped_exchanges": float(self.num_skipped)}

    def _on_letter(self, header: FrameHeader, packet: Packet | None) -> None:
        """Somebody has begun an exchange, or misses a letter of one. Is it past here?"""
        if header.generation == self.epoch and header.step <= self._past:
            self._post.send(header.replica, "skip", epoch=self.epoch, number=header.step)
            return
        if header.generation > self.epoch:  # the news of a death has not come here yet
            self._unanswered.append(header)
        if packet is not None:
            self._put(header, packet)
        elif header.body["op"] == "again":
            self._answer(header, None)

    def _on_skip(self, header: FrameHeader, packet: Packet | None) -> None:
        for exchange in self._exchanges:
            exchange.cancel(header.generation, header.step)
