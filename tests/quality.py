"""Training runs for the quality gates: all stages in one process, real tensors, codecs and frames.

An *arm* is one training run: a task, the codecs of both directions, a seed, and possibly a
mutation, a rule of AC-SGD broken on purpose. Arms of one task and seed share weights, order and
batches. What is measured is the training loss of each epoch and the error of each edge.

Arms are plain data, so that they can run in worker processes (`run_arms`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from quality_tasks import Task
from quality_watch import MUTATIONS, EdgeWatch, Watched, WatchedDelta, fresh_masks
from torch import nn

from compressors.delta import Delta
from compressors.identity import Identity
from compressors.kernels import core
from compressors.registry import CodecSpec, make_codec
from netsim.clock import run_virtual
from netsim.topology import Topology
from ray_pipe.data import DatasetSamples
from ray_pipe.planner.partition import partition
from stages.compute import Compute
from stages.dropout import SampleDropout
from stages.loss import cross_entropy
from stages.optim import OptimSpec
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.rehearsal import LocalPipeline
from stages.spec import StageSpec

STAGES = 4
Watches = dict[tuple[str | int, ...], EdgeWatch]


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """One training run, as data."""

    name: str
    forward: CodecSpec
    backward: CodecSpec
    seed: int = 0
    """Of the order of samples; the weights are the task's."""

    mutation: str = ""
    """One of `MUTATIONS`, or nothing."""

    mutate_epoch: int = 5
    """When rows are lost, counted from 1."""

    dropout: float = 0.0
    num_samples: int | None = None
    epochs: int | None = None
    lr: float | None = None


def fp32(**options: Any) -> ArmSpec:
    exact = CodecSpec(name="fp32")
    return ArmSpec(**{"name": "fp32", "forward": exact, "backward": exact, **options})


def directq(fw: int, bw: int, *, codec: dict[str, Any] | None = None, **options: Any) -> ArmSpec:
    """The baseline without memory; `codec` are further fields of `CodecSpec`."""
    return _quantised("directq", fw, bw, codec or {}, options)


def acsgd(fw: int, bw: int, *, codec: dict[str, Any] | None = None, **options: Any) -> ArmSpec:
    """AC-SGD forward, the same quantiser without memory backward."""
    return _quantised("acsgd", fw, bw, codec or {}, options)


def _quantised(
    kind: str, fw: int, bw: int, codec: dict[str, Any], options: dict[str, Any]
) -> ArmSpec:
    forward, backward = kind, "directq"
    if codec.get("grid") == "reference":  # a codec of its own in the registry
        codec = {key: value for key, value in codec.items() if key != "grid"}
        forward, backward = "acsgd-reference" if kind == "acsgd" else "reference", "reference"
    shared = {key: codec[key] for key in ("grid", "group", "rounding") if key in codec}
    return ArmSpec(
        **{
            "name": f"{kind} fw{fw}/bw{bw}",
            "forward": CodecSpec(name=forward, bits=fw, **codec),
            "backward": CodecSpec(name=backward, bits=bw, **shared),
            **options,
        }
    )


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One step of one edge that has an AC-SGD sender."""

    edge: str
    epoch: int
    measured: float
    """Error between the two ends."""

    error: float
    """The same, as the sender's record tells it."""

    delta_ratio: float
    """‖Δ‖/‖h‖ of the samples that had a row."""

    cold: int
    nacks: int


@dataclass(kw_only=True)
class ArmRun:
    """What an arm did, epoch by epoch."""

    spec: ArmSpec
    losses: list[float] = field(default_factory=list)
    """Mean training loss of each epoch."""

    errors: dict[str, list[float]] = field(default_factory=dict)
    """Edge "0->1" -> error of each epoch, measured between its two ends; nothing for fp32."""

    visits: list[Visit] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    num_steps: int = 0
    nbytes: dict[str, int] = field(default_factory=dict)
    """Sent over all links, by kind."""

    seconds: float = 0.0
    core: str = ""

    @property
    def final_loss(self) -> float:
        return self.losses[-1]

    def mean_error(self, epoch: int) -> float:
        """Mean over the edges; epochs count from 1, or from the end if negative."""
        index = epoch - 1 if epoch > 0 else epoch
        return float(np.mean([errors[index] for errors in self.errors.values()] or [0.0]))


def run_arm(task: Task, spec: ArmSpec) -> ArmRun:
    """Train one arm and tell what happened."""
    assert spec.mutation in ("", *MUTATIONS), spec.mutation
    torch.set_num_threads(1)
    start = time.perf_counter()
    run = ArmRun(spec=spec, core=core())
    with fresh_masks() if spec.mutation == "fresh-masks" else contextlib.nullcontext():
        run_virtual(_train(task, spec, run))
    run.seconds = time.perf_counter() - start
    return run


