"""Who writes a checkpoint is waited for as long as it lives, and no longer. With fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from ray_pipe import pulse, saving
from ray_pipe.failures import Silent
from ray_pipe.pulse import SILENT_S
from ray_pipe.saving import PATIENCE_S, Save

PLACES = (0, 1, 2)


class World:
    """Calls that end when `answers` has them; whoever is `silent` answers no ping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.answers: dict[Any, Any] = {}
        self.silent: set[int] = set()
        handles = {
            place: SimpleNamespace(ping=SimpleNamespace(remote=lambda place=place: ("ping", place)))
            for place in PLACES
        }
        for module in (saving, pulse):
            monkeypatch.setattr(module.ray, "wait", self._wait)
            monkeypatch.setattr(module.ray, "get", self._get)
        monkeypatch.setattr(saving, "crowding", lambda: 1.0)
        self.handles = handles
        self.save = self.start()

    def start(self, **options: Any) -> Save:
        return Save(self.handles, lambda place: f"file {place}", clock=lambda: self.now, **options)

    def _wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> Any:
        ready = [ref for ref in refs if self._is_there(ref)][:num_returns]
        self.now += 0.0 if ready else timeout
        return ready, [ref for ref in refs if ref not in ready]

    def _is_there(self, ref: Any) -> bool:
        return ref[1] not in self.silent if ref[0] == "ping" else ref in self.answers

    def _get(self, ref: Any) -> Any:
        found = None if ref[0] == "ping" else self.answers[ref]
        if isinstance(found, RayError):
            raise found
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_all_are_waited_for_and_told_in_the_order_of_their_places(world: World) -> None:
    world.answers |= {"file 2": "note 2", "file 0": "note 0"}
    assert world.save.results(wait=False) is None

    world.answers["file 1"] = "note 1"
    assert world.save.results(wait=False) == ["note 0", "note 1", "note 2"]


def test_one_that_failed_does_not_keep_the_others_from_writing(world: World) -> None:
    dead = ActorDiedError()
    world.answers |= {"file 0": dead, "file 1": "note 1", "file 2": "note 2"}

    assert world.save.results(wait=True) == [dead, "note 1", "note 2"]


def test_one_that_lives_may_write_for_long_and_not_for_ever(world: World) -> None:
    world.answers |= {"file 0": "note 0", "file 2": "note 2"}

    first, late, last = world.save.results(wait=True) or []

    assert (first, last) == ("note 0", "note 2")
    assert isinstance(late, GetTimeoutError)
    assert PATIENCE_S <= world.now < PATIENCE_S + 10


def test_a_large_state_on_a_slow_link_is_given_its_time(world: World) -> None:
    world.answers |= {"file 0": "note 0", "file 2": "note 2"}

    _, late, _ = world.start(patience_s=1200.0).results(wait=True) or []

    assert str(late) == "it was not written within 1200 s"
    assert 1200.0 <= world.now < 1210.0


def test_one_that_gives_no_sign_of_life_is_not_waited_for(world: World) -> None:
    world.answers |= {"file 0": "note 0", "file 2": "note 2"}
    world.silent.add(1)

    first, lost, last = world.save.results(wait=True) or []

    assert (first, last) == ("note 0", "note 2")
    assert isinstance(lost, Silent)
    assert SILENT_S <= world.now < 2 * SILENT_S


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "mutant: nobody tells them"])
def test_who_waits_for_the_word_of_one_that_died_is_not_waited_for(
    world: World, is_told: bool
) -> None:
    """Shards copy their rows when stage 0 says so; they live, and would be given ten minutes."""
    world.answers["file 0"] = ActorDiedError()

    def let_go(place: int, why: BaseException) -> None:
        assert (place, type(why)) == (0, ActorDiedError)
        world.answers |= {"file 1": "not copied", "file 2": "not copied"}

    save = world.start(on_failed=let_go) if is_told else world.start()
    save.results(wait=True)

    assert (world.now < 10) == is_told
