"""Which stage works on which node: one each where there are enough, neighbours together where not.

Pure: nodes in, choice out. `ray_pipe.cluster` asks Ray for the nodes and carries the choice out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Literal

from ray_pipe.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster, as Ray describes it."""

    id: str
    ip: str
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    is_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The node of each stage, in stage order."""

    nodes: tuple[Node, ...]
    num_gpus: float
    """GPUs that each stage gets: 1, or 0 where there are not enough for all."""

    idle_gpus: int = 0
    """GPUs that stay unused because they would not do for every stage."""

    @property
    def strategy(self) -> Literal["STRICT_SPREAD", "SPREAD"]:
        """What a placement group must promise."""
        return "SPREAD" if self.shared else "STRICT_SPREAD"

    @property
    def num_nodes(self) -> int:
        return len({node.id for node in self.nodes})

    @property
    def shared(self) -> dict[str, list[int]]:
        """The stages on each node that has more than one, by address."""
        homes: dict[tuple[str, str], list[int]] = {}
        for stage, node in enumerate(self.nodes):
            homes.setdefault((node.id, node.ip), []).append(stage)
        return {ip: stages for (_, ip), stages in homes.items() if len(stages) > 1}

    def notes(self) -> list[str]:
        """What a user would not expect, in plain words."""
        notes = []
        if self.shared:
            who = "; ".join(
                f"stages {', '.join(map(str, stages))} share {ip}"
                for ip, stages in self.shared.items()
            )
            notes.append(
                f"{len(self.nodes)} stages on {self.num_nodes} "
                f"node{'s' if self.num_nodes > 1 else ''}: "
                f"{who}. Between them nothing crosses the network; for one stage per node add "
                f"nodes or use --stages {self.num_nodes}."
            )
        if self.idle_gpus:
            notes.append(
                f"{self.idle_gpus} GPUs are too few for {len(self.nodes)} stages, one each, so all "
                f"stages compute on CPUs; use --stages {self.idle_gpus} for GPUs."
            )
        return notes


def place(num_stages: int, nodes: Sequence[Node], *, avoid: Collection[str] = ()) -> Placement:
    """Choose a node for each stage; the same nodes always give the same choice.

    With enough nodes each stage has its own, and the head stays free if it can: it has the
    driver and the cluster's books to carry. With fewer, neighbouring stages share, so that the
    number of cuts that cross the network is the least. `avoid` holds ids of nodes to leave out.
    """
    nodes = [node for node in nodes if node.id not in avoid]
    total_gpus = sum(int(node.num_gpus) for node in nodes)
    on_gpus = total_gpus >= num_stages
    if on_gpus:
        able = [node for node in nodes if node.num_gpus >= 1]
    else:
        able = [node for node in nodes if node.num_cpus > 0] or list(nodes)  # 0: keep off
    if not able:
        raise ClusterError("the cluster has no node that could take a stage; see `ray status`")
    able.sort(key=by_address)
    if len(able) > num_stages:
        able = [node for node in able if not node.is_head] + [node for node in able if node.is_head]
        able = sorted(able[:num_stages], key=by_address)
    return Placement(
        nodes=tuple(_in_runs(num_stages, able, on_gpus=on_gpus)),
        num_gpus=1.0 if on_gpus else 0.0,
        idle_gpus=0 if on_gpus else total_gpus,
    )


def move(
    placement: Placement,
    stages: Collection[int],
    nodes: Sequence[Node],
    *,
    avoid: Collection[str] = (),
) -> Placement:
    """Places for stages that lost their actor: their own node if it lives, else a node that has no
    stage yet, else beside the nearest neighbour."""
    alive = sorted((node for node in nodes if node.id not in avoid), key=by_address)
    homes: dict[int, Node] = {
        stage: node for stage, node in enumerate(placement.nodes) if stage not in stages
    }

    def has_room(node: Node) -> bool:
        used = sum(home.id == node.id for home in homes.values())
        return node.num_gpus >= used + 1 if placement.num_gpus else node.num_cpus > 0 or used > 0

    for stage in sorted(stages):
        own = [node for node in alive if node.id == placement.nodes[stage].id]
        taken = {node.id for node in homes.values()}
        empty = [node for node in alive if node.id not in taken and has_room(node)]
        near = [
            homes[other]
            for other in sorted(homes, key=lambda other: abs(other - stage))
            if homes[other].id in {node.id for node in alive} and has_room(homes[other])
        ]
        choice = [*own, *empty, *near]
        if not choice:
            raise ClusterError(
                f"stage {stage} lost its node {placement.nodes[stage].ip}, and no other node has "
                f"{'a free GPU' if placement.num_gpus else 'room'} for it; add one (`ray status` "
                "shows the nodes), then --resume"
            )
        homes[stage] = choice[0]
    return replace(placement, nodes=tuple(homes[stage] for stage in range(len(placement.nodes))))


def at_home(
    placement: Placement, homes: Mapping[int, Collection[str]], nodes: Sequence[Node]
) -> tuple[Placement, list[int]]:
    """Stages where something of theirs lies: as placed if that is among `homes` (ids of nodes, by
    stage), else on the first of those that has room once the others are at home, too. Returns who
    has none as well, and stays."""
    alive = sorted(nodes, key=by_address)
    settled: dict[int, Node] = {}

    def settle(stage: int, tried: set[str]) -> bool:
        """Find a home, and for whoever has to make way another one of its own."""
        own = placement.nodes[stage]
        able = [node for node in alive if node.id in homes.get(stage, ())]
        for node in sorted(able, key=lambda node: node.id != own.id):
            if node.id in tried:
                continue
            tried.add(node.id)
            guests = [other for other, home in settled.items() if home.id == node.id]
            has_room = not placement.num_gpus or node.num_gpus >= len(guests) + 1
            if has_room or any(settle(guest, tried) for guest in guests):
                settled[stage] = node
                return True
        return False

    homeless = [stage for stage in range(len(placement.nodes)) if not settle(stage, set())]
    chosen = tuple(settled.get(stage, node) for stage, node in enumerate(placement.nodes))
    return replace(placement, nodes=chosen), homeless


def spare_homes(placement: Placement, nodes: Sequence[Node]) -> list[Node]:
    """Nodes where a warm spare makes sense: those that have stages, whose black boxes lie there,
    and the free one that `move` would go to if one of them were lost. With GPUs only nodes that
    have one left, because a spare holds its own."""
    alive = sorted(nodes, key=by_address)
    used = [node.id for node in placement.nodes]
    able = [
        node
        for node in alive
        if (node.num_gpus >= used.count(node.id) + 1 if placement.num_gpus else True)
    ]
    free = [node for node in able if node.id not in used and (placement.num_gpus or node.num_cpus)]
    return [node for node in able if node.id in used] + free[:1]


def _in_runs(num_stages: int, nodes: Sequence[Node], *, on_gpus: bool) -> list[Node]:
    """Runs of neighbouring stages, as even as the nodes' GPUs allow."""
    counts = [0] * len(nodes)
    for _ in range(num_stages):
        open_nodes = [
            i for i, node in enumerate(nodes) if not on_gpus or counts[i] < int(node.num_gpus)
        ]
        counts[min(open_nodes, key=lambda i: counts[i])] += 1
    return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]


def by_address(node: Node) -> tuple[bool, int, int, str]:
    """The head first, then by address as a number: 10.0.0.9 comes before 10.0.0.10."""
    try:
        address = ip_address(node.ip)
    except ValueError:
        return not node.is_head, 0, 0, node.id
    return not node.is_head, address.version, int(address), node.id
