"""The leader's stand-in for another stage: orders out, reports in, nothing once it was given up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netsim.clock import run_virtual
from stages.sync.orders import RemoteExchange, plan_from_body, plan_to_body
from stages.sync.strategy import Interrupted, SyncPlan

PLAN = SyncPlan(epoch=3, number=7, op="reduce", peers=(0, 2))


class Stage:
    """A stage far away: keeps the orders, reports when it is told to."""

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []
        self.reports: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.exchange = RemoteExchange(order=self.order, report=self.report, say=self.said.append)

    def order(self, body: dict[str, Any]) -> int:
        self.orders.append(body)
        self.reports[len(self.orders)] = asyncio.get_running_loop().create_future()
        return len(self.orders)

    def report(self, number: int) -> Coroutine[Any, Any, dict[str, Any]]:
        async def hear() -> dict[str, Any]:
            return await self.reports[number]

        return hear()

    def done(self, number: int) -> None:
        body = {"members": [0, 2], "nbytes": 10, "waited_s": 0.5, "has_loss": False}
        self.reports[number].set_result(body)


@given(
    st.integers(0, 99),
    st.sampled_from(["reduce", "mailbox", "swap", "fetch"]),
    st.lists(st.integers(0, 9), unique=True),
    st.booleans(),
    st.dictionaries(st.integers(0, 9), st.floats(0, 1)),
)
def test_a_plan_is_the_same_after_its_way_through_a_message(
    number: int, op: Any, peers: list[int], keep: bool, weights: dict[int, float]
) -> None:
    plan = SyncPlan(
        epoch=1, number=number, op=op, peers=tuple(peers), keep=keep, weights=weights,
        versions=dict.fromkeys(peers, number),
    )  # fmt: skip

    assert plan_from_body(plan_to_body(plan)) == plan


def test_the_stage_is_ordered_and_its_report_is_the_result() -> None:
    async def main() -> None:
        stage = Stage()
        handle = stage.exchange.begin(PLAN, None)
        await asyncio.sleep(1)
        stage.done(1)

        result = await stage.exchange.finish(handle)

        assert plan_from_body(stage.orders[0]["plan"]) == PLAN
        assert result.contributors == (0, 2)
        assert stage.exchange.last_number == 7
        assert stage.exchange.is_over((3, 7))

    run_virtual(main())


@pytest.mark.parametrize("how", ["cancel", "epoch"])
def test_a_report_after_the_exchange_was_given_up_does_not_count(how: str) -> None:
    async def main() -> None:
        stage = Stage()
        handle = stage.exchange.begin(PLAN, None)
        await asyncio.sleep(1)
        if how == "cancel":
            stage.exchange.cancel(3, 7)
        else:
            stage.exchange.refuse_before(4)
        stage.done(1)  # at the same moment: others were told that it is off

        with pytest.raises(Interrupted):
            await stage.exchange.finish(handle)
        assert stage.exchange.last_number == -1
        assert not stage.exchange.is_over((3, 7))

    run_virtual(main())


def test_what_was_cancelled_before_it_began_is_never_ordered() -> None:
    async def main() -> None:
        stage = Stage()
        stage.exchange.cancel(3, 7)

        with pytest.raises(Interrupted):
            await stage.exchange.finish(stage.exchange.begin(PLAN, None))
        assert stage.orders == []

    run_virtual(main())


def test_an_update_counts_once_however_often_the_stage_says_that_it_has_it() -> None:
    async def main() -> None:
        updates = Stage().exchange.updates
        heard: list[tuple[int, int, int]] = []
        updates.on_update = lambda *what: heard.append(what)

        for _ in range(3):
            updates.heard(2, 5, 4)
        updates.forget_before(2, 6)
        updates.heard(2, 5, 4)
        updates.heard(2, 6, 5)

        assert heard == [(2, 5, 4), (2, 6, 5)]

    run_virtual(main())
