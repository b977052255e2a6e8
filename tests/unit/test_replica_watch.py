"""Of replicas that wait for each other the one that stopped is named: virtual time, fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from ray_pipe import pulse as pulse_module
from ray_pipe import replica_watch as module
from ray_pipe.failures import name_failure
from ray_pipe.pulse import PULSE_S, STOPPED_S, Pulse
from ray_pipe.replica_watch import ReplicaWatch, Standstill
from stages.sync.strategy import SyncTimeout

PATIENCE_S = 60.0


class World:
    """Four replicas of one stage, of which some are silent, stopped, or stuck in their work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.work_s: dict[int, Any] = dict.fromkeys(range(4), 0.0)
        self.silent: set[int] = set()
        self.stopped: set[int] = set()
        self.asked: list[int] = []
        handles = [
            SimpleNamespace(
                ping=SimpleNamespace(remote=lambda i=i: ("ping", i)),
                at_work_s=SimpleNamespace(remote=lambda i=i: ("work", i)),
            )
            for i in range(4)
        ]
        infos = [{"pid": 100 + i, "node": "here"} for i in range(4)]
        for where in (pulse_module, module):
            monkeypatch.setattr(where.ray, "wait", self._wait)
            monkeypatch.setattr(where.ray, "get", self._get)
        monkeypatch.setattr(pulse_module, "is_here", lambda info: True)
        monkeypatch.setattr(pulse_module, "is_stopped", lambda pid: pid - 100 in self.stopped)

        def clock() -> float:
            return self.now

        self.watch = ReplicaWatch(
            handles, lambda: Pulse(handles, infos, doing="in a step", clock=clock), clock=clock
        )

    def _wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> Any:
        here = [ref for ref in refs if ref[1] not in self.silent]
        return here, [ref for ref in refs if ref not in here]

    def _get(self, ref: Any) -> Any:
        what, who = ref
        self.asked.append(who)
        if what == "ping":
            return 1
        if isinstance(self.work_s[who], Exception):
            raise self.work_s[who]
        return self.work_s[who]

    def run(self, seconds: float, *, ending: tuple[int, ...] = ()) -> tuple[float, dict[int, Any]]:
        """Time goes by, steps of some end all the time; when somebody was lost, and who."""
        start = self.now
        while self.now - start < seconds:
            self.now += 0.5
            for place in ending:
                self.watch.heard(place)
            if lost := self.watch.look(range(4), patience_s=PATIENCE_S):
                return self.now - start, lost
        return seconds, {}


@pytest.mark.parametrize("ending", [(), (0, 1, 3)], ids=["all wait for it", "the others go on"])
def test_a_stopped_replica_is_named_within_seconds_whatever_the_others_do(
    monkeypatch: pytest.MonkeyPatch, ending: tuple[int, ...]
) -> None:
    world = World(monkeypatch)
    world.silent = world.stopped = {2}

    after_s, lost = world.run(300.0, ending=ending)

    assert list(lost) == [2]
    assert after_s <= STOPPED_S + 3 * PULSE_S
    assert name_failure(lost, step=3).kind == "hung"


def test_who_gets_on_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    assert world.run(300.0, ending=(0, 1, 2, 3)) == (300.0, {})
    assert world.asked == []


@pytest.mark.parametrize("ending", [(), (1, 2, 3)], ids=["all wait for it", "the others go on"])
def test_of_replicas_that_all_live_the_one_stuck_in_its_work_is_named(
    monkeypatch: pytest.MonkeyPatch, ending: tuple[int, ...]
) -> None:
    world = World(monkeypatch)
    world.work_s |= {0: 61.0, 1: 0.2}

    after_s, lost = world.run(300.0, ending=ending)

    assert PATIENCE_S <= after_s <= PATIENCE_S + 2 * PULSE_S
    assert {place: str(error) for place, error in lost.items()} == {
        0: "one piece of its work has not ended for 61 s"
    }


def test_a_slow_replica_whose_others_wait_is_no_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.work_s[3] = 20.0

    with pytest.raises(Standstill, match="they wait for each other"):
        world.run(300.0)


def test_a_replica_that_waits_for_longer_than_the_others_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert World(monkeypatch).run(300.0, ending=(0, 1, 2)) == (300.0, {})


def test_whoever_dies_while_it_is_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.work_s[1] = ActorDiedError()

    assert list(world.run(300.0)[1]) == [1]


def test_after_a_change_all_have_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.run(PATIENCE_S - 5.0)
    world.watch.changed()

    assert world.run(PATIENCE_S - 5.0)[1] == {}


def test_a_replica_that_waited_in_vain_is_a_timeout_that_the_others_survive() -> None:
    failure = name_failure({0: SyncTimeout("replica 0 waited 60 s for replicas [2]")}, step=3)

    assert failure.kind == "timeout"
