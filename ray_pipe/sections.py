"""The sections of a run's configuration: each checks its own options when it is built.

What an option means stands below it; `--help` and `--show-config` quote it from here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from ray_pipe.codec_names import backward_codec, canonical_codec, has_memory
from ray_pipe.errors import ConfigError, listed, nearest
from ray_pipe.models.sizes import SIZES, ModelSize
from ray_pipe.options import Unsaid, UnsaidText, check_section, expand_home, option


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
    """Probability of dropout, with a mask fixed per sample so that AC-SGD need not send masks."""

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
    """Use only the first so many samples; empty: all of them, of pydoc the first 160 for each
    replica."""

    def __post_init__(self) -> None:
        check_section(self, prefix="data.")
        expand_home(self, "source")


MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the model is cut, and in which order the stages work."""

    stages: int = option(4, low=1)
    """Pipeline stages, one Ray actor each."""

    micro_batches: int = option(4, low=1)
    """Micro-batches per step."""

    micro_batch_size: int = option(16, low=1)
    """Samples per micro-batch."""

    schedule: Literal["gpipe", "1f1b", "eager-1f1b"] = "gpipe"
    """Order of work: gpipe; 1f1b, which holds the fewest activations; or eager-1f1b, which holds up
    to twice as many and keeps slow links busy in both directions."""

    transport: Literal["push", "refs"] = "push"
    """push: stages hand frames to each other; refs: the driver passes each ObjectRef on."""

    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the blocks; weights and optimizer stay fp32."""

    threads: str = "1"
    """Threads that a stage computes with on CPUs: a number, or auto, the node's cores over the
    stages on it. With 1 results are the same to the bit wherever stages are."""

    def __post_init__(self) -> None:
        check_section(self, prefix="pipeline.")
        word = self.threads.strip().lower()
        if word != "auto" and not (word.isdigit() and 1 <= int(word) <= MAX_THREADS):
            raise ConfigError(
                f"pipeline.threads is {self.threads!r}; it must be a whole number from 1 to "
                f"{MAX_THREADS}, or auto."
            )
        object.__setattr__(self, "threads", word)

    @property
    def num_threads(self) -> int:
        """Of each stage; 0: as many as its node has for it."""
        return 0 if self.threads == "auto" else int(self.threads)

    @property
    def samples_per_step(self) -> int:
        return self.micro_batches * self.micro_batch_size


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """How activations and gradients are written on the wire."""

    name: str = UnsaidText("acsgd")
    """acsgd, directq, fp32, fp16, bf16, topk, reference, acsgd-topk or acsgd-reference; +ef (error
    feedback, not with acsgd) and +zstd may follow."""

    fw_bits: int = option(4, low=1, high=8)
    """Bits per activation value, or per change of it with acsgd."""

    bw_bits: int = option(4, low=1, high=8)
    """Bits per gradient value."""

    grid: Literal["signed", "symmetric"] = "signed"
    """Quantiser: signed-scale or symmetric groups. The paper's own grid is a codec, reference."""

    group: int = option(32, low=1, high=2**20)
    """Channels that share a scale."""

    reference_group: int | None = option(None, low=1, high=2**20)
    """The same for reference and acsgd-reference; empty: as published, one scale for each channel
    of a micro-batch."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How values meet the grid."""

    first_visit_bits: int = 8
    """Bits of a sample's first visit with acsgd: 1 to 8, or 32 for full precision."""

    rows: Literal["bf16", "fp32", "int8", "int4", "int2"] = "bf16"
    """How the remembered activations are kept, the same at both ends of a link."""

    memory_cap: int | None = option(None, low=1, unit="size")
    """Memory for the remembered activations at each end of each link, such as 2GB; empty: no cap.
    Samples that were pushed out are sent as on a first visit."""

    spill_dir: str | None = None
    """Folder for remembered activations on disk instead of in memory."""

    spill_ram: int = option(256 * 2**20, low=0, unit="size")
    """With spill_dir: memory for the rows written last, at each end of each link; the others are on
    disk. 0B keeps none in memory."""

    density: float = option(0.1, above=0.0, high=1.0)
    """Share of the entries that topk sends."""

    checksum: bool = False
    """Put a checksum of the new rows into each frame, to find drift between the two ends."""

    compressed_eval: bool = False
    """Compress the activations of --eval, too, as on a first visit with acsgd: what a model sees
    that will be used over compressed links. Else they are sent as they are."""

    def __post_init__(self) -> None:
        check_section(self, prefix="codec.")
        expand_home(self, "spill_dir")
        if self.is_said:
            object.__setattr__(self, "name", canonical_codec(self.name))
        if self.first_visit_bits not in (*range(1, 9), 32):
            raise ConfigError(
                f"codec.first_visit_bits is {self.first_visit_bits}; it must be 1 to 8, "
                "or 32 for full precision."
            )
        needs_two = self.grid == "symmetric" or "reference" in self.name
        widths = (
            ("fw_bits", self.fw_bits),
            ("bw_bits", self.bw_bits),
            ("first_visit_bits", self.first_visit_bits),
        )
        for label, bits in widths:
            if bits == 1 and needs_two:
                grid = "reference" if "reference" in self.name else "symmetric"
                raise ConfigError(
                    f"codec.{label} is 1, but the {grid} grid needs at least 2 bits to converge; "
                    f"use codec.{label}=2, or codec.grid=signed with acsgd or directq."
                )

    @property
    def is_said(self) -> bool:
        """Whether somebody asked for the codec by its name, even if it is the default's."""
        return not isinstance(self.name, UnsaidText)

    @property
    def has_memory(self) -> bool:
        """Whether each sample is remembered between visits."""
        return has_memory(self.name)

    @property
    def forward_name(self) -> str:
        """The activations' codec. Error feedback is for gradients: a residual of other samples
        has no place in a sample's activation."""
        return self.name.replace("+ef", "")

    @property
    def backward_name(self) -> str:
        """The gradients' codec: never with memory."""
        return backward_codec(self.name)


