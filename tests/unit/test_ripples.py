"""Ripples in virtual time: groups never overlap, the mean stays, deaths are survived."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from compressors.frame import FrameHeader
from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from netsim.faults import FaultyLink
from stages.sync.exchange import Exchange
from stages.sync.fleet import Fleet
from stages.sync.generator import GroupGenerator
from stages.sync.isolation import components
from stages.sync.payload import VectorCoder
from stages.sync.post import Inbox, Post
from stages.sync.problems import ComputeTime
from stages.sync.ripples import Ripples, by_node, ruler
from stages.sync.strategies import Assembly, SyncSpec, SyncSpecError
from tests.unit.fleets import (
    disagreement,
    mean_of,
    priced,
    quadratics,
    run_fleet,
    shuffled,
    slow_net,
    uniform_time,
)

SMART = SyncSpec(name="ripples")
PAIRS = SyncSpec(name="ripples", group_size=2)
RULER = SyncSpec(name="ripples", groups="ruler")
FOUR_BITS = SyncSpec(name="ripples", codec=CodecSpec(name="directq", bits=4))


class Log:
    """What each replica executed, and when."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self.overlaps: list[tuple[int, int, int]] = []
        self.applied: dict[int, list[int]] = {}
        self.members: dict[int, tuple[int, ...]] = {}


def logged(log: Log, make: type[GroupGenerator] = GroupGenerator) -> type[Assembly]:
    class Logged(Ripples):
        async def plan(self, k: int) -> Any:
            plan = await super().plan(k)
            me = self._post.replica
            if plan.op == "reduce":
                log.running[me] = plan.number
                log.members[plan.number] = plan.peers
            return plan

        def finished(self, plan: Any, results: Any) -> None:
            me = self._post.replica
            log.running.pop(me, None)
            log.applied.setdefault(plan.number, []).append(me)
            super().finished(plan, results)

        def _on_ticket(self, header: Any, packet: Any) -> None:
            me = self._post.replica
            if log.running.get(me, header.step) != header.step:
                log.overlaps.append((me, log.running[me], header.step))
            super()._on_ticket(header, packet)

        def _on_cancel(self, header: Any, packet: Any) -> None:
            log.running.pop(self._post.replica, None)
            super()._on_cancel(header, packet)

    class Mine(Assembly):
        def strategy(self, post: Any, exchanges: Any) -> Any:
            return Logged(post=post, exchanges=exchanges, patience=self.spec.patience())

        def make_generator(self, epoch: int) -> GroupGenerator:
            plain = super().make_generator(epoch)
            plain.__class__ = make
            return plain

    return Mine


@pytest.mark.quick(1)
@pytest.mark.parametrize("sync", [SMART, PAIRS, RULER, FOUR_BITS], ids=["4", "2", "ruler", "4 bit"])
def test_groups_agree_and_keep_the_mean(sync: SyncSpec) -> None:
    trainers = quadratics(8, lr=0.0, offset=1.0)
    before, spread = mean_of(trainers), disagreement(trainers)
    run_fleet(trainers, sync, 64, topology=slow_net(8))

    torch.testing.assert_close(mean_of(trainers), before, rtol=0, atol=1e-12)
    assert disagreement(trainers) < 0.2 * spread


def drift(codec: CodecSpec, **patches: Any) -> tuple[float, float]:
    """Section 4.3: unit-size weights, spread 0.01, groups of 4; drift and spread left."""
    trainers = quadratics(8, lr=0.0, offset=0.01, dim=64)
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(64, generator=generator, dtype=torch.float64)
    for trainer in trainers:
        trainer.shards[0].x = trainer.shards[0].x + common
    before = mean_of(trainers)
    run_fleet(trainers, SyncSpec(name="ripples", codec=codec), 40, topology=slow_net(8), **patches)
    return float((mean_of(trainers) - before).norm() / 8 / 0.01), disagreement(trainers) / 8 / 0.01


@pytest.mark.slow
def test_four_bits_do_not_move_the_mean() -> None:
    moved, left = drift(CodecSpec(name="directq", bits=4))

    assert moved < 1e-6
    assert left < 0.5


@pytest.mark.slow
def test_mutant_quantised_parameters_written_over_move_the_mean() -> None:
    from stages.sync.collective import Collective

    original = Collective.reduce

    async def overwrite(self: Collective, plan: Any, vector: Any) -> Any:
        from dataclasses import replace

        result = await original(self, replace(plan, keep=False), vector)
        return replace(result, delta=result.value - vector, value=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "reduce", overwrite)
        moved, _ = drift(CodecSpec(name="directq", bits=4))

    assert moved > 0.01


def test_groups_that_were_cancelled_are_forgotten_when_a_later_one_is_over() -> None:
    post = Post(replica=0, link_to=lambda target: pytest.fail("nothing is sent"))
    exchange = Exchange(post, VectorCoder())
    ripples = Ripples(post=post, exchanges=[exchange])
    for gid in range(0, 200, 2):
        header = FrameHeader(
            kind="control", replica=-1, source=0, target=0, step=gid, body={"op": "cancel"}
        )
        post.handlers["cancel"](header, None)
        exchange.inbox.close((0, gid + 1))

    assert len(ripples._cancelled) == 1


