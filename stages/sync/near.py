"""A few bits of a vector for somebody who has nearly the same one: which of the points near it.

    sender      n = round(x / step)        sends n modulo 2**bits, and a checksum of n
    receiver    the n with that remainder that is nearest to its own vector

Replicas that agree are near each other however far they have come from the start of the run. The
step is a share of what they were apart lately, so it shrinks as they agree; that of codes for the
way from the start grows, and with it what rounding loses. Moniqua (Lu and De Sa, 2020) codes so.

Both ends have the same points or the checksum says no: too far apart, such as a straggler. Then the
receiver asks for the points themselves. There is no memory that a lost letter, a death or a
newcomer could break, and what a sender keeps of its rounding does not depend on who understood it.
"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from compressors.base import CodecError, Packet
from compressors.checksum import crc32
from compressors.identity import dtype_name, dtype_of, one_part, to_part
from compressors.kernels_torch import pack, unpack
from stages.sync.strategy import State

NAME = "near"
LEAST_BITS, MOST_BITS = 3, 8
"""With 2 bits a step would be as long as what replicas are apart: rounding would part them anew."""

NUM_SEEN = 4
"""Exchanges by which it is judged how far others are; before so many there is no judgement."""

ROOM = 1.5
"""Times what they were apart: so far they may be and still be understood."""

FINEST = 2.0**-20
"""Of the largest value: a smaller step would be lost in the rounding of floats."""

SMALLEST = 1e-30


class Near:
    """How far the others are from one stage, and letters that need not say more than that."""

    def __init__(self, bits: int) -> None:
        self._bits = max(LEAST_BITS, bits)
        self._apart: deque[float] = deque(maxlen=NUM_SEEN)

    def saw(self, one: Tensor, other: Tensor, times: float = 1.0) -> None:
        """Two vectors of an exchange that went well; others were `times` as far apart."""
        self._apart.append(times * float((one - other).abs().max()) if one.numel() else 0.0)

    def encode(self, vector: Tensor, num: int = 1) -> tuple[Packet, Tensor] | None:
        """A packet and what it says. The sender will keep `num` times what is lost, so it gets as
        many more bits; None if that would still be too much, or too little is known."""
        far = ROOM * max(self._apart, default=0.0)
        if len(self._apart) < NUM_SEEN or not all(map(math.isfinite, self._apart)):
            return None
        bits = min(MOST_BITS, self._bits + math.ceil(math.log2(num)))
        step = far / ((1 << bits) - 1) * 2
        if num * step > far / ROOM:  # the sender would be further off than it was
            return None
        if not vector.numel() or vector.dtype.itemsize < 4:  # halves cannot hold the numbers
            return None
        largest = float(vector.abs().max())
        if not math.isfinite(largest):
            return None
        step = max(step, FINEST * largest, SMALLEST)
        numbers = torch.round(vector / step).to(torch.int32)
        codes = (numbers & ((1 << bits) - 1)).to(torch.uint8)
        packet = Packet(
            codec=NAME,
            shape=tuple(vector.shape),
            meta={
                "bits": bits, "step": step, "sum": crc32(to_part(numbers)),
                "dtype": dtype_name(vector.dtype),
            },
            parts=(to_part(pack(codes.reshape(1, -1), bits)),),
        )  # fmt: skip
        return packet, _points(numbers, step, vector.dtype)

    def state_dict(self) -> State:
        return {"apart": list(self._apart)}

    def load_state_dict(self, state: State) -> None:
        self._apart.clear()
        self._apart.extend(map(float, state["apart"]))


def decode(packet: Packet, own: Tensor) -> Tensor | None:
    """What the sender meant, by one's own vector; None if that is too far from it."""
    bits, step, total = (packet.meta.get(key) for key in ("bits", "step", "sum"))
    if type(bits) is not int or not 1 <= bits <= MOST_BITS:
        raise CodecError(f"{NAME} packet has bits {bits!r:.40}, not 1 to {MOST_BITS}")
    if not (isinstance(step, float) and 0 < step < math.inf):
        raise CodecError(f"{NAME} packet has step {step!r:.40}, not a number above 0")
    if packet.shape != tuple(own.shape) or dtype_of(packet) != own.dtype:
        raise CodecError(
            f"{NAME} packet of {packet.shape} {packet.meta['dtype']} is read by {tuple(own.shape)} "
            f"{dtype_name(own.dtype)}; all replicas must train the same model"
        )
    part = memoryview(one_part(packet))
    if part.nbytes != -(-own.numel() * bits // 8):
        raise CodecError(
            f"{NAME} packet of shape {packet.shape} has {part.nbytes} bytes of {bits} bits"
        )
    packed = torch.frombuffer(bytearray(part), dtype=torch.uint8).reshape(1, -1)
    codes = unpack(packed, own.numel(), bits).reshape(-1).to(own.dtype)
    span = 1 << bits
    turns = torch.round((own / step - codes) / span)
    numbers = codes.add_(turns, alpha=span).to(torch.int32)
    if crc32(to_part(numbers)) != total:
        return None
    return _points(numbers, step, own.dtype)


def _points(numbers: Tensor, step: float, dtype: torch.dtype) -> Tensor:
    return numbers.to(dtype) * step