LINK_OPTIONS = {
    "bandwidth_bps": "bandwidth",
    "latency_s": "latency",
    "jitter_s": "jitter",
    "loss_rate": "loss",
}
"""Options of a link, and their names in a topology file, which describes all links by itself."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The links between the stages, as they are emulated."""

    bandwidth_bps: float = option(Unsaid(100e6), above=0.0, unit="bandwidth")
    """Speed of each node's uplink in bits per second, such as 100Mbps; unlimited: no shaping."""

    latency_s: float = option(Unsaid(0.0), low=0.0, below=math.inf, unit="duration")
    """One-way delay of each link, such as 20ms."""

    jitter_s: float = option(Unsaid(0.0), low=0.0, below=math.inf, unit="duration")
    """How far the delay varies, such as 5ms."""

    loss_rate: float = option(Unsaid(0.0), low=0.0, high=0.5, unit="fraction")
    """Share of the segments that are lost and sent again, such as 0.01 or 1%."""

    topology: str | None = None
    """YAML file with bandwidth and latency by stage pair, instead of the options above."""

    def __post_init__(self) -> None:
        check_section(self, prefix="network.")
        expand_home(self, "topology")

    @property
    def said(self) -> dict[str, float]:
        """What was asked for, even if it is the default's own value; not the topology."""
        own = {name: getattr(self, name) for name in LINK_OPTIONS}
        return {name: value for name, value in own.items() if not isinstance(value, Unsaid)}

    @property
    def unlimited(self) -> bool:
        """Whether frames pass unshaped, as on a real slow network."""
        return math.isinf(self.bandwidth_bps) and self.topology is None


