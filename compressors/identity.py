"""The codec that changes nothing: the tensor's own bytes, in its own dtype.

The dull twin of all others. Bit-identical, NaN payloads and signed zeros included. Encoding a
contiguous CPU tensor copies nothing: the part is a view of the tensor's memory, so the tensor
must not be written to before the packet is packed. Decoding copies only if the buffer is
read-only, as bytes and Ray's shared memory are: a tensor over such memory could be written to.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from compressors.base import Buffer, CodecError, Packet, SampleKeys, Stateless, check_parts

DTYPES: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
"""Names that a packet's `meta` may use for a dtype."""


class Identity(Stateless):
    """Sends every value as it is; `estimate_nbytes` speaks of fp32 tensors."""

    name = "fp32"

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        return Packet(
            codec=self.name,
            shape=tuple(tensor.shape),
            meta={"dtype": dtype_name(tensor.dtype)},
            parts=(to_part(tensor),),
        )

    def decode(self, packet: Packet) -> Tensor:
        dtype = dtype_of(packet)
        return from_part(one_part(packet), dtype, packet.shape, codec=self.name)

    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        return 4 * math.prod(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as `meta` spells it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CodecError(f"dtype {name} cannot be sent; known are {', '.join(DTYPES)}")
    return name


def dtype_of(packet: Packet) -> torch.dtype:
    """The dtype that the packet's tensor had before encoding."""
    name = packet.meta.get("dtype")
    if not isinstance(name, str) or name not in DTYPES:
        raise CodecError(
            f"{packet.codec} packet has dtype {name!r:.40}; known are {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def one_part(packet: Packet) -> Buffer:
    """The only part of a packet that must have exactly one."""
    check_parts(packet, 1)
    return packet.parts[0]


def to_part(tensor: Tensor) -> memoryview:
    """The tensor's bytes, row-major; a view of its memory where it lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def borrow_part(part: Buffer, dtype: torch.dtype, shape: tuple[int, ...], *, codec: str) -> Tensor:
    """A tensor over these bytes wherever they are: for reading only, whatever torch allows."""
    view = memoryview(part)
    if not view.nbytes:
        return from_part(part, dtype, shape, codec=codec)
    raw = np.asarray(_Borrowed(view))
    return from_part(raw.data, dtype, shape, codec=codec)


class _Borrowed:
    """Memory that may be read-only, shown to numpy as if it were not: torch knows no other."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.__array_interface__ = {
            "version": 3,
            "shape": (view.nbytes,),
            "typestr": "|u1",
            "data": (np.frombuffer(view, dtype=np.uint8).ctypes.data, False),
        }


def from_part(part: Buffer, dtype: torch.dtype, shape: tuple[int, ...], *, codec: str) -> Tensor:
    """A tensor of these bytes, over the buffer if it may be written to, else over a copy."""
    view = memoryview(part)
    expected = math.prod(shape) * dtype.itemsize
    if view.nbytes != expected:
        raise CodecError(
            f"{codec} packet of shape {tuple(shape)} needs {expected} bytes of "
            f"{dtype_name(dtype)}, has {view.nbytes}"
        )
    if expected == 0:
        return torch.empty(shape, dtype=dtype)
    raw = np.frombuffer(view, dtype=np.uint8)
    # torch reads at multiples of the element size; frames align parts, other buffers may not.
    if view.readonly or raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).reshape(shape)
