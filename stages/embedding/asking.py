"""Questions to shards and their answers: sent until answered, matched by ticket.

Path: stages.embedding.hybrid -> stages.embedding.asking -> netsim.link

Every letter may be lost, doubled or damaged; a shard takes it once, so it may be sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from compressors.base import Packet
from compressors.frame import FrameError, FrameHeader, pack, unpack
from netsim.link import LinkLike
from stages.embedding import letters
from stages.embedding.shard_terms import IdSet

ANSWERS = {"pull": "rows", "push": "ack", "void": "ack", "read": "values"}


class ShardTimeout(RuntimeError):
    """A shard does not answer."""


class ShardRefused(RuntimeError):
    """A shard refused a pull or a push; its own words follow."""


class _Nudged(Exception):
    """An answer that will not come: the shard that was asked is gone."""


class Asking:
    """One client's letters to and from all shards. Belongs to the event loop."""

    def __init__(
        self,
        links: Sequence[LinkLike],
        *,
        client: int,
        session: int,
        deadline_s: float,
        num_tries: int,
    ) -> None:
        self.links = list(links)
        self.num_damaged = 0
        self.num_resent = 0
        self._client = client
        self._session = session
        self._deadline_s = deadline_s
        self._num_tries = num_tries
        self._num_sent = 0
        self._waiting: dict[tuple[str, int, int], asyncio.Future[tuple[FrameHeader, Any]]] = {}

    def on_frame(self, frame: Any) -> None:
        """A letter from a shard."""
        try:
            header, packet = unpack(frame)
        except FrameError:
            self.num_damaged += 1
            return
        if header.generation != self._session:
            return
        op = header.body.get("op", "")
        waiting = self._waiting.get((op, header.step, header.source))
        if op in ("need", "error"):
            for answer in ("rows", "ack", "values"):
                waiting = waiting or self._waiting.get((answer, header.step, header.source))
        if waiting is not None and not waiting.done():
            waiting.set_result((header, packet))

    async def ask(
        self,
        shard: int,
        ticket: int,
        op: str,
        packet: Packet | None = None,
        *,
        again: Mapping[str, IdSet] | None = None,
        **body: Any,
    ) -> tuple[FrameHeader, Any]:
        """Send until it is answered; every shard takes a letter once."""
        key = (ANSWERS[op], ticket, shard)
        loop = asyncio.get_running_loop()
        started, wait_s = loop.time(), self._deadline_s
        for attempt in range(self._num_tries):
            answer: asyncio.Future[tuple[FrameHeader, Any]] = loop.create_future()
            self._waiting[key] = answer
            self.send(shard, ticket, op, packet, **body)
            self.num_resent += attempt > 0
            try:
                header, reply = await asyncio.wait_for(answer, wait_s)
            except TimeoutError:
                wait_s *= 2
                continue
            except _Nudged:
                continue
            finally:
                self._waiting.pop(key, None)
            if header.body["op"] == "need" and again is not None:
                packet = letters.ids_packet(again)  # the ids were lost, or the shard is new
                continue
            if header.body["op"] in ("need", "error"):
                raise ShardRefused(f"step {ticket}: {header.body.get('why', 'ids are missing')}")
            return header, reply
        raise ShardTimeout(
            f"client {self._client} asked shard {shard} {self._num_tries} times to {op} step "
            f"{ticket} and had no answer for {loop.time() - started:.0f} s; see whether the shard "
            "lives, or raise `deadline_s`"
        )

    def nudge(self, shard: int) -> None:
        """The shard has begun anew: ask again at once what it has not answered."""
        for (_, _, asked), answer in self._waiting.items():
            if asked == shard and not answer.done():
                answer.set_exception(_Nudged())

    def send(
        self, shard: int, ticket: int, op: str, packet: Packet | None = None, **body: Any
    ) -> None:
        self._num_sent += 1
        header = FrameHeader(
            kind="embedding",  # all of one kind: a pull must not overtake its ids
            source=self._client,
            target=shard,
            step=ticket,
            seq=self._num_sent,
            generation=self._session,
            body={"op": op, **body},
        )
        self.links[shard].send(pack(header, packet), kind=header.kind)
