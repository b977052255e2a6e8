"""Strategies by name: the whole set on one page, with their options and what they refuse."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from compressors.registry import CodecSpec, split_name
from stages.sync.ad_psgd import AdPsgd
from stages.sync.all_reduce import AllReduce
from stages.sync.exchange import Exchange
from stages.sync.generator import GroupGenerator
from stages.sync.generator_desk import GeneratorDesk
from stages.sync.hop import Hop, HopOptions
from stages.sync.local import Local, QuantizedAdam
from stages.sync.mixing import Graph, make_graph
from stages.sync.patience import Patience
from stages.sync.payload import FP32, VectorCoder, payload_spec
from stages.sync.post import Post
from stages.sync.ripples import Ripples, StaticRipples
from stages.sync.rules import FrozenAdam, GradientMean, OuterStep, ParameterMove, Rule
from stages.sync.strategy import SyncStrategy

KEEPS_LOSS: Final = ("ripples", "hop", "ad-psgd")
"""Strategies that send parameters: whoever rounds keeps what was lost, without `+ef`."""


class SyncSpecError(ValueError):
    """Options that no fleet of this size can work with, with the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSpec:
    """A strategy as the user asks for it; each strategy reads the fields that concern it."""

    name: str = "allreduce"
    codec: CodecSpec = field(default_factory=lambda: FP32)
    route: Literal["ring", "direct"] = "ring"
    """Of all-reduce: partial sums round a ring, or straight to the owners."""

    graph: str = "ring-based"
    """Of Hop: a name of `stages.sync.mixing`, or a file of edges."""

    max_gap: int = 5
    """Of Hop: how many iterations neighbours may be apart."""

    backup_workers: int = 0
    """Of Hop: so many neighbours may be late."""

    staleness: int = 0
    """Of Hop: updates may be so many iterations old."""

    skip: int = 0
    """Of Hop: a replica that is behind may skip up to so many iterations."""

    group_size: int = 4
    """Of Ripples: replicas in a group."""

    slowdown_threshold: int = 4
    """Of Ripples: who is so many requests behind is not waited for; 0 waits for everybody."""

    isolation_rounds: int = 16
    """Of Ripples: groups of so many rounds must connect all replicas; 0 does not care."""

    groups: Literal["smart", "ruler", "by-node"] = "smart"
    """Of Ripples: tickets of the Group Generator, or a schedule without coordinator."""

    local_steps: int = 1
    """Steps between exchanges, of Ripples, AD-PSGD and local."""

    outer_lr: float = 0.7
    """Of local: 1, with no momentum, averages parameters (LocalSGD)."""

    outer_momentum: float = 0.5
    """Of local: Nesterov's, of the outer step."""

    warmup: int = 20
    """Of quantized-adam: exact steps before the variance is frozen."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    """These four of quantized-adam, which has an optimizer of its own."""

    deadline_s: float = 60.0
    """How long to wait for a peer before waits have been measured."""

    deadline_k: float = 6.0
    """A wait may take the median of such waits and this many deviations more."""

    seed: int = 0

    @property
    def payload(self) -> CodecSpec:
        """The codec of what replicas send; quantized-adam keeps both its errors.

        Where parameters are sent what rounding lost is still in them when they are sent again:
        `+ef` would add it a second time, and with top-k once for each time that it was not sent.
        """
        spec = payload_spec(self.codec)
        base, suffixes = split_name(spec.name)
        if self.name in KEEPS_LOSS:
            suffixes = tuple(suffix for suffix in suffixes if suffix != "ef")
        elif self.name == "quantized-adam" and base != "fp32" and "ef" not in suffixes:
            suffixes = ("ef", *suffixes)
        return replace(spec, name="+".join([base, *suffixes]))

    def patience(self) -> Patience:
        """A limit for one kind of wait."""
        return Patience(first_s=self.deadline_s, floor_s=self.deadline_s / 20, k=self.deadline_k)


class Assembly:
    """Puts the parts of a strategy together, for every replica and stage alike."""

    def __init__(self, spec: SyncSpec, members: Sequence[int]) -> None:
        self.spec = spec
        self.members = tuple(members)
        check_spec(spec, len(self.members))
        self._graph: Graph | None = None

    def strategy(self, post: Post, exchanges: Sequence[Exchange]) -> SyncStrategy:
        """The leader's half."""
        return STRATEGIES[self.spec.name](self, post, exchanges)

    @property
    def graph(self) -> Graph:
        """Who mixes with whom, in strategies that have a graph."""
        if self._graph is None:
            self._graph = make_graph(self.spec.graph, len(self.members))
        return self._graph

    def coder(self, replica: int) -> VectorCoder:
        """What codes the vectors of one stage of a replica."""
        return VectorCoder(self.spec.payload, replica=replica)

    @property
    def history(self) -> int:
        """Updates that a stage keeps: of as many iterations as a neighbour may be behind, of the
        one that runs, and of the one before, which a replica that jumps asks for."""
        return self.spec.max_gap + 2

    def rule(self) -> Rule:
        """The arithmetic of one stage."""
        return RULES[self.spec.name](self.spec)

    def generator(self, post: Post) -> GeneratorDesk | None:
        """The Group Generator behind its post box; None for strategies that need none."""
        if self.spec.name != "ripples" or self.spec.groups != "smart":
            return None
        return GeneratorDesk(post, self.make_generator)

    def make_generator(self, epoch: int) -> GroupGenerator:
        """A Group Generator that knows the members; after a restart it comes back empty."""
        spec = self.spec
        generator = GroupGenerator(
            group_size=spec.group_size,
            threshold=spec.slowdown_threshold,
            isolation_rounds=spec.isolation_rounds,
            seed=spec.seed,
            epoch=epoch,
            patience=spec.patience(),
        )
        if epoch == 0:
            for member in self.members:
                generator.register(member)
        return generator


