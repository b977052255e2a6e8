"""Who may go when, properties 3, 8 and 13 of the replica spec: each with mutants that break it.

A property is a function that asserts; the code as it is passes, and each mutant fails it for the
reason that the message names. Properties 1, 2, 4, 9 and 12 are in test_hop, 6 in test_mixing, 10 in
test_generator, 11 in test_ripples, and 5, 7 and 14 to 17 in test_sync_means.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

from netsim.clock import Deadlock, VirtualTimeout, run_virtual
from stages.sync.fleet import Fleet
from stages.sync.generator import GroupGenerator
from stages.sync.hop import Hop
from stages.sync.mixing import ring_based
from stages.sync.patience import Patience
from stages.sync.post import Inbox
from stages.sync.ripples import Ripples, StaticRipples
from stages.sync.strategies import Assembly, SyncSpec
from stages.sync.strategy import SyncTimeout
from stages.sync.updates import Updates
from tests.unit.fleets import priced, quadratics, run_fleet, shuffled, slow_net, uniform_time
from tests.unit.test_hop import MODES, run_hop, violations

NEVER_LATE = 1e6
PAIRS = SyncSpec(name="ripples", group_size=2, deadline_s=NEVER_LATE)
STUCK = (Deadlock, SyncTimeout, VirtualTimeout)


def with_generator(kind: type[GroupGenerator]) -> type[Assembly]:
    """An assembly whose Group Generator may be a mutant, and in which no lease ever ends."""

    class Mine(Assembly):
        def make_generator(self, epoch: int) -> GroupGenerator:
            made = kind(
                group_size=self.spec.group_size,
                threshold=0,
                isolation_rounds=0,
                seed=self.spec.seed,
                epoch=epoch,
                patience=Patience(first_s=NEVER_LATE, floor_s=NEVER_LATE),
            )
            for member in self.members:
                made.register(member)
            return made

    return Mine


# --- 3: when nothing can happen any more, all are done ------------------------------------------


def assert_nobody_is_stuck(kind: type[GroupGenerator], seed: int) -> None:
    """Between 100 s and 300 s everybody gets on, however slow."""
    num = 8
    at: list[list[int]] = []

    async def main() -> None:
        fleet = Fleet(
            sync=SyncSpec(name="ripples", group_size=3, deadline_s=NEVER_LATE, seed=seed),
            topology=slow_net(num, rate_bps=1e6),
            assembly=with_generator(kind),
            **priced(num, uniform_time(num, "1:4x,5:6x,random:6x@0.06", seed=seed)),
        )
        asyncio.get_running_loop().call_later(
            100, lambda: at.append([r.k for r in fleet.replicas.values()])
        )
        await fleet.run_for(300)
        at.append([r.k for r in fleet.replicas.values()])

    run_virtual(main())
    stuck = [r for r, (before, after) in enumerate(zip(at[0], at[-1])) if before == after]
    assert not stuck, f"replicas {stuck} wait in a circle"


class Queues(GroupGenerator):
    """Puts anybody into a group, busy or not; whoever has several executes the oldest first."""

    newest_first = False

    def _divide(self, initiator: int) -> bool:
        others = [w for w in self._members if w != initiator]
        self._random.shuffle(others)
        self._open([initiator, *others[: self.group_size - 1]])
        return True

    def _open(self, members: Any, *, is_bridge: bool = False) -> int:
        held = {m: self._members[m].group for m in members}
        gid = super()._open(members, is_bridge=is_bridge)
        self.queues: dict[int, list[int]] = getattr(self, "queues", {})
        for member, old in held.items():
            if old is not None:
                queue = self.queues.setdefault(member, [])
                self._members[member].group = gid if self.newest_first else old
                queue.append(old if self.newest_first else gid)
        return gid

    def _release(self, replica: int, member: Any) -> None:
        super()._release(replica, member)
        queue = getattr(self, "queues", {}).get(replica)
        if queue:
            member.group = queue.pop() if self.newest_first else queue.pop(0)
            self._idle.pop(replica, None)


class Overtakes(Queues):
    """The newest first: a group overtakes a pending one that shares a member."""

    newest_first = True


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GroupGenerator, Queues], ids=["ours", "in order"])
def test_3_nobody_waits_in_a_circle(kind: type[GroupGenerator]) -> None:
    for seed in range(20):
        assert_nobody_is_stuck(kind, seed)


@pytest.mark.parametrize("seed", range(20))
def test_3_mutant_a_group_that_overtakes_a_pending_one_deadlocks(seed: int) -> None:
    with pytest.raises(AssertionError, match="wait in a circle"):
        assert_nobody_is_stuck(Overtakes, seed)


class Locks:
    """A lock vector over all replicas; `fair` grants no group while a member owes an older one."""

    def __init__(self, *, fair: bool) -> None:
        self.fair = fair
        self.held: dict[int, int] = {}
        self.open: dict[tuple[int, tuple[int, ...]], set[int]] = {}
        self.step: Counter[int] = Counter()
        self.freed = asyncio.Event()

    def is_granted(self, k: int, members: tuple[int, ...]) -> bool:
        if (k, members) in self.open:
            return True
        if any(member in self.held for member in members):
            return False
        if self.fair and any(self.step[member] < k for member in members):
            return False
        self.held.update(dict.fromkeys(members, k))
        self.open[k, members] = set(members)
        return True

    def done(self, k: int, members: tuple[int, ...], who: int) -> None:
        left = self.open[k, members]
        left.discard(who)
        if not left:
            for member in members:
                del self.held[member]
            self.freed.set()


def run_static_under_locks(*, fair: bool, seed: int) -> None:
    locks: list[Locks] = []

    class Locked(StaticRipples):
        async def plan(self, k: int) -> Any:
            plan = await super().plan(k)
            locks[0].step[self._post.replica] = k
            locks[0].freed.set()
            while plan.op == "reduce" and not locks[0].is_granted(k, plan.peers):
                locks[0].freed.clear()
                await locks[0].freed.wait()
            return plan

        def finished(self, plan: Any, results: Any) -> None:
            super().finished(plan, results)
            locks[0].done(plan.number, plan.peers, self._post.replica)

    class Mine(Assembly):
        def strategy(self, post: Any, exchanges: Any) -> Any:
            if not locks:
                locks.append(Locks(fair=fair))
            patience = Patience(first_s=NEVER_LATE, floor_s=NEVER_LATE)
            return Locked(post=post, exchanges=exchanges, members=self.members, patience=patience)

    options = priced(8, uniform_time(8, "1:4x,5:6x", seed=seed))
    run_fleet(
        options.pop("trainers"), SyncSpec(name="ripples", groups="ruler"), 40,
        assembly=Mine, limit_s=1e5, **options,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_3_mutant_static_groups_under_a_lock_vector_deadlock(seed: int) -> None:
    run_static_under_locks(fair=True, seed=seed)
    with pytest.raises(STUCK):
        run_static_under_locks(fair=False, seed=seed)


# --- 8: nobody in two groups; every group once, by exactly its members ----------------------------


def assert_groups_are_whole(kind: type[GroupGenerator], seed: int, seconds: float = 60) -> None:
    """Watches tickets and results from outside, and judges groups that had time to end."""
    running: dict[int, int] = {}
    applied: dict[int, list[int]] = defaultdict(list)
    members: dict[int, tuple[int, ...]] = {}
    begun: dict[int, float] = {}
    twice: list[tuple[int, int, int]] = []

    class Watched(Ripples):
        def _on_ticket(self, header: Any, packet: Any) -> None:
            me = self._post.replica
            if running.get(me, header.step) != header.step:
                twice.append((me, running[me], header.step))
            if header.step >= 0:
                running[me] = header.step
                members[header.step] = tuple(header.body["members"])
                begun.setdefault(header.step, asyncio.get_running_loop().time())
            super()._on_ticket(header, packet)

        def finished(self, plan: Any, results: Any) -> None:
            running.pop(self._post.replica, None)
            applied[plan.number].append(self._post.replica)
            super().finished(plan, results)

    class Mine(with_generator(kind)):  # type: ignore[misc]
        def strategy(self, post: Any, exchanges: Any) -> Any:
            patience = Patience(first_s=NEVER_LATE, floor_s=NEVER_LATE)
            return Watched(post=post, exchanges=exchanges, patience=patience)

    async def main() -> None:
        compute_s = uniform_time(8, "2:4x,random:6x@0.1", seed=seed)
        fleet = Fleet(
            sync=SyncSpec(name="ripples", group_size=3, seed=seed),
            topology=slow_net(8, rate_bps=1e6),
            assembly=Mine,
            **priced(8, compute_s),
        )
        await fleet.run_for(seconds)

    run_virtual(main())
    assert not twice, f"(replica, its group, another ticket): {twice[:3]}"
    old = [gid for gid, start in begun.items() if start < seconds - 30]
    torn = {g: applied[g] for g in old if sorted(applied[g]) != [*members[g]]}
    assert not torn, f"groups not executed once by each of their members: {torn}"
    assert len(old) > 20


@pytest.mark.parametrize("seed", range(20))
def test_8_nobody_is_in_two_groups_and_each_is_executed_once_by_its_members(seed: int) -> None:
    assert_groups_are_whole(GroupGenerator, seed)


class FreesAtTheFirstTicket(GroupGenerator):
    """Frees every member when the first gets its ticket; none has applied anything by then."""

    def _arrive(self, replica: int, gid: int, now: float) -> Any:
        notices = super()._arrive(replica, gid, now)
        for other in self._groups[gid].members:
            self._release(other, self._members[other])
        return notices


class IgnoresLocks(GroupGenerator):
    """Divides all, not only those without a group."""

    def _divide(self, initiator: int) -> bool:
        self._idle = dict.fromkeys(self._members)
        return super()._divide(initiator)


@pytest.mark.parametrize("mutant", [FreesAtTheFirstTicket, IgnoresLocks])
@pytest.mark.parametrize("seed", range(4))
def test_8_mutant_locks_freed_before_all_have_applied(
    mutant: type[GroupGenerator], seed: int
) -> None:
    with pytest.raises(AssertionError, match="not executed once by each"):
        assert_groups_are_whole(mutant, seed)


class FreesAtTheFirstResult(GroupGenerator):
    """Frees every member when the first has applied: not a mutant, all have begun by then."""

    def done(self, gid: int, replica: int, **options: Any) -> Any:
        group = self._groups.get(gid)
        for other in group.members if group is not None else ():
            if self._members[other].group == gid and other != replica:
                self._release(other, self._members[other])
        return super().done(gid, replica, **options)


def test_8_a_result_at_one_member_is_proof_that_all_have_begun() -> None:
    """Whoever has begun asks for its next group only after this one, so order is kept."""
    for seed in range(4):
        assert_groups_are_whole(FreesAtTheFirstResult, seed)


# --- 13: letters in any order, some of them twice -------------------------------------------------


def assert_order_changes_nothing(name: str) -> None:
    """Up to 50 letters of a replica overtake each other, one in a hundred comes twice."""
    sync = SyncSpec(name=name, graph="complete", deadline_s=NEVER_LATE)
    expected = quadratics(6, spread=1.0)
    run_fleet(expected, sync, 12, topology=slow_net(6))
    trainers = quadratics(6, spread=1.0)
    try:
        run_fleet(
            trainers, sync, 12, topology=slow_net(6), limit_s=1e5,
            wrap_link=shuffled(share_twice=0.01, by_s=10.0),
        )  # fmt: skip
    except STUCK as error:
        raise AssertionError(f"{name} hangs: {error}") from error
    assert all(torch.equal(a.x, b.x) for a, b in zip(trainers, expected)), f"{name} is changed"


@pytest.mark.parametrize("name", ["allreduce", "local", "hop"])
def test_13_letters_out_of_order_change_nothing(name: str) -> None:
    assert_order_changes_nothing(name)


def test_13_mutant_an_inbox_that_trusts_the_order_of_calls(monkeypatch: Any) -> None:
    """The n-th letter of a kind from a sender is taken for that of its n-th exchange."""
    right = Inbox._put

    def in_order(self: Inbox, header: Any, packet: Any) -> None:
        seen = self.__dict__.setdefault("seen", Counter())
        key = (header.body["op"], header.micro_batch, header.replica)
        header = header.__class__(**{**_fields(header), "step": seen[key]})
        seen[key] += 1
        right(self, header, packet)

    monkeypatch.setattr(Inbox, "_put", in_order)
    run_fleet(quadratics(3), SyncSpec(), 4)  # as long as letters come in order all is well
    with pytest.raises(AssertionError, match=r"allreduce (hangs|is changed)"):
        assert_order_changes_nothing("allreduce")


def test_13_mutant_a_mailbox_that_trusts_the_order_of_calls(monkeypatch: Any) -> None:
    right = Updates._take_in

    async def in_order(self: Updates, header: Any, packet: Any) -> None:
        seen = self.__dict__.setdefault("seen", Counter())
        body = {**header.body, "last": seen[header.replica] - 1}
        header = header.__class__(**{**_fields(header), "step": seen[header.replica], "body": body})
        seen[header.replica] += 1
        await right(self, header, packet)

    monkeypatch.setattr(Updates, "_take_in", in_order)
    run_fleet(quadratics(3), SyncSpec(name="hop", graph="complete"), 4)
    with pytest.raises(AssertionError, match=r"hop (hangs|is changed)"):
        assert_order_changes_nothing("hop")


def _fields(header: Any) -> dict[str, Any]:
    return {name: getattr(header, name) for name in header.__dataclass_fields__}


class CountsTokens(Hop):
    """A letter is a token, whatever it says: one that comes twice counts twice."""

    def _on_token(self, header: Any, packet: Any) -> None:
        count = self._entered.get(header.replica, 0)
        first = header.replica not in self.__dict__.setdefault("greeted", set())
        self.greeted.add(header.replica)
        self._entered[header.replica] = count + (not first)
        self._changed.set()


def assert_gaps_hold(kind: type[Hop], **options: Any) -> None:
    graph, sync = ring_based(8), MODES["backup"]
    _, watch = run_hop(graph, sync, 120, slow="random:6x@0.1", kind=kind, **options)
    broken = violations(graph, sync, watch)
    assert not broken, f"{len(broken)} pairs further apart than their bound"


def test_13_tokens_that_come_twice_or_late_hold_the_bounds() -> None:
    assert_gaps_hold(Hop, wrap_link=shuffled(share_twice=0.1, by_s=0.5))


@pytest.mark.slow
def test_13_mutant_counted_tokens_break_the_bounds() -> None:
    assert_gaps_hold(CountsTokens)  # as long as each comes once
    with pytest.raises(AssertionError, match="pairs further apart than their bound"):
        assert_gaps_hold(CountsTokens, wrap_link=shuffled(share_twice=0.1, by_s=0.5))


def assert_requests_count_once(kind: type[GroupGenerator]) -> None:
    """Every synchronisation point of a replica is one request, however often its letter comes."""
    options = priced(6, uniform_time(6))

    async def main() -> tuple[GroupGenerator, dict[int, int]]:
        fleet = Fleet(
            sync=PAIRS, topology=slow_net(6, rate_bps=1e6), assembly=with_generator(kind),
            wrap_link=shuffled(share_twice=0.1, by_s=0.5), **options,
        )  # fmt: skip
        await fleet.run_for(60)
        assert fleet.generator is not None
        asked = {i: r.strategy._request for i, r in fleet.replicas.items()}  # type: ignore[attr-defined]
        return fleet.generator.generator, asked

    generator, asked = run_virtual(main())
    counters, num_torn = generator.state_dict()["counters"], generator.counts["cancelled"]
    assert not num_torn, f"{num_torn} groups were torn, and nobody was slow or dead"
    more = {r: (counters[r], asked[r]) for r in asked if counters[r] > asked[r]}
    assert not more, f"(counted, asked): {more}"
    assert min(asked.values()) > 20, f"replicas are stuck: {asked}"


class EveryLetterIsARequest(GroupGenerator):
    def request(self, replica: int, *, number: int, counter: int, now: float) -> Any:
        self._members[replica].counter += number == self._members[replica].request
        return super().request(replica, number=number, counter=counter, now=now)


class EveryLetterIsAGroup(GroupGenerator):
    """A repeated request leaves the group that it has and gets another."""

    def request(self, replica: int, *, number: int, counter: int, now: float) -> Any:
        member = self._members[replica]
        if number == member.request and member.group is not None:
            self._release(replica, member)
        return super().request(replica, number=number, counter=counter, now=now)


def test_13_requests_that_come_twice_count_once() -> None:
    assert_requests_count_once(GroupGenerator)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [(EveryLetterIsARequest, r"\(counted, asked\)"), (EveryLetterIsAGroup, "groups were torn")],
)
def test_13_mutant_requests_that_are_not_idempotent(
    mutant: type[GroupGenerator], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_requests_count_once(mutant)
