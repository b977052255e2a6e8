"""A test bench: a tiny GPT cut into stages, all in one process and in virtual time.

    bench = Bench(num_stages=4, schedule="1f1b", activation=acsgd())
    run = bench.run(steps=3)
    run.losses, run.weights, run.rows_agree()

Real tensors, codecs, frames and links; `plain_loop` is the same training without any of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from compressors.registry import CodecSpec
from compressors.row_log import row_store
from netsim.clock import run_virtual
from netsim.faults import FaultyLink
from netsim.topology import Topology
from ray_pipe.data import Order, Samples, TextSamples
from ray_pipe.models.gpt import GPTShape, gpt_block
from stages.compute import Compute
from stages.loss import LossFn, count_targets, cross_entropy
from stages.optim import OptimSpec, make_optimizer, set_lr
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.rehearsal import LocalPipeline, StageCosts
from stages.spec import StageSpec
from stages.stage import Stage

SHAPE = GPTShape(layers=4, width=32, heads=2, context=8)
TEXT = bytes((i * i * 7 + i * 13 + i // 11) % 96 + 32 for i in range(4096))
FP32 = CodecSpec(name="fp32")
DIRECTQ = CodecSpec(name="directq", bits=4)
WORK = StageCosts(
    phases={"forward": 0.05, "backward": 0.1, "encode": 0.01, "decode": 0.01, "update": 0.02}
)


def acsgd(**changes: Any) -> CodecSpec:
    """AC-SGD at 4 bits, checksums of rows compared at each visit."""
    return CodecSpec(**{"name": "acsgd", "bits": 4, "checksum": True, **changes})


@dataclass(kw_only=True)
class Run:
    """What a run left behind."""

    records: list[list[StepRecord]]
    stages: list[Stage]
    links: dict[str, FaultyLink]
    end_s: float

    @property
    def losses(self) -> list[float]:
        return [step[-1].loss for step in self.records if step[-1].loss is not None]

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for stage in self.stages for p in stage.compute.parameters]

    @property
    def events(self) -> list[str]:
        return [event for step in self.records for record in step for event in record.events]

    def rows(self) -> list[tuple[str, str]]:
        """Digests of the rows at the two ends of each activation edge."""
        return rows_of(self.stages)


def rows_of(stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """Digests at the two ends of each edge, without rows whose eviction is still to be told."""
    found = []
    for sender, receiver in pairwise(stages):
        assert sender.wiring.activation_out is not None
        assert receiver.wiring.activation_in is not None
        ours = row_store(sender.wiring.activation_out.codec)
        theirs = row_store(receiver.wiring.activation_in.codec)
        assert ours is not None
        assert theirs is not None
        found.append((ours.digest(), theirs.digest(without=ours.pending_evictions)))
    return found


def build_gpt(shape: GPTShape, seed: int, blocks: Sequence[int]) -> nn.Module:
    """Some blocks of a GPT as one module."""
    return nn.Sequential(*(gpt_block(shape, index, seed=seed) for index in blocks))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A pipeline and what it is to train, as data."""

    num_stages: int = 2
    schedule: str = "gpipe"
    shape: GPTShape = SHAPE
    activation: CodecSpec = FP32
    gradient: CodecSpec = FP32
    optim: OptimSpec = field(default_factory=lambda: OptimSpec(clip=0.5))
    lr: float = 1e-3
    micro_batches: int = 3
    micro_batch_size: int = 2
    num_samples: int = 12
    seed: int = 3
    deadline_s: float = 60.0
    recompute: bool = False
    precision: str = "fp32"
    latency_s: float = 0.01
    bandwidth_bps: float = 1e8
    loss: LossFn = cross_entropy
    samples: Samples | None = None
    build: Callable[[Sequence[int]], nn.Module] | None = None
    """Blocks of another model than the GPT."""

    order: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Micro-batches of each step; by default shuffled epochs."""

    costs: StageCosts = field(default_factory=StageCosts)
    num_cores: float = 1e9
    faults: Callable[[FaultyLink], Any] | None = None
    """Adds rules to a link; told apart by `link.name`."""

    def data(self) -> Samples:
        if self.samples is not None:
            return self.samples
        return TextSamples(TEXT, context=self.shape.context).first(self.num_samples)

    def blocks(self, stage: int) -> range:
        share = self.shape.layers // self.num_stages
        return range(stage * share, (stage + 1) * share)

    def module(self, blocks: Sequence[int]) -> nn.Module:
        if self.build is not None:
            return self.build(blocks)
        return build_gpt(self.shape, self.seed, blocks)

    def specs(self) -> list[StageSpec]:
        return [
            StageSpec(
                index=index,
                num_stages=self.num_stages,
                build=partial(self.module, self.blocks(index)),
                loss=self.loss if index == self.num_stages - 1 else None,
                optim=self.optim,
                activation_codec=self.activation,
                gradient_codec=self.gradient,
                topology=Topology.uniform(self.num_stages, self.bandwidth_bps, self.latency_s),
                dataset=self.data().digest,
                first_block=self.blocks(index).start,
                recompute=self.recompute,
                precision=self.precision,
                seed=self.seed,
            )
            for index in range(self.num_stages)
        ]

    def compute(self, index: int) -> Compute:
        spec = self.specs()[index]
        return Compute(
            spec.build(),
            optim=spec.optim,
            loss=spec.loss,
            recompute=spec.recompute,
            precision=spec.precision,
            seed=index,
            first_block=spec.first_block,
        )

    def plan(self, step: int, **changes: Any) -> StepPlan:
        if self.order:
            ids = self.order[step]
        else:
            ids = Order(
                num_samples=len(self.data()),
                micro_batches=self.micro_batches,
                micro_batch_size=self.micro_batch_size,
                seed=self.seed,
            ).at(step)
        plan = StepPlan(
            step=step,
            micro_batches=ids,
            schedule=self.schedule,
            lr=self.lr,
            deadline_s=self.deadline_s,
        )
        return replace(plan, **changes)

    def pipeline(self, links: dict[str, FaultyLink] | None = None) -> LocalPipeline:
        """The stages, joined; must be called inside `run_virtual`."""

        def wrap(link: Any) -> FaultyLink:
            faulty = FaultyLink(link, seed=zlib.crc32(f"{self.seed} {link.name}".encode()))
            if self.faults is not None:
                self.faults(faulty)
            if links is not None:
                links[link.name] = faulty
            return faulty

        return LocalPipeline(
            specs=self.specs(),
            compute_of=self.compute,
            samples=self.data(),
            costs=[self.costs] * self.num_stages,
            num_cores=self.num_cores,
            wrap_link=wrap,
        )

    def run(self, steps: int = 3, *, plans: Iterable[StepPlan] | None = None) -> Run:
        """Train for some steps, or run just these plans."""
        chosen = [self.plan(step) for step in range(steps)] if plans is None else list(plans)

        async def main(pipeline: LocalPipeline) -> list[list[StepRecord]]:
            return await pipeline.run(chosen)

        return self.drive(main)

    def drive(
        self,
        main: Callable[[LocalPipeline], Awaitable[list[list[StepRecord]]]],
        *,
        limit_s: float = 1e6,
    ) -> Run:
        """Give the pipeline to `main` inside virtual time, then wait until all links are quiet."""

        async def everything() -> Run:
            links: dict[str, FaultyLink] = {}
            pipeline = self.pipeline(links)
            records = await main(pipeline)
            end_s = asyncio.get_running_loop().time()
            await asyncio.sleep(1000)
            return Run(records=records, stages=pipeline.stages, links=links, end_s=end_s)

        return run_virtual(everything(), limit_s=limit_s)


def plain_loop(bench: Bench, steps: int = 3) -> tuple[list[float], list[Tensor]]:
    """The same training in one process: no stages, no frames, no codec."""
    model = bench.module(range(bench.shape.layers))
    parameters = list(model.parameters())
    optimizer = make_optimizer(bench.optim, parameters)
    losses = []
    for step in range(steps):
        plan = bench.plan(step)
        batches = [bench.data().batch(ids) for ids in plan.micro_batches]
        num_items = sum(count_targets(bench.loss, batch.targets) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = bench.loss(model(batch.inputs), batch.targets)[0] / num_items
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        gradients = [p.grad for p in parameters if p.grad is not None]
        squares = [float(torch.linalg.vector_norm(g, dtype=torch.float64) ** 2) for g in gradients]
        norm = math.sqrt(math.fsum(squares))
        if 0 < bench.optim.clip < norm:
            for gradient in gradients:
                gradient.mul_(bench.optim.clip / (norm + 1e-6))
        set_lr(optimizer, plan.lr)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in parameters]


def same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors agree in every bit."""
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs)
    )


