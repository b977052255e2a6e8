"""What the leader of a replica tells its other stages, and what they report.

One plan serves all stages of a replica. The leader, stage 0, runs the strategy; for each exchange
it sends the plan as an order, hears from every stage that its part is here, and orders all of them
to take it. An order that comes while an exchange still runs ends it: its group was cancelled or
somebody died, and the new order says what to do instead. Orders and reports are control messages
of the pipeline (`stages.control`): small, matched by turn, asked for again when they are late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from stages.sync.exchange import Handle
from stages.sync.strategy import Interrupted, SyncPlan, SyncResult

PATIENT = 1_000_000
"""Deadlines that a stage waits for its leader, who may wait for slow replicas: the driver hears of
a leader that is dead, and ends the replica."""


def plan_to_body(plan: SyncPlan) -> dict[str, Any]:
    """The plan as msgpack holds it: what is as usual is left out."""
    usual = SyncPlan(epoch=0, number=0, op="none")
    body: dict[str, Any] = {}
    for field in fields(SyncPlan):
        value = getattr(plan, field.name)
        if field.name in ("epoch", "number", "op") or value != getattr(usual, field.name):
            pairs = isinstance(value, Mapping)
            body[field.name] = [list(item) for item in value.items()] if pairs else value
    return body


def plan_from_body(body: Mapping[str, Any]) -> SyncPlan:
    """What `plan_to_body` was given."""
    values = dict(body)
    for name in ("weights", "versions"):
        if name in values:
            values[name] = {int(key): value for key, value in values[name]}
    if "peers" in values:
        values["peers"] = tuple(values["peers"])
    return SyncPlan(**values)


class RemoteUpdates:
    """The mailbox of another stage, as far as the leader's strategy asks for it."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say = say
        self._heard: dict[int, set[int]] = {}
        self._floor: dict[int, int] = {}
        self.lost: set[tuple[int, int]] = set()
        self.on_update: Callable[[int, int, int], None] = lambda source, tag, before: None

    def heard(self, source: int, tag: int, before: int, *, is_lost: bool = False) -> None:
        """The stage has an update; it says so more than once, it counts once."""
        known = self._heard.setdefault(source, set())
        if tag not in known and tag >= self._floor.get(source, -1):
            known.add(tag)
            if is_lost:
                self.lost.add((source, tag))
            self.on_update(source, tag, before)

    def forget_before(self, source: int, tag: int) -> None:
        """The stage does the same when it takes what was mixed."""
        self._floor[source] = max(tag, self._floor.get(source, -1))
        self._heard[source] = {old for old in self._heard.get(source, ()) if old >= tag}
        self.lost = {(j, t) for j, t in self.lost if j != source or t >= tag}

    def drop(self, source: int) -> None:
        """A neighbour is gone."""
        self._heard.pop(source, None)
        self._floor.pop(source, None)
        self._say({"do": "drop", "source": source})

    def ask(self, source: int, tag: int) -> None:
        """Have the stage ask for an update, or say again that it has it."""
        self._say({"do": "ask", "source": source, "tag": tag})


class RemoteSwap:
    """The meetings of another stage."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say = say
        self.num_answered = 0

    def forget(self, replica: int) -> None:
        """A replica is gone."""
        self._say({"do": "drop", "source": replica})


class RemoteExchange:
    """The exchange of another stage of the same replica, in the leader's hands."""

    def __init__(
        self,
        *,
        order: Callable[[dict[str, Any]], int],
        report: Callable[[int], Any],
        say: Callable[[dict[str, Any]], None],
    ) -> None:
        """`order(body)` gives an order and returns its number, `await report(number)` hears what
        became of it, `say` tells what needs no answer."""
        self._order = order
        self._report = report
        self.updates = RemoteUpdates(say)
        self.swap = RemoteSwap(say)
        self.last_number = -1
        self._floor = (-1, -1)
        self._min_epoch = -1
        self._cancelled: set[tuple[int, int]] = set()
        self._running: tuple[tuple[int, int], asyncio.Future[None]] | None = None

    def publish(self, plan: SyncPlan, vector: Any) -> None:
        """Told with the word to enter the step."""

    def begin(self, plan: SyncPlan, vector: Any) -> Handle:
        """Order the stage to do its part; what it sends is its own."""
        return Handle(plan, asyncio.create_task(self._run(plan), name=f"remote {plan.op}"))

    async def finish(self, handle: Handle) -> SyncResult:
        """What the stage reports; raises `Interrupted` if there will be nothing."""
        return await handle.task

    async def _run(self, plan: SyncPlan) -> SyncResult:
        tag = (plan.epoch, plan.number)
        self._check(tag)
        number = self._order({"do": "exchange", "plan": plan_to_body(plan)})
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heard = asyncio.ensure_future(self._report(number))
        self._running = (tag, ended)
        try:
            await asyncio.wait({ended, heard}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._running = None
            if not heard.done():
                heard.cancel()
        # A report that comes after the exchange was given up is too late: others were told so.
        self._check(tag)
        body = heard.result()
        self._floor = max(self._floor, tag)
        if plan.op in ("reduce", "fetch") and not plan.keep:
            self.last_number = plan.number
        return SyncResult(
            contributors=tuple(body["members"]),
            nbytes=body["nbytes"],
            waited_s=body["waited_s"],
            has_loss=body["has_loss"],
        )

    def refuse_before(self, epoch: int) -> None:
        """End what belongs to an earlier epoch, running or still to come."""
        self._min_epoch = max(self._min_epoch, epoch)
        if self._running is not None and self._running[0][0] < epoch:
            _end(self._running[1])

    def cancel(self, epoch: int, number: int) -> None:
        """End one exchange, running or still to come."""
        tag = (epoch, number)
        if tag > self._floor:
            self._cancelled = {old for old in self._cancelled if old > self._floor} | {tag}
            if self._running is not None and self._running[0] == tag:
                _end(self._running[1])

    def forget(self, replica: int) -> None:
        """A replica is gone."""
        self.swap.forget(replica)

    def is_over(self, tag: tuple[int, int]) -> bool:
        """The stage has finished that exchange, or a later one."""
        return tag <= self._floor

    def _check(self, tag: tuple[int, int]) -> None:
        if tag[0] < self._min_epoch or tag in self._cancelled:
            raise Interrupted(f"exchange {tag} was cancelled")


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