def arm_pool(workers: int = 2) -> ProcessPoolExecutor:
    """Processes that train arms, each on one thread."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=workers, mp_context=spawn)


def run_arms(task: Task, specs: Sequence[ArmSpec], *, workers: int = 2) -> Iterator[ArmRun]:
    """Train arms in worker processes; results in the order of `specs`."""
    with arm_pool(workers) as pool:
        yield from pool.map(partial(run_arm, task), specs)


async def _train(task: Task, spec: ArmSpec, run: ArmRun) -> None:
    order = task.order(spec.seed, num_samples=spec.num_samples)
    watches: Watches = {}
    pipeline = _pipeline(task, spec, watches)
    for epoch in range(1, (spec.epochs or task.epochs) + 1):
        if epoch == spec.mutate_epoch:
            for stage in pipeline.stages[1:]:
                assert stage.wiring.activation_in is not None
                codec: Any = stage.wiring.activation_in.codec
                if isinstance(codec, WatchedDelta):
                    codec.spoil_rows()
        losses: list[float] = []
        sums: dict[str, list[tuple[float, float]]] = {}
        for step in range((epoch - 1) * order.steps_per_epoch, epoch * order.steps_per_epoch):
            plan = StepPlan(
                step=step,
                micro_batches=order.at(step),
                schedule="1f1b",
                lr=task.lr if spec.lr is None else spec.lr,
            )
            (records,) = await pipeline.run([plan])
            assert records[-1].loss is not None
            losses.append(records[-1].loss)
            for (kind, edge, *_), watch in watches.items():
                if kind == "activation":
                    sums.setdefault(str(edge), []).append(watch.drain())
            _note(run, epoch, records, {edge: pairs[-1] for edge, pairs in sums.items()})
        run.losses.append(float(np.mean(losses)))
        for edge, pairs in sorted(sums.items()):
            error = math.sqrt(sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs))
            run.errors.setdefault(edge, []).append(error)


def _note(
    run: ArmRun, epoch: int, records: list[StepRecord], sums: dict[str, tuple[float, float]]
) -> None:
    run.num_steps += 1
    for record in records:
        run.events += record.events
        for kinds in record.sent.values():
            for kind, count in kinds.items():
                run.nbytes[kind] = run.nbytes.get(kind, 0) + count
        edge = f"{record.stage}->{record.stage + 1}"
        stats = record.codec.get(edge, {})
        if "cold" not in stats:
            continue  # no AC-SGD sender
        error, value = sums[edge]
        receiver = records[record.stage + 1].codec.get(edge, {})
        run.visits.append(
            Visit(
                edge=edge,
                epoch=epoch,
                measured=math.sqrt(error / value),
                error=stats["error"],
                delta_ratio=stats.get("delta_ratio", math.nan),
                cold=int(stats["cold"]),
                nacks=int(receiver.get("nacks", 0)),
            )
        )


def _pipeline(task: Task, spec: ArmSpec, watches: Watches) -> LocalPipeline:
    blocks = task.blocks()
    for module in nn.ModuleList(blocks).modules():
        if isinstance(module, SampleDropout):
            module.probability = spec.dropout
    cuts = partition(task.costs(), STAGES)
    parts = [nn.Sequential(*(blocks[index] for index in cut)) for cut in cuts]
    pairs = [(torch.tensor(sample[:-1]), torch.tensor(sample[1:])) for sample in task.samples]
    digest = hashlib.sha256(repr(task.samples).encode()).hexdigest()[:16]
    optim = OptimSpec(clip=task.clip, weight_decay=task.weight_decay)
    specs = [
        StageSpec(
            index=index,
            num_stages=STAGES,
            build=parts[index].train,
            loss=cross_entropy if index == STAGES - 1 else None,
            optim=optim,
            activation_codec=spec.forward,
            gradient_codec=spec.backward,
            topology=Topology.uniform(STAGES),
            dataset=digest,
            seed=spec.seed,
        )
        for index in range(STAGES)
    ]

    def codec_for(codec_spec: CodecSpec, namespace: tuple[str | int, ...]) -> Any:
        codec = make_codec(codec_spec, namespace=namespace)
        if isinstance(codec, Identity):
            return codec  # nothing to watch
        watch = watches.setdefault(namespace, EdgeWatch())
        if isinstance(codec, Delta):
            return WatchedDelta(codec, watch, spec.mutation)
        return Watched(codec, watch)

    return LocalPipeline(
        specs=specs,
        compute_of=lambda index: Compute(parts[index], optim=optim, loss=specs[index].loss),
        samples=DatasetSamples(pairs, digest=digest),
        codec_for=codec_for,
    )
