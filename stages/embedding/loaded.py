"""Batches that a user's loader makes: sent to stage 0 and to the last stage, kept until used.

Path: ray_pipe.rec_loader -> stages.embedding.loaded -> stages.embedding.loaded_feed

Where samples have stable ids, ids travel and the stages read the data. A loader in the driver has
the data itself, so it travels: ids and dense features to stage 0, labels to the last stage, one
letter for each micro-batch, ahead of the step as far as the loader is ahead. Letters come in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressors.base import CodecError, Packet
from compressors.frame import FrameError, unpack
from compressors.id_lists import decode_id_lists, encode_id_lists
from stages.ends import StageTimeout
from stages.plan import StepPlan

PART_BITS = 20
MAX_SAMPLES = 1 << PART_BITS
"""Of a micro-batch: a sample's id is its micro-batch's number, then its place in it."""

FEATURES = "features"
LABELS = "labels"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFeature:
    """A feature of a batch: whose rows it reads, and how they become a vector."""

    name: str
    table: str
    pooling: str
    dim: int
    sharded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bag:
    """Ids of one feature: [B] or [B, L] without offsets, or flat with them."""

    ids: Tensor
    offsets: Tensor | None = None

    @property
    def num_samples(self) -> int:
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What stage 0 has of a micro-batch."""

    bags: tuple[Bag, ...]
    """In the order of the features."""

    dense: Tensor | None
    num_samples: int


@dataclass(frozen=True, slots=True)
class Targets:
    """What the last stage has of a micro-batch."""

    targets: Tensor
    lengths: None = None


def sample_ids_of(number: int, num_samples: int) -> tuple[int, ...]:
    """What a plan calls the samples of a micro-batch."""
    return tuple(range(number << PART_BITS, (number << PART_BITS) + num_samples))


def features_packet(part: Part) -> Packet:
    """Ids in the shortest of their forms, dense features as they are."""
    inner, shapes = [], []
    for bag in part.bags:
        flat = np.ascontiguousarray(bag.ids.reshape(-1).numpy())
        lengths = None
        if bag.offsets is not None:
            lengths = np.diff(bag.offsets.numpy())
        elif bag.ids.dim() == 2:
            lengths = np.full(len(bag.ids), bag.ids.shape[1], np.int64)
        inner.append(encode_id_lists(flat, lengths))
        shapes.append(None if bag.offsets is not None else list(bag.ids.shape))
    dense = b"" if part.dense is None else part.dense.contiguous().numpy().tobytes()
    columns = -1 if part.dense is None else part.dense.shape[1]
    return Packet(
        codec="loader-features",
        shape=(part.num_samples,),
        meta={"shapes": shapes, "columns": columns},
        parts=(dense,),
        inner=tuple(inner),
    )


def read_features(packet: Packet) -> Part:
    """The micro-batch that `features_packet` wrote."""
    if packet.codec != "loader-features" or len(packet.parts) != 1:
        raise CodecError(f"expected features of a loader, got {packet.codec!r}")
    (num,) = packet.shape
    bags = []
    for inner, shape in zip(packet.inner, packet.meta["shapes"], strict=True):
        ids, lengths = decode_id_lists(inner)
        flat = torch.from_numpy(ids.copy())
        if shape is not None:
            bags.append(Bag(ids=flat.reshape(tuple(shape))))
            continue
        if lengths is None or len(lengths) != num:
            raise CodecError(f"bags of a loader do not fit its {num} samples")
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        bags.append(Bag(ids=flat, offsets=torch.from_numpy(ends)))
    columns, dense = packet.meta["columns"], None
    if columns >= 0:
        values = np.frombuffer(packet.parts[0], np.float32).copy()
        dense = torch.from_numpy(values).reshape(num, columns)
    return Part(bags=tuple(bags), dense=dense, num_samples=num)


def labels_packet(label: Tensor) -> Packet:
    """Labels as they are."""
    return Packet(
        codec="loader-labels",
        shape=tuple(label.shape),
        meta={"dtype": str(label.dtype).removeprefix("torch.")},
        parts=(label.contiguous().numpy().tobytes(),),
    )