def test_the_ruler_meets_everybody_in_time() -> None:
    sizes = [len(ruler(0, step, 8)) for step in range(8)]

    assert sizes == [1, 2, 1, 4, 1, 2, 1, 8]
    assert ruler(5, 3, 8) == (4, 5, 6, 7)
    assert ruler(5, 7, 6) == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("schedule", [ruler, by_node])
@pytest.mark.parametrize("num", [4, 6, 8, 16])
def test_static_groups_are_disjoint_and_agreed_on_by_their_members(schedule: Any, num: int) -> None:
    for step in range(16):
        groups = [schedule(rank, step, num) for rank in range(num)]
        assert all(rank in group for rank, group in enumerate(groups))
        assert all(groups[other] == group for group in groups for other in group)


@pytest.mark.parametrize("schedule", [ruler, by_node])
def test_the_groups_of_one_period_connect_everybody(schedule: Any) -> None:
    for num in range(1, 34):  # nodes of four need not be full, not even after a death
        period = max(4, 1 << (num - 1).bit_length())
        met = {0}
        for _ in range(num):  # whoever is reached reaches whom it meets
            groups = [schedule(rank, step, num) for rank in sorted(met) for step in range(period)]
            met |= {other for group in groups for other in group}

        assert met == set(range(num)), f"{num} replicas"


def test_a_node_that_is_not_full_meets_the_others_heads() -> None:
    assert [by_node(rank, 0, 6) for rank in range(6)] == [
        (0, 4),
        (1,),
        (2, 3),
        (2, 3),
        (0, 4),
        (5,),
    ]
    assert [by_node(rank, 2, 6) for rank in range(6)] == [
        (0, 3),
        (1, 5),
        (2,),
        (0, 3),
        (4,),
        (1, 5),
    ]


def test_the_published_schedule_for_nodes_of_four() -> None:
    assert [by_node(rank, 0, 8) for rank in range(4)] == [(0, 4), (1,), (2, 3), (2, 3)]
    assert by_node(5, 1, 8) == (4, 5, 6, 7)
    assert [by_node(rank, 2, 8) for rank in range(4)] == [(0, 3), (1, 5), (2,), (0, 3)]


def test_shuffled_and_repeated_letters_keep_the_mean_and_the_groups_whole() -> None:
    trainers = quadratics(6, lr=0.0, offset=1.0)
    before = mean_of(trainers)
    log = Log()
    run_fleet(
        trainers, PAIRS, 40, topology=slow_net(6), assembly=logged(log),
        wrap_link=shuffled(share_twice=0.2, by_s=1.0),
    )  # fmt: skip

    torch.testing.assert_close(mean_of(trainers), before, rtol=0, atol=1e-12)
    assert all(sorted(who) == [*log.members[gid]] for gid, who in log.applied.items())


@pytest.mark.parametrize("sync", [PAIRS, RULER], ids=["tickets", "ruler"])
def test_lost_picks_of_top_k_are_asked_for_again_and_the_mean_stays(sync: SyncSpec) -> None:
    count = iter(range(1000))
    trainers = quadratics(4, lr=0.0, offset=1.0, dim=60)
    before, spread = mean_of(trainers), disagreement(trainers)
    fleet = run_fleet(
        trainers,
        replace(sync, codec=CodecSpec(name="topk", density=0.3), deadline_s=2.0),
        40,
        topology=slow_net(4),
        wrap_link=lambda link: FaultyLink(link, seed=next(count)).drop("replica", share=0.1),
    )

    torch.testing.assert_close(mean_of(trainers), before, rtol=0, atol=1e-12)
    assert disagreement(trainers) < 0.5 * spread
    assert sum(r.exchanges[0].inbox.num_asked for r in fleet.replicas.values()) > 0


def progress(sync: SyncSpec, during: Any = None, num: int = 8, until_s: float = 400) -> int:
    async def main() -> int:
        fleet = Fleet(
            sync=sync, topology=slow_net(num, rate_bps=1e6), **priced(num, uniform_time(num))
        )
        if during is not None:
            during(fleet)
        await fleet.run_for(until_s)
        return min(r.k for i, r in fleet.replicas.items() if i not in fleet.dead)

    return run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("sync", [SMART, PAIRS, RULER], ids=["4", "2", "ruler"])
def test_survivors_of_a_death_keep_their_pace(sync: SyncSpec) -> None:
    def during(fleet: Fleet) -> None:
        asyncio.get_running_loop().call_later(50, fleet.kill, 3)

    assert progress(sync, during) >= 0.95 * progress(sync)


@pytest.mark.slow
def test_the_generator_may_die_and_come_back() -> None:
    def during(fleet: Fleet) -> None:
        loop = asyncio.get_running_loop()
        assert fleet.generator is not None
        loop.call_later(50, fleet.generator.close)
        loop.call_later(80, fleet.generator.reopen)

    assert progress(SyncSpec(name="ripples", deadline_s=6.0), during) >= 0.95 * progress(SMART)


