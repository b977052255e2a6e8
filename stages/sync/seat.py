"""A stage's seat among the replicas: its post, its exchange, and its part of every step.

The leader, stage 0, runs the loop of `stages.sync.replica` with its strategy; the other stages do
as they are told (`stages.sync.orders`). All of them go through a step in the same order:

    at start   publish parameters, passes, mix, norm, update             hop
    at grad    passes, exchange, norm of the mean, clip, update          allreduce
               passes, norm, clip, exchange, the rule's own update       quantized-adam
    at param   passes, norm, update, exchange                            ripples, ad-psgd, local

Exchanging gradients before the norm makes all-reduce equal one process on the joined batch, the
clipping included, and lets a gradient that is not finite skip the step everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compressors.frame import FrameHeader
from netsim.link import LinkLike
from stages.plan import StepPlan
from stages.spec import StageSpec
from stages.stage import Stage
from stages.sync.exchange import Exchange
from stages.sync.fleet_spec import FleetSpec
from stages.sync.post import Post
from stages.sync.rules import FrozenAdam, Rule
from stages.sync.slow_lane import SlowLane
from stages.sync.slowness import slow_factor
from stages.sync.stage_shard import StageShard
from stages.sync.strategies import Assembly
from stages.sync.strategy import (
    MemberEvent,
    State,
    SyncResult,
)

LinkTo = Callable[[int], LinkLike]


class Seat:
    """What leader and followers have in common. Belongs to the stage's loop."""

    def __init__(self, stage: Stage, spec: StageSpec, *, link_to: LinkTo) -> None:
        assert spec.fleet is not None
        self.stage = stage
        self.fleet: FleetSpec = spec.fleet
        self.replica = spec.replica
        self.post = Post(replica=spec.replica, stage=spec.index, link_to=link_to)
        self.parts = Assembly(self.fleet.sync, self.fleet.members)
        self.exchange = Exchange(
            self.post,
            self.parts.coder(spec.replica),
            lane=stage.lanes.transmit,
            history=self.parts.history,
        )
        self.rule: Rule = self.parts.rule()
        self.shard = StageShard(stage.compute)
        anchor = self.shard.parameters()
        self.exchange.open(anchor)
        self.rule.open(anchor)
        if isinstance(self.rule, FrozenAdam):
            self.rule.decay_only(self.shard.decayed())
            self.rule.cut_at(self.shard.sizes())
        self._plan: StepPlan | None = None
        self._factor = 0.0
        self._norm = 0.0

    @property
    def plan(self) -> StepPlan:
        assert self._plan is not None
        return self._plan

    async def step(self, plan: StepPlan) -> float | None:
        """The whole of a training step; None if the replica skips it, else the gradient's norm."""
        self._plan = plan
        self.shard.rate = plan.lr
        compute = self.stage.lanes.compute
        if isinstance(compute, SlowLane):
            seed = self.fleet.slow_seed
            compute.factor = slow_factor(self.fleet.slow, self.replica, plan.step, seed=seed)
        if await self._step(plan):
            return self._norm
        self.stage.skip(plan)
        return None

    async def _step(self, plan: StepPlan) -> bool:
        raise NotImplementedError

    # --- pieces of a step ------------------------------------------------------------------------

    async def passes(self) -> None:
        """Forward and backward; where the rule updates, the replica's own norm and clip, too."""
        await self.stage.act(self.plan)
        if self.rule.updates:
            self._norm, self._factor = await self.stage.agree_on_norm(self.plan)
            await self._work("clip", self.shard.scale_gradients, self._factor)

    async def update(self) -> None:
        """Norm over all stages, update, commit."""
        if self.rule.updates:
            self._factor = 0.0  # the rule has made the update: only gradients are cleared
        else:
            self._norm, self._factor = await self.stage.agree_on_norm(self.plan)
        await self.stage.commit(self.plan, self._factor)

    async def outgoing(self, k: int) -> Any:
        return await self._work("pack", self.rule.outgoing, self.shard, k)

    async def parameters(self) -> Any:
        return await self._work("pack", self.shard.parameters)

    async def take(self, k: int, result: SyncResult) -> None:
        await self._work("take", self.rule.incoming, self.shard, k, result)

    async def _work(self, name: str, work: Callable[..., Any], *args: object) -> Any:
        return await self.stage.lanes.compute.run("update", name, -1, work, *args)

    # --- what comes in, and what stays -----------------------------------------------------------

    def on_frame(self, frame: Any) -> None:
        """A letter of another replica, or of the Group Generator."""
        self.post.on_frame(frame)

    def on_word(self, header: FrameHeader) -> None:
        """A word between stages of this replica that belongs to no turn."""

    def on_member(self, event: MemberEvent) -> None:
        """Somebody came or went."""

    def leave(self) -> None:
        """The replica is done."""

    def strategy_state(self) -> State:
        """What a newcomer adopts; the leader's alone."""
        return {}

    def adopt(self, strategy: State, k: int) -> None:
        """Join as somebody whose donor's strategy has this state and is about to enter `k`."""

    def numbers(self) -> dict[str, Any]:
        """For the step's record."""
        nbytes, self.post.fp32_nbytes = self.post.fp32_nbytes, 0
        return {"fp32_bytes": nbytes}

    def state_dict(self) -> State:
        return {
            "replica": self.replica,
            "exchange": self.exchange.state_dict(),
            "rule": self.rule.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self.exchange.load_state_dict(state["exchange"])
        self.exchange.updates.resumed()
        self.rule.load_state_dict(state["rule"])

    def take_over(self, state: State, k: int) -> None:
        """Join, with what a donor's seat had saved before its iteration `k`."""
        self.rule.load_state_dict(state["rule"])
        self.exchange.adopt(state["exchange"])
