"""The bound that chooses itself: covers the round trip, follows changes, does not feed queues."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from netsim.clock import run_virtual
from netsim.link import Link
from netsim.shaper import Uplink
from netsim.topology import LinkSpec
from stages.embedding.auto_staleness import AutoStaleness
from stages.embedding.hybrid import Hybrid
from stages.embedding.letters import Wire
from stages.embedding.permits import Permits
from stages.embedding.routing import Step
from stages.embedding.row_rules import Sgd
from stages.embedding.shard import Shard
from stages.embedding.shard_server import ShardServer
from stages.embedding.tables import Table


def feed(auto: AutoStaleness, num: int, **times: float) -> list[int]:
    """Steps of the same times, each as far from the last as compute and permits make it."""
    took, now_s = [], 1000.0 * len(auto.changes) + auto._num_seen
    way = times["pull_s"] + times["step_s"] + times["push_s"]
    for _ in range(num):
        now_s += max(times["step_s"], way / (auto.tau + 1))
        change = auto.observe(now_s=now_s, **times)
        took += [] if change is None else [change]
    return took


def test_after_two_steps_the_bound_covers_the_round_trip() -> None:
    auto = AutoStaleness()

    assert feed(auto, 1, pull_s=0.100, step_s=0.025, push_s=0.075) == []
    assert feed(auto, 1, pull_s=0.100, step_s=0.025, push_s=0.075) == [7]
    assert feed(auto, 48, pull_s=0.100, step_s=0.025, push_s=0.075) == []
    assert auto.changes[0].why == "175.0 ms to shards and back, 25.0 ms a step"


def test_a_first_step_that_is_ten_times_as_slow_does_not_choose_the_bound() -> None:
    auto = AutoStaleness()
    feed(auto, 1, pull_s=1.0, step_s=0.250, push_s=0.75)

    assert feed(auto, 49, pull_s=0.100, step_s=0.025, push_s=0.075) == [7]


def test_a_first_choice_from_two_slow_steps_is_corrected_by_the_next_window() -> None:
    auto = AutoStaleness(window=4)
    feed(auto, 2, pull_s=0.100, step_s=0.100, push_s=0.075)
    assert auto.tau == 2

    assert feed(auto, 3 + 4, pull_s=0.100, step_s=0.025, push_s=0.075) == [7]


def test_where_rows_are_near_everything_stays_synchronous() -> None:
    auto = AutoStaleness()

    assert feed(auto, 100, pull_s=0.0, step_s=0.025, push_s=0.0) == []
    assert auto.tau == 0


def test_the_cap_holds_and_a_cap_that_cannot_be_is_refused() -> None:
    auto = AutoStaleness(cap=5)

    assert feed(auto, 100, pull_s=9.0, step_s=0.01, push_s=9.0) == [5]
    with pytest.raises(ValueError, match="cap is -1"):
        AutoStaleness(cap=-1)


def test_when_the_way_becomes_longer_or_shorter_the_bound_follows() -> None:
    auto = AutoStaleness()
    feed(auto, 50, pull_s=0.05, step_s=0.025, push_s=0.05)
    assert auto.tau == 4

    feed(auto, 100, pull_s=0.1, step_s=0.025, push_s=0.1)
    assert auto.tau == 8
    feed(auto, 100, pull_s=0.02, step_s=0.025, push_s=0.02)
    assert auto.tau == 2


def test_noise_around_a_boundary_does_not_move_the_bound_all_the_time() -> None:
    auto, generator, now_s = AutoStaleness(), random.Random(0), 0.0
    for _ in range(2000):
        now_s += 0.025
        auto.observe(
            pull_s=0.05 * generator.uniform(0.9, 1.1),
            step_s=0.025 * generator.uniform(0.9, 1.1),
            push_s=0.05 * generator.uniform(0.9, 1.1),
            now_s=now_s,
        )

    assert auto.tau in (4, 5)
    assert len(auto.changes) < 12


def hybrid_run(
    auto: AutoStaleness, num: int, *, bandwidth_bps: float, step_s: float
) -> tuple[list[float], list[Shard], Permits]:
    """When steps began, over two shards 50 ms away, in virtual time."""

    async def run() -> tuple[list[float], list[Shard], Permits]:
        tables = (Table(name="user", dim=16, optimizer=Sgd(lr=0.1)),)
        spec, permits = LinkSpec(bandwidth_bps=bandwidth_bps, latency_s=0.05), Permits(0)
        back = [Link(spec, Uplink(), lambda frame: None, seed=s) for s in range(2)]
        shards = [
            Shard(tables, index=s, tau=auto.cap, capacity="8MiB", slab="64KiB", core="twin")
            for s in range(2)
        ]
        servers = [
            ShardServer(shard, link_to=lambda c, s=s: back[s], wire=Wire())  # type: ignore[misc]
            for s, shard in enumerate(shards)
        ]
        there = [Link(spec, Uplink(), server.on_frame, seed=9) for server in servers]
        client = Hybrid(tables, permits=permits, links=there, auto=auto)
        for link in back:
            link.deliver = client.on_frame
        began = []

        async def train(number: int, step: Step) -> None:
            began.append(asyncio.get_running_loop().time())
            step.rows["user"].sum().backward()
            await asyncio.sleep(step_s)

        generator = np.random.default_rng(0)
        data: list[dict[str, Any]] = [{"user": generator.integers(0, 5000, 64)} for _ in range(num)]
        await client.run(data, train)
        return began, shards, permits

    return run_virtual(run())


def test_a_hybrid_run_finds_its_bound_and_then_computes_all_the_time() -> None:
    auto = AutoStaleness()

    began, shards, permits = hybrid_run(auto, 60, bandwidth_bps=100e6, step_s=0.025)
    assert [change.tau for change in auto.changes] == [9]  # 201 ms of way, 25 ms a step
    assert (permits.tau, permits.free, permits.in_use) == (9, 10, 0)
    assert (began[-1] - began[20]) / 39 == pytest.approx(0.025, rel=0.01)  # no waiting
    assert max(shards[0].counts.staleness) <= 9


def rate_and_bound(auto: AutoStaleness) -> tuple[float, float]:
    """A wire that takes some 70 ms for the rows of a step, and 5 ms of compute: the second half."""
    began, _, _ = hybrid_run(auto, 400, bandwidth_bps=0.15e6, step_s=0.005)
    bounds = [0] * 401
    for change in auto.changes:
        bounds[change.step :] = [change.tau] * (401 - change.step)
    return (began[-1] - began[199]) / 200, sum(bounds[200:]) / 201


@pytest.mark.slow
def test_where_the_wire_is_the_limit_permits_that_only_queue_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the mutant, which ignores queues, gains nothing by its many permits."""
    seconds, bound = rate_and_bound(AutoStaleness())

    monkeypatch.setattr("stages.embedding.auto_staleness.QUEUE_SIGN", float("inf"))
    mutant_seconds, mutant_bound = rate_and_bound(AutoStaleness())
    assert seconds < 1.03 * mutant_seconds
    assert mutant_bound == 16
    assert bound < 8


def test_permits_that_become_fewer_hold_as_soon_as_steps_come_home() -> None:
    async def run() -> None:
        permits = Permits(3)
        for ticket in range(4):
            await permits.acquire(ticket)
        permits.resize(1)
        assert permits.bound_of(2) == 3  # it was given under the bound of before
        late = asyncio.get_running_loop().create_task(permits.acquire(4))
        permits.release(0)
        permits.release(1)
        await asyncio.sleep(0)
        assert not late.done()  # two are under way, and two is the bound
        permits.release(2)
        await late
        assert (permits.in_use, permits.free, permits.bound_of(4)) == (2, 0, 1)
        more = asyncio.get_running_loop().create_task(permits.acquire(5))
        await asyncio.sleep(0)
        permits.resize(2)
        await more
        with pytest.raises(ValueError, match="got tau = -1"):
            permits.resize(-1)

    run_virtual(run())
