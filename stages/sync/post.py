"""Tagged letters between replicas: bulk and control, matched by tag, never by order.

Path: stages.sync.exchange -> stages.sync.post -> netsim.link

A letter's tag is `(op, epoch, number, part, sender)` and travels in the frame's header:
`generation` is the epoch, `step` the iteration or group, `micro_batch` the part. A letter that
arrives twice, late or out of order is recognised by it. Letters with a packet are bulk of kind
`replica`; the others are control, which the link carries before all bulk.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressors.base import Packet
from compressors.frame import FrameError, FrameHeader, scatter
from netsim.link import LinkLike, frame_nbytes
from stages.ends import FRAMES, WireFormat
from stages.sync.strategy import Interrupted, SyncTimeout

Key = tuple[str, int, int, int, int]
"""op, epoch, number, part, sender"""

Handler = Callable[[FrameHeader, Packet | None], None]
NUM_LIMITS = 10
"""A silent peer is given up after so many deadlines, each twice as long as the one before."""

LETTERS = WireFormat(pack=scatter)
"""Large tensors stay where they are until the transport takes them: they must not change."""

LOST = 2
"""Mark of a letter that comes late because one was lost: it was asked for again (2), its sender
waited for such a one in the same exchange (2), or in the one before (1). How long it was waited for
says nothing about how long such waits take (Karn's rule)."""

GENERATOR = -1
"""The Group Generator's address among the replicas."""


class Post:
    """One stage's letters to and from the same stage of other replicas. Belongs to the loop."""

    def __init__(
        self,
        *,
        replica: int,
        link_to: Callable[[int], LinkLike],
        stage: int = 0,
        wire: WireFormat = LETTERS,
    ) -> None:
        self.replica = replica
        self.stage = stage
        self.handlers: dict[str, Handler] = {}
        self.num_damaged = 0
        self.fp32_nbytes = 0
        """What the tensors sent so far would have taken in fp32; whoever reads it may clear it."""

        self.sending_s = 0.0
        """How long the uplink took for bulk letters so far, as far as it is shaped; whoever reads
        it may clear it."""

        self._free_at = 0.0  # when the last bulk letter has left
        self._link_to = link_to
        self._wire = wire
        self._is_real = wire in (FRAMES, LETTERS)  # a simulated letter knows only its size
        self._num_sent = 0

    def send(
        self,
        target: int,
        op: str,
        *,
        epoch: int = 0,
        number: int = 0,
        part: int = 0,
        body: Mapping[str, Any] | None = None,
        packet: Packet | None = None,
    ) -> int:
        """Post a letter and return its bytes on the wire. Never waits."""
        return self.send_all(
            (target,), op, epoch=epoch, number=number, part=part, body=body, packet=packet
        )

    def send_all(
        self,
        targets: Sequence[int],
        op: str,
        *,
        epoch: int = 0,
        number: int = 0,
        part: int = 0,
        body: Mapping[str, Any] | None = None,
        packet: Packet | None = None,
    ) -> int:
        """One letter to several: made and summed up once, and the very same frame for all."""
        self._num_sent += 1
        header = FrameHeader(
            kind="control" if packet is None else "replica",
            replica=self.replica,
            source=self.stage,
            target=self.stage,
            step=number,
            micro_batch=part,
            generation=epoch,
            seq=self._num_sent,
            body={"op": op} if body is None else {"op": op, **body},
        )
        frame = self._wire.pack(header, packet)
        # A pick is no vector that would be sent otherwise.
        if packet is not None and op != "pick" and self._is_real:
            num_values = packet.meta.get("num_values") or math.prod(packet.shape)
            self.fp32_nbytes += 4 * int(num_values) * len(targets)
        for target in targets:
            link = self._link_to(target)
            link.send(frame, kind=header.kind)
            if packet is not None and link.busy_until > self._free_at:
                now = asyncio.get_running_loop().time()
                self.sending_s += max(0.0, link.busy_until - max(now, self._free_at))
                self._free_at = link.busy_until
        return frame_nbytes(frame) * len(targets)

    def on_frame(self, frame: Any) -> None:
        """A letter arrived; a damaged one is dropped, whoever needs it will ask again."""
        try:
            header, packet = self._wire.unpack(frame)
        except FrameError:
            self.num_damaged += 1
            return
        handler = self.handlers.get(header.body.get("op", ""))
        if handler is not None:
            handler(header, packet)


@dataclass(frozen=True, slots=True)
class Kept:
    """What was sent, in case it is asked for again."""

    packet: Packet
    full: Packet | None = None
    """The same for whoever cannot read it (`stages.sync.near`)."""

    def answer(self, header: FrameHeader) -> Packet:
        """As it was, or in full, as the question says."""
        return self.full if self.full is not None and "full" in header.body else self.packet


class Inbox:
    """Letters of exchanges, kept until they are collected; each counts once."""

    def __init__(self, post: Post, ops: Iterable[str]) -> None:
        self._post = post
        self._letters: dict[Key, Packet] = {}
        self._waits: dict[Key, _Wait] = {}
        self._sent: dict[int, dict[Key, Kept]] = {}  # by target
        self._written_to: set[int] = set()  # since the last exchange was over
        self._floor = (-1, -1)
        self._min_epoch = -1
        self._cancelled: set[tuple[int, int]] = set()
        self._losses: dict[tuple[int, int], int] = {}  # exchange -> highest mark of its letters
        self._loss_before = 0  # what is left of the mark of the exchange before
        self.num_duplicates = 0
        self.num_asked = 0
        self.num_asked_in_full = 0
        self.on_late: Callable[[list[int], float], None] | None = None
        """Hears who is silent and for how long, each time a deadline has passed."""

        for op in ops:
            post.handlers[op] = self._put
        post.handlers["again"] = self.answer

    def send(
        self,
        target: int,
        op: str,
        tag: tuple[int, int],
        *,
        part: int,
        packet: Packet,
        full: Packet | None = None,
    ) -> int:
        """Post a letter of an exchange and keep it, in case it is asked for again."""
        return self.send_all((target,), op, tag, part=part, packet=packet, full=full)

    def send_all(
        self,
        targets: Sequence[int],
        op: str,
        tag: tuple[int, int],
        *,
        part: int,
        packet: Packet,
        full: Packet | None = None,
    ) -> int:
        """The same letter to several."""
        epoch, number = tag
        kept = Kept(packet, full)
        for target in targets:
            self._sent.setdefault(target, {})[op, epoch, number, part, self._post.replica] = kept
            self._written_to.add(target)
        loss = self.loss_of(tag)
        return self._post.send_all(
            targets,
            op,
            epoch=epoch,
            number=number,
            part=part,
            body={"loss": loss} if loss else None,
            packet=packet,
        )

    def loss_of(self, tag: tuple[int, int]) -> int:
        """Whether an exchange took longer because letters were lost, here or elsewhere: see LOST"""
        return max(self._losses.get(tag, 0), self._loss_before)

    async def collect(
        self, op: str, tag: tuple[int, int], wanted: Iterable[tuple[int, int]], *, limit_s: float
    ) -> list[Packet]:
        """The letters `(part, sender)` of an exchange, in the order given."""
        epoch, number = tag
        keys: list[Key] = [(op, epoch, number, part, sender) for part, sender in wanted]
        self.check(tag)
        missing = {key for key in keys if key not in self._letters}
        if missing:
            await self._wait(tag, missing, limit_s)
        letters = self._letters
        return [letters.pop(key) for key in keys]

    def ask_in_full(self, sender: int, op: str, tag: tuple[int, int], *, part: int) -> None:
        """A letter came and says too little: ask for all of it. It comes under the same tag."""
        self.num_asked_in_full += 1
        body = {"what": op, "full": True}
        self._post.send(sender, "again", epoch=tag[0], number=tag[1], part=part, body=body)

    def close(self, tag: tuple[int, int]) -> None:
        """The exchange is over: letters of it and of earlier ones are of no use any more.

        What was sent in it is kept until the next one *with the same peer* is over, which proves
        that the peer had it: others may come between, while it still asks. Where somebody knows
        that all have it, `release` says so sooner: of many peers each is met again late.
        """
        self._loss_before = max(0, self.loss_of(tag) - 1)
        self._floor = max(self._floor, tag)
        if self._losses:
            self._losses = {other: m for other, m in self._losses.items() if other > self._floor}
        if self._letters:
            floor = self._floor
            self._letters = {k: v for k, v in self._letters.items() if k[1:3] > floor}
        for target in self._written_to:
            own = self._sent[target]
            self._sent[target] = {key: v for key, v in own.items() if key[1:3] >= tag}
        self._written_to.clear()
        self._cancelled = {cancelled for cancelled in self._cancelled if cancelled > self._floor}

    def release(self, epoch: int, number: int) -> None:
        """Exchanges of an epoch before `number` are over everywhere: none will be asked about."""
        for target, own in list(self._sent.items()):
            kept = {k: v for k, v in own.items() if k[1] != epoch or k[2] >= number}
            if kept:
                self._sent[target] = kept
            elif target not in self._written_to:
                del self._sent[target]

    @property
    def num_kept(self) -> int:
        """Letters that are kept in case they are asked for again."""
        return sum(map(len, self._sent.values()))

    def forget_sent(self, target: int) -> None:
        """A peer has all that was sent to it, or is gone."""
        self._sent.pop(target, None)
        self._written_to.discard(target)

    def refuse_before(self, epoch: int) -> None:
        """End all exchanges of earlier epochs."""
        self._min_epoch = max(self._min_epoch, epoch)
        for key, wait in list(self._waits.items()):
            if key[1] < epoch:
                wait.fail(Interrupted(f"epoch {epoch} has begun"))

    def cancel(self, tag: tuple[int, int]) -> None:
        """End one exchange, whether it has begun or not."""
        if tag <= self._floor:
            return
        self._cancelled.add(tag)
        for key, wait in list(self._waits.items()):
            if key[1:3] == tag:
                wait.fail(Interrupted(f"exchange {tag} was cancelled"))

    def is_over(self, tag: tuple[int, int]) -> bool:
        """The exchange, or a later one, was closed."""
        return tag <= self._floor

    def check(self, tag: tuple[int, int]) -> None:
        """Raise if the exchange will not end any more."""
        if tag[0] < self._min_epoch or tag in self._cancelled:
            raise Interrupted(f"exchange {tag} was cancelled")

    def _put(self, header: FrameHeader, packet: Packet | None) -> None:
        tag = (header.generation, header.step)
        key: Key = (header.body["op"], *tag, header.micro_batch, header.replica)
        if tag <= self._floor or header.generation < self._min_epoch or key in self._letters:
            self.num_duplicates += 1
            return
        assert packet is not None
        if "loss" in header.body:
            self._losses[tag] = max(self._losses.get(tag, 0), header.body["loss"])
        self._letters[key] = packet
        wait = self._waits.pop(key, None)
        if wait is not None:
            wait.arrived(key)

    def answer(self, header: FrameHeader, packet: Packet | None) -> None:
        """Somebody lacks a letter: post it again if it was posted."""
        tag = (header.generation, header.step)
        key: Key = (header.body["what"], *tag, header.micro_batch, self._post.replica)
        kept = self._sent.get(header.replica, {}).get(key)
        if kept is not None:
            self._post.send(
                header.replica,
                key[0],
                epoch=tag[0],
                number=tag[1],
                part=key[3],
                body={"loss": LOST},
                packet=kept.answer(header),
            )

    async def _wait(self, tag: tuple[int, int], missing: set[Key], limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        wait = _Wait(missing, loop.create_future())
        self._waits.update(dict.fromkeys(missing, wait))
        start = loop.time()
        timer = loop.call_later(limit_s, self._late, wait, start, limit_s, 1)
        wait.timer = timer
        try:
            await wait.done
        finally:
            wait.timer.cancel()
            for key in wait.missing:
                self._waits.pop(key, None)

    def _late(self, wait: _Wait, start: float, limit_s: float, count: int) -> None:
        loop = asyncio.get_running_loop()
        silent = sorted({key[4] for key in wait.missing})
        waited_s = loop.time() - start
        if count > NUM_LIMITS:
            op, epoch, number, *_ = min(wait.missing)
            wait.fail(
                SyncTimeout(
                    f"replica {self._post.replica} waited {waited_s:.1f} s for {op!r} of exchange "
                    f"{number}, epoch {epoch}, from replicas {silent}, and nobody declared them "
                    "dead; if they are that slow, raise `deadline_s`"
                )
            )
            return
        self.num_asked += len(wait.missing)
        for op, epoch, number, part, sender in sorted(wait.missing):
            self._post.send(
                sender, "again", epoch=epoch, number=number, part=part, body={"what": op}
            )
        if self.on_late is not None:
            self.on_late(silent, waited_s)
        wait.timer = loop.call_later(
            limit_s * 2**count, self._late, wait, start, limit_s, count + 1
        )


class _Wait:
    """One call of `Inbox.collect` that found letters missing."""

    __slots__ = ("done", "missing", "timer")

    def __init__(self, missing: set[Key], done: asyncio.Future[None]) -> None:
        self.missing = missing
        self.done = done
        self.timer: asyncio.TimerHandle

    def arrived(self, key: Key) -> None:
        self.missing.discard(key)
        if not self.missing and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
