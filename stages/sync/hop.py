"""Hop: each replica mixes with its neighbours in a graph, held together by tokens.

    post x_k to the neighbours, compute g meanwhile, wait for their x_k (or most of them, or
    recent ones), x_{k+1} = sum_j W_ij x_j - lr g, spend a token of each out-neighbour, go on

The weights never change with who was late: a neighbour whose update is missing counts with its
last known one. Mixing "whoever arrived" moves the mean, and with unlike data by a lot.

Tokens hold the fast back: `max_gap` at first, one more from o for each iteration that o enters,
one spent for each that i enters. A token letter says which iteration its sender has entered, so
it may be lost, doubled or late: `tokens(o) = max_gap + entered(o) - k`. A replica that is far
behind may jump: no further than its slowest out-neighbour, or others would wait for a tag that
never comes; by no more than `max_gap`, or a neighbour may lack the very tokens that it needs to
send what the jumper waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compressors.base import Packet
from compressors.frame import FrameHeader
from stages.sync.exchange import Exchange
from stages.sync.mixing import Graph
from stages.sync.patience import Patience
from stages.sync.post import NUM_LIMITS, Post
from stages.sync.strategy import (
    NOTHING,
    At,
    MemberEvent,
    Plain,
    State,
    SyncPlan,
    SyncTimeout,
)
from stages.sync.updates import START, spent

NEVER = 1 << 62
WAVE = 4
"""A replica that waited for a lost letter is late; its neighbours are at the next iteration, theirs
at the one after. So many iterations on the wave is no longer to be told from anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopOptions:
    """How far replicas may part, and what is done about slow ones."""

    max_gap: int = 5
    """Tokens at first: out-neighbours are never more than this many iterations ahead or behind."""

    backup_workers: int = 0
    """So many neighbours' updates may be missing."""

    staleness: int = 0
    """Updates may be so many iterations old; 0 waits for this iteration's."""

    max_jump: int = 0
    """A replica that is behind may skip up to so many iterations; 0 never skips."""

    trigger: int = 2
    """How far behind it must be to skip."""


