"""The sending end of an edge: tensors in, frames out, and again when asked.

Path: stages.compute -> stages.ends -> compressors.base

An edge joins two neighbouring stages in one direction. Its sending end encodes in the transmit
lane, in the order of `send` calls, and hands frames to the link. Each frame carries a number: the
receiving end (`stages.receiving`) decodes in that order, knows by it what was lost, and asks. What
was sent is kept until the step commits. It goes out again as it was, number and all, so that a
fault of the wire changes no bit; only a receiver that has lost its row gets it cold, as a new
frame with a new number.

Lanes only run codecs. All other state of an end belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from compressors.base import Compressor, Packet, ResendsCold, SampleKeys
from compressors.frame import RAW, FrameHeader, Kind, pack, unpack
from compressors.identity import Identity
from compressors.kernels import NonFinite
from netsim.link import LinkLike
from stages.lanes import Lane
from stages.plan import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """How a packet becomes a frame; the simulator has one of its own."""

    pack: Callable[[FrameHeader, Packet | None], Any] = pack
    unpack: Callable[[Any], tuple[FrameHeader, Packet | None]] = unpack


FRAMES = WireFormat()
LETTER = {"activation": "F", "gradient": "B"}
LOST, DAMAGED, COLD = "lost", "damaged", "cold"
"""Why a frame is asked for again: it did not come, it came damaged, or its row is not there."""


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


def turn_of(header: FrameHeader) -> Turn:
    """The turn that a frame or message belongs to."""
    return Turn(header.attempt, header.step, header.body.get("part", 0))


def part_of(turn: Turn) -> dict[str, Any]:
    """What `turn_of` reads from the body; nothing in the usual case, so it costs no bytes."""
    return {"part": turn.part} if turn.part else {}


@dataclass(slots=True)
class Sent:
    """What one frame brought, kept until its step commits, in case it must be sent again."""

    turn: Turn
    micro_batch: int
    tensor: Tensor
    keys: SampleKeys
    seq: int = -1
    is_raw: bool = False
    """Whether the codec of the edge was passed by."""
    packet: Packet | None = None
    """What was sent; the tensor is kept for a cold resend."""
    leaves_at: float = 0.0
    """When its last frame is past the uplink, in loop time."""


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
        compressed_evaluation: bool = False,
    ) -> None:
        self._wire = wire
        self._compressed_evaluation = compressed_evaluation
        self.edge = edge
        self.codec = codec
        self._link = link
        self._lane = lane
        self._turn: Turn | None = None
        self._next_seq = 0
        self._sent: dict[int, Sent] = {}
        self.num_resent = 0
        self.fp32_nbytes = 0
        """What the tensors sent since the last record would have taken in fp32."""

        self.events: list[str] = []
        self.num_nonfinite = 0

    async def send(self, turn: Turn, micro_batch: int, tensor: Tensor, keys: SampleKeys) -> None:
        """Encode in the transmit lane, then hand the frame to the link."""
        await self._transmit(Sent(turn, micro_batch, tensor, keys), self.encode)

    async def resend(
        self, turn: Turn, *, seq: int | None = None, micro_batch: int = -1, cold: bool = False
    ) -> bool:
        """Send a frame, or the latest of a micro-batch, again: as it was, or `cold` and new.

        False if there is no such thing: not sent yet, still waiting for the uplink, committed
        long since, or of an attempt that was aborted.
        """
        now = asyncio.get_running_loop().time()
        for item in reversed(self._sent.values()):
            if item.turn != turn:
                continue
            if seq is None:
                found = item.micro_batch == micro_batch
                if found and item.leaves_at > now:
                    return False
            else:
                found = item.seq == seq
            if found:
                self.num_resent += 1
                # Nothing but rows can be colder: what has none goes as it was.
                cold = cold and item.packet is not None and item.packet.rows is not None
                self.events.append(
                    f"edge {self.edge.name}: {self.edge.kind} of micro-batch {item.micro_batch}, "
                    f"{item.turn}, was sent again{', cold' if cold else ''}"
                )
                if cold:
                    # A frame of its own: what was sent under the old number stays what it was.
                    await self._transmit(replace(item), self._encode_cold)
                else:
                    await self._transmit(item, self._repeat)
                return True
        return False

    def encode(self, item: Sent) -> tuple[int, Any]:
        """One frame and its number, taken in the order of encoding: the receiver decodes in it."""
        self.fp32_nbytes += 4 * math.prod(item.tensor.shape)
        return self._frame(item, self._packet(item))

    def forget(self) -> None:
        """The step is over at both ends: let kept tensors go."""
        self._sent.clear()

    async def _transmit(self, item: Sent, encode: Callable[[Sent], tuple[int, Any]]) -> None:
        name = f"{LETTER[self.edge.kind]}{item.micro_batch}"
        seq, frame = await self._lane.run("encode", name, item.micro_batch, encode, item)
        self._sent[seq] = item
        self._link.send(frame, kind=self.edge.kind)
        item.leaves_at = self._link.busy_until

    def _packet(self, item: Sent) -> Packet:
        if not item.keys.remember and not self._compressed_evaluation:
            return self._raw(item)
        try:
            return self.codec.encode(item.tensor, keys=item.keys)
        except NonFinite:
            # No grid holds it, and hiding it would be worse: the norm sees it and skips the step.
            self.num_nonfinite += 1
            return self._raw(item)

    def _raw(self, item: Sent) -> Packet:
        item.is_raw = True
        return Identity().encode(item.tensor, keys=item.keys)

    def _encode_cold(self, item: Sent) -> tuple[int, Any]:
        """For a receiver that cannot apply the change: the value itself, in a new generation."""
        resends = cast(ResendsCold, self.codec)
        return self._frame(item, resends.resend_cold(item.tensor, keys=item.keys))

    def _repeat(self, item: Sent) -> tuple[int, Any]:
        """The same frame. The receiver has not applied it, or knows its number and drops it."""
        assert item.packet is not None
        return item.seq, self._pack(item, item.packet)

    def _frame(self, item: Sent, packet: Packet) -> tuple[int, Any]:
        if item.turn != self._turn:
            self._turn, self._next_seq = item.turn, 0
        item.seq, self._next_seq = self._next_seq, self._next_seq + 1
        item.packet = packet
        return item.seq, self._pack(item, packet)

    def _pack(self, item: Sent, packet: Packet) -> Any:
        lengths = item.keys.lengths
        header = FrameHeader(
            kind=self.edge.kind,
            replica=self.edge.replica,
            source=self.edge.source,
            target=self.edge.target,
            step=item.turn.step,
            micro_batch=item.micro_batch,
            flags=RAW if item.is_raw else 0,
            seq=item.seq,
            attempt=item.turn.attempt,
            body=part_of(item.turn) | ({} if lengths is None else {"n": list(lengths)}),
        )
        return self._wire.pack(header, packet)
