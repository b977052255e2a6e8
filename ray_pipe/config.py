"""The run as frozen dataclasses. Every check of what a user gave starts here.

Sections check their own options when they are built (`ray_pipe.options`); `RunConfig.validate`
checks what only shows when sections meet, and touches files and folders (`ray_pipe.checks`).
Files, flags and `--set` are laid over each other in `ray_pipe.settings_file`. No torch, no ray.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from ray_pipe import checks, settings_file
from ray_pipe.checks import check_corpus, check_memory, check_repeat_visits
from ray_pipe.codec_names import backward_codec, has_memory, split_codec
from ray_pipe.errors import ConfigError, listed, nearest
from ray_pipe.models.sizes import SIZES, ModelSize
from ray_pipe.options import check_section, option, plain

__all__ = [
    "CodecConfig",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "NetworkConfig",
    "OptimConfig",
    "PipelineConfig",
    "RunConfig",
    "check_corpus",
    "check_memory",
    "check_repeat_visits",
]

DEFAULT_EPOCHS = 8
DEFAULT_ARMS = ("fp32", "directq", "acsgd")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and where it differs from its name's size."""

    name: str = "gpt-tiny"
    """Model by name: gpt-nano, gpt-tiny, gpt-small or gpt2."""

    layers: int | None = option(None, low=1)
    """Transformer blocks; empty: as the name says."""

    width: int | None = option(None, low=1)
    """Channels per token; empty: as the name says."""

    heads: int | None = option(None, low=1)
    """Attention heads; empty: as the name says."""

    context: int | None = option(None, low=2)
    """Tokens per sample; empty: as the name says."""

    dropout: float = option(0.0, low=0.0, below=1.0)
    """Probability of dropout. AC-SGD wants 0: fresh masks are changes that it must send."""

    def __post_init__(self) -> None:
        check_section(self, prefix="model.")
        if self.name not in SIZES:
            raise ConfigError(
                f"model.name: there is no model {self.name!r}{nearest(self.name, SIZES)} "
                f"Known are {listed(SIZES)}."
            )
        size = self.size
        if size.width % size.heads:
            raise ConfigError(
                f"model {self.name}: a width of {size.width} cannot be divided among {size.heads} "
                f"heads; set model.heads to a divisor of {size.width}, or change model.width."
            )

    @property
    def size(self) -> ModelSize:
        """The name's size with this section's changes."""
        named = SIZES[self.name]
        changed = {
            name: value
            for name in ("layers", "width", "heads", "context")
            if (value := getattr(self, name)) is not None
        }
        return dataclasses.replace(named, **changed)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model reads."""

    source: str = "pydoc"
    """A UTF-8 text file, a folder of them, or pydoc: the English text that comes with Python."""

    num_samples: int | None = option(None, low=1)
    """Use only the first so many samples; empty: all of them."""

    def __post_init__(self) -> None:
        check_section(self, prefix="data.")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the model is cut, and in which order the stages work."""

    stages: int = option(4, low=1)
    """Pipeline stages, one Ray actor each."""

    micro_batches: int = option(8, low=1)
    """Micro-batches per step."""

    micro_batch_size: int = option(8, low=1)
    """Samples per micro-batch."""

    schedule: str = option("gpipe", choices=("gpipe", "1f1b"))
    """Order of work: gpipe, or 1f1b, which holds fewer activations."""

    transport: str = option("push", choices=("push", "refs"))
    """push: stages hand frames to each other; refs: the driver passes each ObjectRef on."""

    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them."""

    precision: str = option("fp32", choices=("fp32", "bf16"))
    """Arithmetic of the blocks; weights and optimizer stay fp32."""

    def __post_init__(self) -> None:
        check_section(self, prefix="pipeline.")

    @property
    def samples_per_step(self) -> int:
        return self.micro_batches * self.micro_batch_size


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """How activations and gradients are written on the wire."""

    name: str = "acsgd"
    """acsgd, directq, fp32, fp16, bf16 or topk, with +zstd or +ef after it if wanted."""

    fw_bits: int = option(4, low=1, high=8)
    """Bits per activation value, or per change of it with acsgd."""

    bw_bits: int = option(4, low=1, high=8)
    """Bits per gradient value."""

    grid: str = option("signed", choices=("signed", "symmetric", "reference"))
    """Quantiser: signed-scale groups, symmetric groups, or the paper's reference grid."""

    group: int = option(32, low=1)
    """Channels that share a scale."""

    rounding: str = option("nearest", choices=("nearest", "stochastic"))
    """How values meet the grid."""

    first_visit_bits: int = 8
    """Bits of a sample's first visit with acsgd: 1 to 8, or 32 for full precision."""

    rows: str = option("bf16", choices=("bf16", "fp32", "int8", "int4"))
    """How the remembered activations are kept, the same at both ends of a link."""

    memory_cap: int | None = option(None, low=1, unit="size")
    """Memory for the remembered activations at each end of each link, such as 2GB; empty: no cap.
    Samples that were pushed out are sent as on a first visit."""

    spill_dir: str | None = None
    """Folder for remembered activations on disk instead of in memory."""

    density: float = option(0.1, above=0.0, high=1.0)
    """Share of the entries that topk sends."""

    checksum: bool = False
    """Put a checksum of the new rows into each frame, to find drift between the two ends."""

    def __post_init__(self) -> None:
        check_section(self, prefix="codec.")
        split_codec(self.name)
        if self.first_visit_bits not in (*range(1, 9), 32):
            raise ConfigError(
                f"codec.first_visit_bits is {self.first_visit_bits}; it must be 1 to 8, "
                "or 32 for full precision."
            )
        checks.check_grid(self)

    @property
    def has_memory(self) -> bool:
        """Whether each sample is remembered between visits."""
        return has_memory(self.name)

    @property
    def forward_name(self) -> str:
        """The activations' codec."""
        return self.name

    @property
    def backward_name(self) -> str:
        """The gradients' codec: never with memory."""
        return backward_codec(self.name)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The links between the stages, as they are emulated."""

    bandwidth_bps: float = option(100e6, above=0.0, unit="bandwidth")
    """Speed of each node's uplink in bits per second, such as 100Mbps; unlimited: no shaping."""

    latency_s: float = option(0.0, low=0.0, unit="duration")
    """One-way delay of each link, such as 20ms."""

    jitter_s: float = option(0.0, low=0.0, unit="duration")
    """How far the delay varies, such as 5ms."""

    loss_rate: float = option(0.0, low=0.0, below=1.0)
    """Probability that a frame is lost and must be sent again."""

    topology: str | None = None
    """YAML file with bandwidth and latency by stage pair; other links are as above."""

    def __post_init__(self) -> None:
        check_section(self, prefix="network.")

    @property
    def unlimited(self) -> bool:
        """Whether frames pass unshaped, as on a real slow network."""
        return math.isinf(self.bandwidth_bps) and self.topology is None


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How the weights move."""

    name: str = option("adamw", choices=("adamw", "sgd"))
    """adamw or sgd."""

    lr: float = option(1e-3, low=0.0, below=math.inf)
    """Peak learning rate."""

    weight_decay: float = option(0.01, low=0.0)
    """Decoupled weight decay."""

    warmup_steps: int = option(0, low=0)
    """Steps in which the learning rate climbs from 0."""

    decay: str = option("constant", choices=("constant", "cosine", "linear"))
    """Course of the learning rate after the warm-up."""

    min_lr_ratio: float = option(0.1, low=0.0, high=1.0)
    """Where the decay ends, as a share of the peak."""

    clip: float = option(1.0, low=0.0)
    """Largest global gradient norm over all stages; 0: no clipping."""

    beta1: float = option(0.9, low=0.0, below=1.0)
    """Decay of AdamW's first moment."""

    beta2: float = option(0.95, low=0.0, below=1.0)
    """Decay of AdamW's second moment."""

    eps: float = option(1e-8, above=0.0)
    """Added to AdamW's denominator."""

    momentum: float = option(0.0, low=0.0, below=1.0)
    """Momentum of sgd."""

    def __post_init__(self) -> None:
        check_section(self, prefix="optim.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run needs to know. Equal configurations give equal losses."""

    name: str = ""
    """Name of the run and of its folder; empty: made from the codec, the bandwidth and the time."""

    out: str = "runs"
    """Folder that gets the run's folder."""

    seed: int = option(0, low=0, below=2**32)
    """Seed of weights, order of samples and rounding."""

    address: str | None = None
    """Address of an existing Ray cluster (auto, HOST:PORT, ray://HOST:PORT); empty: start one."""

    compare: tuple[str, ...] = DEFAULT_ARMS
    """Codecs that are trained one after another on the same seed, order and batches.
    Empty: only codec.name; so it is when a codec is given without this."""

    epochs: int | None = option(None, low=1)
    """Passes over the data. Either this or steps; 8 when neither is given."""

    steps: int | None = option(None, low=1)
    """Optimizer steps, instead of epochs."""

    eval: bool = False
    """Measure the loss on held-out samples after each epoch."""

    deadline_s: float = option(60.0, above=0.0, below=math.inf, unit="duration")
    """Shortest time that a stage waits for its neighbour before it gives up; grows with the
    measured step time."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    name_is_generated: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", DEFAULT_EPOCHS)
        if not self.name:
            object.__setattr__(self, "name_is_generated", True)
            object.__setattr__(self, "name", _make_name(self))
        check_section(self, prefix="")
        checks.check_arms(self)
        checks.check_name(self.name)

    @property
    def arms(self) -> tuple[CodecConfig, ...]:
        """The codecs to train, one after another."""
        names = self.compare or (self.codec.name,)
        return tuple(dataclasses.replace(self.codec, name=name) for name in names)

    def num_steps(self, num_samples: int) -> int:
        """Optimizer steps of the run over so many samples; a last partial batch is not used."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * (num_samples // self.pipeline.samples_per_step)

    def validate(self, *, num_blocks: int | None = None) -> list[str]:
        """Refuse what cannot work, before anything is started; return what deserves a warning.

        `num_blocks` is for a user's own model; else it is the named model's number of layers.
        """
        return checks.check_run(self, num_blocks=num_blocks)

    def to_dict(self) -> dict[str, Any]:
        """The whole configuration as JSON can hold it; `from_dict` gives an equal one back."""
        result: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            if not item.init:
                continue
            value = getattr(self, item.name)
            if dataclasses.is_dataclass(value):
                result[item.name] = {name: plain(inner) for name, inner in vars(value).items()}
            else:
                result[item.name] = plain(value)
        return result

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "config") -> Self:
        """A configuration from nested (or dotted) keys; what is not given keeps its default."""
        return cls.from_layers([(source, values)])

    @classmethod
    def from_layers(cls, layers: Iterable[tuple[str, Mapping[str, Any]]]) -> Self:
        """Lay several sources of settings over the defaults, later over earlier."""
        merged = settings_file.merge_layers(cls, layers)
        return cls(**settings_file.build_sections(cls, merged))

    def with_overrides(self, settings: Iterable[str]) -> Self:
        """A copy with settings written as on the command line: `["codec.fw_bits=2"]`."""
        own = self.to_dict()
        if self.name_is_generated:
            del own["name"]  # it would speak of the old codec and bandwidth
        given = settings_file.parse_settings(settings)
        return self.from_layers([("config", own), ("--set", given)])


def _make_name(config: RunConfig) -> str:
    from netsim.units import show_bandwidth

    arms = "compare" if len(config.compare) > 1 else (config.compare or (config.codec.name,))[0]
    rate = "topology" if config.network.topology else show_bandwidth(config.network.bandwidth_bps)
    return f"{arms}-{rate.replace(' ', '').replace('/', '')}-{datetime.now():%m%d-%H%M%S}"
