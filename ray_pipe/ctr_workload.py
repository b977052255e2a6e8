"""What a click run trains: samples, tables, a DLRM, and a loss that remembers its logits.

Path: ray_pipe.ctr_run -> ray_pipe.ctr_workload -> ray_pipe.ctr_data
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netsim.topology import Topology
from ray_pipe.config import RunConfig
from ray_pipe.ctr_data import (
    CtrBatch,
    CtrSamples,
    Ints,
    Scale,
    Split,
    split_by_seed,
    split_by_time,
)
from ray_pipe.ctr_formats import load
from ray_pipe.ctr_section import SYNTHETIC, num_nodes
from ray_pipe.ctr_small import SmallRows, SmallTables
from ray_pipe.ctr_spec import form_of
from ray_pipe.ctr_synthetic import SyntheticCtr, SyntheticSpec
from ray_pipe.data import Batch, Order
from ray_pipe.errors import ConfigError, DataError
from ray_pipe.models.dlrm import DLRMShape, dlrm_block, dlrm_flops
from ray_pipe.plans import Arm
from ray_pipe.workload import Workload
from stages.embedding.embedding_spec import EmbeddingSpec
from stages.embedding.letters import Wire
from stages.embedding.row_rules import Adagrad, Adam, Optimizer, RowAdagrad, Sgd, Uniform
from stages.embedding.tables import ChunkPrune, Table
from stages.loss import binary_cross_entropy
from stages.plan import StepPlan
from stages.spec import StageSpec

EVAL_SAMPLES = 8192
"""Held-out samples whose rows are read at once."""

PRUNE_CHUNKS = 4


class ClickSet:
    """Training samples first, then the held-out ones: the order that plans count in."""

    def __init__(self, samples: CtrSamples, split: Split, small: SmallTables) -> None:
        self._samples = samples
        self._small = small
        self._places: Ints = np.concatenate([split.train, split.test])
        self.num_train = len(split.train)
        whole = hashlib.sha256(samples.digest.encode() + self._places.tobytes())
        self.digest = whole.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._places)

    def clicks(self, ids: Sequence[int]) -> CtrBatch:
        """Dense features and bags: what stage 0 needs."""
        batch = self._samples.batch(self._places[np.asarray(ids, np.int64)])
        return self._small.numbered(batch) if self._small.names else batch

    def batch(self, ids: Sequence[int]) -> Batch:
        """Labels: what the last stage needs."""
        places = self._places[np.asarray(ids, np.int64)]
        labels = torch.from_numpy(self._samples.labels[places])
        return Batch(inputs=labels, targets=labels)


class ClickLoss:
    """Binary cross-entropy; in an evaluation it keeps the logits, for the AUC."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        if not torch.is_grad_enabled():
            self._kept.append((logits.detach().clone(), targets.detach().clone()))
        return binary_cross_entropy(logits, targets)

    def scores(self, num: int) -> tuple[Any, Any]:
        """Logits and labels of the last `num` samples."""
        kept, self._kept = last_of(self._kept, num), []
        if not kept:
            return np.empty(0, np.float32), np.empty(0, np.float32)
        logits = torch.cat([one.reshape(-1).float() for one, _ in kept])
        labels = torch.cat([one.reshape(-1).float() for _, one in kept])
        return logits.numpy(), labels.numpy()


def last_of(kept: list[tuple[Tensor, Tensor]], num: int) -> list[tuple[Tensor, Tensor]]:
    """Of the outputs and labels of micro-batches those of the last `num` samples: before them may
    be some of an evaluation that was broken off, and run again."""
    total = sum(len(labels) for _, labels in kept)
    first = 0
    while total > num:
        total -= len(kept[first][1])
        first += 1
    return kept[first:]


@dataclass(frozen=True, kw_only=True)
class ClickTask:
    """Data and model of a click run."""

    workload: Workload
    tables: tuple[Table, ...]
    features: tuple[str, ...]
    shape: DLRMShape
    text: str
    """What it is, for people."""

    best_auc: float | None = None
    """What the planted truth of synthetic data scores on the held-out samples."""