def hidden_options(section: Any) -> frozenset[str]:
    """Options that mean nothing beside the others: links that nobody described, with a topology."""
    if not isinstance(section, NetworkConfig) or section.topology is None:
        return frozenset()
    return frozenset(LINK_OPTIONS.keys() - section.said.keys())


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved on the way, and where a run goes on."""

    every: int | None = option(None, low=1)
    """Save everything after every so many steps and at the end of each arm; empty: by time."""

    automatic_s: float = option(300.0, low=0.0, below=math.inf, unit="duration")
    """Without `every`: save when so much time has passed, and from then on at the end of each arm;
    a shorter run saves nothing. 0: never."""

    keep: int | None = option(None, low=1)
    """Checkpoints of each arm that are kept; the oldest goes once a new one was verified. Empty: 3,
    or 1 where they are saved by time."""

    dir: str | None = None
    """Folder or URI (s3://bucket/run) of the checkpoints; empty: in the run's folder."""

    resume: str | None = None
    """Go on from a run's folder or one of its checkpoints, with its settings where none are given;
    auto: the newest run in --out, or --name, from the beginning if it has no checkpoint."""

    def __post_init__(self) -> None:
        check_section(self, prefix="checkpoint.")
        expand_home(self, "dir", "resume")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How the weights move."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw or sgd."""

    lr: float = option(1e-3, low=0.0, below=math.inf)
    """Peak learning rate."""

    weight_decay: float = option(0.01, low=0.0, below=math.inf)
    """Decoupled weight decay of matrices, with adamw and sgd alike: each step they shrink by lr
    times this."""

    warmup_steps: int = option(0, low=0)
    """Steps in which the learning rate climbs from 0."""

    decay: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the warm-up."""

    min_lr_ratio: float = option(0.1, low=0.0, high=1.0)
    """Where the decay ends, as a share of the peak."""

    clip: float = option(1.0, low=0.0)
    """Largest global gradient norm over all stages; 0 or inf: no clipping."""

    beta1: float = option(0.9, low=0.0, below=1.0)
    """Decay of AdamW's first moment."""

    beta2: float = option(0.95, low=0.0, below=1.0)
    """Decay of AdamW's second moment."""

    eps: float = option(1e-8, above=0.0, below=math.inf)
    """Added to AdamW's denominator."""

    momentum: float = option(0.0, low=0.0, below=1.0)
    """Momentum of sgd."""

    def __post_init__(self) -> None:
        check_section(self, prefix="optim.")
        if math.isinf(self.clip):
            object.__setattr__(self, "clip", 0.0)  # the same, and JSON has no infinity


@dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """What a run survives, and how."""

    max_failures: int = option(3, low=-1)
    """Failures after which the run ends; 0: the first one ends it, -1: no limit. Each time the
    stages go back to the last step that all of them have, and repeat what came after."""

    spares: int = option(1, low=0, high=16)
    """Warm spares on each node that has stages: idle processes (about 0.3 GB of memory each, no
    CPU) that take the place of a stage that dies in less than a second; 0: a new process is
    started then, which takes seconds. None are started with max_failures 0."""

    spare_after_s: float = option(10.0, low=0.0, below=math.inf, unit="duration")
    """Spares are started once training has lasted so long: a short run does without."""

    black_box: str = "auto"
    """Folder on each node where a stage keeps its last two steps outside its process, off, or
    auto: /dev/shm if it has room, else the folder for temporary files."""

    min_deadline_s: float = option(30.0, above=0.0, below=math.inf, unit="duration")
    """Shortest wait for a neighbour that counts as a failure, once step times were measured:
    then a wait may take four median steps and ten times their deviation. Longer where the
    driver's machine is busy: times the threads that want each core, up to `deadline_s`."""

    def __post_init__(self) -> None:
        check_section(self, prefix="faults.")
        expand_home(self, "black_box")
        if not self.black_box.strip():
            raise ConfigError("faults.black_box is empty; give a folder, auto, or off.")
