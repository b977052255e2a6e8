"""Stage 0 of a replica: runs the strategy, and tells the other stages what it decides."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, cast

from compressors.frame import FrameHeader
from stages.plan import StepPlan
from stages.spec import StageSpec
from stages.stage import Stage
from stages.sync.exchange import Exchange
from stages.sync.orders import PATIENT, RemoteExchange, plan_to_body
from stages.sync.replica import Replica
from stages.sync.seat import LinkTo, Seat
from stages.sync.stage_shard import StageShard
from stages.sync.strategy import MemberEvent, State, SyncPlan, SyncResult


class Leader(Seat):
    """Stage 0: runs the strategy for the whole replica."""

    def __init__(self, stage: Stage, spec: StageSpec, *, link_to: LinkTo) -> None:
        super().__init__(stage, spec, link_to=link_to)
        self._orders: dict[int, int] = {}
        self._others = [
            RemoteExchange(
                order=partial(self._order, target),
                report=partial(self._report, target),
                say=partial(self._say, target),
            )
            for target in range(1, spec.num_stages)
        ]
        exchanges = [self.exchange, *(cast(Exchange, other) for other in self._others)]
        self.strategy = self.parts.strategy(self.post, exchanges)
        self.loop = _Loop(self, exchanges)
        self._has_run = False

    async def _step(self, plan: StepPlan) -> bool:
        k, loop = plan.step, self.loop
        self._orders = dict.fromkeys(range(1, self.stage.num_stages), 0)
        if self._has_run and loop.k < k:
            await loop.advance(self.fleet.num_steps)
            self._has_run = False
        if loop.k > k:
            if not loop.has_jumped:
                self._enter(run=False)
            loop.has_jumped = False
            return False
        loop.k = k
        if self.strategy.at != "start":
            self._enter(run=True)
        await loop.step()
        self._has_run = True
        return True

    def _enter(self, *, run: bool, plan: SyncPlan | None = None, jump: bool = False) -> None:
        """Tell the other stages what becomes of this turn."""
        body: dict[str, Any] = {"op": "enter", "run": run, "at": self.strategy.at}
        if (self.plan.step + 1) % self.strategy.every == 0:
            body["agree"] = True
        if jump:
            body["jump"] = True
        if plan is not None:
            body["plan"] = plan_to_body(plan)
        for target in range(1, self.stage.num_stages):
            self.stage.control.tell(target, self.plan.turn, body)

    def enter_with(self, plan: SyncPlan) -> None:
        """The step begins, and these are the neighbours whom parameters are published to."""
        self._enter(run=True, plan=plan)

    def jump(self) -> None:
        """The turns up to the iteration that was reached are skipped; first a mix."""
        self._enter(run=False, jump=True)

    def order_all(self, body: dict[str, Any]) -> None:
        for target in range(1, self.stage.num_stages):
            self._order(target, body)

    def _order(self, target: int, body: dict[str, Any]) -> int:
        self._orders[target] += 1
        number = self._orders[target]
        self.stage.control.tell(target, self.plan.turn, {"op": f"order{number}", **body})
        return number

    def _report(self, target: int, number: int) -> Coroutine[Any, Any, dict[str, Any]]:
        return self.stage.control.hear(
            f"report{number}",
            self.plan.turn,
            source=target,
            deadline_s=self.plan.deadline_s,
            num_deadlines=PATIENT,
        )

    def _say(self, target: int, body: dict[str, Any]) -> None:
        self.stage.control.request(target, self.stage.turn, {"op": "sync", **body})

    def on_word(self, header: FrameHeader) -> None:
        """Another stage tells which updates it has."""
        updates = self._others[header.source - 1].updates
        for source, tag, before, is_lost in header.body.get("have", ()):
            updates.heard(source, tag, before, is_lost=is_lost)

    def on_member(self, event: MemberEvent) -> None:
        self.loop.on_member(event)

    def leave(self) -> None:
        self.strategy.left(self.fleet.num_steps)

    def numbers(self) -> dict[str, Any]:
        loop = self.loop
        return {
            **super().numbers(),
            "iteration": loop.k + self._has_run,
            "run": loop.num_run,
            "skipped": loop.num_skipped,
            "interrupted": loop.num_interrupted,
            "staleness": loop.staleness,
            "waited": dict(loop.waited),
            "group": list(loop.groups[0]) if loop.groups else [],
            **self.strategy.stats(),
        }

    def state_dict(self) -> State:
        return {
            **super().state_dict(),
            "k": self.loop.k,
            "has_run": self._has_run,
            "strategy": self.strategy.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.loop.k = int(state["k"])
        self._has_run = bool(state["has_run"])
        self.strategy.load_state_dict(state["strategy"])
        self.strategy.resumed()

    def strategy_state(self) -> State:
        return self.strategy.state_dict()

    def adopt(self, strategy: State, k: int) -> None:
        self.strategy.adopt(strategy, k)

    def take_over(self, state: State, k: int) -> None:
        super().take_over(state, k)
        self.strategy.adopt(state["strategy"], k)
        self.loop.k = k
        self._has_run = False


class _Loop(Replica):
    """The loop of `stages.sync.replica`; the other stages are told what it decides."""

    def __init__(self, leader: Leader, exchanges: Sequence[Exchange]) -> None:
        self.leader = leader
        self.has_jumped = False
        super().__init__(
            index=leader.replica,
            trainer=self,
            strategy=leader.strategy,
            exchanges=exchanges,
            rules=[leader.rule],
            late=[leader.exchange],
        )

    @property
    def shards(self) -> list[StageShard]:
        return [self.leader.shard]

    async def compute(self, k: int) -> None:
        await self.leader.passes()

    async def advance(self, num_steps: int) -> None:
        """On to the iteration that the strategy lets this replica enter."""
        await self._advance(num_steps)

    async def _outgoing(self, k: int) -> list[Any]:
        return self._for_all(await self.leader.outgoing(k))

    async def _parameters(self) -> list[Any]:
        return self._for_all(await self.leader.parameters())

    async def _publish(self, k: int, plan: SyncPlan) -> None:
        self.leader.enter_with(plan)
        await super()._publish(k, plan)

    async def _update(self, k: int) -> None:
        await self.leader.update()

    async def _take(self, k: int, results: Sequence[SyncResult]) -> None:
        self.leader.order_all({"do": "take"})
        await self.leader.take(k, results[0])

    async def _pass_over(self) -> None:
        self.leader.order_all({"do": "none"})

    async def _jump(self, k: int) -> None:
        self.has_jumped = True
        self.leader.jump()
        await super()._jump(k)

    def _for_all(self, own: Any) -> list[Any]:
        return [own, *(None for _ in self.exchanges[1:])]
