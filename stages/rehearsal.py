"""All stages of a pipeline in one process and in virtual time: the same code without Ray.

With real tensors it is a test bench: every stage, codec, frame and link as in earnest, and an
hour of waiting in milliseconds. With costs instead of tensors it is the simulator that predicts
the step time of a run: the stages run their real action lists over the real links, and only the
arithmetic is replaced by its price on cores that the stages share.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, TypeVar, cast

import torch

from compressors.base import Packet, SampleKeys, Stateless
from compressors.frame import FrameHeader, frame_nbytes
from compressors.registry import CodecSpec, sizing_codec
from netsim.link import LinkLike
from netsim.simulate import Cores
from netsim.simulate import Lane as SharedLane
from stages.assembly import assemble
from stages.black_box import BlackBox
from stages.ends import WireFormat
from stages.keeper import Keeper
from stages.lanes import Lane, Recorder, Unrecorded
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.spec import StageSpec
from stages.stage import Stage
from stages.wiring import Lanes

T = TypeVar("T")
Home = tuple[str, float]
"""The node that a stage is on, and how many cores it has."""

MIN_SHARE = 0.25
"""Of a node's cores, whatever else it seems to be doing: it may have been a short while."""

MAX_TEMPLATE = 1 << 14
"""Elements of the largest tensor that the simulator gives to a real codec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """CPU seconds of one stage's single pieces of work."""

    phases: Mapping[str, float] = field(default_factory=dict)
    """By phase (`stages.record.PHASES`); one that is missing costs nothing."""

    push_s: float = 0.0
    """Of sending one message through Ray, at the sender."""

    deliver_s: float = 0.0
    """Of receiving it."""

    box_s: float = 0.0
    """Of writing a step into the stage's black box, while the next one computes."""

    node_load: float | None = None
    """Cores of its node that were busy, with anything, while this stage was measured."""

    own_load: float = 0.0
    """Of these, with this stage."""


def cores_left(costs: Sequence[StageCosts], homes: Sequence[Home]) -> list[Home]:
    """The homes less the cores that other processes were using while the stages were measured.

    Stages of one node are measured all at once: what they did not use themselves is others'.
    """
    left = {}
    for node, num_cores in homes:
        tenants = [own for own, (home, _) in zip(costs, homes, strict=True) if home == node]
        seen = [own.node_load for own in tenants if own.node_load is not None]
        others = mean(seen) - sum(own.own_load for own in tenants) if seen else 0.0
        left[node] = max(num_cores - max(0.0, others), num_cores * MIN_SHARE)
    return [(node, left[node]) for node, _ in homes]


class CostLane:
    """A lane whose work takes its price on shared cores, then happens at once."""

    def __init__(self, cores: Cores, costs: StageCosts, recorder: Recorder) -> None:
        self._lane = SharedLane(cores)
        self._costs = costs
        self._recorder = recorder

    async def run(
        self, phase: str, name: str, micro_batch: int, work: Callable[..., T], *args: object
    ) -> T:
        start, end = await self._lane.work(self._costs.phases.get(phase, 0.0))
        self._recorder.add(phase, name, micro_batch, start, end)
        return work(*args)


