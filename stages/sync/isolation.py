"""The isolation guard: groups of the last rounds must connect all replicas.

Small groups that never meet train apart, and a filter that avoids the slow may starve their data.
Once a round (as many requests as there are replicas) the guard joins the groups of the last
rounds; replicas that are apart get a bridge: the next group of one part takes in one of the other,
slow or not, and waits until such a one is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable


class IsolationGuard:
    """Watches groups as they finish; 0 `rounds` turns it off."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._recent: deque[tuple[int, tuple[int, ...]]] = deque()
        self._num_requests = 0
        self._num_replicas = 1
        self._part_of: dict[int, int] = {}
        """The component of each replica, while they are apart."""

    @property
    def round(self) -> int:
        return self._num_requests // self._num_replicas

    def asked(self, num_replicas: int) -> bool:
        """One of so many wants a group; whether it is time to `judge`, which is once a round."""
        before = self.round
        self._num_requests += 1
        self._num_replicas = max(1, num_replicas)
        return bool(self.rounds) and self.round != before

    def judge(self, replicas: Collection[int]) -> None:
        """See whether the groups of the last rounds connect all of them."""
        # Half the window is left for the bridge to be built and crossed.
        oldest = self.round - max(1, self.rounds // 2)
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        if oldest >= 0:
            parts = components(replicas, (members for _, members in self._recent))
            self._part_of = parts if len(set(parts.values())) > 1 else {}

    def met(self, members: tuple[int, ...]) -> None:
        """A group was executed by all its members."""
        if self.rounds:
            self._recent.append((self.round, members))

    def forget(self, replica: int) -> None:
        """A replica is gone."""
        self._part_of.pop(replica, None)

    def must_wait(self, initiator: int, idle: Collection[int]) -> bool:
        """Everybody whom the initiator is apart from is busy: it waits for one of them."""
        others = self.apart_from(initiator)
        return bool(others) and not any(replica in idle for replica in others)

    def apart_from(self, replica: int) -> list[int]:
        """Those whom no group of the last rounds connects it with."""
        own = self._part_of.get(replica)
        return [] if own is None else [r for r, part in self._part_of.items() if part != own]

    def bridge(self, initiator: int, idle: Iterable[int]) -> list[int]:
        """One idle replica of each part that the initiator's is apart from, if any."""
        own = self._part_of.get(initiator)
        if own is None:
            return []
        found: dict[int, int] = {}
        for replica in idle:
            part = self._part_of.get(replica, own)
            if part != own:
                found.setdefault(part, replica)
        self._part_of = {r: own if part in found else part for r, part in self._part_of.items()}
        return list(found.values())


def components(replicas: Iterable[int], groups: Iterable[tuple[int, ...]]) -> dict[int, int]:
    """The smallest replica that each one is connected to, through groups with common members."""
    parent = {replica: replica for replica in replicas}

    def root(replica: int) -> int:
        while parent[replica] != replica:
            parent[replica] = replica = parent[parent[replica]]
        return replica

    for members in groups:
        known = [member for member in members if member in parent]
        for member in known[1:]:
            low, high = sorted((root(known[0]), root(member)))
            parent[high] = low
    return {replica: root(replica) for replica in parent}
