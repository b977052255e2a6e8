"""The Group Generator's Ray face: a small actor that Ray may restart at any time.

It comes back empty and with a higher epoch; replicas go on alone until it answers. No method is
`async`: letters are handed to a private event loop in the order they came.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import ray

from netsim.link import Link
from netsim.loop_thread import LoopThread
from netsim.shaper import Uplink
from netsim.topology import Topology
from stages.courier import Courier
from stages.remote import own_copy
from stages.sync.fleet_spec import FleetSpec
from stages.sync.generator import GroupGenerator
from stages.sync.generator_desk import GeneratorDesk
from stages.sync.post import GENERATOR, Post
from stages.sync.strategies import Assembly
from stages.sync.strategy import MemberEvent


class GeneratorActor:
    """Decides who averages with whom, for all replicas of an arm."""

    def __init__(
        self,
        fleet: FleetSpec,
        topology: Topology,
        num_stages: int,
        generation: int,
        leaders: dict[int, str],
        started_s: float,
    ) -> None:
        """`leaders` are the names of the actors of each replica's stage 0: they outlive a restart.
        `started_s` is when the driver first started this actor, so that a restart has a higher
        epoch than any life before it."""
        self._fleet = fleet
        self._topology = topology
        self._num_stages = num_stages
        self._generation = generation
        self._names = leaders
        self._handles: dict[int, Any] = {}
        reborn = ray.get_runtime_context().was_current_actor_reconstructed
        self._epoch = 1 + int(1000 * (time.time() - started_s)) if reborn else 0
        self._links: dict[int, Link] = {}
        self._loop = LoopThread(name="group-generator")
        self._courier = Courier(GENERATOR, lambda why: None)
        self._post = Post(replica=GENERATOR, link_to=self._link_to)
        self._uplink = Uplink(topology.uplink_bps(topology.num_nodes - 1))
        self._desk: GeneratorDesk = self._loop.submit(self._open()).result()

    def __repr__(self) -> str:
        return "GroupGenerator()"

    async def _open(self) -> GeneratorDesk:
        parts = Assembly(self._fleet.sync, self._fleet.members)

        def make(epoch: int) -> GroupGenerator:
            return parts.make_generator(self._epoch)

        return GeneratorDesk(self._post, make)

    def connect(self, leaders: dict[int, str]) -> None:
        """Learn who leads which replica now."""
        self._names = leaders
        self._handles = {}

    def deliver_letter(self, generation: int, frame: Any) -> None:
        """A letter of a replica: enqueue only."""
        if generation == self._generation:
            self._loop.call_soon(self._post.on_frame, frame)

    def on_member(self, event: MemberEvent) -> None:
        """A replica came or went."""
        self._loop.call_soon(self._desk.on_member, event)

    def stats(self) -> dict[str, Any]:
        """Counters and bytes since the start, or the restart; `epoch` tells which."""

        async def read() -> dict[str, Any]:
            return {
                **self._desk.generator.stats(),
                "epoch": self._epoch,
                "sent": {link.name: dict(link.sent) for link in self._links.values()},
                "pid": os.getpid(),
            }

        return self._loop.submit(read()).result()

    def _link_to(self, target: int) -> Link:
        found = self._links.get(target)
        if found is None:
            here = self._topology.num_nodes - 1
            there = target * self._num_stages
            found = self._links[target] = Link(
                self._topology.link(here, there),
                self._uplink,
                self._deliver_to(target),
                seed=here * 31 + there,
                name=f"{here}->{there}",
            )
        return found

    def _deliver_to(self, target: int) -> Callable[[Any], None]:
        def deliver(frame: Any) -> None:
            peer = self._leader_of(target)
            if peer is not None:
                self._courier.post(peer, target, self._generation, frame)

        return deliver

    def _leader_of(self, replica: int) -> Any:
        """None for one that is gone; it needs no answer."""
        if replica not in self._handles and replica in self._names:
            with contextlib.suppress(ValueError):  # Ray knows no living actor of that name
                self._handles[replica] = ray.get_actor(self._names[replica])
        return self._handles.get(replica)


def remote_generator(
    fleet: FleetSpec,
    topology: Topology,
    *,
    num_stages: int,
    generation: int,
    leaders: dict[int, str],
    name: str,
) -> Any:
    """Start the generator; Ray restarts it as often as it dies."""
    cls: Any = type("GroupGenerator", (GeneratorActor,), {})
    mark = ray.method(num_returns=0, enable_task_events=False)
    cls.deliver_letter = mark(own_copy(GeneratorActor.deliver_letter))
    decorate: Any = ray.remote
    remote = decorate(num_cpus=0, max_restarts=-1)(cls)
    return remote.options(name=name).remote(
        fleet, topology, num_stages, generation, leaders, time.time()
    )
