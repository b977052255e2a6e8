"""Packets, and the seam that every codec fits.

Path: stages.ends -> compressors.base -> compressors.frame

A codec turns a tensor into a packet and back. It knows neither Ray nor the wire. A packet names
its codec and carries everything that decoding needs except memory of earlier visits, so the
receiver needs no configuration; what both ends must remember (AC-SGD's rows) is named in `rows`.

The first dimension of every tensor is the sample; `SampleKeys` says which samples they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Buffer = bytes | bytearray | memoryview
State = dict[str, Any]


class CodecError(ValueError):
    """A packet that cannot be decoded, or a tensor that cannot be encoded."""


class NeedCold(CodecError):
    """The receiver cannot apply a delta: ask the sender for a cold resend of this packet."""

    def __init__(self, reason: str, ids: tuple[int, ...]) -> None:
        super().__init__(reason, ids)
        self.reason = reason
        self.ids = ids

    def __str__(self) -> str:
        return f"cold resend needed for samples {list(self.ids)}: {self.reason}"


class DuplicatePacket(CodecError):
    """The packet was applied before; it changes nothing and is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKeys:
    """Which samples the rows of a tensor are."""

    ids: tuple[int, ...]
    """Global, stable sample ids, one for each index of the first dimension."""

    lengths: tuple[int, ...] | None = None
    """Valid positions (second dimension) of each sample; None where nothing is padded."""

    remember: bool = True
    """False in evaluation: no row and no counter may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMarks:
    """What sender and receiver must agree on about the rows of a packet."""

    ids: tuple[int, ...]
    visits: tuple[int, ...]
    generations: tuple[int, ...]
    cold: tuple[bool, ...]
    evicted: tuple[int, ...] = ()
    """Samples whose rows the sender has given up since its last packet."""

    checksum: int | None = None
    """CRC-32 of the new rows, for debugging; None when not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """One tensor on the wire."""

    codec: str
    shape: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Small msgpack-able values that decoding needs: bits, group, dtype."""

    parts: tuple[Buffer, ...] = ()
    """Raw buffers: codes, scales."""

    inner: tuple[Packet, ...] = ()
    """Packets that a wrapping codec (delta, zstd, error feedback) wraps."""

    rows: RowMarks | None = None

    @property
    def nbytes(self) -> int:
        """Payload bytes, the header not counted."""
        own = sum(memoryview(part).nbytes for part in self.parts)
        return own + sum(packet.nbytes for packet in self.inner)


def check_parts(packet: Packet, num_parts: int) -> None:
    """Refuse a packet that has not as many parts as its codec makes, or wraps another: whatever
    else it carries was not made by that codec, and nobody would look at it."""
    if len(packet.parts) != num_parts or packet.inner:
        raise CodecError(
            f"{packet.codec} packet has {len(packet.parts)} parts and wraps {len(packet.inner)} "
            f"packets, expected {num_parts} and none"
        )


class Compressor(Protocol):
    """The seam every codec fits. `tests/contract/` says what it promises.

    One instance serves one end of one edge in one direction: the sender encodes with it, the
    receiver decodes with its own. Codecs with memory stage what they learn until `commit`.
    """

    name: str

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet: ...
    def decode(self, packet: Packet) -> Tensor: ...
    def estimate_nbytes(self, shape: tuple[int, ...]) -> int: ...
    def prefetch(self, ids: Collection[int]) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, float]: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


@runtime_checkable
class ResendsCold(Protocol):
    """What a codec whose packets name rows offers besides: the answer to `NeedCold`."""

    def resend_cold(self, tensor: Tensor, *, keys: SampleKeys) -> Packet: ...


class Stateless:
    """What a codec without memory need not write again."""

    def prefetch(self, ids: Collection[int]) -> None:
        """Nothing is kept anywhere."""

    def close(self) -> None:
        """Nothing is held."""

    def commit(self) -> None:
        """Nothing was staged."""

    def abort(self) -> None:
        """Nothing was staged."""

    def stats(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got keys {sorted(state)}")
