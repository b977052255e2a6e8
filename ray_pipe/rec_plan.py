"""What a user gave to `ray_pipe.Pipeline`, checked and put into the terms of the stages.

Path: ray_pipe.rec_pipeline -> ray_pipe.rec_plan -> ray_pipe.rec_arm
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ray_pipe.config import OptimConfig, RunConfig
from ray_pipe.data import Order
from ray_pipe.errors import ConfigError
from ray_pipe.rec_arm import LoadedArm, OwnLoss
from ray_pipe.rec_link import Link
from ray_pipe.rec_stage import EmbeddingStage
from ray_pipe.workload import Workload, tied_names
from stages.embedding.front import Front
from stages.embedding.loaded import Inbox


def taken_apart(stages: Sequence[Any]) -> tuple[EmbeddingStage, tuple[nn.Module, ...]]:
    """The embedding stage, and the blocks behind it."""
    emb, *blocks = stages
    if not isinstance(emb, EmbeddingStage):
        raise ConfigError(
            f"the first stage is a {type(emb).__name__}, expected a rec.EmbeddingStage; a model "
            "without embeddings is trained by ray_pipe.PipelineTrainer."
        )
    if not blocks:
        raise ConfigError("there is no dense block behind the EmbeddingStage; give an nn.Module.")
    for number, block in enumerate(blocks, start=1):
        if not isinstance(block, nn.Module):
            raise ConfigError(f"stage {number} is a {type(block).__name__}, expected an nn.Module.")
    return emb, tuple(blocks)


def config_of(
    *,
    optim: OptimConfig | None,
    stages: int,
    micro_batches: int,
    codec: str,
    seed: int,
    deadline_s: float,
    max_failures: int,
) -> RunConfig:
    """The settings of a run that the stages know."""
    config = RunConfig.from_dict(
        {
            "task": "ctr",
            "steps": 1,
            "seed": seed,
            "deadline_s": deadline_s,
            "codec.name": codec,
            "pipeline.stages": stages,
            "pipeline.micro_batches": micro_batches,
            "faults.max_failures": max_failures,
        },
        source="Pipeline",
    )
    if config.codec.has_memory:
        raise ConfigError(
            f"codec={codec!r} remembers each sample's activation, and a loader's samples have no "
            "ids; use fp32, fp16 or directq."
        )
    if optim is None:
        return config
    if optim.decay != "constant":
        raise ConfigError(
            f"optim.decay is {optim.decay!r}, which must know the number of steps, and a loader "
            "does not say it; use decay='constant'."
        )
    return replace(config, optim=optim)


def workload_of(
    emb: EmbeddingStage, blocks: Sequence[nn.Module], *, stages: int, micro_batches: int, name: str
) -> Workload:
    """The blocks, the vectors of all features in front of the first."""
    first, *others = blocks
    front = Front(first, features=emb.features, tables=emb.tables, seed=emb.seed)
    made = (front, *others)
    workload = Workload(
        costs=tuple(float(sum(p.numel() for p in block.parameters()) or 1) for block in made),
        build=_never,
        loss=OwnLoss(micro_batches=micro_batches),
        samples=Inbox(emb.features),  # type: ignore[arg-type]
        blocks=made,
        tied=tied_names(made),
        name=name,
    )
    if not 1 <= stages <= len(made):
        raise ConfigError(
            f"num_stages is {stages}, and there are {len(made)} dense blocks; each stage has at "
            "least one."
        )
    workload.check_ties(stages)
    return workload


def arm_of(
    emb: EmbeddingStage, config: RunConfig, workload: Workload, link: Link, *, shards: int
) -> LoadedArm:
    """One life of the pipeline: the nodes are its stages, its shards and the loader."""
    return LoadedArm(
        label=workload.name,
        config=config,
        codec=config.codec,
        workload=workload,
        topology=link.topology(config.pipeline.stages + shards + 1),
        order=Order(num_samples=1, micro_batches=1, micro_batch_size=1, seed=0),  # not asked
        num_steps=1,
        deadline_s=config.deadline_s,
        embedding=emb.spec(shards),
    )


def named_weights(
    cuts: Sequence[range], states: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Tensor]]:
    """Weights of all stages as `nn.Sequential(*blocks)` names them; replicated tables as
    `rec.Embeddings` does."""
    for cut, state in zip(cuts, states, strict=True):
        for name, tensor in state["module"].items():
            place, _, rest = name.partition(".")
            if rest.startswith("replicated."):
                yield rest, tensor
            else:
                rest = rest.removeprefix("block.") if cut.start + int(place) == 0 else rest
                yield f"{cut.start + int(place)}.{rest}", tensor


def _never(start: int, stop: int) -> nn.Module:
    raise AssertionError("the blocks are given, not built")
