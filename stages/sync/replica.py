"""One replica: computes, agrees with the others as its strategy says, updates, goes on.

The leader's loop. It knows when to exchange but neither with whom nor how: the strategy makes the
plans, the exchanges of the stages carry them out. In a rehearsal (`stages.sync.fleet`) time is
virtual; nothing here can tell.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stages.sync.exchange import Exchange, Handle
from stages.sync.rules import Rule, Shard
from stages.sync.strategy import (
    Interrupted,
    MemberEvent,
    State,
    SyncPlan,
    SyncResult,
    SyncStrategy,
)


class Trainer(Protocol):
    """What a replica trains: the shards of its stages, and the gradient of a step."""

    @property
    def shards(self) -> Sequence[Shard]: ...

    async def compute(self, k: int) -> None: ...


class Replica:
    """Runs steps. `waited` tells where its time went besides computing, by cause."""

    def __init__(
        self,
        *,
        index: int,
        trainer: Trainer,
        strategy: SyncStrategy,
        exchanges: Sequence[Exchange],
        rules: Sequence[Rule],
        on_step: Callable[[int, int], None] | None = None,
        late: Sequence[Exchange] | None = None,
    ) -> None:
        """`on_step(index, k)` hears of every iteration entered; `late` are the exchanges that live
        here, all of them unless stages are actors of their own."""
        self.index = index
        self.trainer = trainer
        self.strategy = strategy
        self.exchanges = exchanges
        self.rules = rules
        self.k = 0
        """The iteration entered, or to be entered next."""

        self.num_run = 0
        self.num_skipped = 0
        self.num_interrupted = 0
        self.waited: Counter[str] = Counter()
        self.staleness = 0
        """Iterations that the oldest parameters mixed last were behind."""

        self.groups: list[tuple[int, ...]] = []
        """Contributors of the latest exchange, by stage."""

        self._on_step = on_step
        for exchange in exchanges if late is None else late:
            exchange.inbox.on_late = strategy.late

    def open(self, anchors: Sequence[Any]) -> None:
        """Begin with parameters that all replicas know, one vector for each stage."""
        for exchange, rule, anchor in zip(self.exchanges, self.rules, anchors, strict=True):
            exchange.open(anchor)
            rule.open(anchor)

    def take_over(self, other: Replica) -> None:
        """Become what another replica is at the beginning of its iteration."""
        self.k = other.k
        for mine, theirs in zip(self.trainer.shards, other.trainer.shards, strict=True):
            mine.set_parameters(theirs.parameters())
        for rule, there in zip(self.rules, other.rules, strict=True):
            rule.load_state_dict(there.state_dict())
        for exchange, giver in zip(self.exchanges, other.exchanges, strict=True):
            exchange.adopt(giver.state_dict())

    async def run(self, num_steps: int) -> None:
        """Steps until iteration `num_steps`; may be called again with a higher number."""
        while self.k < num_steps:
            await self.step()
            await self._advance(num_steps)
        self.strategy.left(self.k)

    async def step(self) -> None:
        """One iteration, the way to the next one not included."""
        strategy, k = self.strategy, self.k
        strategy.entered(k)
        if self._on_step is not None:
            self._on_step(self.index, k)
        if strategy.at == "start":
            await self._step_overlapped(k)
        else:
            await self.trainer.compute(k)
            if strategy.at == "grad":
                await self._agree(k)
                await self._update(k)
            else:
                await self._update(k)
                if (k + 1) % strategy.every == 0:
                    await self._agree(k)
        self.num_run += 1

    def on_member(self, event: MemberEvent) -> None:
        """Somebody came or went."""
        self.strategy.on_member(event)

    def state_dict(self) -> State:
        """Everything that the next step depends on, the model and its optimizer aside."""
        return {
            "k": self.k,
            "strategy": self.strategy.state_dict(),
            "exchanges": [exchange.state_dict() for exchange in self.exchanges],
            "rules": [rule.state_dict() for rule in self.rules],
        }

    def load_state_dict(self, state: State) -> None:
        self.k = int(state["k"])
        self.strategy.load_state_dict(state["strategy"])
        for exchange, saved in zip(self.exchanges, state["exchanges"], strict=True):
            exchange.load_state_dict(saved)
        for rule, saved in zip(self.rules, state["rules"], strict=True):
            rule.load_state_dict(saved)

    async def _agree(self, k: int) -> None:
        """Exchange until one exchange goes well; what is sent stays the same."""
        outgoing = await self._outgoing(k)
        while True:
            with self._waiting("plan"):
                plan = await self.strategy.plan(k)
            if plan.op == "none":
                await self._pass_over()
                return
            try:
                results = await self._finish(self._begin(plan, outgoing), plan)
            except Interrupted:
                self.num_interrupted += 1
                continue
            break
        await self._take(k, results)

    async def _step_overlapped(self, k: int) -> None:
        """Post first, compute while the others' letters arrive, mix, update."""
        plan = await self.strategy.plan(k)
        await self._publish(k, plan)
        await self.trainer.compute(k)
        await self._mix(k, plan)
        await self._update(k)

    async def _mix(self, k: int, plan: SyncPlan) -> None:
        with self._waiting("updates"):
            plan = await self.strategy.complete(plan)
        if plan.op == "none":
            await self._pass_over()
            return
        results = await self._finish(self._begin(plan, await self._parameters()), plan)
        await self._take(k, results)

    async def _advance(self, num_steps: int) -> None:
        with self._waiting("gate"):
            k = min(await self.strategy.gate(self.k + 1), num_steps)
        if k > self.k + 1:
            self.num_skipped += k - self.k - 1
            await self._jump(k)
        self.k = k

    # --- the stages' part of it: at once here, by messages where stages are actors ---------------

    async def _outgoing(self, k: int) -> list[Any]:
        """What each stage's rule sends."""
        return [rule.outgoing(shard, k) for rule, shard in self._stages()]

    async def _parameters(self) -> list[Any]:
        return [shard.parameters() for shard in self.trainer.shards]

    async def _publish(self, k: int, plan: SyncPlan) -> None:
        for exchange, vector in zip(self.exchanges, await self._outgoing(k), strict=True):
            exchange.publish(plan, vector)

    async def _update(self, k: int) -> None:
        for rule, shard in zip(self.rules, self.trainer.shards, strict=True):
            if not rule.updates:
                shard.update(k)

    async def _take(self, k: int, results: Sequence[SyncResult]) -> None:
        for (rule, shard), result in zip(self._stages(), results, strict=True):
            rule.incoming(shard, k, result)

    async def _pass_over(self) -> None:
        """Nothing is exchanged this time."""

    async def _jump(self, k: int) -> None:
        """Before `k`, which is further on than the next, is entered."""
        await self._mix(k, self.strategy.refresh(k))

    def _begin(self, plan: SyncPlan, vectors: Sequence[Any]) -> list[Handle]:
        return [exchange.begin(plan, v) for exchange, v in zip(self.exchanges, vectors)]

    async def _finish(self, handles: Sequence[Handle], plan: SyncPlan) -> list[SyncResult]:
        """All stages' results; an interruption at one stage interrupts all."""
        with self._waiting(plan.op):
            if len(handles) == 1:
                results = [await self.exchanges[0].finish(handles[0])]
            else:
                found = await asyncio.gather(
                    *(e.finish(h) for e, h in zip(self.exchanges, handles, strict=True)),
                    return_exceptions=True,
                )
                for result in found:
                    if isinstance(result, BaseException):
                        raise result
                results = [result for result in found if isinstance(result, SyncResult)]
        self.strategy.finished(plan, results)
        self.staleness = max((plan.number - tag for tag in plan.versions.values()), default=0)
        self.groups = [result.contributors for result in results]
        return results

    def _stages(self) -> list[tuple[Rule, Shard]]:
        return list(zip(self.rules, self.trainer.shards, strict=True))

    def _waiting(self, cause: str) -> _Stopwatch:
        return _Stopwatch(self.waited, cause)


class _Stopwatch:
    """Adds the loop time between entry and exit to a counter."""

    __slots__ = ("_cause", "_counter", "_start")

    def __init__(self, counter: Counter[str], cause: str) -> None:
        self._counter = counter
        self._cause = cause

    def __enter__(self) -> None:
        self._start = asyncio.get_running_loop().time()

    def __exit__(self, *exc: object) -> None:
        self._counter[self._cause] += asyncio.get_running_loop().time() - self._start  # type: ignore[assignment]
