"""The Group Generator alone: buffer, division, filter, guard, leases, and calls that come twice."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from stages.sync.generator import GroupGenerator
from stages.sync.isolation import IsolationGuard, components
from stages.sync.patience import Patience
from stages.sync.tickets import SOLO, Member, Notice


def generator(num: int = 8, **options: object) -> GroupGenerator:
    made = GroupGenerator(**{"group_size": 4, "threshold": 0, **options})  # type: ignore[arg-type]
    for replica in range(num):
        made.register(replica)
    return made


def ask(made: GroupGenerator, replica: int, number: int = 1, now: float = 0.0) -> list[Notice]:
    return made.request(replica, number=number, counter=number - 1, now=now)


def group_of(notices: list[Notice]) -> tuple[int, tuple[int, ...]]:
    (notice,) = [n for n in notices if n.kind == "ticket"]
    return notice.gid, notice.members


def test_the_first_who_asks_divides_all_who_are_idle() -> None:
    made = generator(8)
    groups = {group_of(ask(made, replica)) for replica in range(8)}

    assert len(groups) == 2
    assert sorted(m for _, members in groups for m in members) == list(range(8))
    assert made.stats()["groups"] == 2


def test_nobody_is_left_alone_by_a_division() -> None:
    made = generator(9)
    sizes = {len(group_of(ask(made, replica))[1]) for replica in range(9)}

    assert sizes == {4, 5}


def test_asking_again_gives_the_same_ticket_and_counts_once() -> None:
    made = generator(4)
    first = ask(made, 0)

    assert ask(made, 0) == first
    assert made.state_dict()["counters"][0] == 1


def test_repeated_requests_do_not_make_a_replica_look_fast() -> None:
    made = generator(4, threshold=2, group_size=2)
    for _ in range(5):
        ask(made, 0)

    assert made.state_dict()["counters"] == {0: 1, 1: 0, 2: 0, 3: 0}


def test_a_request_that_was_served_long_ago_is_ignored() -> None:
    made = generator(2, group_size=2)
    gid, _ = group_of(ask(made, 0))
    ask(made, 1)
    for replica in (0, 1):
        made.done(gid, replica, number=1, ok=True, now=1.0)

    assert ask(made, 0) == []


def test_slow_replicas_are_not_waited_for_but_may_ask() -> None:
    made = GroupGenerator(group_size=4, threshold=2)
    for replica, counter in ((0, 5), (1, 5), (2, 5), (3, 4)):
        made.register(replica, counter=counter, number=counter)

    assert group_of(ask(made, 0, 6))[1] == (0, 1, 2)


def test_a_slow_replica_that_asks_admits_everybody() -> None:
    made = GroupGenerator(group_size=4, threshold=2)
    for replica, counter in ((0, 9), (1, 9), (2, 9), (3, 1)):
        made.register(replica, counter=counter, number=counter)

    assert group_of(ask(made, 3, 2))[1] == (0, 1, 2, 3)


def steps_done(made: GroupGenerator, step_s: dict[int, float], until_s: float) -> Counter[int]:
    """Replicas that compute, ask, and go on as soon as their group is complete."""
    due = [(taken, replica) for replica, taken in step_s.items()]
    number, steps = dict.fromkeys(step_s, 0), Counter[int]()
    there: dict[int, set[int]] = {}
    while due:
        now, replica = heapq.heappop(due)
        if now > until_s:
            return steps
        steps[replica] += 1
        number[replica] += 1
        notices = made.request(replica, number=number[replica], counter=0, now=now)
        while notices:
            ticket = notices.pop(0)
            came = there.setdefault(ticket.gid, set())
            came.add(ticket.to)
            if came != set(ticket.members):
                continue
            for member in sorted(came):
                if ticket.gid != SOLO:
                    notices += made.done(
                        ticket.gid, member, number=number[member], ok=True, now=now
                    )
                heapq.heappush(due, (now + step_s[member], member))
            del there[ticket.gid]
    raise AssertionError("nobody goes on")


def one_behind() -> GroupGenerator:
    made = GroupGenerator(group_size=2, threshold=4, isolation_rounds=0)
    for replica, counter in ((0, 10), (1, 10), (2, 0)):
        made.register(replica, counter=counter)
    return made


def test_who_is_behind_but_as_fast_as_the_others_keeps_pace_with_them() -> None:
    steps = steps_done(one_behind(), {0: 1.0, 1: 1.0, 2: 1.0}, 40.0)

    assert steps[0] - steps[2] <= 2


def test_who_is_behind_and_slow_is_not_waited_for() -> None:
    steps = steps_done(one_behind(), {0: 1.0, 1: 1.0, 2: 4.0}, 40.0)

    assert (steps[0], steps[1]) == (40, 40)
    assert steps[2] >= 8


def test_mutant_by_counts_alone_who_is_behind_comes_at_every_second_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stages.sync.generator.SLOWER", 0.0)
    steps = steps_done(one_behind(), {0: 1.0, 1: 1.0, 2: 1.0}, 40.0)

    assert steps[2] <= 0.6 * steps[0]


def test_a_replica_that_is_all_alone_goes_on() -> None:
    assert group_of(ask(generator(1), 0)) == (SOLO, (0,))


def test_a_replica_far_ahead_of_all_others_goes_on_alone() -> None:
    made = GroupGenerator(group_size=2, threshold=2)
    for replica, counter in ((0, 9), (1, 1), (2, 1)):
        made.register(replica, counter=counter, number=counter)

    assert group_of(ask(made, 0, 10)) == (SOLO, (0,))


def test_a_parked_replica_is_served_when_another_is_done() -> None:
    made = generator(2, group_size=2)
    gid, _ = group_of(ask(made, 0))
    ask(made, 1)
    made.register(2)

    assert ask(made, 2) == []
    notices = made.done(gid, 0, number=1, ok=True, now=1.0)
    assert group_of(notices)[1] == (0, 2)


def test_a_group_whose_lease_has_run_out_goes_on_smaller_under_a_new_number() -> None:
    made = generator(4, patience=Patience(first_s=10.0))
    gid, members = group_of(ask(made, 0, now=0.0))
    for replica in (1, 2):
        ask(made, replica, now=1.0)

    assert made.expire(9.0) == []
    notices = made.expire(11.0)
    cancels = [n.to for n in notices if n.kind == "cancel"]
    tickets = {(n.gid, n.members) for n in notices if n.kind == "ticket"}
    assert (members, cancels, tickets) == ((0, 1, 2, 3), [0, 1, 2], {(gid + 1, (0, 1, 2))})


def test_a_death_voids_its_group_and_what_was_half_applied_is_counted() -> None:
    made = generator(4)
    gid, _ = group_of(ask(made, 0))
    for replica in (1, 2, 3):
        ask(made, replica)
    made.done(gid, 1, number=1, ok=True, now=1.0)
    notices = made.gone(3, now=2.0)

    assert {n.members for n in notices if n.kind == "ticket"} == {(0, 2)}
    assert made.stats()["half_applied"] == 1


def test_a_group_that_it_does_not_know_is_cancelled() -> None:
    made = generator(2, epoch=3)

    assert made.lost(17, 1, epoch=2, now=0.0) == [Notice(1, "cancel", 17)]


def test_a_request_that_comes_after_its_writer_has_left_makes_no_ghost_to_wait_for() -> None:
    made = generator(2, group_size=2)
    for replica in (0, 1):
        gid, _ = group_of(ask(made, replica))
    for replica in (0, 1):
        made.done(gid, replica, number=1, ok=True, now=1.0)
    made.leave(1, now=2.0)

    assert ask(made, 1, number=1, now=3.0) == []  # late on its way
    assert group_of(ask(made, 0, number=2, now=4.0)) == (SOLO, (0,))
    made.came(1)  # a new replica in the same place begins to count where its donor is
    assert group_of(ask(made, 1, number=1, now=5.0))[1]


def test_who_waits_in_vain_for_one_that_went_on_is_let_go_after_a_while() -> None:
    made = generator(2, group_size=2)
    gid, members = group_of(ask(made, 0))
    ask(made, 1)
    ask(made, 1, number=2, now=1.0)  # its tickets were lost: it went on alone
    assert members == (0, 1)

    # Perhaps it has applied it, and the letter is on its way: all stages complain at once.
    assert made.lost(gid, 0, epoch=0, now=2.0) == []
    assert made.lost(gid, 0, epoch=0, now=2.0) == []
    notices = made.lost(gid, 0, epoch=0, now=200.0)

    assert Notice(0, "cancel", gid) in notices


def test_a_ticket_refused_by_one_that_has_gone_on_lets_the_others_go() -> None:
    made = generator(2, group_size=2)
    gid, _ = group_of(ask(made, 0))
    ask(made, 1)
    ask(made, 1, number=2, now=1.0)
    notices = made.done(gid, 1, number=2, ok=False, now=2.0)

    assert Notice(0, "cancel", gid) in notices
    assert made.stats()["cancelled"] == 1


def test_asking_again_while_all_are_busy_is_one_conflict() -> None:
    made = generator(3, group_size=2, threshold=0)
    for replica in (0, 1):
        made.register(replica)
    made.gone(2, now=0.0)
    ask(made, 0)
    made.request(2, number=1, counter=0, now=0.1)
    made.request(2, number=1, counter=0, now=0.2)

    assert made.stats()["conflicts"] == 1


def test_its_state_comes_back_with_a_higher_epoch_and_no_groups() -> None:
    made = generator(4)
    ask(made, 0)
    other = GroupGenerator()
    other.load_state_dict(made.state_dict())

    assert other.epoch == 1
    assert other.state_dict()["counters"] == made.state_dict()["counters"]
    assert group_of(ask(other, 2, number=1))[0] == 0


def two_cliques(made: GroupGenerator, num_turns: int) -> list[tuple[int, ...]]:
    """Pairs (0, 1) and (2, 3) ask only while the other pair is busy: they never meet by chance."""
    done: list[tuple[int, ...]] = []
    number = dict.fromkeys(range(4), 0)
    ticket: dict[int, tuple[int, tuple[int, ...]]] = {}
    asked: set[int] = set()

    def hear(notices: list[Notice]) -> None:
        for notice in notices:
            ticket[notice.to] = (notice.gid, notice.members)

    for turn in range(num_turns):
        mine = (0, 1) if turn % 2 == 0 else (2, 3)
        for replica in mine:
            made.register(replica)
        for replica in mine:
            if replica not in ticket and replica not in asked:
                number[replica] += 1
                asked.add(replica)
                hear(made.request(replica, number=number[replica], counter=0, now=0.0))
        for gid, members in sorted({*ticket.values()}):
            whole = all(ticket.get(member, (None,))[0] == gid for member in members)
            if whole and {*members} != {*mine}:
                done.append(members)
                for member in members:
                    del ticket[member]
                    asked.discard(member)
                    hear(made.done(gid, member, number=number[member], ok=True, now=0.0))
    return done


def test_the_isolation_guard_bridges_what_would_stay_apart() -> None:
    made = generator(0, group_size=2, isolation_rounds=6)
    done = two_cliques(made, 100)

    assert len(done) > 60
    for start in range(len(done) - 24):
        assert len({*components(range(4), done[start : start + 24]).values()}) == 1
    assert made.stats()["bridges"] > 3


def test_mutant_without_the_guard_they_stay_apart() -> None:
    done = two_cliques(generator(0, group_size=2, isolation_rounds=0), 100)

    assert {*done} == {(0, 1), (2, 3)}


class Counted(dict[int, Member]):
    """Members; counts how often somebody goes through all of them."""

    num_looks = 0

    def items(self) -> Any:
        self.num_looks += 1
        return super().items()


def looks_at_everybody(num: int, *, rounds: int = 6) -> int:
    made = generator(num)
    made._members = members = Counted(made._members)
    for number in range(1, rounds + 1):
        for replica in range(num):
            for notice in ask(made, replica, number, now=float(number)):
                if notice.gid != SOLO:
                    made.done(notice.gid, notice.to, number=number, ok=True, now=float(number))
    return members.num_looks


def test_the_guard_looks_at_everybody_once_a_round_not_for_each_who_asks() -> None:
    assert looks_at_everybody(40) == looks_at_everybody(160) <= 7


def test_mutant_a_guard_that_looks_for_each_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IsolationGuard, "asked", lambda self, num_replicas: True)

    assert looks_at_everybody(160) > 900


def test_components_are_named_by_their_smallest_member() -> None:
    assert components(range(6), [(0, 1), (4, 5), (1, 2)]) == {0: 0, 1: 0, 2: 0, 3: 3, 4: 4, 5: 4}


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(2, 9),
    st.integers(2, 5),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_no_replica_is_ever_in_two_groups_and_all_come_to_an_end(
    num: int, size: int, threshold: int, seed: int
) -> None:
    """Replicas in any order, letters doubled: disjoint groups, and nobody waits for ever."""
    source = random.Random(seed)
    made = GroupGenerator(group_size=size, threshold=threshold, isolation_rounds=4, seed=seed)
    for replica in range(num):
        made.register(replica)
    number = dict.fromkeys(range(num), 0)
    ticket: dict[int, tuple[int, tuple[int, ...]]] = {}
    asked: set[int] = set()
    applied = {}

    def hear(notices: list[Notice]) -> None:
        for notice in notices:
            assert notice.kind == "ticket"
            if notice.request == number[notice.to] and notice.to in asked:
                ticket[notice.to] = (notice.gid, notice.members)

    for _ in range(60 * num):
        replica = source.randrange(num)
        if replica not in asked:
            number[replica] += 1
            asked.add(replica)
        if replica not in ticket:
            for _ in range(1 + (source.random() < 0.3)):
                hear(made.request(replica, number=number[replica], counter=0, now=0.0))
        for member, (gid, members) in list(ticket.items()):
            if gid == SOLO:
                del ticket[member]
                asked.discard(member)
            elif all(ticket.get(m, (None,))[0] == gid for m in members):
                for m in members:
                    applied[gid] = applied.get(gid, 0) + 1
                    del ticket[m]
                    asked.discard(m)
                    for _ in range(1 + (source.random() < 0.3)):
                        hear(made.done(gid, m, number=number[m], ok=True, now=0.0))
                assert applied[gid] == len(members)

    assert min(number.values()) > 3


def test_impossible_patience_is_refused() -> None:
    with pytest.raises(ValueError, match="window of 4 or more"):
        GroupGenerator(patience=Patience(window=1))
