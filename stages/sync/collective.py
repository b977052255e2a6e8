"""The mean over a group: pieces are gathered at owners, averaged there, and given back.

`direct`: each member sends piece i to the i-th member, which averages and sends the mean to all.
`ring`: partial sums travel round the ring, then the means do. Both send 2 (g-1)/g of the vector
from each member; the ring takes 2 (g-1) latencies, the direct way 2.

Rounding. With `keep`, whoever encodes a value keeps what the encoding lost, so the sum over the
members is what it was, to the last bit but for float addition: a member adds `mean - read` where
`read` is its own message as the others read it; an owner's loss is that of all g members, so it
keeps g times that. Without `keep` all members end with the same bits and the loss is the codec's
(error feedback, if it has any). Sums run in the order of ids, never in that of arrival.

A codec that sends few values of a vector must send the same ones at all members, if they `keep` the
rest (`stages.sync.picks`): the owner of a piece picks, which takes a letter and a latency more. One
of few bits says which of the points near the reader's own vector it is (`stages.sync.near`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.lanes import Lane
from stages.sync import near
from stages.sync.near import Near
from stages.sync.payload import Coder
from stages.sync.picks import Picks, only
from stages.sync.post import Inbox
from stages.sync.strategy import SyncPlan, SyncResult

OPS = ("pick", "up", "down", "pass", "share")


class Collective:
    """The reduce of one stage."""

    def __init__(
        self,
        *,
        me: int,
        inbox: Inbox,
        coder: Coder,
        lane: Lane,
        picks: Picks | None = None,
        nearness: Near | None = None,
    ) -> None:
        """`picks` of a codec that sends few values, `nearness` of one that sends few bits."""
        self._me = me
        self._inbox = inbox
        self._coder = coder
        self._lane = lane
        self._picks = picks
        self._near = nearness

    async def reduce(self, plan: SyncPlan, vector: Any) -> SyncResult:
        """The mean of all members' vectors, or what takes the own vector there."""
        if plan.peers == (self._me,):
            return SyncResult(value=vector, delta=None, contributors=plan.peers)
        way = self._ring if plan.route == "ring" else self._direct
        coder, picked, nbytes = self._coder, None, 0
        if plan.keep and self._picks is not None:
            picked, nbytes = await self._agree_on_picks(plan, vector, self._picks)
            vector = only(vector, picked)
        value = coder.blank(vector)
        kept, sent = await way(plan, vector, value)
        nbytes += sent
        if not plan.keep:
            return SyncResult(value=value, contributors=plan.peers, nbytes=nbytes)
        if coder.is_exact:  # nothing was lost
            delta = coder.combine([value, vector], [1.0, -1.0])
        else:
            delta = coder.combine([value, coder.join(kept), vector], [1.0, 1.0, -1.0])
        if picked is not None and self._picks is not None:
            self._picks.averaged(coder.combine([vector, delta], [1.0, 1.0]), picked)
        if self._near is not None:  # two members are at most twice as far apart as from their mean
            await self._lane.run("decode", "near", -1, self._near.saw, value, vector, 2.0)
        return SyncResult(delta=delta, contributors=plan.peers, nbytes=nbytes)

    async def _agree_on_picks(self, plan: SyncPlan, vector: Any, picks: Picks) -> tuple[Any, int]:
        """Of which coordinates all members speak: of each piece its owner says so."""
        members, coder, tag = plan.peers, self._coder, (plan.epoch, plan.number)
        num = len(members)
        place = members.index(self._me)
        scores = await self._lane.run("encode", "pick", -1, picks.scores, vector)
        piece = coder.cut(scores, num)[place]
        packet, own = await self._encode(f"pick/{num}/{place}", piece, plan)
        others = _others(place, num)
        nbytes = self._inbox.send_all(
            [members[index] for index in others], "pick", tag, part=place, packet=packet
        )
        packets = await self._inbox.collect(
            "pick", tag, [(index, members[index]) for index in others], limit_s=plan.deadline_s
        )
        read = {place: own}
        for index, packet in zip(others, packets, strict=True):
            read[index] = await self._read(packet)
        return coder.join([read[index] for index in range(num)]) != 0, nbytes

    async def _direct(self, plan: SyncPlan, vector: Any, value: Any) -> tuple[list[Any], int]:
        members, coder, tag = plan.peers, self._coder, (plan.epoch, plan.number)
        num = len(members)
        place = members.index(self._me)
        pieces = coder.cut(vector, num)
        kept = list(pieces)  # placeholders; every one is replaced below
        nbytes = 0
        for index in _others(place, num):
            packet, read = await self._encode(f"up/{num}/{index}", pieces[index], plan)
            kept[index] = self._lost(pieces[index], read, 1)
            full = self._full(packet, read)
            nbytes += self._inbox.send(
                members[index], "up", tag, part=index, packet=packet, full=full
            )
        wanted = [(place, member) for member in members if member != self._me]
        packets = await self._inbox.collect("up", tag, wanted, limit_s=plan.deadline_s)
        packets = await self._readable("up", plan, wanted, packets, [pieces[place]] * len(wanted))
        mean = await self._lane.run("decode", "reduce", -1, self._mean, packets, pieces, place)
        packet, read = await self._encode(f"down/{num}/{place}", mean, plan, num)
        kept[place] = self._lost(mean, read, num)
        next_first = [members[index] for index in _others(place, num)]
        full = self._full(packet, read)
        nbytes += self._inbox.send_all(
            next_first, "down", tag, part=place, packet=packet, full=full
        )
        await self._place(value, place, num, read)  # while the others do the same
        wanted = [(index, members[index]) for index in range(num) if index != place]
        packets = await self._inbox.collect("down", tag, wanted, limit_s=plan.deadline_s)
        own = [pieces[index] for index, _ in wanted]
        packets = await self._readable("down", plan, wanted, packets, own)
        for (index, _), packet in zip(wanted, packets, strict=True):
            await self._place(value, index, num, await self._read(packet))
        return kept, nbytes

    async def _readable(
        self,
        op: str,
        plan: SyncPlan,
        wanted: Sequence[tuple[int, int]],
        packets: list[Any],
        own: Sequence[Any],
    ) -> list[Any]:
        """Packets that can be read on their own, in place of those that are about `own`."""
        if self._near is None:
            return packets
        tag, found = (plan.epoch, plan.number), []
        for (part, sender), packet, vector in zip(wanted, packets, own, strict=True):
            while packet.codec == near.NAME:
                read = await self._lane.run("decode", op, -1, near.decode, packet, vector)
                if read is not None:
                    packet, _ = self._coder.encode(op, read, exact=True)
                    break
                self._inbox.ask_in_full(sender, op, tag, part=part)
                (packet,) = await self._inbox.collect(
                    op, tag, [(part, sender)], limit_s=plan.deadline_s
                )
            found.append(packet)
        return found

    def _full(self, packet: Any, read: Any) -> Any:
        """The letter for whoever cannot read it: what it says, as it is."""
        if self._near is None or packet.codec != near.NAME:
            return None
        return self._coder.encode("full", read, exact=True)[0]

    def _mean(self, packets: list[Any], pieces: list[Any], place: int) -> Any:
        vectors = [self._coder.read(packet) for packet in packets]
        vectors.insert(place, pieces[place])
        return self._coder.mean(vectors)

    async def _ring(self, plan: SyncPlan, vector: Any, value: Any) -> tuple[list[Any], int]:
        members, coder, tag = plan.peers, self._coder, (plan.epoch, plan.number)
        num = len(members)
        place = members.index(self._me)
        after, before = members[(place + 1) % num], members[(place - 1) % num]
        pieces = coder.cut(vector, num)
        kept = list(pieces)
        nbytes = 0
        part = place
        total = pieces[place]
        for _ in range(num - 1):
            packet, read = await self._encode(f"pass/{num}/{part}", total, plan)
            kept[part] = self._lost(total, read, 1)
            nbytes += self._inbox.send(after, "pass", tag, part=part, packet=packet)
            part = (part - 1) % num
            (packet,) = await self._inbox.collect(
                "pass", tag, [(part, before)], limit_s=plan.deadline_s
            )
            total = coder.combine([await self._read(packet), pieces[part]], [1.0, 1.0])
        mean = coder.combine([total], [1.0 / num])
        packet, read = await self._encode(f"share/{num}/{part}", mean, plan)
        kept[part] = self._lost(mean, read, num)
        for _ in range(num - 1):
            # The packet goes on as it came: everybody reads the owner's bits.
            nbytes += self._inbox.send(after, "share", tag, part=part, packet=packet)
            await self._place(value, part, num, read)
            part = (part - 1) % num
            (packet,) = await self._inbox.collect(
                "share", tag, [(part, before)], limit_s=plan.deadline_s
            )
            read = await self._read(packet)
        await self._place(value, part, num, read)
        return kept, nbytes

    async def _encode(
        self, slot: str, vector: Any, plan: SyncPlan, num: int = 1
    ) -> tuple[Any, Any]:
        """The packet, and what `num` others will read in it."""
        if plan.exact or self._coder.is_exact:  # a view, no work for a lane
            return self._coder.encode(slot, vector, exact=True)
        if self._near is not None and plan.keep and plan.route == "direct":
            found = await self._lane.run("encode", slot, -1, self._near.encode, vector, num)
            if found is not None:
                return found
        return await self._lane.run("encode", slot, -1, self._coder.encode, slot, vector)

    def _lost(self, meant: Any, read: Any, times: int) -> Any:
        """What the others do not know of, for as many of them as it was meant for."""
        if self._coder.is_exact:
            return meant
        return self._coder.combine([meant, read], [float(times), -float(times)])

    async def _place(self, value: Any, index: int, num: int, piece: Any) -> None:
        await self._lane.run("decode", "place", -1, self._coder.place, value, index, num, piece)

    async def _read(self, packet: Any) -> Any:
        if self._coder.is_exact:  # a view
            return self._coder.read(packet)
        return await self._lane.run("decode", "reduce", -1, self._coder.read, packet)


def _others(place: int, num: int) -> list[int]:
    """All places but one's own, the next first: not everybody writes to member 0 at once."""
    return [(place + shift) % num for shift in range(1, num)]
