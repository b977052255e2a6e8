"""Who of the shards lives: busy, stopped, silent and dead ones, in virtual time, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from ray_pipe import shard_pulse
from ray_pipe.hearing import PING_S
from ray_pipe.shard_pulse import Pulse

INFOS = [{"pid": 10 + index, "node": "here"} for index in range(3)]


class Ref:
    """Told apart by identity, as Ray's are."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Call:
    """A method of a fake actor; its answer may be an exception, or None: not yet."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def remote(self, *args: Any) -> Ref:
        return Ref(self._answer(*args))


class FakeShard:
    def __init__(self, world: World, index: int) -> None:
        self.ping = Call(lambda: world.pings.get(index, index))
        self.sees_stopped = Call(lambda info: info["pid"] - 10 in world.stopped)
        self.end_process = Call(lambda info: world.ended.append(info["pid"] - 10))


class World:
    """Ray and the clock, as far as `shard_pulse` sees them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pings: dict[int, Any] = {}
        self.stopped: set[int] = set()
        self.ended: list[int] = []
        self.killed: list[Any] = []
        self.shards = [FakeShard(self, index) for index in range(3)]

    def monotonic(self) -> float:
        return self.now

    def wait(self, refs: Any, *, num_returns: int, timeout: float) -> Any:
        self.now += timeout if any(ref.value is None for ref in refs) else 0.01
        return [ref for ref in refs if ref.value is not None], []

    def get(self, ref: Any, timeout: float) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, handle: Any) -> None:
        self.killed.append(handle)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(shard_pulse, "ray", made)
    monkeypatch.setattr(shard_pulse, "time", made)
    monkeypatch.setattr(shard_pulse, "crowding", lambda: 1.0)
    return made


def test_shards_that_answer_are_heard_and_nobody_is_lost(world: World) -> None:
    pulse = Pulse()

    assert pulse.beat(world.shards, INFOS, wait_s=0.5) == {}
    assert pulse.heard_s == {0: 100.0, 1: 100.0, 2: 100.0}


def test_a_process_that_is_gone_is_found_at_once(world: World) -> None:
    world.pings[1] = ActorDiedError()

    lost = Pulse().beat(world.shards, INFOS, wait_s=0.5)

    assert {index: one.kind for index, one in lost.items()} == {1: "died"}


def test_a_stopped_shard_is_seen_by_its_neighbour_after_a_second(world: World) -> None:
    pulse = Pulse()
    world.pings[1], world.stopped = None, {1}

    beats = [pulse.beat(world.shards, INFOS, wait_s=0.5) for _ in range(2)]

    assert beats[0] == {}
    assert beats[1][1].kind == "hung"
    assert "its process was stopped, silent for 1.0 s" in beats[1][1].why
    pulse.end(1, world.shards, INFOS)
    assert world.ended == [1]
    assert world.killed == [world.shards[1]]


def test_a_shard_that_is_silent_but_not_stopped_has_more_time(world: World) -> None:
    pulse = Pulse()
    world.pings[2] = None
    rounds = 0
    while not (lost := pulse.beat(world.shards, INFOS, wait_s=0.5)):
        rounds += 1

    assert lost[2].kind == "hung"
    assert "gave no sign of life for 5.0 s" in lost[2].why
    assert rounds == 2 * PING_S - 1


def test_of_all_stopped_ones_none_is_a_witness(world: World) -> None:
    """Then only patience tells."""
    pulse = Pulse()
    world.pings, world.stopped = dict.fromkeys(range(3)), {0, 1, 2}
    while not (lost := pulse.beat(world.shards, INFOS, wait_s=0.5)):
        pass

    assert sorted(lost) == [0, 1, 2]
    assert world.now == pytest.approx(100.0 + PING_S)


def test_before_the_shards_are_set_up_silence_means_nothing(world: World) -> None:
    pulse = Pulse()
    world.pings = dict.fromkeys(range(3))

    assert [pulse.beat(world.shards, [], wait_s=5.0) for _ in range(4)] == [{}] * 4