@dataclass(kw_only=True)
class LocalPipeline:
    """Stages joined by links in one event loop. Must be built and used inside `run_virtual`."""

    specs: Sequence[StageSpec]
    compute_of: Callable[[int], Any]
    samples: Any
    costs: Sequence[StageCosts] = ()
    num_cores: float = 1e9
    """That all stages share, where `homes` says nothing else."""

    homes: Sequence[Home] = ()
    """For each stage its node and that node's cores: only stages of one node share them."""

    wrap_link: Callable[[Any], LinkLike] | None = None
    """Puts something (faults) around each link."""

    codec_for: Callable[..., Any] | None = None
    wire: WireFormat | None = None
    stages: list[Stage] = field(init=False)

    def __post_init__(self) -> None:
        homes = list(self.homes) or [("", self.num_cores)] * len(self.specs)
        nodes = {node: Cores(num_cores) for node, num_cores in homes}
        self._cores = [nodes[node] for node, _ in homes]
        self._costs = list(self.costs) or [StageCosts()] * len(self.specs)
        self._deliveries: set[asyncio.Task[None]] = set()
        self.stages = [self.make(index) for index in range(len(self.specs))]

    def make(self, index: int) -> Stage:
        """A new stage; put in the place of an old one it is what a restarted process would be."""
        spec, costs = self.specs[index], self._costs[index]
        recorder = Recorder()
        lanes = Lanes(
            receive=self.lane(costs, recorder, index),
            compute=self.lane(costs, recorder, index),
            transmit=self.lane(costs, recorder, index),
        )
        options: dict[str, Any] = {}
        if self.codec_for is not None:
            options["codec_for"] = self.codec_for
        if self.wire is not None:
            options["wire"] = self.wire
        if self.wrap_link is not None:
            options["wrap_link"] = self.wrap_link
        stage = assemble(
            spec,
            compute=self.compute_of(spec.index),
            samples=self.samples,
            lanes=lanes,
            recorder=recorder,
            deliver_to=self._deliver_from(spec.index),
            **options,
        )
        if costs.box_s:
            price = StageCosts(phases={"sync": costs.box_s})
            stage.keeper = PricedKeeper(stage, self.lane(price, Unrecorded(), index))
        return stage

    def lane(self, costs: StageCosts, recorder: Recorder, index: int = 0) -> CostLane:
        """A lane on the cores that a stage shares with the others of its node."""
        return CostLane(self._cores[index], costs, recorder)

    async def run(self, plans: Iterable[StepPlan]) -> list[list[StepRecord]]:
        """Run all steps as the driver does: each stage starts the next when it is done."""
        plans = list(plans)

        async def work(stage: Stage) -> list[StepRecord]:
            return [await stage.run(plan) for plan in plans]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(stage)) for stage in self.stages]
        return [list(step) for step in zip(*(task.result() for task in tasks), strict=True)]

    def _deliver_from(self, source: int) -> Callable[[int], Callable[[Any], None]]:
        def to(target: int) -> Callable[[Any], None]:
            push_s, deliver_s = self._costs[source].push_s, self._costs[target].deliver_s
            if push_s + deliver_s == 0.0:
                return lambda frame: self.stages[target].on_frame(source, frame)
            ways = [(SharedLane(self._cores[source]), push_s + deliver_s)]
            if self._cores[source] is not self._cores[target]:
                ways = [
                    (SharedLane(self._cores[source]), push_s),
                    (SharedLane(self._cores[target]), deliver_s),
                ]

            async def carry(frame: Any) -> None:
                for lane, price in ways:
                    await lane.work(price)
                self.stages[target].on_frame(source, frame)

            def deliver(frame: Any) -> None:
                task = asyncio.create_task(carry(frame))
                self._deliveries.add(task)
                task.add_done_callback(self._deliveries.discard)

            return deliver

        return to


# --- costs instead of tensors ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor that has nothing but a shape."""

    shape: tuple[int, ...]


class SizeOnlyCodec(Stateless):
    """Packets of the size that the real codec makes of samples it has met, filled with nothing.

    What a packet costs besides its payload (marks of rows, names, nesting) is learnt from the real
    codec on a tensor of zeros: on compressed frames it is no small part.
    """

    name = "size-only"
    _nothing = memoryview(b"")  # shared by all packets: a simulated gigabyte costs no memory

    def __init__(self, spec: CodecSpec, namespace: tuple[str | int, ...]) -> None:
        self._real = sizing_codec(spec, namespace=namespace)
        self._made: dict[tuple[tuple[int, ...], SampleKeys], Packet] = {}

    def encode(self, tensor: Any, *, keys: SampleKeys) -> Packet:
        known = (tuple(tensor.shape), keys)
        if known not in self._made:
            self._made[known] = self._make(*known)
        return self._made[known]

    def _make(self, shape: tuple[int, ...], keys: SampleKeys) -> Packet:
        small = shape
        if math.prod(shape) > MAX_TEMPLATE:
            small = (shape[0], *([1] * (len(shape) - 2)), min(shape[-1], 64))
        zeros = torch.zeros(small)
        self._real.encode(zeros, keys=keys)  # from the second visit on rows are there
        template = self._real.encode(zeros, keys=keys)
        self._real.commit()
        nbytes = self.estimate_nbytes(shape)
        if len(SizeOnlyCodec._nothing) < nbytes:
            SizeOnlyCodec._nothing = memoryview(bytes(nbytes))
        filled = _refill(template, [self._nothing[:nbytes]])
        return replace(filled, shape=shape, codec=template.codec[:-1] + "*")  # no real codec's

    def decode(self, packet: Packet) -> Any:
        return Shape(packet.shape)

    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        return self._real.estimate_nbytes(shape)


