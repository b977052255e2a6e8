"""What a stage needs to know about the other replicas of its fleet."""

from __future__ import annotations

from dataclasses import dataclass

from netsim.topology import Topology
from stages.sync.post import GENERATOR
from stages.sync.slowness import Slowness
from stages.sync.strategies import SyncSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """The same for every stage of every replica.

    Stage s of replica r is node `r * num_stages + s` of the topology; its last node is the Group
    Generator's.
    """

    sync: SyncSpec
    members: tuple[int, ...]
    num_steps: int
    """Nobody jumps further than this."""

    slow: tuple[Slowness, ...] = ()
    slow_seed: int = 0

    def node_of(self, replica: int, stage: int, num_stages: int, topology: Topology) -> int:
        """The node of a stage, or of the Group Generator."""
        return topology.num_nodes - 1 if replica == GENERATOR else replica * num_stages + stage
