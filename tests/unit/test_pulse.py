"""Who owes the driver an answer is alive, or is named: in virtual time, with fakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError

from ray_pipe import pulse as module
from ray_pipe.failures import name_failure, to_error
from ray_pipe.pulse import PULSE_S, SILENT_S, STOPPED_S, Pulse
from stages.process_state import is_stopped


class World:
    """Stages that answer, or do not; processes that are stopped; a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, remote: bool = False) -> None:
        self.now = 0.0
        self.answers: dict[int, Any] = {0: 1, 1: 1}
        self.stopped: set[int] = set()
        self.looks = 0
        self.handles = [
            SimpleNamespace(ping=SimpleNamespace(remote=lambda i=i: ("ping", i))) for i in (0, 1)
        ]
        self.infos = [{"pid": 100 + i, "node": "there"} for i in (0, 1)]
        monkeypatch.setattr(module.ray, "wait", self._wait)
        monkeypatch.setattr(module.ray, "get", self._get)
        monkeypatch.setattr(module, "is_here", lambda info: not remote)
        monkeypatch.setattr(module, "is_stopped", lambda pid: pid in self.stopped)
        monkeypatch.setattr(module, "_look_there", self._look)

    def _look(self, info: Any) -> Any:
        self.looks += 1
        return "look", info["pid"]

    def _wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> Any:
        ((what, who),) = refs
        return (refs if what == "look" or who in self.answers else []), []

    def _get(self, ref: Any) -> Any:
        what, who = ref
        found = who in self.stopped if what == "look" else self.answers[who]
        if isinstance(found, Exception):
            raise found
        return found

    def watch(self, seconds: float, **options: Any) -> tuple[float, dict[int, Any]]:
        """Look every few seconds; when somebody was lost, and who."""
        infos = options.pop("infos", self.infos)
        own = Pulse(self.handles, infos, doing="in step 4", clock=lambda: self.now, **options)
        start = self.now
        while self.now - start < seconds:
            self.now += PULSE_S
            if lost := own.look([0, 1]):
                return self.now - start, lost
        return seconds, {}


def test_who_answers_may_take_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World(monkeypatch).watch(3600.0) == (3600.0, {})


@pytest.mark.parametrize("remote", [False, True], ids=["on the driver's node", "elsewhere"])
def test_a_stopped_process_is_named_within_seconds(
    monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    world = World(monkeypatch, remote=remote)
    del world.answers[1]
    world.stopped.add(101)

    after_s, lost = world.watch(60.0)

    assert after_s <= STOPPED_S + 2 * PULSE_S
    assert list(lost) == [1]
    failure = name_failure(lost, step=4, infos=world.infos)
    assert (failure.kind, failure.stage) == ("hung", 1)
    assert "its process 101 is stopped" in str(to_error(failure, doing="in step 4"))
    assert (world.looks > 0) is remote


def test_all_that_are_stopped_together_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.answers.clear()
    world.stopped |= {100, 101}

    assert sorted(world.watch(60.0)[1]) == [0, 1]


def test_a_process_that_is_stopped_for_a_moment_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.stopped.add(101)  # but answers: it goes on in between

    assert world.watch(60.0)[1] == {}


@pytest.mark.parametrize("crowding", [1.0, 3.0, 100.0])
def test_silence_without_a_reason_is_given_more_time_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch, crowding: float
) -> None:
    world = World(monkeypatch)
    del world.answers[0]

    after_s, lost = world.watch(600.0, crowding=lambda: crowding)

    limit_s = SILENT_S * min(4.0, crowding)
    assert limit_s <= after_s <= limit_s + 2 * PULSE_S
    assert list(lost) == [0]


def test_before_anybody_was_set_up_silence_is_all_that_can_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    del world.answers[1]
    world.stopped.add(101)

    after_s, lost = world.watch(60.0, infos=[])

    assert SILENT_S <= after_s <= SILENT_S + 2 * PULSE_S
    assert "no sign of life for" in str(lost[1])


def test_a_death_is_told_at_once_and_being_out_of_reach_is_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.answers[0] = ActorUnavailableError("not now", b"x" * 16)
    world.answers[1] = ActorDiedError()

    assert list(world.watch(60.0)[1]) == [1]
    world.answers[1] = 1
    after_s, lost = world.watch(60.0)
    assert (after_s > SILENT_S, list(lost)) == (True, [0])


def test_a_stopped_process_is_seen_as_such() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert not is_stopped(process.pid)
