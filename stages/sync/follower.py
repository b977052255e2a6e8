"""A stage of a replica that is not its first: does as its leader says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from compressors.frame import FrameHeader
from stages.plan import StepPlan
from stages.spec import StageSpec
from stages.stage import Stage
from stages.sync.orders import PATIENT, plan_from_body
from stages.sync.seat import LinkTo, Seat
from stages.sync.strategy import Interrupted, State, SyncResult
from stages.sync.updates import spent


class Follower(Seat):
    """A stage that does as its leader says."""

    def __init__(self, stage: Stage, spec: StageSpec, *, link_to: LinkTo) -> None:
        super().__init__(stage, spec, link_to=link_to)
        self._number = 0
        self._have: dict[int, dict[int, int]] = {}
        self.exchange.updates.on_update = self._noted

    async def _step(self, plan: StepPlan) -> bool:
        k, self._number = plan.step, 0
        word = await self._hear("enter")
        if word.get("jump"):
            await self._obey(k, self.parameters)
        if not word["run"]:
            return False
        at = word["at"]
        if at == "start":
            self.exchange.publish(plan_from_body(word["plan"]), await self.outgoing(k))
        await self.passes()
        if at == "start":
            await self._obey(k, self.parameters)
        elif at == "grad":
            await self._obey(k, partial(self.outgoing, k))
        await self.update()
        if at == "param" and word.get("agree"):
            await self._obey(k, partial(self.outgoing, k))
        return True

    async def _obey(self, k: int, vector_of: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Exchange as ordered, as often as ordered, until there is something to take or nothing."""
        vector = await vector_of()
        order = await self._next_order()
        while order["do"] == "exchange":
            plan = plan_from_body(order["plan"])
            number, handle = self._number, self.exchange.begin(plan, vector)
            following = asyncio.create_task(self._next_order())
            try:
                await asyncio.wait({handle.task, following}, return_when=asyncio.FIRST_COMPLETED)
                if handle.task.done():
                    with contextlib.suppress(Interrupted):  # the leader will say what to do
                        result = handle.task.result()
                        self._tell_report(number, result)
                else:
                    handle.task.cancel()
                    await asyncio.wait({handle.task})
                order = await following
            finally:
                handle.task.cancel()
                following.cancel()
        if order["do"] == "take":
            await self.take(k, result)
            for source, tag in plan.versions.items():
                if source != self.replica:
                    self._forget_before(source, spent(tag, plan.number))

    def _tell_report(self, number: int, result: SyncResult) -> None:
        body = {
            "op": f"report{number}",
            "members": list(result.contributors),
            "nbytes": result.nbytes,
            "waited_s": result.waited_s,
            "has_loss": result.has_loss,
        }
        self.stage.control.tell(0, self.plan.turn, body)

    async def _next_order(self) -> dict[str, Any]:
        self._number += 1
        return await self._hear(f"order{self._number}")

    async def _hear(self, op: str) -> dict[str, Any]:
        return await self.stage.control.hear(
            op,
            self.plan.turn,
            source=0,
            deadline_s=self.plan.deadline_s,
            num_deadlines=PATIENT,
        )

    # --- which updates are here ------------------------------------------------------------------

    def _noted(self, source: int, tag: int, before: int) -> None:
        self._have.setdefault(source, {})[tag] = before
        self._tell_have(source)

    def _tell_have(self, source: int) -> None:
        lost = self.exchange.updates.lost
        have = [
            [source, tag, before, (source, tag) in lost]
            for tag, before in sorted(self._have.get(source, {}).items())
        ]
        if have:
            self.stage.control.request(0, self.stage.turn, {"op": "sync", "have": have})

    def _forget_before(self, source: int, tag: int) -> None:
        self.exchange.updates.forget_before(source, tag)
        here = self._have.get(source, {})
        self._have[source] = {t: before for t, before in here.items() if t >= tag}

    def on_word(self, header: FrameHeader) -> None:
        """The leader misses an update, or somebody is gone."""
        source = header.body["source"]
        if header.body["do"] == "drop":
            self._have.pop(source, None)
            self.exchange.updates.drop(source)
            self.exchange.forget(source)
        elif header.body["tag"] in self._have.get(source, {}):
            self._tell_have(source)
        else:
            self.exchange.updates.ask(source, header.body["tag"])

    def state_dict(self) -> State:
        have = {source: dict(tags) for source, tags in self._have.items()}
        return {**super().state_dict(), "have": have}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._have = {
            int(source): {
                int(tag): int(before)
                for tag, before in tags.items()
                if int(tag) in self.exchange.updates.tags_of(int(source))
            }
            for source, tags in state["have"].items()
        }
