"""The training loop on one screen: feed, run, collect, record.

Path: ray_pipe.run -> ray_pipe.driver -> ray_pipe.data

Each stage gets one call a step, a step ahead, so that the driver's distance never sits in the
critical path; stages exchange tensors among themselves. The driver watches, and on the first
failure aborts the survivors and says who failed and why.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from compressors.registry import CodecSpec
from netsim.topology import Topology
from ray_pipe.cluster import StageActors
from ray_pipe.config import CodecConfig, RunConfig
from ray_pipe.data import Order
from ray_pipe.errors import StageDied, TrainingError
from ray_pipe.workload import Workload
from stages.actor import StageSpec
from stages.optim import OptimSpec, lr_at
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.stage import StageAborted

AHEAD = 2
"""Steps in flight: the running one and the next."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One codec's training run: same seed, order and batches as its siblings."""

    config: RunConfig
    codec: CodecConfig
    workload: Workload
    order: Order
    num_steps: int
    topology: Topology

    def plan(self, step: int) -> StepPlan:
        """What every stage is told about a step: a pure function of the step's number."""
        optim = self.config.optim
        coming = self.order.at(step + 1) if step + 1 < self.num_steps else ()
        return StepPlan(
            step=step,
            micro_batches=self.order.at(step),
            schedule=self.config.pipeline.schedule,
            lr=lr_at(
                step,
                lr=optim.lr,
                warmup_steps=optim.warmup_steps,
                num_steps=self.num_steps,
                decay=optim.decay,
                min_ratio=optim.min_lr_ratio,
            ),
            coming=tuple(sample for micro_batch in coming for sample in micro_batch),
            deadline_s=self.config.deadline_s,
        )

    def specs(self, *, epoch_s: float) -> list[StageSpec]:
        """What each actor needs to become its stage of this arm."""
        config, codec = self.config, self.codec
        optim = config.optim
        builders = self.workload.stage_builders(config.pipeline.stages)
        return [
            StageSpec(
                index=index,
                num_stages=len(builders),
                build=build,
                loss=self.workload.loss if index == len(builders) - 1 else None,
                optim=OptimSpec(
                    name=optim.name,
                    weight_decay=optim.weight_decay,
                    clip=optim.clip,
                    beta1=optim.beta1,
                    beta2=optim.beta2,
                    eps=optim.eps,
                    momentum=optim.momentum,
                ),
                activation_codec=codec_spec(codec, codec.forward_name, codec.fw_bits, config.seed),
                gradient_codec=codec_spec(codec, codec.backward_name, codec.bw_bits, config.seed),
                topology=self.topology,
                dataset=self.workload.samples.digest,
                recompute=config.pipeline.recompute,
                precision=config.pipeline.precision,
                seed=config.seed,
                epoch_s=epoch_s,
            )
            for index, build in enumerate(builders)
        ]


def codec_spec(codec: CodecConfig, name: str, bits: int, seed: int) -> CodecSpec:
    """One direction's codec as the registry understands it."""
    return CodecSpec(
        name=name,
        bits=bits,
        grid=codec.grid,
        group=codec.group,
        rounding=codec.rounding,
        first_visit_bits=codec.first_visit_bits,
        rows=codec.rows,
        density=codec.density,
        cap_bytes=codec.memory_cap,
        spill_dir=codec.spill_dir,
        checksum=codec.checksum,
        seed=seed,
    )


class Pipeline:
    """The stages of one arm, ready to train."""

    def __init__(self, actors: StageActors, arm: Arm, *, epoch_s: float) -> None:
        self.arm = arm
        self.handles = actors.handles
        samples = ray.put(arm.workload.samples)
        self.infos: list[dict[str, Any]] = ray.get(
            [
                handle.setup.remote(spec, samples)
                for handle, spec in zip(self.handles, arm.specs(epoch_s=epoch_s), strict=True)
            ]
        )

    def train(self) -> Any:
        """Run the arm; yields the stages' records of each step."""
        running: deque[tuple[int, dict[Any, int]]] = deque()
        for step in range(self.arm.num_steps):
            running.append((step, self._start(self.arm.plan(step))))
            if len(running) == AHEAD:
                yield self._collect(*running.popleft())
        while running:
            yield self._collect(*running.popleft())

    def _start(self, plan: StepPlan) -> dict[Any, int]:
        ref = ray.put(plan)
        return {handle.run_step.remote(ref): index for index, handle in enumerate(self.handles)}

    def _collect(self, step: int, refs: dict[Any, int]) -> list[StepRecord]:
        records: list[StepRecord] = []
        waiting = dict(refs)
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            for ref in ready:
                index = waiting.pop(ref)
                try:
                    records.append(ray.get(ref))
                except RayError as error:
                    raise self._failure(step, {index: error}, waiting) from error
        return sorted(records, key=lambda record: record.stage)

    def _failure(
        self, step: int, errors: dict[int, RayError], waiting: dict[Any, int]
    ) -> TrainingError:
        """Abort the survivors, hear all of them out, and name the failure that came first."""
        first = next(iter(errors))
        for handle in self.handles:
            handle.abort.remote(f"stage {first} failed in step {step}")
        ready, _ = (
            ray.wait(list(waiting), num_returns=len(waiting), timeout=3.0) if waiting else ([], [])
        )
        for ref in ready:
            try:
                ray.get(ref)
            except RayError as error:
                errors[waiting[ref]] = error
        return name_failure(step, errors)


def name_failure(step: int, errors: dict[int, RayError]) -> TrainingError:
    """The root of several failures: a death before an error, an error before an abort."""

    def rank(item: tuple[int, RayError]) -> int:
        error = item[1]
        if isinstance(error, RayActorError):
            return 0
        cause = error.cause if isinstance(error, RayTaskError) else error
        return 2 if isinstance(cause, StageAborted) else 1

    index, error = min(errors.items(), key=rank)
    if isinstance(error, RayActorError):
        return StageDied(index, step, _death(error))
    cause = error.cause if isinstance(error, RayTaskError) else error
    return TrainingError(f"stage {index} failed in step {step}: {type(cause).__name__}: {cause}")


def _death(error: RayActorError) -> str:
    text = " ".join(str(error).split())
    for mark in ("Worker unexpectedly exits", "exit type", "worker died"):
        if mark in text:
            return "its process ended unexpectedly (killed, or out of memory)"
    return text[:300]


def collect_all(records: Sequence[Sequence[StepRecord]]) -> list[StepRecord]:
    """All records of an arm in one list, for the trace."""
    return [record for step in records for record in step]


def now_s() -> float:
    """The run's origin of time."""
    return time.time()
