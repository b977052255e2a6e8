"""Who is guilty when a step fails: fakes of Ray and of the stages, in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from ray_pipe import hearing as module
from ray_pipe.hearing import Hearing
from stages.record import StepRecord

NEVER = math.inf
RECORD = StepRecord(
    stage=0, step=3, loss=None, num_tokens=0, start_s=0.0, end_s=0.0, seconds={}, sent={},
    codec={}, grad_norm=None,
)  # fmt: skip


@dataclass(eq=False)
class Call:
    """Answers after a while, or when the actor that it needs is killed."""

    actor: Actor
    at_s: float
    needs: Actor | None = None
    result: Any = None
    was_heard: bool = False


@dataclass(eq=False)
class Actor:
    """A stage's handle. Its calls take so many seconds to answer."""

    clock: Clock
    ping_s: float = 0.0
    abort_s: float = 0.0
    at_work: bool = False
    error: Exception | None = None
    was_killed: bool = False
    aborts: list[Call] = field(default_factory=list)

    @property
    def ping(self) -> Any:
        return SimpleNamespace(remote=lambda: self._call(self.ping_s, 1))

    @property
    def is_at_work(self) -> Any:
        return SimpleNamespace(remote=lambda: self._call(self.ping_s, self.at_work))

    @property
    def sees_stopped(self) -> Any:
        return SimpleNamespace(remote=lambda info: self._call(0.0, info["stopped"]))

    @property
    def abort(self) -> Any:
        def remote(why: str) -> Call:
            self.aborts.append(self._call(self.abort_s, None))
            return self.aborts[-1]

        return SimpleNamespace(remote=remote)

    def _call(self, after_s: float, result: Any) -> Call:
        return Call(self, self.clock.now + after_s, result=result)


class Clock:
    """Stands for `ray` and for `time`: waiting moves the time on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.node_dies: list[Actor] = []

    def monotonic(self) -> float:
        return self.now

    def wait(self, calls: list[Call], *, num_returns: int, timeout: float) -> Any:
        end = self.now + timeout
        times = sorted(self._due(call) for call in calls)
        self.now = min(max(times[num_returns - 1], self.now), end)
        ready = [call for call in calls if self._due(call) <= self.now]
        return ready, [call for call in calls if call not in ready]

    def get(self, call: Call, timeout: float | None = None) -> Any:
        call.was_heard = True
        if timeout is not None and self._due(call) > self.now + timeout:
            self.now += timeout
            raise ActorUnavailableError("late", None)
        if call.actor.was_killed:
            raise ActorDiedError
        if call.needs is not None and call.needs.was_killed:
            raise RayTaskError("forward", "text", ActorDiedError())
        if call.actor.error is not None:
            raise call.actor.error
        return call.result

    def kill(self, actor: Actor) -> None:
        actor.was_killed = True

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 14.0 and self.node_dies:
            for actor in self.node_dies:
                actor.error = ActorDiedError()

    def _due(self, call: Call) -> float:
        gone = call.actor.was_killed or (call.needs is not None and call.needs.was_killed)
        return self.now if gone or call.actor.error is not None else call.at_s


class Bench:
    """Three stages in a step; `deadline_s` is how long a stage may be stuck."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, transport: str = "push") -> None:
        self.clock = Clock()
        self.stages = [Actor(self.clock) for _ in range(3)]
        self.item = SimpleNamespace(calls={}, results={})
        self.busy = 1.0
        self.pipeline: Any = SimpleNamespace(
            transport=transport,
            handles=self.stages,
            queue=[self.item],
            infos=[{"node": node, "stopped": False} for node in "aab"],
            deadlines=SimpleNamespace(value_s=30.0),
            crowding=lambda: self.busy,
        )
        monkeypatch.setattr(module, "ray", self.clock)
        monkeypatch.setattr(module, "time", self.clock)

    def step(self, stage: int, ends_s: float, *, needs: int | None = None) -> None:
        source = None if needs is None else self.stages[needs]
        self.item.calls[Call(self.stages[stage], ends_s, source, RECORD)] = stage

    def hold(self, **errors: Exception) -> tuple[set[int], set[int]]:
        self.hearing = Hearing(self.pipeline, dict(errors), why="a test")  # type: ignore[arg-type]
        return self.hearing.hold()

    @property
    def killed(self) -> list[int]:
        return [i for i, stage in enumerate(self.stages) if stage.was_killed]


