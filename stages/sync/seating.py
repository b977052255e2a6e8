"""Gives a stage its seat among the replicas, and the links that go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netsim.link import Link, LinkLike
from stages.spec import StageSpec
from stages.stage import Stage
from stages.sync.follower import Follower
from stages.sync.leader import Leader
from stages.sync.seat import Seat


def take_seat(
    stage: Stage,
    spec: StageSpec,
    *,
    deliver_to: Callable[[int], Callable[[Any], object]],
) -> Seat:
    """Give a stage its seat. `deliver_to(replica)` hands a frame to that replica's same stage."""
    fleet = spec.fleet
    assert fleet is not None
    node = spec.node

    def link_to(target: int) -> LinkLike:
        found = stage.wiring.replica_links.get(target)
        if found is None:
            there = fleet.node_of(target, spec.index, spec.num_stages, spec.topology)
            uplink = stage.wiring.uplink
            assert uplink is not None
            found = stage.wiring.replica_links[target] = Link(
                spec.topology.link(node, there),
                uplink,
                deliver_to(target),
                seed=spec.seed * 1009 + node * 31 + there,
                name=f"{node}->{there}",
            )
        return found

    kind = Leader if spec.index == 0 else Follower
    seat = kind(stage, spec, link_to=link_to)
    stage.seat = seat
    return seat