def _refill(packet: Packet, payload: list[memoryview]) -> Packet:
    """The packet with all of the payload in its first part and nothing in the others."""
    parts = tuple(payload.pop() if payload else b"" for _ in packet.parts)
    inner = tuple(_refill(each, payload) for each in packet.inner)
    return replace(packet, parts=parts, inner=inner)


@dataclass(frozen=True, slots=True)
class SizedFrame:
    """A frame that was never packed, with its exact size."""

    header: FrameHeader
    packet: Packet | None
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


def _pack_size(header: FrameHeader, packet: Packet | None) -> Any:
    return SizedFrame(header, packet, frame_nbytes(header, packet))


def _unpack_size(frame: SizedFrame) -> tuple[FrameHeader, Packet | None]:
    return frame.header, frame.packet


SIZES_ONLY = WireFormat(pack=_pack_size, unpack=_unpack_size)


class PricedCompute:
    """What `Compute` offers to a stage, without arithmetic: shapes of its input and output."""

    loss = None

    def __init__(self, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> None:
        self._before = input_shape
        self._behind = output_shape
        self._sizes: dict[int, int] = {}

    def forward(self, micro_batch: int, source: Any, *, ids: Any, train: bool = True) -> Shape:
        self._sizes[micro_batch] = len(ids)
        return Shape((len(ids), *self._behind))

    def forward_loss(
        self, micro_batch: int, source: Any, target: Any, *, ids: Any, num_items: int, train: bool
    ) -> float:
        self._sizes[micro_batch] = len(ids)
        return 0.0

    def backward(self, micro_batch: int, gradient: Any) -> Shape:
        return Shape((self._sizes[micro_batch], *self._before))

    def squared_norms(self) -> list[float]:
        return [1 / 3, 1e-17 / 3, 1e-34 / 3]  # their exact sum is as long as a real one

    def update(self, *, lr: float, factor: float) -> None: ...

    def abort(self) -> None: ...


class PricedKeeper(Keeper):
    """Takes the time that a black box takes, and keeps nothing."""

    class _Nowhere:
        def write(self, image: None) -> None: ...

    def __init__(self, stage: Stage, lane: Lane) -> None:
        super().__init__(stage, cast("BlackBox", self._Nowhere()), lane)

    def _image(self, changes: Any) -> Any:
        return None


class PricedSamples:
    """Stands for the data of the first and last stage."""

    @dataclass(frozen=True, slots=True)
    class _Batch:
        inputs: Any = None
        targets: Any = None
        lengths: None = None

    def batch(self, ids: tuple[int, ...]) -> Any:
        return self._Batch(inputs=Shape((len(ids),)))


def simulate(
    specs: Sequence[StageSpec],
    plans: Sequence[StepPlan],
    *,
    costs: Sequence[StageCosts],
    cut_shapes: Sequence[tuple[int, ...]],
    num_cores: float = 1e9,
    homes: Sequence[Home] = (),
) -> Any:
    """A coroutine for `run_virtual`: the records that the stages would return, at those costs.

    `cut_shapes` is what one sample is at each cut, from the first to the last. All stages share
    `num_cores`, or with `homes` only those of one node its cores.
    """
    shapes = [(), *cut_shapes, ()]  # before the first stage and behind the last nothing is sent
    assert len(shapes) == len(specs) + 1, f"{len(cut_shapes)} cuts of {len(specs)} stages"

    async def main() -> list[list[StepRecord]]:
        pipeline = LocalPipeline(
            specs=specs,
            compute_of=lambda index: PricedCompute(shapes[index], shapes[index + 1]),
            samples=PricedSamples(),
            costs=costs,
            num_cores=num_cores,
            homes=homes,
            codec_for=SizeOnlyCodec,
            wire=SIZES_ONLY,
        )
        return await pipeline.run(plans)

    return main()
