"""The Group Generator of Ripples: who averages with whom, so that nobody is in two groups at once.

A plain class without tensors and without a clock: it is told the time and returns what to tell
whom. One place orders all groups, and only replicas without a pending group are put into one, so
groups are disjoint and nobody waits in a circle.

    Group Buffer      a replica that is in a group already gets that one
    Group Division    else all idle replicas are divided, not only those who ask
    slowdown filter   without those who are `threshold` requests behind the one who asks and take
                      longer for a step and for sending than it; a slow one who asks admits
                      everybody, for it is there and nobody waits for it
    isolation guard   groups of the last rounds must connect all; if not, the next one is a bridge
    lease             a group that is not complete in time is cancelled, those who came go on; who
                      did not come is in no group and not missed by the guard until it asks: it may
                      have stopped, and everybody would wait for it in turn

It may be restarted empty: requests register whoever it does not know, and a higher epoch voids
the tickets of its former life.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from stages.sync.isolation import IsolationGuard
from stages.sync.patience import Patience
from stages.sync.tickets import SOLO, Group, Member, Notice

SLOWER = 1.5
"""So much longer are the steps of a slow one. Who only is behind waited for others: left out for
it, it would ask when the others have just gone on, and come at every second turn for ever."""

BRIDGE_LEASES = 8
"""A bridge is waited for so much longer: it is there to reach the slow."""

HELD_LEASES = 2
"""So long the guard holds a replica until somebody is free whom it is apart from. Groups are over
sooner, but for one that waits for letters which were lost."""


class GroupGenerator:
    """Decisions are serialised by being calls; every call may be repeated without harm."""

    def __init__(
        self,
        *,
        group_size: int = 4,
        threshold: int = 4,
        isolation_rounds: int = 16,
        seed: int = 0,
        epoch: int = 0,
        patience: Patience | None = None,
    ) -> None:
        """`threshold` 0 turns the filter off, `isolation_rounds` 0 the guard."""
        self.epoch = epoch
        self.group_size = group_size
        self.threshold = threshold
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed * 7919 + epoch)
        self._patience = patience or Patience()
        self._members: dict[int, Member] = {}
        self._idle: dict[int, None] = {}  # in order of becoming idle
        self._parked: dict[int, None] = {}  # have asked and wait until somebody else is idle
        self._groups: dict[int, Group] = {}
        self._left: dict[int, int] = {}  # who has run its last step, and its last request
        self._num_late = 0  # members who let a lease run out and have not asked since
        self._next_gid = 0
        self._guard = IsolationGuard(isolation_rounds)

    # --- calls -----------------------------------------------------------------------------------

    def register(self, replica: int, *, counter: int = 0, number: int = 0) -> None:
        """A replica exists; it may be put into groups before it asks for one."""
        if replica not in self._members:
            unfinished = {gid for gid, g in self._groups.items() if replica in g.members}
            self._members[replica] = Member(
                counter=counter, request=number, satisfied=number, unfinished=unfinished
            )
            self._idle[replica] = None

    def request(self, replica: int, *, number: int, counter: int, now: float) -> list[Notice]:
        """A replica is at its synchronisation point and wants a group.

        `number` rises with each point; asking again with the same number changes nothing.
        """
        if number <= self._left.get(replica, -1):
            return []  # written before it left: nobody must wait for it
        self.register(replica, counter=counter, number=number - 1)
        member = self._members[replica]
        if number < member.request or number <= member.satisfied:
            return []
        if number > member.request:
            member.request = number
            member.counter += 1
            self._num_late -= member.is_late
            member.is_late = False
            if member.free_s is not None:
                member.steps_s.append(now - member.free_s)
                member.step_s, member.free_s = statistics.median(member.steps_s), None
            if self._guard.asked(len(self._members) - self._num_late):
                # Once a round: a look at everybody for each who asks would take n^2 a round.
                self._guard.judge([r for r, other in self._members.items() if not other.is_late])
            if member.group is not None and replica in self._groups[member.group].arrived:
                self._leave_group(replica, member)  # it went on without telling
        return self._serve(replica, now)

    def done(
        self, gid: int, replica: int, *, number: int, ok: bool, now: float, sent_s: float = 0.0
    ) -> list[Notice]:
        """A replica has applied the result of its group, for which its own letters took `sent_s`;
        or, not `ok`, will take no part in it."""
        member, group = self._members.get(replica), self._groups.get(gid)
        if not ok:
            if group is None or replica not in group.members:
                return []
            group.done -= group.assumed & {replica}  # it went on, and not with this group
            if replica in group.done:
                return []
            if member is not None and member.group == gid:
                self._release(replica, member)
            return self._cancel(gid, now=now, but=replica)
        if member is None:
            return []
        member.satisfied = max(member.satisfied, number)
        if group is None or replica not in group.members or member.group != gid:
            return []
        group.done.add(replica)
        member.free_s = now - sent_s
        self._release(replica, member)
        if len(group.done) == len(group.members):
            self._finish(gid, group)
        return self._serve_parked(now)

    def lost(self, gid: int, replica: int, *, epoch: int, now: float) -> list[Notice]:
        """A replica waits in vain in this group: does it exist at all?"""
        group = self._groups.get(gid)
        if epoch != self.epoch or group is None:
            return [Notice(replica, "cancel", gid)]
        if group.assumed:
            # What it lacks may be on its way: it has asked for it again.
            first_s = group.missed.setdefault(replica, now)
            if now - first_s > self._patience.limit_s / 2:
                return self._cancel(gid, now=now)
        return self.expire(now)

    def leave(self, replica: int, *, now: float) -> list[Notice]:
        """A replica has run its last step. Whatever group it came to, it has applied."""
        member = self._members.get(replica)
        gid = None if member is None else member.group
        if member is not None:
            self._left[replica] = member.request
            if gid is not None and replica in self._groups[gid].arrived:
                self._leave_group(replica, member)
        return self.gone(replica, now=now) + self._serve_parked(now)

    def came(self, replica: int) -> None:
        """A replica is new, whatever its place was before; it will ask."""
        self._left.pop(replica, None)

    def gone(self, replica: int, *, now: float) -> list[Notice]:
        """A replica is dead; its group goes on without it."""
        member = self._members.pop(replica, None)
        self._idle.pop(replica, None)
        self._parked.pop(replica, None)
        self._guard.forget(replica)
        self._num_late -= member is not None and member.is_late
        if member is None or member.group is None:
            return []
        return self._cancel(member.group, now=now, but=replica)

    def expire(self, now: float) -> list[Notice]:
        """Cancel groups whose lease has run out."""
        limit_s = self._patience.limit_s
        late = [
            gid
            for gid, group in self._groups.items()
            if group.arrived
            and not group.is_complete
            and now - min(group.arrived.values())
            > limit_s * (BRIDGE_LEASES if group.is_bridge else 1)
        ]
        notices: list[Notice] = []
        for gid in late:
            if gid in self._groups:
                group = self._groups[gid]
                if not group.is_bridge:
                    self._patience.gave_up()
                self._mark_late(set(group.members) - group.arrived.keys())
                notices += self._cancel(gid, now=now)
        return notices

    def _mark_late(self, replicas: Iterable[int]) -> None:
        for replica in replicas:
            self._num_late += not self._members[replica].is_late
            self._members[replica].is_late = True
            self._guard.forget(replica)

    def stats(self) -> dict[str, float]:
        return {name: float(count) for name, count in sorted(self.counts.items())}

    def state_dict(self) -> dict[str, Any]:
        """Counters only: groups do not outlive a restart, the higher epoch voids them."""
        return {
            "epoch": self.epoch,
            "counters": {r: m.counter for r, m in self._members.items()},
            "requests": {r: m.request for r, m in self._members.items()},
            "random": self._random.getstate(),
            "patience": self._patience.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = int(state["epoch"]) + 1
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))
        self._patience.load_state_dict(state["patience"])
        self._groups = {}
        self._members = {
            int(r): Member(
                counter=int(counter),
                request=int(state["requests"][r]),
                satisfied=int(state["requests"][r]),
            )
            for r, counter in state["counters"].items()
        }
        self._num_late = 0
        self._idle = dict.fromkeys(sorted(self._members))
        self._parked = {}

    # --- groups ----------------------------------------------------------------------------------

    def _serve(self, replica: int, now: float) -> list[Notice]:
        member = self._members[replica]
        if member.group is None and self._guard.must_wait(replica, self._idle):
            member.held_s = now if member.held_s is None else member.held_s
            if now - member.held_s <= HELD_LEASES * self._patience.limit_s:
                self._parked[replica] = None
                return []
            self._mark_late(self._guard.apart_from(replica))
        member.held_s = None
        if member.group is None and not self._divide(replica):
            return self._solo_or_park(replica, member, now)
        assert member.group is not None
        return self._arrive(replica, member.group, now)

    def _arrive(self, replica: int, gid: int, now: float) -> list[Notice]:
        group = self._groups[gid]
        self._parked.pop(replica, None)
        if replica not in group.arrived:
            group.arrived[replica] = now
            if group.is_complete:
                self._patience.saw(now - min(group.arrived.values()))
        return [self._ticket(replica, gid)]

    def _ticket(self, replica: int, gid: int) -> Notice:
        return Notice(
            replica,
            "ticket",
            gid,
            members=self._groups[gid].members,
            request=self._members[replica].request,
            deadline_s=self._patience.limit_s,
            over=min(self._members[replica].unfinished),
        )

    def _divide(self, initiator: int) -> bool:
        """Put all idle replicas into groups; False if the initiator finds nobody."""
        member = self._members[initiator]
        others = [
            w for w in self._idle if w != initiator and not self._is_slow(self._members[w], member)
        ]
        bridge = self._guard.bridge(initiator, self._idle)
        self.counts["bridges"] += bool(bridge)
        others = [w for w in others if w not in bridge]
        if not others and not bridge:
            return False
        self._random.shuffle(others)
        first = max(0, self.group_size - 1 - len(bridge))
        groups = [[initiator, *bridge, *others[:first]]]
        rest = others[first:]
        size = self.group_size
        groups += [rest[start : start + size] for start in range(0, len(rest), size)]
        if len(groups[-1]) == 1:  # nobody is left alone
            alone = groups.pop()
            groups[-1].extend(alone)
        for members in groups:
            self._open(members, is_bridge=bool(bridge) and initiator in members)
        return True

    def _is_slow(self, other: Member, member: Member) -> bool:
        """Whether `member` had better not wait for the other one."""
        if other.is_late:
            return True
        if not self.threshold or member.counter - other.counter < self.threshold:
            return False
        if other.step_s is None or member.step_s is None:
            return True
        return other.step_s > SLOWER * member.step_s

    def _open(self, members: Iterable[int], *, is_bridge: bool = False) -> int:
        gid, self._next_gid = self._next_gid, self._next_gid + 1
        group = self._groups[gid] = Group(tuple(sorted(members)), is_bridge=is_bridge)
        for replica in group.members:
            self._members[replica].group = gid
            self._members[replica].unfinished.add(gid)
            self._idle.pop(replica, None)
        self.counts["groups"] += 1
        return gid

    def _solo_or_park(self, replica: int, member: Member, now: float) -> list[Notice]:
        """Alone: wait for somebody who is busy now and not slow; if there is none, go on."""
        can_wait = any(
            other is not member and other.group is not None and not self._is_slow(other, member)
            for other in self._members.values()
        )
        if can_wait:
            self.counts["conflicts"] += replica not in self._parked  # it may only be asking again
            self._parked[replica] = None
            return []
        self.counts["solo"] += 1
        member.free_s = now
        return [Notice(replica, "ticket", SOLO, members=(replica,), request=member.request)]

    def _serve_parked(self, now: float) -> list[Notice]:
        notices: list[Notice] = []
        for replica in list(self._parked):
            if replica not in self._parked:
                continue  # served together with an earlier one
            gid = self._members[replica].group
            if gid is not None:
                notices += self._arrive(replica, gid, now)
            elif not self._guard.must_wait(replica, self._idle) and self._divide(replica):
                notices += self._serve(replica, now)
        return notices

    def _release(self, replica: int, member: Member) -> None:
        member.group = None
        self._idle[replica] = None

    def _leave_group(self, replica: int, member: Member) -> None:
        assert member.group is not None
        group = self._groups[member.group]
        group.done.add(replica)
        group.assumed.add(replica)
        if len(group.done) == len(group.members):
            self._finish(member.group, group)
        self._release(replica, member)

    def _finish(self, gid: int, group: Group) -> None:
        del self._groups[gid]
        self._end(gid, group)
        self._guard.met(group.members)

    def _end(self, gid: int, group: Group) -> None:
        for replica in group.members:
            if replica in self._members:
                self._members[replica].unfinished.discard(gid)

    def _cancel(self, gid: int, *, now: float, but: int | None = None) -> list[Notice]:
        """Void a group. Those who came get a smaller one; the others ask again."""
        group = self._groups.pop(gid)
        self._end(gid, group)
        self.counts["cancelled"] += 1
        if group.done:
            self.counts["half_applied"] += 1
        there = [r for r in group.arrived if r not in group.done and r != but]
        there = [r for r in there if r in self._members]
        for replica in group.members:
            member = self._members.get(replica)
            if member is not None and member.group == gid:
                self._release(replica, member)
        notices = [Notice(replica, "cancel", gid) for replica in there]
        if len(there) > 1:
            fresh = self._open(there)
            for replica in there:
                notices += self._arrive(replica, fresh, now)
        elif there:
            self._parked[there[0]] = None
        return notices + self._serve_parked(now)
