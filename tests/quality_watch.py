"""Codecs under watch for the quality runs, and AC-SGD with a rule broken on purpose.

The error of an edge is taken between what its sender was given and what its receiver decoded, so
that a codec cannot report an error it does not have. Mutations act here, outside the product.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compressors.base import Compressor, Packet, SampleKeys
from compressors.delta import Delta
from stages.dropout import SampleDropout

MUTATIONS = {
    "store-h": "the sender remembers h instead of what the receiver decoded",
    "id-is-position": "rows are kept by place in the batch instead of by sample",
    "lose-rows": "every receiver forgets all rows at the start of an epoch",
    "zero-rows": "the same, but it does not notice: rows are zero, counters are intact",
    "fresh-masks": "dropout draws a new mask on every visit",
}


class EdgeWatch:
    """Compares what an edge's sender was given with what its receiver decoded."""

    def __init__(self) -> None:
        self._given: deque[Tensor] = deque()
        self._error = 0.0
        self._value = 0.0

    def give(self, tensor: Tensor) -> None:
        self._given.append(tensor)

    def take(self) -> Tensor:
        """Packets are decoded in the order of encoding, so the oldest is the one that comes."""
        return self._given.popleft()

    def compare(self, given: Tensor, received: Tensor) -> None:
        self._error += float(torch.sum((received - given) ** 2))
        self._value += float(torch.sum(given**2))

    def drain(self) -> tuple[float, float]:
        """Squared error and squared value since the last drain."""
        sums, self._error, self._value = (self._error, self._value), 0.0, 0.0
        return sums


class Watched:
    """A codec, and the watch that sees what goes in at one end and comes out at the other."""

    def __init__(self, codec: Compressor, watch: EdgeWatch) -> None:
        self._codec: Any = codec
        self._watch = watch
        self.name = codec.name

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        packet: Packet = self._codec.encode(tensor, keys=keys)
        self._watch.give(tensor)
        return packet

    def decode(self, packet: Packet) -> Tensor:
        given = self._watch.take()
        received: Tensor = self._codec.decode(packet)
        self._watch.compare(given, received)
        return received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)


class WatchedDelta(Watched):
    """The same for AC-SGD, whose sender can be asked again, with a rule broken where asked."""

    def __init__(self, codec: Delta, watch: EdgeWatch, mutation: str) -> None:
        super().__init__(codec, watch)
        self._mutation = mutation
        self._num_slots = 0

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        if self._mutation == "id-is-position":
            first, self._num_slots = self._num_slots, self._num_slots + len(keys.ids)
            keys = SampleKeys(ids=tuple(range(first, self._num_slots)))
        packet = super().encode(tensor, keys=keys)
        if self._mutation == "store-h":
            self._store_h(tensor, keys)
        return packet

    def resend_cold(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        packet: Packet = self._codec.resend_cold(tensor, keys=keys)
        self._watch.give(tensor)
        return packet

    def commit(self) -> None:
        self._num_slots = 0
        self._codec.commit()

    def spoil_rows(self) -> None:
        """Do to this receiver what the mutation says, at the start of an epoch."""
        if self._mutation == "lose-rows":
            empty = Delta(
                self._codec.inner,
                namespace=self._codec.namespace,
                rows=self._codec.state_dict()["format"],
            )
            self._codec.load_state_dict(empty.state_dict())
        elif self._mutation == "zero-rows":
            state = self._codec.state_dict()
            self._codec.load_state_dict({**state, "values": torch.zeros_like(state["values"])})

    def _store_h(self, tensor: Tensor, keys: SampleKeys) -> None:
        store = self._codec._store
        for sample, h in zip(keys.ids, tensor):
            mark = store.mark(sample)
            store.stage(sample, mark, store.row_format.pack(h.reshape(-1, h.shape[-1])))


@contextlib.contextmanager
def fresh_masks() -> Iterator[None]:
    """Dropout as it usually is: a new mask on every visit."""
    kept = SampleDropout._mask
    generator = torch.Generator().manual_seed(0)

    def fresh(self: SampleDropout, sample: int, shape: torch.Size) -> Tensor:
        return torch.rand(shape, generator=generator) >= self.probability

    SampleDropout._mask = fresh  # type: ignore[method-assign]
    try:
        yield
    finally:
        SampleDropout._mask = kept  # type: ignore[method-assign]
