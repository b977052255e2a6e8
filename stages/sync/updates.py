"""The mailbox of one stage: neighbours push their parameters, tagged; the mix takes them by tag.

An update of a lossy codec is a difference against what the sender published before, its *public
copy*, which every neighbour holds too; what rounding loses stays in the difference to the next
one. Each letter names the tag it builds on, so letters may come in any order and more than once. A
receiver that lacks the base asks for it at once and gets a cold one, the public copy as it is, or,
where that is forgotten, the newest. Exact codecs send it always.

Mixing with fixed weights and public copies, `x_i += sum_j W_ij (public_j - public_i)`, keeps the
mean of the replicas exact, whatever the codec loses. Where most values are not sent at all a public
copy is many iterations old, and going the whole way towards it at each of them overshoots further
every time: the way is then a share of it, as in CHOCO, `x_i += PULL density sum_j W_ij (...)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from compressors.base import Packet
from compressors.frame import FrameHeader
from stages.lanes import Lane
from stages.sync.payload import Coder
from stages.sync.post import LOST, Post
from stages.sync.strategy import State, SyncPlan, SyncResult

START = -1
"""The tag before the first."""


PULL = 1.5
"""Times the density. 1 to 2 agree soonest, on a ring as on a complete graph, at densities from 0.01
to 0.3; 3 parts a complete graph of 8 for good."""


def spent(mixed: int, tag: int) -> int:
    """Versions before this will not be mixed any more, once `mixed` was at iteration `tag`.

    A neighbour that joins is mixed before it counts: perhaps with a version from after `tag`, and
    those between will still be waited for.
    """
    return min(mixed, tag + 1)


class Updates:
    """What this stage published, and what its neighbours did."""

    def __init__(self, *, post: Post, coder: Coder, lane: Lane, history: int = 8) -> None:
        """`history` published versions are kept for neighbours that lost one."""
        self._post = post
        self._coder = coder
        self._lane = lane
        self._history = history
        self._pull = min(1.0, PULL * coder.density) if coder.density < 1 else 1.0
        self._published: dict[int, Any] = {}
        self._tag = START
        self._sent_to: dict[int, int] = {}
        self._versions: dict[int, dict[int, Any]] = {}
        self._floor: dict[int, int] = {}
        self._early: dict[int, dict[int, tuple[FrameHeader, Packet]]] = {}
        """By source and tag: differences whose base is not here, the latest `history` of them."""

        self._reading: set[tuple[int, int]] = set()  # source and tag of what is being decoded
        self._busy: asyncio.Task[None] | None = None
        self._decoding: set[asyncio.Task[None]] = set()
        self.num_duplicates = 0
        self.lost: set[tuple[int, int]] = set()
        """Source and tag of updates that are here because they were asked for again."""

        self.on_update: Callable[[int, int, int], None] = lambda source, tag, before: None
        """Hears `(source, tag, the source's tag before it)` of every update that is here."""

        post.handlers["update"] = self._on_update
        post.handlers["want"] = self._on_want

    def publish(self, plan: SyncPlan, vector: Any) -> None:
        """Push the parameters of iteration `plan.number` to `plan.peers`. Never waits."""
        before = self._busy
        self._busy = asyncio.create_task(self._publish(plan, vector, before), name="publish")

    async def mix(self, plan: SyncPlan, own: Any) -> SyncResult:
        """What takes the own vector to the mix of the versions that the plan names."""
        if self._busy is not None:
            await self._busy
        me = self._post.replica
        base = self._published[plan.versions[me]] if me in plan.versions else own
        vectors, weights = [], []
        for source, weight in plan.weights.items():
            tag = plan.versions.get(source)
            # A neighbour that never spoke, or has just gone, counts as oneself.
            if tag is not None and source in self._versions:
                vectors.append(self._versions[source][tag])
                weights.append(self._pull * weight)
        if not vectors:
            return SyncResult(contributors=(me,))
        delta = self._coder.combine([*vectors, base], [*weights, -sum(weights)])
        return SyncResult(delta=delta, contributors=tuple(sorted({me, *plan.versions})))

    def forget_before(self, source: int, tag: int) -> None:
        """Versions of a neighbour older than `tag` will not be asked for."""
        self._floor[source] = max(tag, self._floor.get(source, START))
        versions = self._versions.get(source, {})
        newest = max(versions, default=START)
        for old in [t for t in versions if t < tag and t != newest]:
            del versions[old]
        early = self._early.get(source, {})
        for old in [t for t in early if t < tag]:
            del early[old]
        if self.lost:
            self.lost = {(j, t) for j, t in self.lost if j != source or t >= tag}

    def drop(self, source: int) -> None:
        """A neighbour is gone."""
        for table in (self._versions, self._early, self._sent_to, self._floor):
            table.pop(source, None)

    def ask(self, source: int, tag: int) -> None:
        """An update did not come: ask for it, as it is."""
        self._post.send(source, "want", number=tag)

    def _keep_early(self, source: int, header: FrameHeader, packet: Packet) -> None:
        """Keep a difference until its base is here, and ask for what the first of them builds on:
        by tag, it may be that a neighbour whom nobody waits for will never be asked for again."""
        early = self._early.setdefault(source, {})
        early[header.step] = (header, packet)
        while len(early) > self._history:
            del early[min(early)]
        first = early[min(early)][0]
        base = first.body["last"]
        if (source, base) in self._reading:
            return
        self.ask(source, base if base >= self._floor.get(source, START) else first.step)

    def tags_of(self, source: int) -> set[int]:
        """Versions of a neighbour that are here."""
        return set(self._versions.get(source, ()))

    @property
    def num_held(self) -> int:
        """Versions of neighbours in memory."""
        return sum(map(len, self._versions.values()))

    def state_dict(self) -> State:
        return {
            "tag": self._tag,
            "published": dict(self._published),
            "versions": {source: dict(found) for source, found in self._versions.items()},
            "sent_to": dict(self._sent_to),
        }

    def load_state_dict(self, state: State) -> None:
        self._tag = int(state["tag"])
        self._published = {int(tag): vector for tag, vector in state["published"].items()}
        self._versions = {
            int(source): {int(tag): vector for tag, vector in found.items()}
            for source, found in state["versions"].items()
        }
        self._sent_to = {int(target): int(tag) for target, tag in state["sent_to"].items()}
        self._early = {}

    def resumed(self) -> None:
        """All replicas go on from a checkpoint: versions of later iterations never were."""
        for versions in self._versions.values():
            for tag in [tag for tag in versions if tag > self._tag]:
                del versions[tag]

    async def _publish(
        self, plan: SyncPlan, vector: Any, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await before
        tag, last = plan.number, self._tag
        packet, public = await self._lane.run("encode", "update", -1, self._encode, vector)
        self._coder.commit()
        self._tag = tag
        self._published[tag] = public
        for old in sorted(self._published)[: -self._history]:
            del self._published[old]
        is_whole = self._coder.is_exact or last == START  # the packet is the public copy itself
        for target in plan.peers:
            if is_whole or self._sent_to.get(target, START) != last:
                self._send(target, tag, last, cold=True, packet=packet if is_whole else None)
            else:
                self._send(target, tag, last, cold=False, packet=packet)
            self._sent_to[target] = tag

    def _encode(self, vector: Any) -> tuple[Packet, Any]:
        """The difference to the public copy; the first of all as it is, so that nobody guesses."""
        last = self._published.get(self._tag)
        if self._coder.is_exact or last is None:
            return self._coder.encode("update", vector, exact=True)
        change = self._coder.combine([vector, last], [1.0, -1.0])
        packet, read = self._coder.encode("update", change)
        return packet, self._coder.combine([last, read], [1.0, 1.0])

    def _send(
        self,
        target: int,
        tag: int,
        last: int,
        *,
        cold: bool,
        packet: Packet | None,
        is_answer: bool = False,
    ) -> None:
        if packet is None:
            packet, _ = self._coder.encode("update", self._published[tag], exact=True)
        body: dict[str, Any] = {"last": last} if not cold else {"last": last, "cold": True}
        if is_answer:
            body["loss"] = LOST
        self._post.send(target, "update", number=tag, body=body, packet=packet)

    def _on_want(self, header: FrameHeader, packet: Packet | None) -> None:
        tags = sorted(self._published)
        if not tags or header.step > tags[-1]:
            return  # it will come
        tag = header.step if header.step in self._published else tags[-1]
        place = tags.index(tag)
        last = tags[place - 1] if place else tag - 1
        self._send(header.replica, tag, last, cold=True, packet=None, is_answer=True)

    def _on_update(self, header: FrameHeader, packet: Packet | None) -> None:
        assert packet is not None
        task = asyncio.create_task(self._take_in(header, packet), name="update")
        self._decoding.add(task)
        task.add_done_callback(self._decoding.discard)

    async def _take_in(self, header: FrameHeader, packet: Packet) -> None:
        source, tag = header.replica, header.step
        versions = self._versions.setdefault(source, {})
        if tag in versions or tag < self._floor.get(source, START):
            self.num_duplicates += 1
            return
        last, cold = header.body["last"], bool(header.body.get("cold"))
        if not cold and last not in versions:
            self._keep_early(source, header, packet)
            return
        base = None if cold else versions[last]
        self._reading.add((source, tag))
        try:
            vector = await self._lane.run("decode", "update", -1, self._coder.decode, packet)
        finally:
            self._reading.discard((source, tag))
        if base is not None:
            vector = self._coder.combine([base, vector], [1.0, 1.0])
        if source not in self._versions or tag in versions:
            return  # gone, or here, meanwhile
        versions[tag] = vector
        if "loss" in header.body:
            self.lost.add((source, tag))
        self.on_update(source, tag, last)
        early = self._early.get(source, {})
        for other, (waiting, _) in sorted(early.items()):
            if waiting.body["last"] in versions and other in early:
                await self._take_in(*early.pop(other))