class Hop(Plain):
    """The leader of one replica."""

    name = "hop"
    at: At = "start"

    def __init__(
        self,
        *,
        post: Post,
        exchanges: Sequence[Exchange],
        graph: Graph,
        options: HopOptions,
        patience: Patience | None = None,
    ) -> None:
        if post.replica not in graph.nodes:  # it joins others, and will adopt their graph
            graph = graph.with_node(post.replica)
        self.graph = graph
        self.options = options
        self.epoch = 0
        self.k = 0
        self.max_queue = 0
        """Most updates that ever waited to be mixed."""

        self.num_jumps = 0
        self._me = post.replica
        self._post = post
        self._exchanges = exchanges
        self._patience = patience or Patience()
        neighbours = {*graph.into(self._me), *graph.out_of(self._me)}
        self._entered: dict[int, int] = dict.fromkeys(neighbours, 0)
        self._first: dict[int, int] = dict.fromkeys(graph.into(self._me), 0)
        self._here: dict[int, dict[int, int]] = {}  # source -> tag -> the source's tag before it
        self._parts: dict[tuple[int, int], int] = {}  # source, tag -> stages that have it
        self._mixed = START
        self._has_joined = False
        self._loss = 0  # how late, in steps of the wave, this replica is because a letter was lost
        self._losses: dict[int, int] = {}  # the same, of neighbours
        self._changed = asyncio.Event()
        for exchange in exchanges:
            exchange.updates.on_update = self._note
        post.handlers["token"] = self._on_token

    # --- the step ------------------------------------------------------------------------------

    async def plan(self, k: int) -> SyncPlan:
        weights = {j: w for j, w in self.graph.weights[self._me].items() if j != self._me}
        return SyncPlan(
            epoch=self.epoch,
            number=k,
            op="mailbox",
            peers=self.graph.out_of(self._me),
            weights=weights,
            versions={self._me: k},
            deadline_s=self._patience.limit_s,
        )

    async def complete(self, plan: SyncPlan) -> SyncPlan:
        """Wait for as many neighbours as it takes, then fix which version of each is mixed."""
        if plan.op == "none":
            return plan
        tag = plan.number
        await self._until(
            lambda: self._is_enough(tag), lambda: self._missing(tag), f"update {tag}", tag=tag
        )
        weights = {j: w for j, w in self.graph.weights[self._me].items() if j != self._me}
        versions = {j: self._version(j, tag) for j in weights if self._here.get(j)}
        self._mixed = max(self._mixed, tag)
        for source, chosen in versions.items():
            self._forget_before(source, spent(chosen, tag))
        own = {self._me: plan.versions[self._me]} if self._me in plan.versions else {}
        return replace(plan, weights=weights, versions=own | versions)

    async def gate(self, k: int) -> int:
        """Wait for a token of every out-neighbour; then the next iteration, or a later one."""
        assert k == self.k + 1
        await self._until(
            lambda: all(self._tokens(o) >= 1 for o in self.graph.out_of(self._me)),
            lambda: [o for o in self.graph.out_of(self._me) if self._tokens(o) < 1],
            "token",
        )
        step = self._step()
        self.num_jumps += step > 1
        return self.k + step

    def refresh(self, k: int) -> SyncPlan:
        """After a jump: mix with what the neighbours sent just before `k`; own x stays in."""
        return SyncPlan(epoch=self.epoch, number=k - 1, op="mailbox") if k else NOTHING

    def entered(self, k: int) -> None:
        self.k = k
        self._grant(k)

    def left(self, k: int) -> None:
        """Whoever is behind must not wait for tokens of a replica that is done."""
        self.k = k
        self._grant(k)

    # --- the rules, each a line that a mutant may break ------------------------------------------

    def _tokens(self, out_neighbour: int) -> int:
        entered = self._entered.get(out_neighbour)
        return NEVER if entered is None else self.options.max_gap + entered - self.k

    def _grant(self, k: int) -> None:
        """Against the edges, to those who send to me, once `k` is really entered."""
        body = {"loss": self._loss} if self._loss else None
        for source in self.graph.into(self._me):
            self._post.send(source, "token", epoch=self.epoch, number=k, body=body)
        self._loss = max(0, self._loss - 1)

    def _step(self) -> int:
        if not self.options.max_jump:
            return 1
        known = [self._tokens(o) for o in self.graph.out_of(self._me)]
        behind = min(known, default=0) - self.options.max_gap
        if not self.options.trigger <= behind < NEVER // 2:
            return 1
        return min(behind, self.options.max_gap, self.options.max_jump)

    def _is_enough(self, tag: int) -> bool:
        need = [j for j in self.graph.into(self._me) if self._first.get(j, NEVER) <= tag]
        if self.options.staleness:
            return all(self._newest(j) >= tag - self.options.staleness for j in need)
        return sum(self._has(j, tag) for j in need) >= len(need) - self.options.backup_workers

    def _version(self, source: int, tag: int) -> int:
        """The newest that is not from after `tag`; of a neighbour that has just come, the first.

        What it sent after that will be waited for by its tag.
        """
        if self.options.staleness:
            return self._newest(source)
        here = self._here[source]
        return max((found for found in here if found <= tag), default=min(here))

    # --- what has come --------------------------------------------------------------------------

    def _newest(self, source: int) -> int:
        return max(self._here.get(source, ()), default=START)

    def _has(self, source: int, tag: int) -> bool:
        """The update is here, or the source has jumped over it."""
        here = self._here.get(source, {})
        return tag in here or any(before < tag < found for found, before in here.items())

    def _missing(self, tag: int) -> list[int]:
        return [j for j in self.graph.into(self._me) if not self._has(j, tag)]

    def _note(self, source: int, tag: int, before: int) -> None:
        """A stage has an update; it counts when all stages have it."""
        if source not in self._first:
            return
        parts = self._parts.get((source, tag), 0) + 1
        if parts < len(self._exchanges):
            self._parts[source, tag] = parts
            return
        self._parts.pop((source, tag), None)
        self._here.setdefault(source, {})[tag] = before
        if self._first[source] == NEVER:
            self._first[source] = tag
        queued = sum(t > self._mixed for tags in self._here.values() for t in tags)
        self.max_queue = max(self.max_queue, queued)
        self._changed.set()

    def _forget_before(self, source: int, tag: int) -> None:
        here = self._here[source]
        for old in [t for t in here if t < tag]:
            del here[old]
        for exchange in self._exchanges:
            exchange.updates.forget_before(source, tag)

    def _on_token(self, header: FrameHeader, packet: Packet | None) -> None:
        source = header.replica
        if source in self.graph.nodes:
            self._entered[source] = max(self._entered.get(source, 0), header.step)
            self._losses[source] = header.body.get("loss", 0)
            self._changed.set()
            if header.body.get("ask"):
                body = {"loss": WAVE}
                self._post.send(source, "token", epoch=self.epoch, number=self.k, body=body)

    async def _until(
        self,
        is_true: Callable[[], bool],
        missing: Callable[[], list[int]],
        what: str,
        *,
        tag: int | None = None,
    ) -> None:
        """Wait; each time that a deadline passes, ask those who are missing again."""
        if is_true():
            return
        loop = asyncio.get_running_loop()
        start = loop.time()
        limit_s = self._patience.limit_s
        waited_for = missing()
        for _ in range(NUM_LIMITS):
            try:
                async with asyncio.timeout(limit_s):
                    while not is_true():
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                self._ask_again(missing(), tag)
                limit_s *= 2
            else:
                self._saw(loop.time() - start, waited_for, tag)
                return
        raise SyncTimeout(
            f"replica {self._me} waited {loop.time() - start:.1f} s for a {what} of replicas "
            f"{missing()} at iteration {self.k}, and nobody declared them dead; if they are that "
            "slow, raise `deadline_s`, or set sync.backup_workers or sync.skip"
        )

    def _saw(self, waited_s: float, waited_for: list[int], tag: int | None) -> None:
        """A wait is over. If a letter was lost, here or on the way here, it is no measure."""
        loss = max((self._losses.get(other, 0) for other in waited_for), default=0) - 1
        if any((j, tag) in e.updates.lost for j in waited_for for e in self._exchanges):
            loss = WAVE
        if loss >= 0:
            self._loss = max(self._loss, loss)
        else:
            self._patience.saw(waited_s)

    def _ask_again(self, silent: list[int], tag: int | None) -> None:
        for other in silent:
            if tag is None:
                body = {"ask": True}
                self._post.send(other, "token", epoch=self.epoch, number=self.k, body=body)
                continue
            for exchange in self._exchanges:
                exchange.updates.ask(other, tag)

    # --- members and memory ----------------------------------------------------------------------

    def on_member(self, event: MemberEvent) -> None:
        """Edges go, or come; a new edge counts once its other end has spoken."""
        if event.epoch <= self.epoch:
            return
        self.epoch = event.epoch
        old = self.graph
        if event.kind == "dead" and event.replica in old.nodes:
            self.graph = old.without(event.replica)
            self._forget(event.replica)
        elif event.kind == "joined" and event.replica not in old.nodes:
            self.graph = old.with_node(event.replica)
        for source in self.graph.into(self._me):
            self._first.setdefault(source, NEVER)
        fresh = {*self.graph.into(self._me)} - {*old.into(self._me)}
        for source in sorted(fresh):
            self._post.send(source, "token", epoch=self.epoch, number=self.k)
        self._changed.set()

    def _forget(self, replica: int) -> None:
        for table in (self._entered, self._first, self._here, self._losses):
            table.pop(replica, None)
        self._parts = {key: n for key, n in self._parts.items() if key[0] != replica}
        for exchange in self._exchanges:
            exchange.updates.drop(replica)

    def stats(self) -> dict[str, float]:
        return {"jumps": float(self.num_jumps), "max_queue": float(self.max_queue)}

    def resumed(self) -> None:
        """Neighbours that were ahead begin behind this iteration again, as everybody does."""
        self._entered = {other: min(k, self.k) for other, k in self._entered.items()}
        for source, tags in self._here.items():
            self._here[source] = {t: before for t, before in tags.items() if t <= self.k}

    def adopt(self, state: State, k: int) -> None:
        """Edges count once their other ends have spoken; until then nobody is waited for."""
        if self._me not in state["nodes"]:
            graph = Graph(state["nodes"], [(a, b) for a, b in state["edges"]])
            self.graph = graph.with_node(self._me)
        else:
            self.graph = Graph(state["nodes"], [(a, b) for a, b in state["edges"]])
        self.epoch = int(state["epoch"])
        self.k = k
        if not self._has_joined:
            self._has_joined = True
            self._entered = {}
            self._first = dict.fromkeys(self.graph.into(self._me), NEVER)
        self._mixed = k - 1

    def state_dict(self) -> State:
        return {
            "k": self.k,
            "epoch": self.epoch,
            "nodes": list(self.graph.nodes),
            "edges": sorted(map(list, self.graph.edges)),
            "entered": dict(self._entered),
            "first": dict(self._first),
            "here": {source: dict(tags) for source, tags in self._here.items()},
            "mixed": self._mixed,
            "patience": self._patience.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self.k = int(state["k"])
        self.epoch = int(state["epoch"])
        self.graph = Graph(state["nodes"], [(a, b) for a, b in state["edges"]])
        self._entered = {int(r): int(k) for r, k in state["entered"].items()}
        self._first = {int(r): int(k) for r, k in state["first"].items()}
        self._here = {
            int(r): {int(tag): int(before) for tag, before in tags.items()}
            for r, tags in state["here"].items()
        }
        self._parts = {}
        self._mixed = int(state["mixed"])
        self._patience.load_state_dict(state["patience"])
