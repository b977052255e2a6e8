"""The run as frozen dataclasses. Every check of what a user gave starts here.

Sections check their own options when they are built (`ray_pipe.sections`); `RunConfig.validate`
checks what only shows when sections meet, and touches files and folders (`ray_pipe.checks`).
Files, flags and `--set` are laid over each other in `ray_pipe.settings_file`. No torch, no ray.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

from netsim.units import show_bandwidth
from ray_pipe import checks, settings_file
from ray_pipe.checks import check_corpus, check_repeat_visits
from ray_pipe.codec_names import canonical_codec
from ray_pipe.ctr_section import CTR_DEFAULTS, EmbeddingConfig, check_task
from ray_pipe.errors import ConfigError
from ray_pipe.idle_options import check_losses
from ray_pipe.options import (
    UnsaidNames,
    UnsaidText,
    check_section,
    expand_home,
    option,
    plain,
)
from ray_pipe.row_memory import check_memory, check_memory_cap
from ray_pipe.sections import (
    LINK_OPTIONS,
    CheckpointConfig,
    CodecConfig,
    DataConfig,
    FaultsConfig,
    ModelConfig,
    NetworkConfig,
    OptimConfig,
    PipelineConfig,
    hidden_options,
)
from ray_pipe.sync_config import SyncConfig

__all__ = [
    "CheckpointConfig",
    "CodecConfig",
    "ConfigError",
    "DataConfig",
    "EmbeddingConfig",
    "FaultsConfig",
    "ModelConfig",
    "NetworkConfig",
    "OptimConfig",
    "PipelineConfig",
    "RunConfig",
    "SyncConfig",
    "check_corpus",
    "check_memory",
    "check_memory_cap",
    "check_repeat_visits",
]

DEFAULT_EPOCHS = 8
DEFAULT_ARMS = ("fp32", "directq", "acsgd")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run needs to know. Equal configurations give equal losses."""

    name: str = ""
    """Name of the run and of its folder; empty: made from the codec, the bandwidth and the time."""

    task: Literal["text", "ctr"] = "text"
    """text trains a language model; ctr a click model whose embedding rows live on shards."""

    out: str = "runs"
    """Folder that gets the run's folder."""

    seed: int = option(0, low=0, below=2**32)
    """Seed of weights, order of samples and rounding."""

    address: str | None = None
    """Address of an existing Ray cluster (auto or HOST:PORT); empty: start one."""

    dashboard: bool = False
    """Start the Ray dashboard, too, and print its address; a Ray of one's own has it anyway."""

    compare: tuple[str, ...] = UnsaidNames(DEFAULT_ARMS)
    """Codecs that are trained one after another on the same seed, order and batches.
    Empty: only codec.name; so it is when a codec is given without this."""

    epochs: int | None = option(None, low=1)
    """Passes over the data; either this or steps."""

    steps: int | None = option(None, low=1)
    """Optimizer steps, instead of epochs."""

    eval: bool = False
    """Measure the loss on held-out samples after each epoch."""

    deadline_s: float = option(60.0, above=0.0, below=math.inf, unit="duration")
    """Time that a stage waits for its neighbour before it gives up, until step times were
    measured; see faults.min_deadline_s."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)

    name_is_generated: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", DEFAULT_EPOCHS)
        check_section(self, prefix="")
        expand_home(self, "out")
        self._settle_arms()
        check_task(self)
        checks.check_arms(self)
        if not self.name:
            object.__setattr__(self, "name", UnsaidText(_make_name(self)))
        # It survives `dataclasses.replace`: a copy's folder must not be this run's.
        object.__setattr__(self, "name_is_generated", isinstance(self.name, UnsaidText))
        checks.check_name(self.name)

    def _settle_arms(self) -> None:
        """What was not said of `compare` and `codec.name` follows from what was."""
        names: tuple[str, ...]
        if isinstance(self.compare, UnsaidNames):
            names = UnsaidNames(() if self.codec.is_said else DEFAULT_ARMS)
        else:
            names = tuple(canonical_codec(name, source="compare") for name in self.compare)
        object.__setattr__(self, "compare", names)
        if not self.codec.is_said:
            default = type(self.codec)().name
            name = default if not names or default in names else names[-1]
            codec = dataclasses.replace(self.codec, name=UnsaidText(name))
            object.__setattr__(self, "codec", codec)

    @property
    def arms(self) -> tuple[CodecConfig, ...]:
        """The codecs to train, one after another."""
        names = self.compare or (self.codec.name,)
        return tuple(dataclasses.replace(self.codec, name=str(name)) for name in names)

    @property
    def links_are_given(self) -> bool:
        """Whether somebody said how fast the links are."""
        return self.network.topology is not None or "bandwidth_bps" in self.network.said

    def on_nodes(self, num_nodes: int) -> tuple[Self, list[str]]:
        """The run as it is when its stages are on so many nodes, and what to tell the user.

        Between several nodes there is a real network; where no bandwidth was asked for, none is
        emulated on top of it. A latency, jitter or loss that was asked for is.
        """
        if self.links_are_given:
            return self, []
        if num_nodes < 2:
            return self, [
                "all stages are on one node and no --bandwidth was given: links of "
                f"{show_bandwidth(self.network.bandwidth_bps)} are emulated between them "
                "(--bandwidth unlimited: none)."
            ]
        network = dataclasses.replace(self.network, bandwidth_bps=math.inf)
        name = "" if self.name_is_generated else self.name
        asked = [f"{key} {value:g}" for key, value in self.network.said.items() if value]
        added = f"only {', '.join(asked)} is emulated" if asked else "nothing is emulated"
        changed = dataclasses.replace(self, network=network, name=name)
        check_losses(changed)
        return changed, [
            f"the stages are on {num_nodes} nodes and no --bandwidth was given: frames go over "
            f"the real network as they are, {added} (--bandwidth 100Mbps would)."
        ]

    def make_folder(self) -> Path:
        """Make the run's folder, out/name. A name we made up never meets an old folder: it gets a
        number; a name the user gave may, and the old files are written over."""
        return checks.make_run_folder(self.out, self.name, fresh=self.name_is_generated)

    def validate(self, *, num_blocks: int | None = None) -> list[str]:
        """Refuse what cannot work, before anything is started; return what deserves a warning.

        `num_blocks` is for a user's own model; else it is the named model's number of layers.
        """
        return checks.check_run(self, num_blocks=num_blocks)

    def to_dict(self) -> dict[str, Any]:
        """The whole configuration as JSON can hold it; `from_dict` gives an equal one back.

        With a topology, options of links that nobody gave are left out: they describe nothing.
        """
        result: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            if not item.init:
                continue
            value = getattr(self, item.name)
            if dataclasses.is_dataclass(value):
                hidden = hidden_options(value)
                result[item.name] = {
                    name: plain(inner) for name, inner in vars(value).items() if name not in hidden
                }
            else:
                result[item.name] = plain(value)
        return result

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "config") -> Self:
        """A configuration from nested (or dotted) keys; what is not given keeps its default."""
        return cls.from_layers([(source, values)])

    @classmethod
    def from_layers(cls, layers: Iterable[tuple[settings_file.Labels, Mapping[str, Any]]]) -> Self:
        """Lay several sources of settings over the defaults, later over earlier."""
        merged = settings_file.merge_layers(cls, layers)
        if merged.get("task") == "ctr":
            merged = settings_file.under(CTR_DEFAULTS, merged)
        return cls(**settings_file.build_sections(cls, merged))

    def with_overrides(self, settings: Iterable[str]) -> Self:
        """A copy with settings written as on the command line: `["codec.fw_bits=2"]`."""
        own = self.to_dict()
        if self.name_is_generated:
            del own["name"]  # it would speak of the old codec and bandwidth
        if isinstance(self.compare, UnsaidNames):
            del own["compare"]
        if not self.codec.is_said:
            del own["codec"]["name"]
        for name in LINK_OPTIONS.keys() - self.network.said.keys():
            own["network"].pop(name, None)
        given = settings_file.parse_settings(settings)
        return self.from_layers([("config", own), ("--set", given)])


def _make_name(config: RunConfig) -> str:
    if config.task == "ctr":
        arms = f"ctr-{config.embedding.staleness}"
        rate = "topology" if config.network.topology else None
        shown = rate or show_bandwidth(config.network.bandwidth_bps)
        return f"{arms}-{shown.replace(' ', '').replace('/', '')}-{datetime.now():%m%d-%H%M%S}"
    arms = "compare" if len(config.compare) > 1 else (config.compare or (config.codec.name,))[0]
    rate = "topology" if config.network.topology else show_bandwidth(config.network.bandwidth_bps)
    return f"{arms}-{rate.replace(' ', '').replace('/', '')}-{datetime.now():%m%d-%H%M%S}"