def test_only_the_silent_stage_is_killed_not_those_that_are_slow_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stage 0 is in a long piece of work that an abort cannot cut short."""
    bench = Bench(monkeypatch)
    bench.stages[1].ping_s = NEVER
    bench.step(0, 9.0)
    bench.step(1, NEVER)
    bench.step(2, 0.2)

    dead, hung = bench.hold()

    assert (dead, hung, bench.killed) == (set(), {1}, [1])
    assert sorted(bench.item.results) == [0, 2]
    assert bench.clock.now == pytest.approx(9.0, abs=0.2)


def test_a_stopped_process_is_seen_by_another_stage_on_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    for stage in (1, 2):
        bench.stages[stage].ping_s = NEVER
        bench.pipeline.infos[stage]["stopped"] = True
    bench.pipeline.deadlines.value_s = 0.0

    assert bench.hold() == (set(), {1, 2})
    assert bench.clock.now == pytest.approx(5.0, abs=0.3)  # nobody else is on the node of stage 2
    again = Bench(monkeypatch)
    again.stages[1].ping_s, again.pipeline.infos[1]["stopped"] = NEVER, True
    assert again.hold() == (set(), {1})
    assert again.clock.now == pytest.approx(1.0, abs=0.2)


def test_a_stopped_process_on_the_drivers_node_is_seen_by_the_driver_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only stage of a run, or all of them: no other stage is left to look."""
    bench = Bench(monkeypatch)
    monkeypatch.setattr(module, "is_here", lambda info: info["node"] == "a")
    monkeypatch.setattr(module, "is_stopped", lambda pid: pid == 1)
    for stage in range(3):
        bench.stages[stage].ping_s = NEVER
        bench.pipeline.infos[stage] |= {"pid": stage}
    bench.pipeline.deadlines.value_s = 0.0
    stopped = Hearing(bench.pipeline, {}, why="a test")._stopped({0, 1, 2})

    assert stopped == {1}
    assert bench.hold() == (set(), {0, 1, 2})


def test_a_stage_that_answers_but_never_ends_is_killed_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.stages[2].at_work = True
    bench.step(0, 1.0)
    bench.step(2, NEVER)

    assert bench.hold() == (set(), {2})
    assert bench.killed == [2]
    assert bench.clock.now == pytest.approx(30.0, abs=0.3)


def test_with_refs_calls_that_wait_for_the_stuck_stage_are_innocent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, transport="refs")
    bench.stages[1].at_work = True
    bench.step(0, NEVER, needs=1)
    bench.step(1, NEVER)
    bench.step(2, NEVER, needs=1)

    assert bench.hold() == (set(), {1})
    assert bench.killed == [1]
    assert set(bench.hearing.errors) == {0, 2}  # what stage 1 owed them


def test_if_nobody_says_that_it_is_at_work_all_that_have_not_ended_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.step(0, NEVER)
    bench.step(1, NEVER)

    assert bench.hold() == (set(), {0, 1})


@pytest.mark.parametrize("transport", ["push", "refs"])
def test_no_abort_is_on_its_way_when_the_hearing_is_over(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """With refs it is sent last; one that arrived later would end the next attempt."""
    bench = Bench(monkeypatch, transport=transport)
    for stage in bench.stages:
        stage.ping_s = stage.abort_s = 0.7  # one thread: the ping is answered after the abort

    bench.hold()

    aborts = [call for stage in bench.stages for call in stage.aborts]
    assert len(aborts) == 3
    assert all(call.at_s <= bench.clock.now for call in aborts)


def test_a_stage_that_does_not_confirm_the_abort_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, transport="refs")
    bench.stages[0].abort_s = NEVER

    assert bench.hold() == (set(), {0})


def test_the_dead_are_no_suspects(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.stages[1].error = ActorDiedError()
    bench.step(1, NEVER)

    assert bench.hold() == ({1}, set())
    assert bench.killed == []


def test_who_cannot_be_reached_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.stages[1].error = ActorUnavailableError("unreachable", None)

    assert bench.hold() == ({1}, set())
    assert isinstance(bench.hearing.errors[1], ActorUnavailableError)
    assert bench.clock.now == pytest.approx(20.0, abs=0.3)


def test_that_a_node_is_gone_is_waited_for_because_ray_does_not_know_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.stages[1].error = ActorUnavailableError("unreachable", None)
    bench.clock.node_dies = [bench.stages[1]]

    assert bench.hold() == ({1}, set())
    assert type(bench.hearing.errors[1]) is ActorDiedError
    assert bench.clock.now == pytest.approx(14.0, abs=0.3)


def test_on_a_busy_machine_silence_is_forgiven_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.stages[1].ping_s = 12.0

    assert bench.hold() == (set(), {1})
    again = Bench(monkeypatch)
    again.stages[1].ping_s, again.busy = 12.0, 3.0
    assert again.hold() == (set(), set())
