"""The `sync` section: copies of the pipeline, and how they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_pipe.codec_names import canonical_codec
from ray_pipe.options import check_section, option


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How many copies of the pipeline are trained, and how they agree on parameters."""

    replicas: int = option(1, low=1)
    """Copies of the pipeline; each trains on its own fixed share of the samples."""

    name: str | None = None
    """How replicas agree: allreduce, quantized-adam, ripples, hop, ad-psgd or local; empty:
    allreduce."""

    codec: str | None = None
    """Codec of what replicas send each other; empty: fp32, and directq where quantized-adam is
    combined with a codec other than fp32."""

    bits: int = option(4, low=1, high=8)
    """Bits per value that replicas send, with a codec that has bits."""

    slow: tuple[str, ...] = ()
    """Replicas made slow on purpose: 2:4x (replica 2 computes 4 times slower), random:6x@0.06
    (each step with that probability); several with commas between."""

    route: Literal["ring", "direct"] = "ring"
    """Of allreduce: sums round a ring, or straight to the owners of each piece."""

    graph: str = "ring-based"
    """Of hop, who mixes with whom: ring, ring-based, double-ring, complete or a file of edges."""

    max_gap: int = 5
    """Of hop: iterations that neighbours may be apart; about f to hide a slowdown of f."""

    backup_workers: int = 0
    """Of hop: so many neighbours may be late."""

    staleness: int = 0
    """Of hop: updates may be so many iterations old."""

    skip: int = 0
    """Of hop: a replica that is behind may skip up to so many iterations."""

    group_size: int | None = None
    """Of ripples: replicas in a group; empty: half of them, 2 to 4."""

    groups: Literal["smart", "ruler", "by-node"] = "smart"
    """Of ripples: tickets of the Group Generator, or a schedule without one."""

    slowdown_threshold: int = 4
    """Of ripples: who is so many requests behind is not waited for; 0 waits for everybody."""

    isolation_rounds: int = 16
    """Of ripples: the groups of so many rounds must connect all replicas; 0 does not care."""

    local_steps: int | None = None
    """Steps between exchanges, of ripples, ad-psgd and local; empty: 1, with local 8."""

    outer_lr: float = 0.7
    """Of local: learning rate of the outer step; 1 without momentum is LocalSGD."""

    outer_momentum: float = 0.5
    """Of local: Nesterov momentum of the outer step."""

    warmup: int | None = None
    """Of quantized-adam: steps with exact gradients before the variance is frozen; empty: a tenth
    of the run, at least 4."""

    deadline_k: float = option(6.0, above=0.0)
    """A wait for a replica may take the median of such waits and this many deviations more."""

    rejoin: bool = False
    """Start a new replica in the place of one that died; it takes over the state of another."""

    def __post_init__(self) -> None:
        check_section(self, prefix="sync.")
        if self.codec is not None:
            object.__setattr__(self, "codec", canonical_codec(self.codec, source="sync.codec"))

    @property
    def strategy(self) -> str:
        """The name, or what stands for none."""
        return self.name or "allreduce"
