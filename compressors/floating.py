"""Half the bytes, no memory: fp16 and bf16.

A finite value beyond the narrow format's range is sent as the largest one (65504 in fp16) and
counted in `stats()`: an overflow to infinity would poison the run, a refusal would end it, and a
silent clip would hide it. Infinities and NaN pass as they are, since they were there before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compressors.base import CodecError, Packet, SampleKeys, Stateless
from compressors.identity import dtype_name, dtype_of, from_part, one_part, to_part


class Floating(Stateless):
    """Rounds to a 16-bit float (nearest even) and gives back the tensor's own dtype."""

    name: str
    dtype: torch.dtype

    def __init__(self) -> None:
        self._num_saturated = 0

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        if not tensor.is_floating_point():
            raise CodecError(
                f"{self.name} sends floating-point tensors, got {dtype_name(tensor.dtype)}; "
                "use fp32, which sends any dtype as it is"
            )
        narrow, num_saturated = narrow_to(tensor.detach(), self.dtype)
        if keys.remember:
            self._num_saturated += num_saturated
        return Packet(
            codec=self.name,
            shape=tuple(tensor.shape),
            meta={"dtype": dtype_name(tensor.dtype)},
            parts=(to_part(narrow),),
        )

    def decode(self, packet: Packet) -> Tensor:
        dtype = dtype_of(packet)
        return from_part(one_part(packet), self.dtype, packet.shape, codec=self.name).to(dtype)

    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        return 2 * math.prod(shape)

    def stats(self) -> dict[str, float]:
        return {"saturated": float(self._num_saturated)}


class Fp16(Floating):
    """Eleven bits of precision, largest value 65504, steps of 6e-8 near zero."""

    name = "fp16"
    dtype = torch.float16


class Bf16(Floating):
    """Eight bits of precision with the range of fp32."""

    name = "bf16"
    dtype = torch.bfloat16


def narrow_to(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """The tensor in `dtype`, and how many finite values were too large and got clipped."""
    narrow = tensor.to(dtype)
    largest = torch.finfo(dtype).max
    if not tensor.numel():
        return narrow, 0
    low, high = tensor.aminmax()
    if -largest <= low and high <= largest:  # false if any is NaN
        return narrow, 0
    clipped = narrow.isinf() & tensor.isfinite()
    narrow = torch.where(clipped, tensor.sign().to(dtype) * largest, narrow)
    return narrow, int(clipped.sum())