@pytest.mark.slow
def test_after_a_restart_groups_form_again() -> None:
    trainers = quadratics(6, lr=0.0, offset=1.0)
    before, spread = mean_of(trainers), disagreement(trainers)

    def during(fleet: Fleet) -> None:
        assert fleet.generator is not None
        fleet.generator.close()
        asyncio.get_running_loop().call_later(20, fleet.generator.reopen)

    fleet = run_fleet(
        trainers, SyncSpec(name="ripples", deadline_s=3.0), 60, during=during,
        topology=slow_net(6),
    )  # fmt: skip

    assert all(r.strategy.epoch == 1 for r in fleet.replicas.values())  # type: ignore[attr-defined]
    assert sum(r.strategy.num_orphaned for r in fleet.replicas.values()) > 0  # type: ignore[attr-defined]
    assert disagreement(trainers) < 1e-3 * spread
    torch.testing.assert_close(mean_of(trainers), before, rtol=0, atol=1e-12)


def windows_apart(sync: SyncSpec, num: int, compute_s: ComputeTime) -> int:
    """Windows of 16 rounds whose groups leave somebody unconnected."""
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Remembers(GroupGenerator):
        def _finish(self, gid: int, group: Any) -> None:
            seen.append((self._guard.round, group.members))
            super()._finish(gid, group)

    class Mine(Assembly):
        def make_generator(self, epoch: int) -> GroupGenerator:
            plain = super().make_generator(epoch)
            plain.__class__ = Remembers
            return plain

    async def main() -> None:
        fleet = Fleet(sync=sync, assembly=Mine, **priced(num, compute_s))
        await fleet.run_for(150)

    run_virtual(main())
    apart = 0
    for start in range(seen[-1][0] - 16):
        window = [members for rnd, members in seen if start <= rnd < start + 16]
        apart += len({*components(range(num), window).values()}) > 1
    return apart


def test_groups_of_the_last_rounds_connect_everybody_with_a_straggler() -> None:
    assert windows_apart(PAIRS, 8, uniform_time(8, "2:20x")) == 0


def test_mutant_without_the_guard_the_filter_leaves_a_straggler_apart() -> None:
    assert windows_apart(replace(PAIRS, isolation_rounds=0), 8, uniform_time(8, "2:20x")) > 5


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (SyncSpec(name="ripples", group_size=9), "group_size is 9, there are 8 replicas"),
        (SyncSpec(name="ripples", group_size=1), "set 2 to 8"),
        (SyncSpec(name="ripples", slowdown_threshold=-1), "must be 0 \\(off\\) or more"),
        (SyncSpec(name="ripples", local_steps=0), "sync.local_steps is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(sync: SyncSpec, message: str) -> None:
    with pytest.raises(SyncSpecError, match=message):
        Assembly(sync, range(8))


def letters_kept(num: int, *, dies: int | None = None, lost: float = 0.0) -> tuple[int, set[int]]:
    """Most letters that a replica keeps after 60 s, and whom they were for."""
    count = iter(range(1 << 30))

    def wrap(link: Any) -> FaultyLink:
        own = FaultyLink(link, seed=next(count))
        return own.drop(share=lost) if lost else own

    async def main() -> Fleet:
        fleet = Fleet(
            sync=replace(PAIRS, deadline_s=4.0),
            topology=slow_net(num, rate_bps=1e7),
            wrap_link=wrap,
            **priced(num, uniform_time(num)),
        )
        if dies is not None:
            asyncio.get_running_loop().call_later(30.0, fleet.kill, dies)
        await fleet.run_for(60.0)
        return fleet

    fleet = run_virtual(main())
    kept = [r.exchanges[0].inbox for i, r in fleet.replicas.items() if i != dies]
    return max(one.num_kept for one in kept), {target for one in kept for target in one._sent}


@pytest.mark.slow
def test_what_was_sent_is_kept_for_the_groups_that_run_not_for_every_peer() -> None:
    # A letter each way and piece: two in a pair, four in a group of three.
    assert letters_kept(32)[0] <= 6
    assert letters_kept(32, lost=0.01)[0] <= 10
    assert 5 not in letters_kept(16, dies=5)[1]


@pytest.mark.slow
def test_mutant_keeping_it_until_the_next_meeting_keeps_as_much_as_there_are_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Inbox, "release", lambda self, epoch, number: None)

    assert letters_kept(32)[0] > 30


def test_nobody_is_told_to_forget_a_group_that_somebody_is_still_in() -> None:
    made = GroupGenerator(group_size=2, isolation_rounds=0)
    for replica in (0, 1):
        made.register(replica)
    first = [made.request(r, number=1, counter=0, now=0.0)[0] for r in (0, 1)]
    made.done(first[0].gid, 0, number=1, ok=True, now=1.0)  # 1 still asks for what it lacks
    made.register(2)
    second = made.request(0, number=2, counter=1, now=2.0)[0]
    assert (second.members, second.over) == ((0, 2), first[0].gid)

    made.done(first[0].gid, 1, number=1, ok=True, now=3.0)
    assert made.request(0, number=2, counter=1, now=4.0)[0].over == second.gid
