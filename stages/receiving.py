"""The receiving end of an edge: frames in, tensors out, and what heals between.

Path: netsim.link -> stages.receiving -> stages.loss

Frames are unpacked as soon as they arrive and decoded in the receive lane in the order of sending,
which their numbers tell: what comes behind a gap is held until the gap is closed, so both ends
change their rows in one order whatever the wire does. A frame that was lost or damaged is asked
for and comes again as it was; one whose number was seen is dropped. Only a delta whose row is not
here is asked for cold. Tensors are matched by id, never by arrival. Numbers begin anew with each
turn, and what is late for its turn is of no use: the step was complete without it.
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
from stages.ends import (
    COLD,
    DAMAGED,
    FRAMES,
    LETTER,
    LOST,
    Edge,
    StageTimeout,
    WireFormat,
    turn_of,
)
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
AHEAD = "ahead"
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
        self._due = 0
        """The number of the frame to decode next."""

        self._next_seq = 0
        """One more than the highest number seen."""

        self._held: dict[int, Opened] = {}
        """Frames behind a gap, by number."""

        self._asked: set[int] = set()
        self._refused: set[int] = set()
        """Micro-batches that came but could not be applied."""

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
            self._ask_again(turn, micro_batch)
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
                    self._accept, frame, self._turn, self._min_attempt, self._due,
                )  # fmt: skip
            except FrameError as error:
                # Links keep order, so this was most likely the next one.
                self._note(f"a damaged frame was dropped: {error}")
                self._nack(self._next_seq, DAMAGED)
            except Exception as error:
                self._fail(error)
            else:
                self._settle(arrival)

    def _is_early(self, frame: Any) -> bool:
        """Of a later turn. What comes behind it is not older, so the pump may wait for `begin`."""
        return isinstance(frame, Opened) and max(
            self._turn, Turn(self._min_attempt, -1, -1)
        ) < turn_of(frame.header)

    def _accept(self, frame: Any, turn: Turn, min_attempt: int, due: int) -> Arrival:
        """In the receive lane: decode what is due."""
        if not isinstance(frame, Opened):
            frame = Opened(*self._wire.unpack(frame))
        if frame.packet is None:
            raise FrameError(f"a frame of kind {frame.header.kind} without a tensor")
        its_turn = turn_of(frame.header)
        if frame.header.attempt < min_attempt:
            return Arrival(frame, trouble=STALE)
        if its_turn != turn:
            return Arrival(frame, trouble=EARLY if its_turn > turn else DUPLICATE)
        if frame.header.seq != due:
            return Arrival(frame, trouble=AHEAD if frame.header.seq > due else DUPLICATE)
        try:
            return Arrival(frame, self._decode(frame.header, frame.packet))
        except (DuplicatePacket, NeedCold) as error:
            # Its number is new, so its samples were not seen: an old visit here means that the
            # sender has lost its rows, as a missing one means that this end has.
            return Arrival(frame, trouble=str(error))

    def _decode(self, header: FrameHeader, packet: Packet) -> Tensor:
        """By the codec of the edge, unless the sender says that it passed it by."""
        codec = Identity() if header.flags & RAW else self.codec
        return codec.decode(packet)

    def _settle(self, arrival: Arrival) -> None:
        header, turn = arrival.frame.header, turn_of(arrival.frame.header)
        micro_batch, what = header.micro_batch, self._what(turn, header.micro_batch)
        if header.attempt < self._min_attempt:
            self._note(f"{what}: left over from an aborted attempt, dropped")
            return
        if arrival.trouble == EARLY:
            self._inbox.appendleft(arrival.frame)
            return
        if arrival.trouble == DUPLICATE or turn != self._turn:
            self._note(f"{what}: {DUPLICATE}")
            return
        self._check_count(header.seq)
        if arrival.trouble == AHEAD:
            self._held[header.seq] = arrival.frame
            return
        self._due = header.seq + 1
        if self._due in self._held:
            self._inbox.appendleft(self._held.pop(self._due))
        if arrival.tensor is None:
            self._note(f"{what}: {arrival.trouble}")
            # Once: if the answer cannot be applied either, `take` asks, at its own pace.
            if micro_batch not in self._refused:
                self._refused.add(micro_batch)
                self._nack(header.seq, COLD)
            return
        self._refused.discard(micro_batch)
        if self._has(micro_batch):
            self._note(f"{what}: {DUPLICATE}")
        else:
            self._future(micro_batch).set_result((arrival.tensor, _lengths(header)))

    def _has(self, micro_batch: int) -> bool:
        return micro_batch in self._taken or self._future(micro_batch).done()

    def _check_count(self, seq: int) -> None:
        for missing in range(self._next_seq, seq):
            self._note(f"frame {missing} was lost on the way")
            self._nack(missing, LOST)
        self._next_seq = max(self._next_seq, seq + 1)

    def _ask_again(self, turn: Turn, micro_batch: int) -> None:
        """For what is waited for, and for all that it may be held up by: answers get lost too."""
        why = COLD if micro_batch in self._refused else LOST
        self._complain(turn, {"op": "want", "mb": micro_batch, "why": why})
        for seq in range(self._due, self._next_seq):
            if seq not in self._held:
                self._complain(turn, {"op": "nack", "seq": seq, "why": LOST})

    def _clear(self) -> None:
        self._ready.clear()
        self._taken.clear()
        self._refused.clear()
        self._held.clear()
        self._asked.clear()
        self._due = self._next_seq = 0
        self._broken = None
        self._wake.set()

    def _nack(self, seq: int, why: str) -> None:
        """Once for each frame that did not come; if the answer is lost too, `take` asks."""
        if why == COLD or seq not in self._asked:
            self._asked.add(seq)
            self.num_nacks += 1
            self._complain(self._turn, {"op": "nack", "seq": seq, "why": why})

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
