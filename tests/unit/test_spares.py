"""Warm spares without Ray: when they are started, which is taken, what happens to dead ones."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, GetTimeoutError

from ray_pipe import spares as module
from ray_pipe.planner.placement import Node
from ray_pipe.spares import Spares

A, B = Node(id="a", ip="10.0.0.10"), Node(id="b", ip="10.0.0.11")


class FakeActor:
    """Its calls are answered by `FakeRay`."""

    def __init__(self, node: Node, number: int) -> None:
        self.name = f"{node.id}{number}"
        self.is_warm = True
        self.is_dead = False
        self.is_stopped = False
        self.answers_after_s = 0.0
        self.was_killed = False
        self.seen: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        return Method(self, method)


class Method:
    def __init__(self, actor: FakeActor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> tuple[FakeActor, str]:
        self._actor.seen.extend(args)
        return self._actor, self._name


class FakeRay:
    """Stands for `ray.wait`, `ray.get` and `ray.kill`."""

    def wait(self, calls: list[Any], *, num_returns: int = 1, timeout: float = 0.0) -> Any:
        done = [call for call in calls if self._is_done(*call)]
        return done, [call for call in calls if call not in done]

    def _is_done(self, actor: FakeActor, method: str) -> bool:
        stopped = actor.is_stopped and method == "ping"
        return actor.is_dead or (actor.is_warm and not stopped)

    def get(self, call: Any, timeout: float | None = None) -> int:
        actor, method = call
        if actor.is_dead:
            raise ActorDiedError
        if method == "ping" and (actor.is_stopped or actor.answers_after_s > (timeout or 0.0)):
            raise GetTimeoutError(f"nothing within {timeout} s")
        return 1

    def kill(self, actor: FakeActor) -> None:
        actor.was_killed = True


class Bench:
    def __init__(self, *, per_node: int = 1, after_s: float = 0.0) -> None:
        self.now = 100.0
        self.crowding = 1.0
        self.started: list[FakeActor] = []
        self.spares = Spares(
            self._start,
            per_node=per_node,
            after_s=after_s,
            clock=lambda: self.now,
            crowding=lambda: self.crowding,
        )

    def _start(self, node: Node) -> FakeActor:
        self.started.append(FakeActor(node, len(self.started)))
        return self.started[-1]

    @property
    def names(self) -> list[str]:
        return [actor.name for actor in self.started]


def taken(bench: Bench, node_id: str, **options: bool) -> str:
    """The name of the spare that is given out."""
    found = bench.spares.take(node_id, **options)
    assert found is not None
    name: str = found.handle.name
    return name


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ray", FakeRay())


def test_a_run_that_is_over_soon_has_not_paid_for_a_spare() -> None:
    bench = Bench(after_s=10.0)

    due = []
    for bench.now in (100.0, 109.9, 110.0, 110.5, 111.1):
        due.append(bench.spares.is_due())

    assert due == [False, False, True, False, True]  # then a look every second


def test_without_spares_nothing_is_ever_due() -> None:
    bench = Bench(per_node=0)

    assert not bench.spares.is_due()
    bench.spares.tend([A], "spec")
    assert bench.started == []


def test_each_node_gets_its_own_and_is_told_what_to_load() -> None:
    bench = Bench()
    bench.spares.tend([A, B], "spec")
    bench.spares.tend([A, B], "spec")

    assert bench.names == ["a0", "b1"]
    assert bench.started[0].seen == ["spec"]


def test_the_spare_of_the_dead_stages_node_is_taken_and_another_one_started() -> None:
    bench = Bench()
    assert bench.spares.is_due()
    bench.spares.tend([A, B], "spec")

    assert taken(bench, "b") == "b1"
    assert bench.spares.take("b") is None
    assert bench.spares.take("c") is None
    assert bench.spares.is_due()  # at once, not at the next look
    bench.spares.tend([A, B], "spec")
    assert bench.names == ["a0", "b1", "b2"]


def test_a_warm_one_is_taken_before_one_that_still_loads() -> None:
    bench = Bench(per_node=2)
    bench.spares.tend([A], "spec")
    bench.started[0].is_warm = False

    given = [bench.spares.take("a") for _ in range(2)]
    assert [(one.handle.name, one.is_warm) for one in given if one] == [("a1", True), ("a0", False)]


def test_where_spares_may_wait_for_a_gpu_only_a_warm_one_is_taken_and_the_others_let_go() -> None:
    bench = Bench(per_node=2)
    bench.spares.tend([A], "spec")
    bench.started[1].is_warm = False

    assert taken(bench, "a", loading=False) == "a0"
    assert bench.spares.take("a", loading=False) is None
    assert [actor.was_killed for actor in bench.started] == [False, True]
    assert bench.spares.handles == []


def test_spares_that_died_or_stopped_meanwhile_are_not_given_out() -> None:
    bench = Bench(per_node=3)
    bench.spares.tend([A], "spec")
    bench.started[0].is_stopped = True
    bench.started[1].is_dead = True

    assert taken(bench, "a") == "a2"
    assert [actor.was_killed for actor in bench.started] == [True, True, False]


def test_a_node_whose_spares_keep_dying_gets_no_more() -> None:
    bench = Bench()
    for _ in range(6):
        bench.spares.tend([A, B], "spec")
        for actor in bench.started:
            actor.is_dead = actor.name.startswith("a")

    assert bench.names == ["a0", "b1", "a2", "a3"]


def test_on_a_busy_machine_a_warm_spare_is_given_time_to_answer() -> None:
    bench = Bench()
    for crowding, expected in ((1.0, False), (3.0, True)):
        bench.spares.tend([A], "spec")
        bench.started[-1].answers_after_s = 5.0  # of 2 s, times what wants each core
        bench.crowding = crowding
        found = bench.spares.take("a")

        assert (found is not None) == expected
        assert bench.started[-1].was_killed != expected


def test_losses_of_spares_count_only_in_a_row() -> None:
    bench = Bench()
    for number in range(8):
        bench.spares.tend([A], "spec")
        bench.started[-1].is_dead = number % 2 == 0
        bench.spares.take("a")

    assert len(bench.started) == 8


def test_the_spares_of_a_lost_node_and_at_the_end_all_are_let_go() -> None:
    bench = Bench()
    bench.spares.tend([A, B], "spec")
    bench.spares.forget("a")

    assert bench.spares.num_idle == 1
    bench.spares.end()
    assert [actor.was_killed for actor in bench.started] == [True, True]
    bench.spares.tend([A, B], "spec")
    assert len(bench.started) == 2


def test_a_node_none_of_whose_spares_answers_cannot_be_reached() -> None:
    bench = Bench(per_node=2)
    bench.spares.tend([A, B], "spec")
    for actor in bench.started[:2]:
        actor.is_stopped = True
    bench.started[2].is_stopped = True

    assert bench.spares.are_silent("a")
    assert not bench.spares.are_silent("b")  # one answers
    assert not bench.spares.are_silent("c")  # nobody to ask
    bench.started[0].is_dead = True
    assert not bench.spares.are_silent("a")  # who can tell of a death is there


def test_waiting_says_whether_all_are_warm() -> None:
    bench = Bench()

    assert bench.spares.wait(0.0)
    bench.spares.tend([A, B], "spec")
    bench.started[1].is_warm = False
    assert not bench.spares.wait(0.0)
