"""What a step will cost: costs measured on this cluster, fed to the simulator.

The prediction is made before the first step, from the pieces of work of each stage measured
alone, the price of a Ray message between two stages, and the links of the topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from compressors.registry import make_codec
from netsim.clock import run_virtual
from netsim.topology import Topology
from ray_pipe.pipeline import Pipeline
from ray_pipe.plans import Arm
from stages.record import StepRecord
from stages.rehearsal import StageCosts, simulate

NUM_STEPS = 4
"""Steps to simulate; the last one stands for the steady state."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How long a step will take, and what bounds it."""

    step_s: float
    compute_step_s: float
    """The same step with links and messages that cost nothing: what compute alone allows."""

    link_step_s: float
    """The same step with compute that costs nothing: what the links alone allow."""

    costs: tuple[StageCosts, ...]

    @property
    def link_to_compute(self) -> float:
        """How much longer the links need than the arithmetic: GPT2-XL in the paper has 4.9."""
        return self.link_step_s / self.compute_step_s if self.compute_step_s else 0.0


def measure_costs(pipeline: Pipeline) -> tuple[list[StageCosts], tuple[int, ...]]:
    """Costs of each stage, measured one after the other; and the shape of a sample at a cut."""
    arm = pipeline.arm
    ids = arm.order.at(0)[0]
    source: Any = None
    sample_shape: tuple[int, ...] = ()
    phases: list[dict[str, float]] = []
    for handle in pipeline.handles:
        costs, source = ray.get(handle.measure.remote(ids, source))
        phases.append(costs)
        if source is not None:
            sample_shape = tuple(source.shape[1:])
    num_stages = len(pipeline.handles)
    if num_stages == 1:
        return [StageCosts(phases=phases[0])], sample_shape
    nbytes = frame_nbytes(arm, (len(ids), *sample_shape))
    probes = [
        ray.get(pipeline.handles[index].probe.remote(index + 1, nbytes, 10))
        for index in range(num_stages - 1)
    ]
    push_s = sorted(own for own, _ in probes)[len(probes) // 2]
    deliver_s = sorted(other for _, other in probes)[len(probes) // 2]
    return [
        StageCosts(phases=costs, push_s=push_s, deliver_s=deliver_s) for costs in phases
    ], sample_shape


def frame_nbytes(arm: Arm, shape: tuple[int, ...]) -> int:
    """A typical activation frame: the payload and a small header."""
    codec = make_codec(arm.specs()[0].activation_codec, namespace=("estimate",))
    return codec.estimate_nbytes(shape) + 200


def predict(
    arm: Arm,
    costs: Sequence[StageCosts],
    sample_shape: tuple[int, ...],
    *,
    num_cores: float,
) -> Prediction:
    """Simulate a few steps at these costs, then with free links and with free compute."""
    free_links = Topology.uniform(arm.topology.num_nodes)
    only_compute = [StageCosts(phases=_only_compute(own)) for own in costs]
    no_costs = [StageCosts() for _ in costs]

    def step_s(topology: Topology, prices: Sequence[StageCosts]) -> float:
        return simulated_step_s(
            replace(arm, topology=topology), prices, sample_shape, num_cores=num_cores
        )

    return Prediction(
        step_s=step_s(arm.topology, costs),
        compute_step_s=step_s(free_links, only_compute),
        link_step_s=step_s(arm.topology, no_costs),
        costs=tuple(costs),
    )


def simulated_step_s(
    arm: Arm,
    costs: Sequence[StageCosts],
    sample_shape: tuple[int, ...],
    *,
    num_cores: float,
) -> float:
    """The step time of the steady state, in virtual time."""
    plans = [replace(arm.plan(step), micro_batches=arm.order.at(0)) for step in range(NUM_STEPS)]
    records: list[list[StepRecord]] = run_virtual(
        simulate(arm.specs(), plans, costs=costs, sample_shape=sample_shape, num_cores=num_cores)
    )
    ends = [max(record.end_s for record in step) for step in records]
    return ends[-1] - ends[-2]


def _only_compute(costs: StageCosts) -> dict[str, float]:
    return {
        phase: cost
        for phase, cost in costs.phases.items()
        if phase in ("forward", "backward", "update")
    }
