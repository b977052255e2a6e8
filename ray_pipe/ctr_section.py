"""The `embedding` section of a run's configuration, and what `--task ctr` changes elsewhere.

No torch: a bad flag is refused before anything heavy is loaded.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ray_pipe.errors import ConfigError
from ray_pipe.options import check_section, expand_home, option

if TYPE_CHECKING:
    from ray_pipe.config import RunConfig

AUTO = "auto"
MAX_TAU = 1024
SYNTHETIC = "synthetic"

CTR_DEFAULTS: dict[str, Any] = {
    "compare": (),
    "epochs": 2,
    "codec.name": "fp16",
    "data.source": SYNTHETIC,
    "pipeline.stages": 2,
    "pipeline.micro_batches": 2,
    "pipeline.micro_batch_size": 512,
    "optim.weight_decay": 0.0,
    "optim.clip": 0.0,
}
"""Where a click model differs from a language model, if nothing else was said."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Tables of embedding rows on shards, beside the dense network (--task ctr)."""

    staleness: str = AUTO
    """Versions that pulled rows may be behind when their gradients arrive: 0 is synchronous, a
    number bounds it, auto measures what hides the links."""

    shards: int = option(2, low=1, high=64)
    """Actors that hold the rows, each a part of every table."""

    wire: Literal["fp16-rowscale", "int8", "fp32"] = "fp16-rowscale"
    """How rows and their gradients travel: fp16-rowscale, int8, or fp32, which loses nothing."""

    dim: int = option(16, low=1, high=4096)
    """Length of a row."""

    optimizer: Literal["adagrad", "row-adagrad", "sgd", "adam"] = "adagrad"
    """What the shards update rows with."""

    lr: float = option(0.05, above=0.0, below=math.inf)
    """Learning rate of the rows; the dense network's is optim.lr."""

    init: float = option(0.01, low=0.0, below=math.inf)
    """Rows begin uniformly between minus and plus this."""

    prune: float = option(0.0, low=0.0, below=1.0, unit="fraction")
    """Share of the rows' real bytes that pruning takes away, such as 0.7; 0: none."""

    capacity: int = option(2 << 30, low=1 << 20, unit="size")
    """Memory for the rows of all shards together, such as 6GiB."""

    spill: str | None = None
    """Folder for rows that do not fit into the capacity; empty: the oldest are dropped."""

    rows: str | None = None
    """Checkpoint whose rows the shards begin with: of `rec.Embeddings.save`, or of a click run. The
    dense network begins anew."""

    replicate: int = option(0, low=0, high=1 << 20)
    """Tables of at most so many ids are kept with the dense network instead of on shards and
    trained in step with it, at its learning rate; 0: none."""

    columns: str | None = None
    """What the columns of a plain CSV file are: `label=clicked; dense=age; ids=user,item`; or the
    settings of another format: `format=libsvm; fields=user:0-942; dense=943; threshold=4`."""

    split: Literal["seed", "time"] = "seed"
    """Which samples are held out for testing: a seeded share, or the latest."""

    test: float = option(0.1, above=0.0, below=1.0, unit="fraction")
    """Share of the samples that are held out."""

    baseline: bool = True
    """Train the fully synchronous fp32 arm first, to compare with."""

    def __post_init__(self) -> None:
        check_section(self, prefix="embedding.")
        expand_home(self, "spill", "rows")
        word = self.staleness.strip().lower()
        if word != AUTO and not (word.isdigit() and int(word) <= MAX_TAU):
            raise ConfigError(
                f"embedding.staleness is {self.staleness!r}; it must be 0 (synchronous), a whole "
                f"number up to {MAX_TAU}, or auto."
            )
        object.__setattr__(self, "staleness", word)

    @property
    def tau(self) -> int | None:
        """The bound; None is measured."""
        return None if self.staleness == AUTO else int(self.staleness)

    @property
    def is_synchronous(self) -> bool:
        return self.tau == 0 and self.wire == "fp32"


def check_task(config: RunConfig) -> None:
    """Refuse options of the other task, when the configuration is built."""
    if config.task != "ctr":
        plain = EmbeddingConfig()
        for field in dataclasses.fields(plain):
            if getattr(config.embedding, field.name) != getattr(plain, field.name):
                raise ConfigError(
                    f"embedding.{field.name} is given, but the task is {config.task}, which has no "
                    "embedding shards; add --task ctr, or leave it out."
                )
        return
    if config.compare:
        raise ConfigError(
            f"compare lists {', '.join(config.compare)}, but --task ctr compares synchronous "
            "training with hybrid training; choose the dense network's codec with --codec, and "
            "the rows' format with --wire."
        )


def check_ctr(config: RunConfig) -> list[str]:
    """What a click run needs, before Ray is started; sentences that deserve a warning."""
    from ray_pipe import checks

    source, embedding = config.data.source, config.embedding
    if config.model != type(config.model)():
        raise ConfigError(
            f"--model {config.model.name} and model.* are for language models; --task ctr trains a "
            "DLRM, whose rows are as long as embedding.dim says. Leave them out."
        )
    if source == "pydoc":
        raise ConfigError(
            "--data pydoc is text; --task ctr reads Criteo TSV, libsvm or libFM, MovieLens ratings "
            f"or CSV with --columns, and makes its own clicks with --data {SYNTHETIC}."
        )
    if source != SYNTHETIC:
        path = Path(source)
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "there is no such file"
            raise ConfigError(
                f"--data {source}: {what}; give a file of clicks (Criteo TSV, libsvm or libFM, "
                f"MovieLens, CSV with --columns), or {SYNTHETIC}."
            )
        if not path.stat().st_size:
            raise ConfigError(f"--data {source}: the file is empty.")
    elif embedding.columns is not None:
        raise ConfigError("--columns describes a file, but no file was given; add --data FILE.")
    checks.check_folder(config.out, flag="--out")
    checks.check_saves(config)
    if embedding.spill is not None:
        checks.check_folder(embedding.spill, flag="--spill")
    if config.network.topology is not None:
        _check_topology(config)
    if config.pipeline.transport != "push":
        raise ConfigError(
            "--transport refs: stage 0 talks to the embedding shards itself, so the driver cannot "
            "pass every frame on; use --transport push."
        )
    if config.pipeline.recompute:
        raise ConfigError(
            "--recompute: the dense network of a click model is small, and its first stage would "
            "need its rows twice; leave it out."
        )
    if embedding.prune:
        _check_prune(config)
    return checks.check_quality(config)


def num_nodes(config: RunConfig) -> int:
    """Stages, then shards: the nodes of the topology."""
    return config.pipeline.stages + config.embedding.shards


def _check_topology(config: RunConfig) -> None:
    from netsim.topology import Topology

    assert config.network.topology is not None
    try:
        Topology.load(config.network.topology, num_nodes(config))
    except ValueError as error:
        stages = config.pipeline.stages
        raise ConfigError(
            f"--topology: {' '.join(str(error).split())} (nodes 0 to {stages - 1} are stages, "
            f"{stages} to {num_nodes(config) - 1} are embedding shards)"
        ) from None


def _check_prune(config: RunConfig) -> None:
    if config.embedding.dim % 4 or config.embedding.dim < 8:
        raise ConfigError(
            f"--prune cuts rows into four chunks of columns, and embedding.dim is "
            f"{config.embedding.dim}; use a multiple of 4 from 8 on, better 32 or more: of short "
            "rows most bytes are not columns."
        )