def click_task(config: RunConfig) -> ClickTask:
    """Read or make the samples, and say what is trained on them."""
    embedding = config.embedding
    best = None
    if config.data.source == SYNTHETIC:
        made = SyntheticCtr(_synthetic_spec(config))
        samples = made.collected()
        split = _split(config, samples)
        _check_labels(samples, split)
        best = made.best_auc(split.test)
        name = f"{len(samples):,} made-up clicks"
    else:
        samples = _read(config)
        split = _split(config, samples)
        _check_labels(samples, split)
        samples = Scale.of(samples, split.train).scaled(samples)
        name = f"{len(samples):,} samples of {config.data.source}"
    small = SmallTables.find(samples, split.train, at_most=embedding.replicate)
    clicks = ClickSet(samples, split, small)
    features = tuple(
        feature.table for i, feature in enumerate(samples.features) if i not in small.features
    )
    if not features:
        raise ConfigError(
            f"embedding.replicate={embedding.replicate}: every table of this data has as few ids, "
            "so that no row is left for the shards; lower it."
        )
    shape = DLRMShape(
        num_dense=len(samples.dense_names), dims=(embedding.dim,) * len(samples.features)
    )
    front = None
    if small.names:
        front = partial(
            SmallRows,
            num_dense=shape.num_dense,
            names=small.names,
            num_ids=tuple(map(len, small.ids)),
            dim=embedding.dim,
            init=Uniform(embedding.init),
            seed=config.seed,
        )
    workload = Workload(
        costs=tuple(
            [1.0] * bool(small.names)
            + [dlrm_flops(shape, index) for index in range(shape.num_blocks)]
        ),
        build=partial(_build, shape, front, config.seed),
        loss=ClickLoss(),
        samples=clicks,
        num_held_out=len(split.test),
        name="dlrm",
    )
    if config.pipeline.stages > workload.num_blocks:
        raise ConfigError(
            f"--stages {config.pipeline.stages}: this click model has {workload.num_blocks} dense "
            f"layers and each stage needs at least one; use --stages {workload.num_blocks} or "
            "fewer."
        )
    return ClickTask(
        workload=workload,
        tables=_tables(config, tuple(dict.fromkeys(features)), workload),
        features=features,
        shape=shape,
        best_auc=best,
        text=f"{name}, {len(samples.features)} features of ids, {shape.num_dense} dense",
    )


def _synthetic_spec(config: RunConfig) -> SyntheticSpec:
    num = config.data.num_samples
    plain = SyntheticSpec(seed=config.seed)
    return plain if num is None else SyntheticSpec(num_samples=num, seed=config.seed)


def _read(config: RunConfig) -> CtrSamples:
    path, columns = config.data.source, config.embedding.columns
    samples = load(path, form_of(path, columns))
    num = config.data.num_samples
    if num is None or num >= len(samples):
        return samples
    return samples.first(num)


def _split(config: RunConfig, samples: CtrSamples) -> Split:
    share = config.embedding.test
    if config.embedding.split == "time":
        return split_by_time(samples.times, test=share)
    return split_by_seed(len(samples), test=share, seed=config.seed)


def _check_labels(samples: CtrSamples, split: Split) -> None:
    """Refuse held-out samples that no AUC can be told of before an epoch was trained."""
    labels = np.unique(samples.labels[split.test])
    if len(labels) < 2:
        raise DataError(
            f"all {len(split.test):,} held-out samples have the label {labels[0]:g}, and an AUC "
            "needs both; give more data, another embedding.split, or a larger embedding.test."
        )


def _build(
    shape: DLRMShape, front: Callable[[], nn.Module] | None, seed: int, start: int, stop: int
) -> nn.Module:
    """Blocks of the dense network; the rows of small tables, if there are any, are the first."""
    shift = 0 if front is None else 1
    return nn.Sequential(
        *(
            front()
            if front is not None and index == 0
            else dlrm_block(shape, index - shift, seed=seed)
            for index in range(start, stop)
        )
    )