def read_labels(packet: Packet) -> Tensor:
    """The labels that `labels_packet` wrote."""
    dtype = DTYPES.get(packet.meta.get("dtype", ""))
    if packet.codec != "loader-labels" or dtype is None:
        raise CodecError(f"expected labels of a loader, got {packet.codec!r}")
    flat = torch.frombuffer(bytearray(packet.parts[0]), dtype=dtype)
    return flat.reshape(packet.shape)


@dataclass(slots=True)
class _Coming:
    """Micro-batches of a training step, as far as they have come."""

    of: int
    ids: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Inbox:
    """The batches of one stage's process, until their step has used them. Samples, to a stage."""

    digest = "loader"

    def __init__(self, features: Sequence[LoadedFeature]) -> None:
        self.features = tuple(features)
        self.on_step: Callable[[], None] = lambda: None
        """Told when more of a training step has come."""

        self._parts: dict[int, Part] = {}
        self._labels: dict[int, Tensor] = {}
        self._steps: dict[int, _Coming] = {}
        self._wants: tuple[str, ...] = ()
        self._came: asyncio.Event | None = None
        self._broken: Exception | None = None

    def __len__(self) -> int:
        return 0

    def open(self, wants: Sequence[str]) -> None:
        """Begin to listen, on the stage's loop; `wants` is what this stage is sent."""
        self._wants = tuple(wants)
        self._came = asyncio.Event()

    def on_frame(self, frame: Any) -> None:
        """A letter of the loader (called on the loop; returns at once)."""
        assert self._came is not None
        try:
            header, packet = unpack(frame)
            body = header.body
            number = body["number"]
            assert packet is not None
            if body["op"] == LABELS:
                self._labels[number] = read_labels(packet)
            else:
                self._parts[number] = part = read_features(packet)
                if header.step >= 0:
                    coming = self._steps.setdefault(header.step, _Coming(of=body["of"]))
                    coming.ids[header.micro_batch] = sample_ids_of(number, part.num_samples)
        except (FrameError, CodecError, KeyError) as error:
            self._broken = RuntimeError(f"a batch of the loader arrived damaged: {error}")
        self._came.set()
        self.on_step()

    async def arrived(self, plan: StepPlan) -> None:
        """Wait for all that a step needs here; forget what came before it."""
        assert self._came is not None
        numbers = [ids[0] >> PART_BITS for ids in plan.micro_batches]
        for old in (self._parts, self._labels):
            for number in [number for number in old if number < min(numbers)]:
                del old[number]
        loop = asyncio.get_running_loop()
        until = loop.time() + plan.deadline_s
        while missing := self._missing(numbers):
            if self._broken is not None:
                raise self._broken
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), until - loop.time())
            except TimeoutError:
                raise StageTimeout(
                    f"the {missing} of {plan.turn} did not come from the loader within "
                    f"{plan.deadline_s:.0f} s; if its link is that slow, raise `deadline_s`"
                ) from None
        for step in [step for step in self._steps if step <= plan.step]:
            del self._steps[step]

    def _missing(self, numbers: Sequence[int]) -> str:
        have: dict[str, Container[int]] = {FEATURES: self._parts, LABELS: self._labels}
        lacking = [want for want in self._wants if any(n not in have[want] for n in numbers)]
        return " and ".join(lacking)

    def micro_batches(self, step: int) -> tuple[tuple[int, ...], ...] | None:
        """The samples of a training step that is wholly here."""
        coming = self._steps.get(step)
        if coming is None or len(coming.ids) < coming.of:
            return None
        return tuple(coming.ids[index] for index in range(coming.of))

    def part(self, ids: Sequence[int]) -> Part:
        """What stage 0 has of the micro-batch of these samples."""
        return self._parts[ids[0] >> PART_BITS]

    def batch(self, ids: Sequence[int]) -> Targets:
        """What the last stage has of it."""
        return Targets(self._labels[ids[0] >> PART_BITS])
