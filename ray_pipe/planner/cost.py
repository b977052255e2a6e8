"""What a step will cost: costs measured on this cluster, fed to the simulator.

The prediction is made before the first step, from the pieces of work of each stage measured
alone, the price of a Ray message between two stages, and the links of the topology.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from compressors.registry import sizing_codec
from netsim.clock import run_virtual
from netsim.topology import Topology
from ray_pipe.pipeline import Pipeline
from ray_pipe.plans import Arm
from stages.box_cost import BOX, BOX_ROWS
from stages.record import StepRecord
from stages.rehearsal import Home, StageCosts, cores_left, simulate

Shapes = tuple[tuple[int, ...], ...]
"""Of one sample at each cut; a user's blocks may differ in width."""

NUM_STEPS = 4
"""Steps to simulate; the last one stands for the steady state."""

REPEATS = 6
MEASURING = "measuring its costs"
NUM_MESSAGES = 8


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How long a step will take, and what bounds it."""

    step_s: float
    compute_step_s: float
    """The same step with links and messages that cost nothing: what compute alone allows."""

    link_step_s: float
    """The same step with compute that costs nothing: what the links alone allow."""

    costs: tuple[StageCosts, ...]
    cut_shapes: Shapes
    """Empty in what was saved when all cuts were taken for equal."""

    num_cores: float
    """Of all nodes together."""

    homes: tuple[Home, ...] = ()
    """The node of each stage and its cores; empty in what was saved before nodes had their own."""

    is_shaped: bool
    """False on links that are not emulated: of those the prediction knows nothing."""

    link_to_compute: float
    """A micro-batch's time on the wire, forth and back, over its time in a stage that shares its
    cores with the others. GPT2-XL in the paper, at 100 Mbps: 4.9."""


def measure_costs(pipeline: Pipeline) -> tuple[list[StageCosts], Shapes]:
    """Costs of each stage, and the shape of a sample at each cut. Leaves no trace in the stages."""
    ids = pipeline.arm.order.at(0)[0]
    handles = pipeline.handles
    inputs: list[Any] = [None]
    for index, handle in enumerate(handles[:-1]):
        call = {handle.measure.remote(ids, inputs[-1], 1): index}
        ((_, output, _),) = pipeline.gather(call, doing=MEASURING)
        inputs.append(output)
    # All at once: stages that share cores and caches in training share them here too.
    calls = {
        handle.measure.remote(ids, source, REPEATS): index
        for index, (handle, source) in enumerate(zip(handles, inputs, strict=True))
    }
    num_micro_batches = len(pipeline.arm.order.at(0))
    costs = [
        StageCosts(
            phases=phases,
            box_s=phases.pop(BOX, 0.0) + num_micro_batches * phases.pop(BOX_ROWS, 0.0),
            node_load=None if load is None else load.all,
            own_load=0.0 if load is None else load.own,
        )
        for phases, _, load in pipeline.gather(calls, doing=MEASURING)
    ]
    if len(handles) == 1:
        return costs, ()
    cut_shapes = tuple(tuple(output.shape[1:]) for output in inputs[1:])
    push_s, deliver_s = measure_message(pipeline, [(len(ids), *shape) for shape in cut_shapes])
    return [replace(own, push_s=push_s, deliver_s=deliver_s) for own in costs], cut_shapes


def measure_message(pipeline: Pipeline, shapes: Sequence[tuple[int, ...]]) -> tuple[float, float]:
    """CPU seconds that a typical frame costs its sender and its receiver, beside the codec.

    A small evaluation shows what a message costs by all that it touches, event loops included;
    probes of both sizes show how much more a frame of this arm costs.
    """
    arm, handles = pipeline.arm, pipeline.handles
    num_hops = len(handles) - 1
    first = arm.order.at(0)[0][:1]
    plan = replace(
        arm.plan(0),
        micro_batches=(first,) * NUM_MESSAGES,
        schedule="forward",
        train=False,
        coming=(),
        attempt=0,
        step=-1,
        part=1,
    )
    before = _cpu_beside_lanes(pipeline)
    pipeline.evaluate(plan)
    after = _cpu_beside_lanes(pipeline)
    num_messages = num_hops * (NUM_MESSAGES + 1)  # each stage also hears that it was seen
    message_s = (sum(after) - sum(before)) / num_messages
    small = [4 * math.prod(shape[1:]) for shape in shapes]
    large = [frame_nbytes(arm, shape) for shape in shapes]
    push_s, deliver_s = message_s / 2, message_s / 2
    for sizes, sign in ((large, 1), (small, -1)):
        ways = []
        for index in range(num_hops):
            call = {handles[index].probe.remote(index + 1, sizes[index], 10): index}
            ways += pipeline.gather(call, doing=MEASURING, watch=(index + 1,))
        push_s += sign * median(own for own, _ in ways)
        deliver_s += sign * median(other for _, other in ways)
    return max(0.0, push_s), max(0.0, deliver_s)


def _cpu_beside_lanes(pipeline: Pipeline) -> list[float]:
    calls = {handle.cpu_beside_lanes.remote(): i for i, handle in enumerate(pipeline.handles)}
    return pipeline.gather(calls, doing=MEASURING)


def frame_nbytes(arm: Arm, shape: tuple[int, ...]) -> int:
    """A typical activation frame: the payload and a small header."""
    codec = sizing_codec(arm.specs()[0].activation_codec)
    return codec.estimate_nbytes(shape) + 200


def predict(
    arm: Arm,
    costs: Sequence[StageCosts],
    cut_shapes: Shapes,
    *,
    homes: Sequence[Home],
) -> Prediction:
    """Simulate a few steps at these costs, then with free links and with free compute.

    `homes`: the node of each stage and its cores. Only stages of one node share them, with whatever
    else was running there while they were measured; what compute alone allows has all of them.
    """
    free_links = Topology.uniform(arm.topology.num_nodes)
    only_compute = [StageCosts(phases=_only_compute(own)) for own in costs]
    no_costs = [StageCosts() for _ in costs]

    def step_s(topology: Topology, prices: Sequence[StageCosts]) -> float:
        return simulated_step_s(replace(arm, topology=topology), prices, cut_shapes, homes=homes)

    tenants = Counter(node for node, _ in homes)
    stage_s = mean(
        (own.phases.get("forward", 0) + own.phases.get("backward", 0))
        * max(1.0, tenants[node] / num_cores)
        for own, (node, num_cores) in zip(costs, homes, strict=True)
    )
    return Prediction(
        step_s=step_s(arm.topology, costs),
        compute_step_s=step_s(free_links, only_compute),
        link_step_s=step_s(arm.topology, no_costs),
        costs=tuple(costs),
        cut_shapes=cut_shapes,
        num_cores=sum(dict(homes).values()),
        homes=tuple(homes),
        is_shaped=not arm.topology.is_unlimited,
        link_to_compute=wire_s(arm, cut_shapes) / stage_s if stage_s else 0.0,
    )


def wire_s(arm: Arm, cut_shapes: Shapes) -> float:
    """Seconds that one micro-batch takes on the slowest pair of links, forth and back."""
    spec, num_samples = arm.specs()[0], len(arm.order.at(0)[0])
    codecs = [sizing_codec(codec) for codec in (spec.activation_codec, spec.gradient_codec)]

    def pair_s(stage: int, shape: tuple[int, ...]) -> float:
        forth, back = (8 * codec.estimate_nbytes((num_samples, *shape)) for codec in codecs)
        return forth / arm.topology.rate_bps(stage, stage + 1) + back / arm.topology.rate_bps(
            stage + 1, stage
        )

    return max((pair_s(stage, shape) for stage, shape in enumerate(cut_shapes)), default=0.0)


def simulated_step_s(
    arm: Arm,
    costs: Sequence[StageCosts],
    cut_shapes: Shapes,
    *,
    homes: Sequence[Home],
) -> float:
    """The step time of the steady state, in virtual time, on cores that others leave free."""
    plans = [replace(arm.plan(step), micro_batches=arm.order.at(0)) for step in range(NUM_STEPS)]
    records: list[list[StepRecord]] = run_virtual(
        simulate(
            arm.specs(), plans, costs=costs, cut_shapes=cut_shapes, homes=cores_left(costs, homes)
        )
    )
    ends = [max(record.end_s for record in step) for step in records]
    return ends[-1] - ends[-2]


def _only_compute(costs: StageCosts) -> dict[str, float]:
    return {
        phase: cost
        for phase, cost in costs.phases.items()
        if phase in ("forward", "backward", "update")
    }