def _tables(config: RunConfig, names: tuple[str, ...], workload: Workload) -> tuple[Table, ...]:
    embedding = config.embedding
    rules: dict[str, Optimizer] = {
        "adagrad": Adagrad(lr=embedding.lr),
        "row-adagrad": RowAdagrad(lr=embedding.lr),
        "sgd": Sgd(lr=embedding.lr),
        "adam": Adam(lr=embedding.lr),
    }
    prune = None
    if embedding.prune:
        steps = num_steps_of(config, workload)
        prune = ChunkPrune(
            chunk=embedding.dim // PRUNE_CHUNKS,
            ratio=embedding.prune,
            warmup=max(1, steps // 4),
            every=max(1, steps // 16),
        )
    return tuple(
        Table(
            name=name,
            dim=embedding.dim,
            optimizer=rules[embedding.optimizer],
            init=Uniform(embedding.init),
            evict="lru",
            prune=prune,
        )
        for name in names
    )


# --- arms -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CtrArm(Arm):
    """One way to train a click model: how stale rows may be, and how everything travels."""

    label: str
    embedding: EmbeddingSpec

    @property
    def name(self) -> str:
        return self.label

    def specs(self, *, epoch_s: float = 0.0, generation: int = 0, run: str = "") -> list[StageSpec]:
        first, *others = Arm.specs(self, epoch_s=epoch_s, generation=generation, run=run)
        return [replace(first, embedding=self.embedding), *others]

    def evaluations(self, step: int) -> list[StepPlan]:
        """The held-out samples after a step, some at a time."""
        whole = self.evaluation(step).micro_batches
        size = max(1, EVAL_SAMPLES // self.config.pipeline.micro_batch_size)
        return [
            replace(
                self.evaluation(step),
                micro_batches=whole[i : i + size],
                part=1 + i // size,
            )
            for i in range(0, len(whole), size)
        ]


def num_steps_of(config: RunConfig, workload: Workload) -> int:
    """Optimizer steps of an arm."""
    return config.steps or (config.epochs or 1) * order_of(config, workload).steps_per_epoch


def order_of(config: RunConfig, workload: Workload) -> Order:
    return Order(
        num_samples=workload.num_train,
        micro_batches=config.pipeline.micro_batches,
        micro_batch_size=config.pipeline.micro_batch_size,
        seed=config.seed,
    )


def ctr_arms(config: RunConfig, task: ClickTask) -> list[CtrArm]:
    """The synchronous fp32 arm, if it is wanted, then the one that was asked for."""
    embedding = config.embedding
    hybrid = _arm(config, task, label="sync" if embedding.tau == 0 else "hybrid")
    if not embedding.baseline or (embedding.is_synchronous and config.codec.name == "fp32"):
        return [hybrid]
    plain = replace(
        config,
        codec=replace(config.codec, name="fp32"),
        embedding=replace(embedding, staleness="0", wire="fp32"),
    )
    baseline = replace(_arm(plain, task, label="fp32"), config=config)
    return [baseline, hybrid]


def _arm(config: RunConfig, task: ClickTask, *, label: str) -> CtrArm:
    network, embedding = config.network, config.embedding
    order = order_of(config, task.workload)
    num_steps = num_steps_of(config, task.workload)
    if network.topology is not None:
        topology = Topology.load(network.topology, num_nodes(config))
    else:
        topology = Topology.uniform(
            num_nodes(config),
            network.bandwidth_bps,
            network.latency_s,
            network.jitter_s,
            network.loss_rate,
        )
    return CtrArm(
        label=label,
        config=config,
        codec=config.codec,
        workload=task.workload,
        topology=topology,
        order=order,
        num_steps=num_steps,
        deadline_s=config.deadline_s,
        embedding=EmbeddingSpec(
            tables=task.tables,
            features=task.features,
            num_shards=embedding.shards,
            tau=embedding.tau,
            wire=Wire(rows=embedding.wire, gradients=embedding.wire),
            order=order,
            num_steps=num_steps,
            capacity=embedding.capacity // embedding.shards,
            # Each arm has a folder: a process must not open one twice.
            spill=None if embedding.spill is None else f"{embedding.spill}/{config.name}/{label}",
            seed=config.seed,
        ),
    )