def _among(parts: Assembly, post: Post, exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """What every strategy that knows all members is made of."""
    return {
        "post": post,
        "exchanges": exchanges,
        "members": parts.members,
        "patience": parts.spec.patience(),
    }


def _all_reduce(parts: Assembly, post: Post, exchanges: Sequence[Exchange]) -> SyncStrategy:
    return AllReduce(route=parts.spec.route, **_among(parts, post, exchanges))


def _local(parts: Assembly, post: Post, exchanges: Sequence[Exchange]) -> SyncStrategy:
    every = parts.spec.local_steps
    return Local(every=every, route="direct", **_among(parts, post, exchanges))


def _quantized_adam(parts: Assembly, post: Post, exchanges: Sequence[Exchange]) -> SyncStrategy:
    warmup = parts.spec.warmup
    return QuantizedAdam(warmup=warmup, route="direct", **_among(parts, post, exchanges))


def _ad_psgd(parts: Assembly, post: Post, exchanges: Sequence[Exchange]) -> SyncStrategy:
    spec = parts.spec
    return AdPsgd(every=spec.local_steps, seed=spec.seed, **_among(parts, post, exchanges))


def _frozen_adam(spec: SyncSpec) -> Rule:
    return FrozenAdam(
        warmup=spec.warmup,
        beta1=spec.beta1,
        beta2=spec.beta2,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
    )


def _hop(parts: Assembly, post: Post, exchanges: Sequence[Exchange]) -> SyncStrategy:
    spec = parts.spec
    return Hop(
        post=post,
        exchanges=exchanges,
        graph=parts.graph,
        options=HopOptions(
            max_gap=spec.max_gap,
            backup_workers=spec.backup_workers,
            staleness=spec.staleness,
            max_jump=spec.skip,
        ),
        patience=spec.patience(),
    )


def _ripples(parts: Assembly, post: Post, exchanges: Sequence[Exchange]) -> SyncStrategy:
    spec = parts.spec
    if spec.groups == "smart":
        return Ripples(
            post=post, exchanges=exchanges, every=spec.local_steps, patience=spec.patience()
        )
    return StaticRipples(
        schedule=spec.groups, every=spec.local_steps, **_among(parts, post, exchanges)
    )


STRATEGIES: Final[dict[str, Callable[[Assembly, Post, Sequence[Exchange]], SyncStrategy]]] = {
    "allreduce": _all_reduce,
    "quantized-adam": _quantized_adam,
    "ripples": _ripples,
    "hop": _hop,
    "ad-psgd": _ad_psgd,
    "local": _local,
}

RULES: Final[dict[str, Callable[[SyncSpec], Rule]]] = {
    "allreduce": lambda spec: GradientMean(),
    "quantized-adam": _frozen_adam,
    "ripples": lambda spec: ParameterMove(),
    "hop": lambda spec: ParameterMove(),
    "ad-psgd": lambda spec: ParameterMove(),
    "local": lambda spec: OuterStep(lr=spec.outer_lr, momentum=spec.outer_momentum),
}


OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "allreduce": ("route",),
    "quantized-adam": ("warmup",),
    "ripples": ("groups", "group_size", "slowdown_threshold", "isolation_rounds", "local_steps"),
    "hop": ("graph", "max_gap", "backup_workers", "staleness", "skip"),
    "ad-psgd": ("local_steps",),
    "local": ("local_steps", "outer_lr", "outer_momentum"),
}
"""Which options of `SyncSpec` a strategy reads, beside those of all."""


