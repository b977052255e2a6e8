"""The two ends of an edge: tensors in, frames out, and what heals between them.

Path: stages.stage -> stages.ends -> compressors.frame

An edge joins two neighbouring stages in one direction. Its sending end encodes in the transmit
lane and hands frames to the link; its receiving end unpacks and decodes in the receive lane in
the order of sending, as soon as a frame arrives. Frames are matched by id, never by arrival.

What goes wrong on the way (a frame lost, damaged, repeated, or a delta whose row is missing) is
answered by a NACK, and the sender resends that micro-batch cold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressors.base import Compressor, DuplicatePacket, NeedCold, Packet, SampleKeys
from compressors.frame import FrameError, FrameHeader, Kind, pack, unpack
from netsim.link import LinkLike
from stages.lanes import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """How a packet becomes a frame; the simulator has one of its own."""

    pack: Callable[[FrameHeader, Packet | None], Any] = pack
    unpack: Callable[[Any], tuple[FrameHeader, Packet | None]] = unpack


FRAMES = WireFormat()
LETTER = {"activation": "F", "gradient": "B"}


class StageTimeout(RuntimeError):
    """A stage waited too long for its neighbour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One direction between two neighbouring stages of a replica."""

    source: int
    target: int
    kind: Kind
    replica: int = 0

    @property
    def name(self) -> str:
        return f"{self.source}->{self.target}"


@dataclass(slots=True)
class Sent:
    """A tensor kept until its step commits, in case it must be sent again."""

    step: int
    micro_batch: int
    tensor: Tensor
    keys: SampleKeys


class SendingEnd:
    """Encodes and sends in the order of `send` calls."""

    def __init__(
        self,
        edge: Edge,
        codec: Compressor,
        link: LinkLike,
        lane: Lane,
        *,
        wire: WireFormat = FRAMES,
    ) -> None:
        self._wire = wire
        self.edge = edge
        self.codec = codec
        self._link = link
        self._lane = lane
        self._seq = 0
        self._sent: dict[int, Sent] = {}
        self.num_resent = 0

    async def send(self, step: int, micro_batch: int, tensor: Tensor, keys: SampleKeys) -> None:
        """Encode in the transmit lane, then hand the frame to the link."""
        item = Sent(step, micro_batch, tensor, keys)
        await self._transmit(item, self.encode)

    async def resend(self, *, seq: int | None, step: int, micro_batch: int) -> bool:
        """Send a micro-batch again, cold; False if it was never sent (or is not known any more)."""
        for number, item in reversed(self._sent.items()):
            if number == seq or (
                seq is None and (item.step, item.micro_batch) == (step, micro_batch)
            ):
                self.num_resent += 1
                await self._transmit(item, self._encode_cold)
                return True
        return False

    def encode(self, item: Sent) -> Any:
        """One frame, its number taken in the order of encoding: the receiver decodes in it."""
        return self._frame(item, self.codec.encode(item.tensor, keys=item.keys))

    def commit(self) -> None:
        """The step is done at both ends: make rows permanent and let kept tensors go."""
        self.codec.commit()
        self._sent.clear()

    def abort(self) -> None:
        """The step never happened."""
        self.codec.abort()
        self._sent.clear()

    async def _transmit(self, item: Sent, encode: Callable[[Sent], Any]) -> None:
        name = f"{LETTER[self.edge.kind]}{item.micro_batch}"
        frame = await self._lane.run("encode", name, item.micro_batch, encode, item)
        self._link.send(frame, kind=self.edge.kind)

    def _encode_cold(self, item: Sent) -> Any:
        resend = getattr(self.codec, "resend_cold", self.codec.encode)
        return self._frame(item, resend(item.tensor, keys=item.keys))

    def _frame(self, item: Sent, packet: Packet) -> Any:
        seq, self._seq = self._seq, self._seq + 1
        self._sent[seq] = item
        body: dict[str, Any] = {} if item.keys.lengths is None else {"n": list(item.keys.lengths)}
        header = FrameHeader(
            kind=self.edge.kind,
            replica=self.edge.replica,
            source=self.edge.source,
            target=self.edge.target,
            step=item.step,
            micro_batch=item.micro_batch,
            seq=seq,
            body=body,
        )
        return self._wire.pack(header, packet)


@dataclass(slots=True)
class Arrival:
    """What came of one frame."""

    header: FrameHeader
    tensor: Tensor | None
    trouble: str = ""


Received = tuple[Tensor, tuple[int, ...] | None]


class ReceivingEnd:
    """Unpacks and decodes as frames arrive; `take` gives the tensor of a micro-batch."""

    def __init__(
        self,
        edge: Edge,
        codec: Compressor,
        lane: Lane,
        complain: Callable[[dict[str, Any]], None],
        *,
        wire: WireFormat = FRAMES,
    ) -> None:
        self._wire = wire
        self.edge = edge
        self.codec = codec
        self._lane = lane
        self._complain = complain
        self._frames: asyncio.Queue[Any] = asyncio.Queue()
        self._ready: dict[tuple[int, int], asyncio.Future[Received]] = {}
        self._taken: set[tuple[int, int]] = set()
        self._early: list[tuple[FrameHeader, Packet | None]] = []
        self._step = -1
        self._next_seq = 0
        self._pump: asyncio.Task[None] | None = None
        self.events: list[str] = []
        self.num_nacks = 0

    def on_frame(self, frame: Any) -> None:
        """A frame arrived (called on the loop; returns at once)."""
        if self._pump is None:
            self._pump = asyncio.create_task(self._receive(), name=f"receive {self.edge.name}")
        self._frames.put_nowait(frame)

    def begin(self, step: int) -> None:
        """Frames of this step may be decoded from now on; earlier arrivals waited for it."""
        self._step = step
        if self._early:
            self.on_frame(None)

    async def take(self, step: int, micro_batch: int, *, deadline_s: float) -> Received:
        """The decoded tensor; asks for it again at half of the deadline."""
        key = (step, micro_batch)
        future = self._future(key)
        await asyncio.wait([future], timeout=deadline_s / 2)
        if not future.done():
            self._note(
                f"no {self._what(step, micro_batch)} after {deadline_s / 2:.1f} s, asked again"
            )
            self._complain({"op": "want", "step": step, "mb": micro_batch})
            await asyncio.wait([future], timeout=deadline_s / 2)
        if not future.done():
            raise StageTimeout(
                f"stage {self.edge.target} waited {deadline_s:.1f} s for the "
                f"{self._what(step, micro_batch)} from stage {self.edge.source}; if the link is "
                "that slow, raise `deadline_s`"
            )
        self._ready.pop(key, None)  # let the tensor go as soon as it has been used
        self._taken.add(key)
        return future.result()

    def commit(self) -> None:
        """The step is done at both ends: make rows permanent."""
        self.codec.commit()
        self._taken = {key for key in self._taken if key[0] > self._step}

    def abort(self) -> None:
        """The step never happened: drop what was received for it."""
        self.codec.abort()
        self._taken.clear()
        self._ready.clear()
        self._early.clear()

    def fail(self, error: BaseException) -> None:
        """Wake whoever waits, with the reason."""
        for future in self._ready.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # read, so that nobody warns about it

    def decode(self, frame: Any) -> Received:
        """Unpack and decode one frame at once, for the transport that passes refs."""
        header, packet = self._wire.unpack(frame)
        assert packet is not None
        return self.codec.decode(packet), _lengths(header)

    async def _receive(self) -> None:
        while True:
            frame = await self._frames.get()
            try:
                arrivals = await self._lane.run(
                    "decode", LETTER[self.edge.kind], -1, self._accept, frame
                )
            except FrameError as error:
                self._note(f"a damaged frame was dropped: {error}")
                self._nack(self._next_seq)
                self._next_seq += 1
                continue
            except Exception as error:
                self.fail(error)
                continue
            for arrival in arrivals:
                self._settle(arrival)

    def _accept(self, frame: Any) -> list[Arrival]:
        """In the receive lane: decode what is due, in order; keep what belongs to a later step."""
        due = []
        if frame is None:
            due, self._early = self._early, []
        else:
            due.append(self._wire.unpack(frame))
        arrivals = []
        for header, packet in due:
            if header.step > self._step:
                self._early.append((header, packet))
                continue
            arrivals.append(self._decode(header, packet))
        return arrivals

    def _decode(self, header: FrameHeader, packet: Packet | None) -> Arrival:
        if packet is None:
            raise FrameError(f"a frame of kind {header.kind} without a tensor")
        try:
            return Arrival(header, self.codec.decode(packet))
        except DuplicatePacket:
            return Arrival(header, None, "duplicate")
        except NeedCold as error:
            return Arrival(header, None, str(error))

    def _settle(self, arrival: Arrival) -> None:
        header = arrival.header
        for seq in range(self._next_seq, header.seq):
            self._note(f"frame {seq} was lost on the way")
            self._nack(seq)
        self._next_seq = max(self._next_seq, header.seq + 1)
        if arrival.tensor is None:
            self._note(f"{self._what(header.step, header.micro_batch)}: {arrival.trouble}")
            if arrival.trouble != "duplicate":
                self._nack(header.seq)
            return
        key = (header.step, header.micro_batch)
        future = self._future(key)
        if future.done() or key in self._taken:
            self._note(f"{self._what(header.step, header.micro_batch)}: arrived twice")
            return
        future.set_result((arrival.tensor, _lengths(header)))

    def _nack(self, seq: int) -> None:
        self.num_nacks += 1
        self._complain({"op": "nack", "seq": seq})

    def _future(self, key: tuple[int, int]) -> asyncio.Future[Received]:
        if key not in self._ready:
            self._ready[key] = asyncio.get_running_loop().create_future()
        return self._ready[key]

    def _what(self, step: int, micro_batch: int) -> str:
        return f"{self.edge.kind} of micro-batch {micro_batch}, step {step}"

    def _note(self, text: str) -> None:
        self.events.append(f"edge {self.edge.name}: {text}")


def _lengths(header: FrameHeader) -> tuple[int, ...] | None:
    lengths = header.body.get("n")
    return None if lengths is None else tuple(lengths)
