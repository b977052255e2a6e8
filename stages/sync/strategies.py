"""Strategies by name: the whole set on one page, with their options and what they refuse."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from compressors.registry import CodecSpec
from stages.sync.all_reduce import AllReduce
from stages.sync.exchange import Exchange
from stages.sync.hop import Hop, HopOptions
from stages.sync.mixing import Graph, make_graph
from stages.sync.patience import Patience
from stages.sync.payload import FP32
from stages.sync.post import Post
from stages.sync.rules import GradientMean, ParameterMove, Rule
from stages.sync.strategy import SyncStrategy


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

    deadline_s: float = 60.0
    """How long to wait for a peer before waits have been measured."""

    deadline_k: float = 6.0
    """A wait may take the median of such waits and this many deviations more."""

    seed: int = 0

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

    def rule(self) -> Rule:
        """The arithmetic of one stage."""
        return RULES[self.spec.name](self.spec)

    def generator(self, post: Post) -> Any:
        """The Group Generator behind its post box; None for strategies that need none."""
        return None


def _all_reduce(parts: Assembly, post: Post, exchanges: Sequence[Exchange]) -> SyncStrategy:
    return AllReduce(
        post=post,
        exchanges=exchanges,
        members=parts.members,
        route=parts.spec.route,
        patience=parts.spec.patience(),
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


STRATEGIES: Final[dict[str, Callable[[Assembly, Post, Sequence[Exchange]], SyncStrategy]]] = {
    "allreduce": _all_reduce,
    "hop": _hop,
}

RULES: Final[dict[str, Callable[[SyncSpec], Rule]]] = {
    "allreduce": lambda spec: GradientMean(),
    "hop": lambda spec: ParameterMove(),
}


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
