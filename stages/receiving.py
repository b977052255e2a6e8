"""The receiving end of an edge: frames in, tensors out, and what heals between.

Path: netsim.link -> stages.receiving -> stages.loss

Frames are unpacked and decoded in the receive lane in the order of sending, as soon as they
arrive, and matched by id, never by arrival. What goes wrong on the way (a frame lost, damaged,
repeated, or a delta whose row is missing) is answered by a NACK, and the sender resends that
micro-batch cold. What a sender encodes in a step changes its rows, so even a frame that nobody
needs any more is decoded; only frames of an aborted attempt, which the sender has forgotten too,
are dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressors.base import Compressor, DuplicatePacket, NeedCold, Packet
from compressors.frame import RAW, FrameError, FrameHeader
from compressors.identity import Identity
from stages.ends import FRAMES, LETTER, Edge, StageTimeout, WireFormat, turn_of
from stages.lanes import Lane
from stages.plan import Turn

NEVER = Turn(-1, -1, -1)
"""Before every turn."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A frame that has been unpacked."""

    header: FrameHeader
    packet: Packet | None


@dataclass(slots=True)
class Arrival:
    """What came of one frame."""

    frame: Opened
    tensor: Tensor | None = None
    trouble: str = ""


ASK_AT = (1 / 4, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Shares of the deadline after which a tensor is asked for. Early, because stages wait for each
other: several losses in a row must heal within one deadline."""

EARLY = "early"
STALE = "stale"
DUPLICATE = "arrived twice"
Received = tuple[Tensor, tuple[int, ...] | None]


class ReceivingEnd:
    """Unpacks and decodes as frames arrive; `take` gives the tensor of a micro-batch."""

    def __init__(
        self,
        edge: Edge,
        codec: Compressor,
        lane: Lane,
        complain: Callable[[Turn, dict[str, Any]], None],
        *,
        wire: WireFormat = FRAMES,
    ) -> None:
        self._wire = wire
        self.edge = edge
        self.codec = codec
        self._lane = lane
        self._complain = complain
        self._inbox: deque[Any] = deque()
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._turn = NEVER
        self._min_attempt = 0
        self._ready: dict[int, asyncio.Future[Received]] = {}
        self._taken: set[int] = set()
        self._broken: Exception | None = None
        self._next_seq = 0
        self._asked: set[int] = set()
        self.events: list[str] = []
        self.num_nacks = 0

    def on_frame(self, frame: Any) -> None:
        """A frame arrived, packed or `Opened` (called on the loop; returns at once)."""
        if self._pump is None:
            self._pump = asyncio.create_task(self._receive(), name=f"receive {self.edge.name}")
        self._inbox.append(frame)
        self._wake.set()

    def begin(self, turn: Turn) -> None:
        """Frames of this turn may be decoded from now on; earlier arrivals waited for it."""
        if turn.attempt > self._min_attempt:
            self.refuse_before(turn.attempt)
        self._turn = turn
        self._clear()

    async def take(self, turn: Turn, micro_batch: int, *, deadline_s: float) -> Received:
        """The decoded tensor; asks for it again before it gives up."""
        assert turn == self._turn, f"asked for {turn} in {self._turn}"
        if self._broken is not None:
            raise self._broken
        future = self._future(micro_batch)
        waited_s = 0.0
        for share in ASK_AT:
            await asyncio.wait([future], timeout=share * deadline_s - waited_s)
            if future.done():
                break
            waited_s = share * deadline_s
            self._complain(turn, {"op": "want", "mb": micro_batch})
        await asyncio.wait([future], timeout=deadline_s - waited_s)
        if not future.done():
            raise StageTimeout(
                f"stage {self.edge.target} waited {deadline_s:.1f} s for the "
                f"{self._what(turn, micro_batch)} from stage {self.edge.source}; if the link is "
                "that slow, raise `deadline_s`"
            )
        del self._ready[micro_batch]  # let the tensor go as soon as it has been used
        self._taken.add(micro_batch)
        return future.result()

    def retire(self) -> None:
        """Stop waiting for frames."""
        if self._pump is not None:
            self._pump.cancel()

    def refuse_before(self, attempt: int) -> None:
        """Drop everything of earlier attempts, here and still on its way."""
        self._min_attempt = max(self._min_attempt, attempt)
        self._restart_count()
        self._clear()

    def decode(self, frame: Any) -> Received:
        """Unpack and decode one frame at once, for the transport that passes refs."""
        header, packet = self._wire.unpack(frame)
        assert packet is not None
        return self._decode(header, packet), _lengths(header)

    async def _receive(self) -> None:
        while True:
            if not self._inbox or self._is_early(self._inbox[0]):
                self._wake.clear()
                await self._wake.wait()
                continue
            frame = self._inbox.popleft()
            try:
                arrival = await self._lane.run(
                    "decode", LETTER[self.edge.kind], -1,
                    self._accept, frame, self._turn, self._min_attempt,
                )  # fmt: skip
            except FrameError as error:
                # Links keep order, so this was most likely the next one.
                self._note(f"a damaged frame was dropped: {error}")
                self._nack(self._next_seq)
            except Exception as error:
                self._fail(error)
            else:
                self._settle(arrival)

    def _is_early(self, frame: Any) -> bool:
        """Of a later turn. What comes behind it is not older, so the pump may wait for `begin`."""
        return isinstance(frame, Opened) and max(
            self._turn, Turn(self._min_attempt, -1, -1)
        ) < turn_of(frame.header)

    def _accept(self, frame: Any, turn: Turn, min_attempt: int) -> Arrival:
        """In the receive lane: decode what is due."""
        if not isinstance(frame, Opened):
            frame = Opened(*self._wire.unpack(frame))
        if frame.packet is None:
            raise FrameError(f"a frame of kind {frame.header.kind} without a tensor")
        if frame.header.attempt < min_attempt:
            return Arrival(frame, trouble=STALE)
        if turn_of(frame.header) > turn:
            return Arrival(frame, trouble=EARLY)
        try:
            return Arrival(frame, self._decode(frame.header, frame.packet))
        except DuplicatePacket:
            return Arrival(frame, trouble=DUPLICATE)
        except NeedCold as error:
            return Arrival(frame, trouble=str(error))

    def _decode(self, header: FrameHeader, packet: Packet) -> Tensor:
        """By the codec of the edge, unless the sender says that it passed it by."""
        codec = Identity() if header.flags & RAW else self.codec
        return codec.decode(packet)

    def _settle(self, arrival: Arrival) -> None:
        header, turn = arrival.frame.header, turn_of(arrival.frame.header)
        what = self._what(turn, header.micro_batch)
        if header.attempt < self._min_attempt:
            self._note(f"{what}: left over from an aborted attempt, dropped")
            return
        if arrival.trouble == EARLY:
            self._inbox.appendleft(arrival.frame)
            return
        self._check_count(header.seq)
        if arrival.trouble == DUPLICATE:
            self._note(f"{what}: {DUPLICATE}")
        elif arrival.tensor is None:
            self._note(f"{what}: {arrival.trouble}")
            self._nack(header.seq)
        elif self._has(turn, header.micro_batch):
            self._note(f"{what}: {DUPLICATE}")
        else:
            result = (arrival.tensor, _lengths(header))
            self._future(header.micro_batch).set_result(result)

    def _has(self, turn: Turn, micro_batch: int) -> bool:
        if turn != self._turn or micro_batch in self._taken:
            return True
        return self._future(micro_batch).done()

    def _check_count(self, seq: int) -> None:
        for missing in range(self._next_seq, seq):
            self._note(f"frame {missing} was lost on the way")
            self._nack(missing)
        self._next_seq = max(self._next_seq, seq + 1)

    def _clear(self) -> None:
        self._ready.clear()
        self._taken.clear()
        self._broken = None
        self._wake.set()

    def _restart_count(self) -> None:
        self._next_seq = 0
        self._asked.clear()

    def _nack(self, seq: int) -> None:
        """Once for each frame; if the answer is lost too, `take` asks for the micro-batch."""
        if seq not in self._asked:
            self._asked.add(seq)
            self.num_nacks += 1
            self._complain(self._turn, {"op": "nack", "seq": seq})

    def _fail(self, error: Exception) -> None:
        """No frame of this edge can be trusted: whoever waits for one in this turn hears why."""
        self._broken = error
        for future in self._ready.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # read, so that nobody warns about it

    def _future(self, micro_batch: int) -> asyncio.Future[Received]:
        if micro_batch not in self._ready:
            self._ready[micro_batch] = asyncio.get_running_loop().create_future()
        return self._ready[micro_batch]

    def _what(self, turn: Turn, micro_batch: int) -> str:
        return f"{self.edge.kind} of micro-batch {micro_batch}, {turn}"

    def _note(self, text: str) -> None:
        self.events.append(f"edge {self.edge.name}: {text}")


def _lengths(header: FrameHeader) -> tuple[int, ...] | None:
    lengths = header.body.get("n")
    return None if lengths is None else tuple(lengths)
