"""Who mixes with whom and with what weight: graphs, doubly stochastic weights, repair.

An edge j -> i means that j sends its parameters to i. Weights are fixed and sum to one by row and
by column, whatever the graph: averaging "whoever arrived", or 1/(degree + 1) on an irregular
graph, moves the mean of the replicas.

    ring          i +- 1                                              degree 2
    ring-based    i +- 1, i + n/2                                     degree 3
    double-ring   two ring-based graphs of n/2, joined node to node   degree 4
    complete      everybody                                           degree n - 1
    FILE          one edge a line: `0<->1` or `0->1`; `#` starts a comment
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

Edge = tuple[int, int]
_LINE = re.compile(r"(\d+)\s*(<->|->)\s*(\d+)")


class GraphError(ValueError):
    """A graph on which replicas cannot agree, with the reason and the way out."""


class Graph:
    """Replicas and directed edges `(source, target)`. Immutable; strongly connected."""

    def __init__(self, nodes: Iterable[int], edges: Iterable[Edge]) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        self.edges = frozenset(edges)
        if not self.nodes:
            raise GraphError("a graph needs at least one replica")
        known = set(self.nodes)
        for source, target in sorted(self.edges):
            if source == target:
                raise GraphError(f"edge {source}->{target} joins replica {source} to itself")
            if source not in known or target not in known:
                lost = source if source not in known else target
                raise GraphError(
                    f"edge {source}->{target} names replica {lost}; there are "
                    f"{len(known)} replicas, {self.nodes[0]} to {self.nodes[-1]}"
                )
        into: dict[int, list[int]] = {node: [] for node in self.nodes}
        out_of: dict[int, list[int]] = {node: [] for node in self.nodes}
        for source, target in sorted(self.edges):
            into[target].append(source)
            out_of[source].append(target)
        self._into = {node: tuple(found) for node, found in into.items()}
        self._out_of = {node: tuple(found) for node, found in out_of.items()}
        far = [node for node in self.nodes if len(self.distances(node)) < len(self.nodes)]
        if far:
            start = far[0]
            lost = min(known - self.distances(start).keys())
            raise GraphError(
                f"the graph is not connected: nothing that replica {start} sends reaches replica "
                f"{lost}; add an edge towards {lost}, or choose sync.graph=ring"
            )

    def into(self, node: int) -> tuple[int, ...]:
        """Who sends to `node`, sorted."""
        return self._into[node]

    def out_of(self, node: int) -> tuple[int, ...]:
        """Whom `node` sends to, sorted."""
        return self._out_of[node]

    def distances(self, start: int) -> dict[int, int]:
        """Edges along the arrows from `start` to each replica that it reaches."""
        found = {start: 0}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for target in self._out_of[node]:
                if target not in found:
                    found[target] = found[node] + 1
                    queue.append(target)
        return found

    @cached_property
    def is_symmetric(self) -> bool:
        return all((target, source) in self.edges for source, target in self.edges)

    @cached_property
    def weights(self) -> Mapping[int, Mapping[int, float]]:
        """`weights[i][j]`: what i gives to j's parameters, itself included.

        Metropolis on symmetric graphs, uniform on directed regular ones; both are doubly
        stochastic. An irregular directed graph has no such weights known to its nodes.
        """
        if self.is_symmetric:
            share: Callable[[int, int], float] = self._metropolis
        else:
            self._check_regular()
            share = self._uniform
        found: dict[int, dict[int, float]] = {}
        for node in self.nodes:
            row = {source: share(node, source) for source in self._into[node]}
            found[node] = {node: 1.0 - sum(row.values()), **row}
        return found

    @cached_property
    def second_eigenvalue(self) -> float:
        """The second largest modulus among the eigenvalues of the weights; 0 for one replica."""
        size = len(self.nodes)
        if size == 1:
            return 0.0
        place = {node: index for index, node in enumerate(self.nodes)}
        matrix = np.zeros((size, size))
        for node, row in self.weights.items():
            for source, weight in row.items():
                matrix[place[node], place[source]] = weight
        moduli = np.sort(np.abs(np.linalg.eigvals(matrix)))
        return float(moduli[-2])

    @property
    def spectral_gap(self) -> float:
        """1 - |second eigenvalue|: the larger, the sooner replicas agree."""
        return 1.0 - self.second_eigenvalue

    def without(self, node: int) -> Graph:
        """The graph after a death: its edges go; its neighbours are joined if they must be.

        A directed graph becomes symmetric, because what is left of it is seldom regular.
        """
        nodes = [other for other in self.nodes if other != node]
        edges = {edge for edge in self.edges if node not in edge}
        around = sorted({*self._into[node], *self._out_of[node]} - {node})
        if not self.is_symmetric:
            edges |= {(target, source) for source, target in edges}
        try:
            return Graph(nodes, edges)
        except GraphError:
            bypass = [*itertools.pairwise(around)]
            return Graph(nodes, edges | {*bypass, *((b, a) for a, b in bypass)})

    def with_node(self, node: int) -> Graph:
        """The graph after a birth: the newcomer is joined to its neighbours in order of id."""
        if node in self.nodes:
            raise GraphError(f"replica {node} is in the graph already")
        before = [other for other in self.nodes if other < node] or [self.nodes[-1]]
        after = [other for other in self.nodes if other > node] or [self.nodes[0]]
        edges = set(self.edges)
        if not self.is_symmetric:
            edges |= {(target, source) for source, target in edges}
        for other in {before[-1], after[0]}:
            edges |= {(node, other), (other, node)}
        return Graph([*self.nodes, node], edges)

    def _metropolis(self, node: int, source: int) -> float:
        return 1.0 / (1 + max(len(self._into[node]), len(self._into[source])))

    def _uniform(self, node: int, source: int) -> float:
        return 1.0 / (1 + len(self._into[node]))

    def _check_regular(self) -> None:
        degrees = {len(self._into[node]) for node in self.nodes}
        degrees |= {len(self._out_of[node]) for node in self.nodes}
        if len(degrees) > 1:
            raise GraphError(
                f"the graph has one-way edges and degrees from {min(degrees)} to {max(degrees)}; "
                "no fixed weights keep the mean on such a graph: write the edges as 0<->1, or give "
                "every replica as many edges in as out"
            )


def ring(num: int) -> Graph:
    """Each replica with the two beside it."""
    return _symmetric(num, [(i, (i + 1) % num) for i in range(num)])


def directed_ring(num: int) -> Graph:
    """Each replica sends to the next one only."""
    return Graph(range(num), [(i, (i + 1) % num) for i in range(num) if num > 1])


def ring_based(num: int) -> Graph:
    """A ring, and each replica with the one across."""
    return _symmetric(num, [edge for i in range(num) for edge in _ring_based_edges(i, num)])


def double_ring(num: int) -> Graph:
    """Two ring-based graphs, joined node to node."""
    if num % 2 or num < 4:
        raise GraphError(
            f"sync.graph=double-ring needs an even number of replicas, 4 or more, got {num}; "
            "choose ring-based"
        )
    half = num // 2
    edges = [edge for i in range(half) for edge in _ring_based_edges(i, half)]
    edges += [(half + a, half + b) for a, b in edges]
    return _symmetric(num, edges + [(i, i + half) for i in range(half)])


def complete(num: int) -> Graph:
    """Everybody with everybody."""
    return _symmetric(num, [(a, b) for a in range(num) for b in range(a)])


GRAPHS: Final[dict[str, Callable[[int], Graph]]] = {
    "ring": ring,
    "ring-based": ring_based,
    "double-ring": double_ring,
    "complete": complete,
    "directed-ring": directed_ring,
}


def make_graph(name: str, num_replicas: int) -> Graph:
    """A graph by name, or from a file of edges; its weights are known to exist."""
    if name in GRAPHS:
        graph = GRAPHS[name](num_replicas)
    else:
        path = Path(name)
        if not path.is_file():
            near = difflib.get_close_matches(name, GRAPHS, n=1, cutoff=0.5)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise GraphError(
                f"sync.graph {name!r} is neither a known graph nor a file; {guess}"
                f"Known are {', '.join(GRAPHS)}"
            )
        graph = parse_graph(path.read_text(encoding="utf-8"), num_replicas, source=name)
    assert graph.weights
    return graph


def parse_graph(text: str, num_replicas: int, *, source: str = "graph") -> Graph:
    """A graph from lines such as `0<->1` or `0->1`."""
    edges: set[Edge] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise GraphError(f"{source} line {number}: {line!r} is not '0<->1' or '0->1'")
        a, b = int(match[1]), int(match[3])
        edges.add((a, b))
        if match[2] == "<->":
            edges.add((b, a))
    try:
        return Graph(range(num_replicas), edges)
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None


def _ring_based_edges(i: int, num: int) -> list[Edge]:
    across = [(i, (i + num // 2) % num)] if num > 3 else []
    return [(i, (i + 1) % num), *across]


def _symmetric(num: int, edges: Iterable[Edge]) -> Graph:
    pairs = {edge for a, b in edges if a != b for edge in ((a, b), (b, a))}
    return Graph(range(num), pairs)