def fingerprint(value: Any) -> str:
    """Equal exactly if all bits are."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(raw).hexdigest()[:12]}"
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return "{" + ", ".join(f"{key}: {fingerprint(item)}" for key, item in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(fingerprint, value)) + "]"
    return repr(value)


def state_of(stages: Sequence[Stage]) -> dict[str, str]:
    """Everything that a step may change, gradients included; generations, which rise, not."""
    state: dict[str, str] = {}
    for stage in stages:
        compute, name = stage.compute, f"stage {stage.index}"
        for index, parameter in enumerate(compute.parameters):
            state[f"{name} weight {index}"] = fingerprint(parameter)
            state[f"{name} gradient {index}"] = fingerprint(parameter.grad)
        state[f"{name} optimizer"] = fingerprint(compute.optimizer.state_dict()["state"])
        state[f"{name} in flight"] = fingerprint(list(compute._in_flight))
        state[f"{name} random"] = fingerprint(compute.state_dict()["random"])
        for end in stage.wiring.ends():
            saved = {k: v for k, v in end.codec.state_dict().items() if k != "generation"}
            state[f"{name} codec of {end.edge.kind} {end.edge.name}"] = fingerprint(saved)
            if hasattr(end.codec, "row_digest"):
                state[f"{name} rows of {end.edge.name}"] = end.codec.row_digest()
    return state
