"""Two replicas meet half way; the one who is asked answers at once, whatever it is computing.

    x_a += (Q_p - Q_a) / 2        x_p += (Q_a - Q_p) / 2

where Q is what the other one reads, so the sum of the two stays what it was under any codec. The
one who is asked speaks for its parameters of the last flush and what has been agreed on since, and
adds that at its next flush. An answer is kept until the other one has it: asked again, it is given
again and counts once. Of a codec that sends few values the one who asks picks which, and the answer
is about the same (`stages.sync.picks`). One that sends few bits says which of the points near the
other's own vector it is (`stages.sync.near`); who is too far from it asks for them in full.
"""

from __future__ import annotations

import asyncio
from typing import Any

from compressors.base import Packet
from compressors.frame import FrameHeader
from stages.lanes import Lane
from stages.sync import near
from stages.sync.near import Near
from stages.sync.payload import Coder
from stages.sync.picks import Picks, only
from stages.sync.post import Inbox, Kept, Post
from stages.sync.strategy import State, SyncPlan, SyncResult


class Swap:
    """The meetings of one stage."""

    def __init__(
        self,
        *,
        post: Post,
        inbox: Inbox,
        coder: Coder,
        lane: Lane,
        picks: Picks | None = None,
        nearness: Near | None = None,
    ) -> None:
        """`picks` of a codec that sends few values, `nearness` of one that sends few bits."""
        self._post = post
        self._inbox = inbox
        self._coder = coder
        self._lane = lane
        self._picks = picks
        self._near = nearness
        self._base: Any = None
        self._pending: Any = None
        self._answers: dict[int, tuple[tuple[int, int], Kept | None]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self.num_answered = 0
        post.handlers["meet"] = self._on_meet
        post.handlers["got"] = self._on_got

    def open(self, vector: Any) -> None:
        """What this stage speaks for before its first flush."""
        self._base = vector

    @property
    def base(self) -> Any:
        """What this stage speaks for, the way from the anchor."""
        return self._base

    async def meet(self, plan: SyncPlan, vector: Any) -> SyncResult:
        """At a flush: what others agreed on with us, and, if there is a peer, with that one."""
        coder, tag = self._coder, (plan.epoch, plan.number)
        async with self._turn:
            agreed, self._pending = self._pending, None
            self._base = vector if agreed is None else coder.combine([vector, agreed], [1.0, 1.0])
        if not plan.peers:
            return SyncResult(delta=agreed, contributors=(self._post.replica,))
        (peer,) = plan.peers
        question, own = await self._lane.run("encode", "swap", -1, self._question, peer)
        nbytes = self._inbox.send(
            peer, "meet", tag, part=0, packet=question.packet, full=question.full
        )
        other = None
        while other is None:
            (answer,) = await self._inbox.collect("met", tag, [(0, peer)], limit_s=plan.deadline_s)
            other = await self._lane.run("decode", "swap", -1, self._read, answer, self._base)
            if other is None:
                self._inbox.ask_in_full(peer, "met", tag, part=0)
        self._inbox.forget_sent(peer)  # the answer proves that the question came
        self._post.send(peer, "got", epoch=tag[0], number=tag[1])
        half = self._half(other, own, self._base)
        self._base = coder.combine([self._base, half], [1.0, 1.0])
        if self._picks is not None:
            self._picks.averaged(self._base, own != 0)
        delta = half if agreed is None else coder.combine([agreed, half], [1.0, 1.0])
        return SyncResult(
            delta=delta, contributors=tuple(sorted((self._post.replica, peer))), nbytes=nbytes
        )

    def again(self, header: FrameHeader) -> None:
        """The peer lacks our answer; perhaps its question never came."""
        tag, found = (header.generation, header.step), self._answers.get(header.replica)
        if found is not None and found[0] == tag:
            self._answer(header.replica, tag, found[1], header)
        else:
            body = {"what": "meet"}
            self._post.send(header.replica, "again", epoch=tag[0], number=tag[1], body=body)

    def forget(self, replica: int) -> None:
        """A replica is gone."""
        self._answers.pop(replica, None)

    def state_dict(self) -> State:
        return {"pending": self._pending, "base": self._base}

    def load_state_dict(self, state: State) -> None:
        self._pending = state["pending"]
        self._base = state["base"]

    def _on_meet(self, header: FrameHeader, packet: Packet | None) -> None:
        assert packet is not None
        task = asyncio.create_task(self._take_part(header, packet), name="answer")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _on_got(self, header: FrameHeader, packet: Packet | None) -> None:
        """The answer arrived: what is kept is that it was given. A word that is lost costs memory
        until the next meeting."""
        tag, found = (header.generation, header.step), self._answers.get(header.replica)
        if found is not None and found[0] == tag:
            self._answers[header.replica] = (tag, None)

    async def _take_part(self, header: FrameHeader, packet: Packet) -> None:
        source, tag = header.replica, (header.generation, header.step)
        async with self._turn:
            found = self._answers.get(source)
            if found is not None and tag <= found[0]:
                if tag == found[0]:
                    self._answer(source, tag, found[1], header)
                return
            agreed = await self._lane.run("decode", "swap", -1, self._half_way, source, packet)
            if agreed is None:
                self._inbox.ask_in_full(source, "meet", tag, part=0)
                return
            answer, half = agreed
            self._pending = (
                half
                if self._pending is None
                else self._coder.combine([self._pending, half], [1.0, 1.0])
            )
            self._answers[source] = (tag, answer)
            self.num_answered += 1
            self._answer(source, tag, answer, header)

    def _question(self, peer: int) -> tuple[Kept, Any]:
        coder, base = self._coder, self._base
        if self._picks is not None:
            _, read = coder.encode("pick", self._picks.scores(base))
            base = only(base, read != 0)
        return self._encode(f"meet/{peer}", base)

    def _half_way(self, source: int, packet: Packet) -> tuple[Kept, Any] | None:
        """The answer and what it means here; None if the question cannot be read."""
        coder = self._coder
        current = self._base
        if self._pending is not None:
            current = coder.combine([self._base, self._pending], [1.0, 1.0])
        other = self._read(packet, current)
        if other is None:
            return None
        if self._picks is not None:
            current = only(current, other != 0)
        answer, own = self._encode(f"met/{source}", current)
        coder.commit()
        return answer, self._half(other, own, current)

    def _half(self, other: Any, own: Any, vector: Any) -> Any:
        if self._near is not None:
            self._near.saw(other, vector)
        return self._coder.combine([other, own], [0.5, -0.5])

    def _encode(self, slot: str, vector: Any) -> tuple[Kept, Any]:
        """The letter, and what the other one will read in it."""
        found = None if self._near is None else self._near.encode(vector)
        if found is None:
            packet, read = self._coder.encode(slot, vector)
            return Kept(packet), read
        packet, read = found
        return Kept(packet, self._coder.encode("full", read, exact=True)[0]), read

    def _read(self, packet: Packet, own: Any) -> Any:
        """What the other one says; None if it is too far from here to be told in few bits."""
        if self._near is not None and packet.codec == near.NAME:
            return near.decode(packet, own)
        return self._coder.decode(packet)

    def _answer(
        self, target: int, tag: tuple[int, int], answer: Kept | None, header: FrameHeader
    ) -> None:
        if answer is None:
            return  # it has it
        packet = answer.answer(header)
        self._post.send(target, "met", epoch=tag[0], number=tag[1], packet=packet)
