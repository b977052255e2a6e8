"""Lossless entropy stage: zstandard over the parts of another codec's packet.

Quantised codes are far from uniform, so a general compressor still finds a tenth to a quarter.
A part that would not shrink is sent as it is. The tree of packets and their headers stay readable;
row marks move to the outer packet, where the stage looks for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import zstandard
from torch import Tensor

from compressors.base import Buffer, CodecError, Compressor, Packet, ResendsCold, SampleKeys, State

MAX_RAW_NBYTES = 1 << 30
_STORED = -1
COUNTED = "zstd.nbytes"
"""Key of the bytes before and after, in the saved state."""


class Entropy:
    """Compresses what the inner codec sends; memory, if any, is the inner codec's."""

    def __init__(self, inner: Compressor, level: int = 1) -> None:
        if not 1 <= level <= 19:
            raise ValueError(f"zstd level {level}, expected 1 (fast) to 19 (small)")
        self.inner = inner
        self.name = f"{inner.name}+zstd"
        self.level = level
        self._raw_nbytes = 0
        self._sent_nbytes = 0
        self._committed = (0, 0)

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        return self._squeeze(self.inner.encode(tensor, keys=keys), keys)

    def resend_cold(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        """The inner codec's cold resend, compressed; only AC-SGD has one."""
        if not isinstance(self.inner, ResendsCold):
            raise CodecError(f"{self.name} remembers no samples: send the packet again as it was")
        return self._squeeze(self.inner.resend_cold(tensor, keys=keys), keys)

    def decode(self, packet: Packet) -> Tensor:
        return self.inner.decode(inflate(packet))

    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        """An upper bound: what compresses is not known before it is seen."""
        return self.inner.estimate_nbytes(shape)

    def prefetch(self, ids: Collection[int]) -> None:
        self.inner.prefetch(ids)

    def close(self) -> None:
        self.inner.close()

    def commit(self) -> None:
        self._committed = (self._raw_nbytes, self._sent_nbytes)
        self.inner.commit()

    def abort(self) -> None:
        self._raw_nbytes, self._sent_nbytes = self._committed
        self.inner.abort()

    def stats(self) -> dict[str, float]:
        ratio = self._sent_nbytes / self._raw_nbytes if self._raw_nbytes else 1.0
        return {**self.inner.stats(), "zstd_ratio": ratio}

    def state_dict(self) -> State:
        """The inner codec's state, and what `zstd_ratio` is made of."""
        return {**self.inner.state_dict(), COUNTED: list(self._committed)}

    def load_state_dict(self, state: State) -> None:
        raw, sent = state.get(COUNTED, (0, 0))
        self._committed = self._raw_nbytes, self._sent_nbytes = int(raw), int(sent)
        self.inner.load_state_dict({k: v for k, v in state.items() if k != COUNTED})

    def _squeeze(self, raw: Packet, keys: SampleKeys) -> Packet:
        packet = deflate(raw, self.level)
        if keys.remember:
            self._raw_nbytes += raw.nbytes
            self._sent_nbytes += packet.nbytes
        return packet


def deflate(packet: Packet, level: int) -> Packet:
    """The packet with each part compressed where that makes it smaller."""
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=False)
    sizes: list[int] = []

    def squeeze(part: Buffer) -> Buffer:
        nbytes = memoryview(part).nbytes
        small: bytes = compressor.compress(part) if nbytes else b""
        gains = len(small) < nbytes
        sizes.append(nbytes if gains else _STORED)
        return small if gains else part

    inner = _map_parts(replace(packet, rows=None), squeeze)
    return Packet(
        codec="zstd", shape=packet.shape, meta={"raw": tuple(sizes)}, inner=(inner,),
        rows=packet.rows,
    )  # fmt: skip


def inflate(packet: Packet) -> Packet:
    """The inner packet as it was; takes no more memory than its shape can explain."""
    if packet.codec != "zstd" or len(packet.inner) != 1 or packet.parts:
        raise CodecError(
            f"expected a zstd packet around one other, got {packet.codec!r:.40} with "
            f"{len(packet.inner)} inner packets and {len(packet.parts)} parts"
        )
    inner = packet.inner[0]
    if tuple(inner.shape) != tuple(packet.shape):
        raise CodecError(
            f"zstd packet of shape {tuple(packet.shape)} is around one of {tuple(inner.shape)}"
        )
    sizes = packet.meta.get("raw")
    num_parts = _num_parts(inner)
    if not isinstance(sizes, (tuple, list)) or len(sizes) != num_parts:
        raise CodecError(f"zstd packet states sizes {sizes!r:.80} for {num_parts} parts")
    # No codec sends more than 16 bytes per element, scales and indices included.
    limit = min(MAX_RAW_NBYTES, 16 * math.prod(inner.shape) + 4096)
    decompressor = zstandard.ZstdDecompressor()
    todo: Iterator[object] = iter(sizes)

    def restore(part: Buffer) -> Buffer:
        size = next(todo)
        if size == _STORED:
            return part
        if type(size) is not int or not 0 < size <= limit:
            raise CodecError(f"zstd part states {size!r:.40} raw bytes, limit is {limit}")
        try:
            stated = zstandard.frame_content_size(part)
            if stated != size:
                raise CodecError(f"zstd part of {stated} raw bytes, the packet states {size}")
            return decompressor.decompress(part, max_output_size=size)
        except zstandard.ZstdError as error:
            raise CodecError(f"zstd part cannot be decompressed: {error}") from error

    return replace(_map_parts(inner, restore), rows=packet.rows)


def _map_parts(packet: Packet, change: Callable[[Buffer], Buffer]) -> Packet:
    """The packet with each part changed, its own first, then its inner packets' in order."""
    parts = tuple(change(part) for part in packet.parts)
    return replace(packet, parts=parts, inner=tuple(_map_parts(p, change) for p in packet.inner))


def _num_parts(packet: Packet) -> int:
    return len(packet.parts) + sum(_num_parts(inner) for inner in packet.inner)
