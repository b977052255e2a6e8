"""A test bench: replicas of a cut model with their leaders and followers, in virtual time.

The classes that run in the actors, joined by links instead of Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from local_pipeline import Bench
from torch import Tensor

from netsim.link import Link
from netsim.shaper import Uplink
from netsim.topology import Topology
from ray_pipe.data import Order
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.rehearsal import LocalPipeline, StageCosts
from stages.state import StageState
from stages.sync.fleet_spec import FleetSpec
from stages.sync.leader import Leader
from stages.sync.post import GENERATOR, Post
from stages.sync.seat import Seat
from stages.sync.seating import take_seat
from stages.sync.strategies import Assembly, SyncSpec
from stages.sync.strategy import MemberEvent

COSTS = StageCosts(phases={"forward": 0.05, "backward": 0.1, "update": 0.01})


@dataclass(kw_only=True)
class Replicas:
    """Must be built and used inside `run_virtual`."""

    sync: SyncSpec
    bench: Bench
    num_replicas: int = 3
    num_steps: int = 6
    slow: dict[int, float] = field(default_factory=dict)
    """How many times slower a replica computes."""

    def __post_init__(self) -> None:
        stages = self.bench.num_stages
        nodes = self.num_replicas * stages + 1
        topology = Topology.uniform(nodes, self.bench.bandwidth_bps, self.bench.latency_s)
        self.fleet = FleetSpec(
            sync=self.sync, members=tuple(range(self.num_replicas)), num_steps=self.num_steps
        )
        self.dead: set[int] = set()
        self.epoch = 0
        self.pipelines: dict[int, LocalPipeline] = {}
        self.seats: dict[int, list[Seat]] = {}
        self.records: dict[int, list[list[StepRecord]]] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        for replica in range(self.num_replicas):
            specs = [
                replace(spec, replica=replica, fleet=self.fleet, topology=topology)
                for spec in self.bench.specs()
            ]
            factor = self.slow.get(replica, 1.0)
            costs = StageCosts(phases={name: factor * s for name, s in COSTS.phases.items()})
            pipeline = LocalPipeline(
                specs=specs,
                compute_of=self.bench.compute,
                samples=self.bench.data(),
                costs=[costs] * stages,
                num_cores=1e9,
            )
            self.pipelines[replica] = pipeline
            self.seats[replica] = [
                take_seat(stage, spec, deliver_to=partial(self._deliver, replica, spec.index))
                for stage, spec in zip(pipeline.stages, specs, strict=True)
            ]
            self.records[replica] = []
        self._uplink = Uplink(topology.uplink_bps(nodes - 1))
        self._generator_links: dict[int, Link] = {}

        def link_to(target: int) -> Link:
            if target not in self._generator_links:
                spec = topology.link(nodes - 1, target * stages)
                deliver = self._deliver(GENERATOR, 0, target)
                self._generator_links[target] = Link(spec, self._uplink, deliver)
            return self._generator_links[target]

        self.post = Post(replica=GENERATOR, link_to=link_to)
        self.desk = Assembly(self.sync, self.fleet.members).generator(self.post)

    def _deliver(self, source: int, stage: int, target: int) -> Callable[[Any], None]:
        def deliver(frame: Any) -> None:
            if {source, target} & self.dead:
                return
            if target == GENERATOR:
                self.post.on_frame(frame)
            else:
                self.seats[target][stage].on_frame(frame)

        return deliver

    def plan(self, step: int, replica: int) -> StepPlan:
        order = Order(
            num_samples=len(self.bench.data()) // self.num_replicas,
            micro_batches=self.bench.micro_batches,
            micro_batch_size=self.bench.micro_batch_size,
            seed=self.bench.seed,
            shard=replica,
            num_shards=self.num_replicas,
        )
        return self.bench.plan(step, micro_batches=order.at(step))

    async def run(self, first: int = 0, last: int | None = None) -> None:
        """All replicas, each at its own pace; returns when all that live are done."""
        last = self.num_steps if last is None else last
        for replica in self.pipelines:
            if replica not in self.dead:
                self.tasks[replica] = asyncio.create_task(self._work(replica, first, last))
        pending = set(self.tasks.values())
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    task.result()

    async def _work(self, replica: int, first: int, last: int) -> None:
        for step in range(first, last):
            plan = self.plan(step, replica)
            self.records[replica] += await self.pipelines[replica].run([plan])
        if last == self.num_steps:
            self.leader(replica).leave()

    def leader(self, replica: int) -> Leader:
        found = self.seats[replica][0]
        assert isinstance(found, Leader)
        return found

    def kill(self, replica: int) -> None:
        """A replica is gone; the others hear of it a little later."""
        self.dead.add(replica)
        self.tasks[replica].cancel()
        asyncio.get_running_loop().call_later(0.3, self._announce, replica)

    def _announce(self, replica: int) -> None:
        self.epoch += 1
        event = MemberEvent(kind="dead", replica=replica, epoch=self.epoch)
        if self.desk is not None:
            self.desk.on_member(event)
        for other, seats in self.seats.items():
            if other not in self.dead:
                for seat in seats:
                    seat.on_member(event)

    def weights(self, replica: int) -> Tensor:
        stages = self.pipelines[replica].stages
        return torch.cat([p.detach().reshape(-1) for s in stages for p in s.compute.parameters])

    async def save(self) -> list[list[bytes]]:
        """Every stage of every replica, between steps."""
        return [
            [(await stage.save_state()).to_bytes() for stage in pipeline.stages]
            for pipeline in self.pipelines.values()
        ]

    async def load(self, saved: list[list[bytes]]) -> None:
        for pipeline, states in zip(self.pipelines.values(), saved, strict=True):
            for stage, state in zip(pipeline.stages, states, strict=True):
                await stage.load_state(StageState.from_bytes(state))
