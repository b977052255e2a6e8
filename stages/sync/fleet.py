"""All replicas in one process and in virtual time: the same strategies without Ray.

Every letter passes a real link with its own latency, jitter and loss and its node's uplink; node
`replica * num_stages + stage` is one stage, the last node is the Group Generator's. With real
trainers it is a test bench, with `Priced` ones the simulator for thousands of replicas. Deaths and
births are events that a test can order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from netsim.link import Link, LinkLike
from netsim.shaper import Uplink
from netsim.topology import Topology
from stages.ends import FRAMES, WireFormat
from stages.sync.exchange import Exchange
from stages.sync.payload import Coder
from stages.sync.post import GENERATOR, Post
from stages.sync.replica import Replica, Trainer
from stages.sync.strategies import Assembly, SyncSpec
from stages.sync.strategy import MemberEvent

MAX_SEPARATE_LINKS = 4096
"""Above so many pairs equal links of a node share one delay line: same times, less memory."""

LOCKSTEP = ("allreduce", "quantized-adam", "local", "ripples-static")
"""Strategies in which everybody must change members at the same iteration."""


@dataclass(kw_only=True)
class Fleet:
    """Replicas joined by links in one event loop. Must be built and used inside `run_virtual`."""

    sync: SyncSpec
    trainers: Sequence[Trainer]
    topology: Topology | None = None
    """Of `num_nodes(...)` nodes; None costs nothing."""

    wire: WireFormat = FRAMES
    coder_of: Callable[[], Coder] | None = None
    wrap_link: Callable[[Link], LinkLike] | None = None
    """Puts something (faults) around each link."""

    detect_s: float = 1.0
    """From a death to the moment when the others hear of it."""

    capacity: int | None = None
    """Most replicas that there will ever be, newcomers included."""

    on_step: Callable[[int, int], None] | None = None
    assembly: type[Assembly] = Assembly
    """A test that breaks a rule gives its own."""

    replicas: dict[int, Replica] = field(init=False)

    def __post_init__(self) -> None:
        self.num_stages = len(self.trainers[0].shards)
        num = len(self.trainers)
        most = self.capacity or num
        self.topology = self.topology or Topology.uniform(num_nodes(most, self.num_stages))
        self.dead: set[int] = set()
        self.epoch = 0
        self.links: dict[tuple[int, int], LinkLike] = {}
        self._uplinks: dict[int, Uplink] = {}
        self._share = (
            not self.topology.links
            and num * num * self.num_stages > MAX_SEPARATE_LINKS
            and self.wrap_link is None
        )
        self._fans: dict[int, Link] = {}
        self._num_delivered = 0
        self._posts: dict[int, Post] = {}
        self._generator_node = most * self.num_stages
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._parts = self.assembly(self.sync, range(num))
        self._anchors = [shard.parameters() for shard in self.trainers[0].shards]
        self._joining: dict[int, tuple[int, int, int]] = {}  # newcomer -> donor, k, num_steps
        self.generator = self._parts.generator(self._post(self._generator_node, GENERATOR, 0))
        self.replicas = {i: self._build(i, trainer) for i, trainer in enumerate(self.trainers)}

    async def run(self, num_steps: int) -> None:
        """All replicas to iteration `num_steps`; returns when all that live are there."""
        for index, replica in self.replicas.items():
            if index not in self.dead:
                self._start(index, replica.run(num_steps))
        pending = set(self._tasks.values())
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                if not task.cancelled():
                    task.result()
            pending = {task for task in self._tasks.values() if not task.done()}

    async def run_for(self, seconds: float) -> None:
        """All replicas for so long, wherever they are then."""
        for index, replica in self.replicas.items():
            self._start(index, replica.run(1 << 60))
        done, _ = await asyncio.wait(self._tasks.values(), timeout=seconds)
        for task in done:
            if not task.cancelled():
                task.result()
        await self.stop()

    async def stop(self) -> None:
        """End all loops where they are."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def kill(self, index: int) -> None:
        """A replica is gone, without a word; the others hear of it after `detect_s`."""
        self.dead.add(index)
        if index in self._tasks:
            self._tasks[index].cancel()
        asyncio.get_running_loop().call_later(self.detect_s, self._announce, "dead", index, 0)

    def join(self, index: int, trainer: Trainer, *, donor: int, num_steps: int) -> None:
        """A new replica, or a dead one again, takes part as soon as its donor is at a boundary.

        The state itself goes by hand here: moving it is the checkpoint's business. Nobody stops.
        """
        alive = [r for r in self.replicas if r not in self.dead and r != index]
        every = self.replicas[donor].strategy.every
        k = max(self.replicas[r].k for r in alive) + 2
        k = k if self.replicas[donor].strategy.name in LOCKSTEP else self.replicas[donor].k + 1
        k += -k % every
        if index >= (self.capacity or len(self.replicas)):
            raise ValueError(
                f"replica {index} has no node: the fleet was built for "
                f"{self.capacity or len(self.replicas)}; give it a larger `capacity`"
            )
        self.dead.discard(index)
        for key in [key for key in self.links if self._node_of(index, 0) in key]:
            del self.links[key]
        replica = self.replicas[index] = self._build(index, trainer)
        replica.strategy.adopt(self.replicas[donor].strategy.state_dict(), k)
        self._joining[index] = (donor, k, num_steps)
        self._announce("joined", index, k)
        replica.on_member(MemberEvent(kind="joined", replica=index, epoch=self.epoch, since=k))

    def _stepped(self, index: int, k: int) -> None:
        if self.on_step is not None:
            self.on_step(index, k)
        for newcomer, (donor, since, num_steps) in list(self._joining.items()):
            if index == donor and k >= since:
                del self._joining[newcomer]
                own, other = self.replicas[newcomer], self.replicas[donor]
                own.take_over(other)
                own.strategy.adopt(other.strategy.state_dict(), k)
                self._start(newcomer, own.run(num_steps))

    def nbytes(self, kind: str = "replica") -> int:
        """What all links have carried of a kind."""
        links: list[LinkLike] = [*self.links.values(), *self._fans.values()]
        return sum(link.sent.get(kind, 0) for link in links)

    def _announce(self, kind: Any, index: int, since: int) -> None:
        self.epoch += 1
        event = MemberEvent(kind=kind, replica=index, epoch=self.epoch, since=since)
        if self.generator is not None:
            self.generator.on_member(event)
        for other, replica in self.replicas.items():
            if other not in self.dead and other != index:
                replica.on_member(event)

    def _start(self, index: int, run: Any) -> None:
        self._tasks[index] = asyncio.create_task(run, name=f"replica {index}")

    def _build(self, index: int, trainer: Trainer) -> Replica:
        posts = [
            self._post(index * self.num_stages + stage, index, stage)
            for stage in range(self.num_stages)
        ]
        make = self.coder_of or partial(self._parts.coder, index)
        exchanges = [Exchange(post, make(), history=self._parts.history) for post in posts]
        rules = [self._parts.rule() for _ in posts]
        replica = Replica(
            index=index,
            trainer=trainer,
            strategy=self._parts.strategy(posts[0], exchanges),
            exchanges=exchanges,
            rules=rules,
            on_step=self._stepped,
        )
        replica.open(self._anchors)
        return replica

    def _post(self, node: int, replica: int, stage: int) -> Post:
        post = Post(
            replica=replica,
            stage=stage,
            wire=self.wire,
            link_to=lambda target: self._link(node, replica, target, stage),
        )
        self._posts[node] = post
        return post

    def _node_of(self, replica: int, stage: int) -> int:
        if replica == GENERATOR:
            return self._generator_node
        return replica * self.num_stages + stage

    def _link(self, node: int, source: int, target: int, stage: int) -> LinkLike:
        there = self._node_of(target, stage)
        if self._share:
            return _Lane(self._fan(node), there)  # not kept: there may be a million
        found = self.links.get((node, there))
        if found is not None:
            return found
        link = self._make_link(node, there, self._deliver_to(source, there, target))
        self.links[node, there] = wrapped = self.wrap_link(link) if self.wrap_link else link
        return wrapped

    def _make_link(self, node: int, there: int, deliver: Callable[[Any], object]) -> Link:
        assert self.topology is not None
        if node not in self._uplinks:
            self._uplinks[node] = Uplink(self.topology.uplink_bps(node))
        return Link(
            self.topology.link(node, there),
            self._uplinks[node],
            deliver,
            seed=node * 100_003 + there,
            name=f"{node}->{there}",
        )

    def _deliver_to(self, source: int, node: int, target: int) -> Callable[[Any], None]:
        post_of = self._posts

        def deliver(frame: Any) -> None:
            if target not in self.dead and source not in self.dead:
                post_of[node].on_frame(frame)

        return deliver

    def _fan(self, node: int) -> Link:
        if node not in self._fans:
            there = (node + 1) % (self._generator_node + 1)

            def deliver(letter: _Addressed) -> None:
                self._num_delivered += 1
                if self._num_delivered % 65536 == 0:  # nobody reads the spans of so many letters
                    for fan in self._fans.values():
                        fan.drain_spans()
                if letter.node // self.num_stages not in self.dead:
                    self._posts[letter.node].on_frame(letter.frame)

            self._fans[node] = self._make_link(node, there, deliver)
        return self._fans[node]


@dataclass(frozen=True, slots=True)
class _Addressed:
    """A frame in a delay line that several links share."""

    node: int
    frame: Any
    nbytes: int


class _Lane:
    """One of many equal links of a node; what it carries is counted where they meet."""

    __slots__ = ("_fan", "_there")
    name = "shared"
    sent: dict[str, int] = {}  # noqa: RUF012  (always empty)
    messages: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, fan: Link, there: int) -> None:
        self._fan = fan
        self._there = there

    @property
    def busy_until(self) -> float:
        return self._fan.busy_until

    def send(self, frame: Any, *, kind: str) -> None:
        self._fan.send(_Addressed(self._there, frame, frame.nbytes), kind=kind)

    def queued_nbytes(self) -> int:
        return self._fan.queued_nbytes()

    def drain_spans(self) -> list[Any]:
        return []

    def close(self) -> None: ...


def num_nodes(num_replicas: int, num_stages: int = 1) -> int:
    """Nodes of a fleet's topology: one for each stage, and the Group Generator's."""
    return num_replicas * num_stages + 1