def options_of(name: str, groups: str = "smart") -> tuple[str, ...]:
    """Those of a strategy; groups by a schedule have the size that the schedule says."""
    if name == "ripples" and groups != "smart":
        return ("groups", "local_steps")
    return OPTIONS[name]


def check_spec(spec: SyncSpec, num_replicas: int) -> None:
    """Refuse what cannot work, before anything is started."""
    if spec.name not in STRATEGIES:
        near = difflib.get_close_matches(spec.name, STRATEGIES, n=1, cutoff=0.4)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise SyncSpecError(
            f"unknown sync strategy {spec.name!r}; {guess}Known are {', '.join(STRATEGIES)}"
        )
    if spec.name == "hop":
        _check_hop(spec, num_replicas)
    if spec.name == "ripples":
        _check_ripples(spec, num_replicas)
    if spec.name == "quantized-adam" and spec.warmup < 1:
        raise SyncSpecError(
            f"sync.warmup is {spec.warmup}: without a warm-up there is no variance to freeze; "
            "set 1 or more, about a tenth of the run"
        )
    if spec.local_steps < 1:
        raise SyncSpecError(f"sync.local_steps is {spec.local_steps}, must be 1 or more")
    if spec.name == "local" and not (spec.outer_lr > 0 and 0 <= spec.outer_momentum < 1):
        raise SyncSpecError(
            f"sync.outer_lr is {spec.outer_lr:g} and sync.outer_momentum {spec.outer_momentum:g}: "
            "the outer step needs a rate above 0 and a momentum from 0 up to, not including, 1; "
            "0.7 and 0.9 are DiLoCo's, 1 and 0 plain averaging"
        )


def _check_ripples(spec: SyncSpec, num_replicas: int) -> None:
    if not 2 <= spec.group_size <= max(2, num_replicas):
        raise SyncSpecError(
            f"sync.group_size is {spec.group_size}, there are {num_replicas} replicas; set 2 to "
            f"{max(2, num_replicas)}"
        )
    if spec.slowdown_threshold < 0 or spec.isolation_rounds < 0:
        raise SyncSpecError(
            "sync.slowdown_threshold and sync.isolation_rounds must be 0 (off) or more, got "
            f"{spec.slowdown_threshold} and {spec.isolation_rounds}"
        )


def _check_hop(spec: SyncSpec, num_replicas: int) -> None:
    graph = make_graph(spec.graph, num_replicas)
    fewest = min(len(graph.into(node)) for node in graph.nodes)
    if spec.max_gap < 1:
        raise SyncSpecError(
            f"sync.max_gap is {spec.max_gap}: nobody could ever enter a second iteration; set 1 or "
            "more, about f to hide a slowdown of f"
        )
    if spec.backup_workers < 0 or (spec.backup_workers and spec.backup_workers >= fewest):
        raise SyncSpecError(
            f"sync.backup_workers is {spec.backup_workers}, but a replica has only {fewest} "
            f"neighbours in graph {spec.graph!r} and would never mix; set at most "
            f"{max(fewest - 1, 0)}, or choose a denser graph"
        )
    if spec.staleness < 0:
        raise SyncSpecError(f"sync.staleness is {spec.staleness}, must be 0 or more")
    if spec.backup_workers and spec.staleness:
        raise SyncSpecError("give either sync.backup_workers or sync.staleness, not both")
    if spec.skip < 0 or (spec.skip and spec.max_gap < 2):
        raise SyncSpecError(
            f"sync.skip={spec.skip} with sync.max_gap={spec.max_gap}: skipping needs a gap of 2 "
            "or more; raise sync.max_gap, or set sync.skip=0"
        )
