"""Letters and vectors that are nothing but their size: simulations of large models and fleets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compressors.base import Packet
from compressors.frame import FrameHeader, frame_nbytes
from stages.ends import WireFormat

HEADER_NBYTES = 88
"""Of a frame in a simulation that packs none."""


@dataclass(frozen=True, slots=True)
class SizedLetter:
    """A frame that was never packed."""

    header: FrameHeader
    packet: Any
    nbytes: int


def scaled_wire(scale: float) -> WireFormat:
    """Frames with the contents of a small model and the size of a `scale` times larger one."""

    last: list[tuple[Packet, Packet, int]] = []  # one packet often goes to several in a row

    def pack(header: FrameHeader, packet: Packet | None) -> Any:
        if packet is None:
            return SizedLetter(header, None, frame_nbytes(header))
        if not last or last[0][0] is not packet:
            parts = tuple(bytes(part) for part in packet.parts)  # the sender's memory moves on
            copied = replace(packet, parts=parts)
            last[:] = [(packet, copied, HEADER_NBYTES + math.ceil(scale * packet.nbytes))]
        _, copied, nbytes = last[0]
        return SizedLetter(header, copied, nbytes)

    return WireFormat(pack=pack, unpack=lambda letter: (letter.header, letter.packet))


@dataclass(frozen=True, slots=True)
class PricedPacket:
    """So many bytes of nothing."""

    nbytes: int


class PricedCoder:
    """A vector that is nothing but its size on the wire."""

    is_exact = True
    density = 1.0
    near_bits = 0

    def __init__(self, nbytes: int) -> None:
        self._packets: dict[int, PricedPacket] = {}
        self._nbytes = nbytes

    def cut(self, vector: Any, num: int) -> list[Any]:
        return [-(-self._nbytes // num)] * num

    def join(self, pieces: Sequence[Any]) -> Any:
        return 0

    def blank(self, vector: Any) -> Any:
        return 0

    def place(self, whole: Any, index: int, num: int, piece: Any) -> None: ...

    def encode(self, slot: str, vector: Any, *, exact: bool = False) -> tuple[Any, Any]:
        nbytes = vector or self._nbytes  # a piece is its size, the whole vector is 0
        packet = self._packets.get(nbytes)
        if packet is None:
            packet = self._packets[nbytes] = PricedPacket(nbytes)
        return packet, nbytes

    def decode(self, packet: Any) -> Any:
        return packet.nbytes

    read = decode

    def mean(self, vectors: Sequence[Any]) -> Any:
        return vectors[0]

    def combine(self, vectors: Sequence[Any], weights: Sequence[float]) -> Any:
        return vectors[0]

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


PRICED_WIRE = WireFormat(
    pack=lambda header, packet: SizedLetter(
        header, packet, HEADER_NBYTES + (0 if packet is None else packet.nbytes)
    ),
    unpack=lambda letter: (letter.header, letter.packet),
)
