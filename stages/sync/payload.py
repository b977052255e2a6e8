"""Vectors on their way to other replicas: cut into pieces, coded, averaged, put together again.

Every strategy works with every codec, because what the codec loses stays with whoever encoded:
`encode` gives back what the others will read, beside the packet. An exchange sends changes against
something that both ends know; of AC-SGD, which does the same with its rows, the inner quantiser is
what is left to do, so `acsgd` names `directq` here, `acsgd-topk` names `topk`, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from compressors.base import Compressor, Packet, SampleKeys, State
from compressors.identity import Identity, borrow_part, dtype_of, one_part
from compressors.kernels import NonFinite
from compressors.registry import CodecSpec, decode_any, make_codec, split_name
from stages.sync.memory import VectorMemory

WIDTH = 512
"""Longer vectors are coded as rows of this many values: some codecs have scales by column."""

_INNER = {"acsgd": "directq", "acsgd-reference": "reference", "acsgd-topk": "topk"}
FP32 = CodecSpec(name="fp32")


class Coder(Protocol):
    """Arithmetic on vectors for the exchanges; the simulator has one that knows sizes only."""

    @property
    def is_exact(self) -> bool: ...
    @property
    def density(self) -> float: ...
    @property
    def near_bits(self) -> int: ...

    def cut(self, vector: Any, num: int) -> list[Any]: ...
    def join(self, pieces: Sequence[Any]) -> Any: ...
    def blank(self, vector: Any) -> Any: ...
    def place(self, whole: Any, index: int, num: int, piece: Any) -> None: ...
    def encode(self, slot: str, vector: Any, *, exact: bool = False) -> tuple[Packet, Any]: ...
    def decode(self, packet: Packet) -> Any: ...
    def read(self, packet: Packet) -> Any: ...
    def mean(self, vectors: Sequence[Any]) -> Any: ...
    def combine(self, vectors: Sequence[Any], weights: Sequence[float]) -> Any: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


class VectorCoder:
    """Real vectors with a codec of the registry; a slot names a piece that comes again."""

    def __init__(self, spec: CodecSpec = FP32, *, replica: int = 0) -> None:
        """`replica` is whose vectors these are: where rounding draws lots each has its own."""
        self.spec = payload_spec(spec)
        self._replica = replica
        self.num_nonfinite = 0
        self._codecs: dict[str, Compressor] = {}
        self._memory = VectorMemory()
        self.is_exact = split_name(self.spec.name) == ("fp32", ())
        """What is read is what was sent."""

        is_sparse = split_name(self.spec.name)[0] == "topk"
        self.density = self.spec.density if is_sparse else 1.0
        """The share of values that is sent at all."""

        is_grid = split_name(self.spec.name) == ("directq", ())
        self.near_bits = self.spec.bits if is_grid and self.spec.rounding == "nearest" else 0
        """Of a value for somebody who has one near it (`stages.sync.near`); 0 for codecs whose
        choice is not how many bits a value has."""

    def cut(self, vector: Tensor, num: int) -> list[Tensor]:
        """`num` pieces of nearly equal length."""
        size = vector.numel()
        return [vector[size * i // num : size * (i + 1) // num] for i in range(num)]

    def blank(self, vector: Tensor) -> Tensor:
        """Memory of its own for as many values as `vector` has."""
        return self._memory.vector(vector.numel(), vector.dtype)

    def place(self, whole: Tensor, index: int, num: int, piece: Tensor) -> None:
        """Write what `cut` has, or would have, at this index."""
        self.cut(whole, num)[index].copy_(piece)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The pieces in one vector, memory of its own."""
        size = sum(piece.numel() for piece in pieces)
        whole = self._memory.vector(size, pieces[0].dtype)
        return torch.cat(list(pieces), out=whole)

    def encode(self, slot: str, vector: Tensor, *, exact: bool = False) -> tuple[Packet, Tensor]:
        """The packet, and what its receivers will read."""
        if exact or self.is_exact or not vector.numel():
            return _identity(vector), vector
        codec = self._codec(slot)
        matrix = _as_matrix(vector)
        keys = _keys(matrix.shape[0])
        try:
            packet = codec.encode(matrix, keys=keys)
        except NonFinite:
            # No grid holds it, and hiding it would be worse: the norm sees it and skips the step.
            self.num_nonfinite += 1
            return _identity(vector), vector
        meta = {**packet.meta, "num_values": vector.numel()} if _is_padded(vector) else packet.meta
        packet = replace(packet, meta=meta)
        return packet, self.decode(packet)

    def decode(self, packet: Packet) -> Tensor:
        """The vector of a packet, from the packet alone."""
        flat = decode_any(packet).reshape(-1)
        num = packet.meta.get("num_values")
        return flat[:num] if isinstance(num, int) else flat

    def read(self, packet: Packet) -> Tensor:
        """As `decode`, but for reading only: exact values stay where they arrived."""
        if packet.codec != Identity.name:
            return self.decode(packet)
        return borrow_part(
            one_part(packet), dtype_of(packet), packet.shape, codec=packet.codec
        ).reshape(-1)

    def mean(self, vectors: Sequence[Tensor]) -> Tensor:
        """In the order given, so that every owner gets the same bits from the same vectors."""
        return self._sum(vectors, [1.0] * len(vectors)).div_(len(vectors))

    def combine(self, vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """The weighted sum, in the order given."""
        return self._sum(vectors, weights)

    def _sum(self, vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        total = self._memory.vector(vectors[0].numel(), vectors[0].dtype)
        if weights[0] == 1.0 and len(vectors) > 1:  # one pass for the first two
            torch.add(vectors[0], vectors[1], alpha=weights[1], out=total)
            left = 2
        else:
            torch.mul(vectors[0], weights[0], out=total)
            left = 1
        for vector, weight in zip(vectors[left:], weights[left:], strict=True):
            total.add_(vector, alpha=weight)
        return total

    def commit(self) -> None:
        """The exchange went well: residuals of error feedback stay."""
        for codec in self._codecs.values():
            codec.commit()

    def abort(self) -> None:
        """The exchange never happened."""
        for codec in self._codecs.values():
            codec.abort()

    def state_dict(self) -> State:
        return {slot: codec.state_dict() for slot, codec in self._codecs.items()}

    def load_state_dict(self, state: State) -> None:
        self._codecs = {}
        for slot, inner in state.items():
            self._codec(slot).load_state_dict(inner)

    def nbytes(self, num_values: int) -> int:
        """Payload of a vector of so many fp32 values, the frame's header not counted."""
        return self._codec("size").estimate_nbytes(tuple(_as_matrix(torch.empty(num_values)).shape))

    def _codec(self, slot: str) -> Compressor:
        codec = self._codecs.get(slot)
        if codec is None:
            namespace = ("replica", self._replica, slot)
            codec = self._codecs[slot] = make_codec(self.spec, namespace=namespace)
        return codec


def payload_spec(spec: CodecSpec) -> CodecSpec:
    """The codec of replica traffic: one without rows, see the module's header."""
    base, suffixes = split_name(spec.name)
    return replace(spec, name="+".join([_INNER.get(base, base), *suffixes]))


def _identity(vector: Tensor) -> Packet:
    return Identity().encode(vector, keys=_keys(1))


def _is_padded(vector: Tensor) -> bool:
    return vector.numel() > WIDTH and vector.numel() % WIDTH != 0


def _as_matrix(vector: Tensor) -> Tensor:
    size = vector.numel()
    if size <= WIDTH:
        return vector.reshape(1, size)
    if size % WIDTH:
        vector = torch.nn.functional.pad(vector, (0, WIDTH - size % WIDTH))
    return vector.reshape(-1, WIDTH)


@lru_cache(maxsize=64)
def _keys(num_rows: int) -> SampleKeys:
    return SampleKeys(ids=tuple(range(num_rows)))
