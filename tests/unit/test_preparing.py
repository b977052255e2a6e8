"""Stages that are lost before the first step of an arm, with fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, RayTaskError

from ray_pipe import preparing as module
from ray_pipe.calls import Silence
from ray_pipe.errors import StageDied, TrainingError
from ray_pipe.preparing import Preparation
from ray_pipe.recovery import Failure
from ray_pipe.replica_actors import ReplicaActors
from ray_pipe.resume import BoxStart, Start
from ray_pipe.stage_actors import GUEST, NotIntroduced


class World:
    """Three actors; what `make` ends in is scripted, and so is who answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Exception | str) -> None:
        self.ends = list(ends)
        self.gone: set[int] = set()
        self.silent: set[int] = set()
        self.failures: list[Failure] = []
        self.told: list[Failure] = []
        self.replaced: list[tuple[list[int], set[str]]] = []
        self.num_introductions = 0
        self.actors: Any = SimpleNamespace(
            handles=[self._handle(index) for index in range(3)],
            placement=SimpleNamespace(nodes=[SimpleNamespace(id=f"node {i}") for i in range(3)]),
            replace=lambda lost, *, avoid: self.replaced.append((lost, avoid)),
            introduce=self._introduce,
        )
        monkeypatch.setattr(module, "ray", SimpleNamespace(wait=self._wait, get=self._get))

    def _handle(self, index: int) -> Any:
        return SimpleNamespace(ping=SimpleNamespace(remote=lambda: index), _actor_id=b"%d" % index)

    def _introduce(self) -> None:
        self.num_introductions += 1

    def _wait(self, refs: list[int], *, num_returns: int, timeout: float) -> Any:
        return [ref for ref in refs if ref not in self.silent], sorted(self.silent)

    def _get(self, ref: int) -> None:
        if ref in self.gone:
            raise ActorDiedError

    def run(self, *, max_failures: int = 3, after: int = -1) -> str:
        preparation = Preparation(
            self.actors,
            arm="acsgd",
            max_failures=max_failures,
            failures=self.failures,
            epoch_s=0.0,
            on_failure=self.told.append,
            begins_after=after,
        )
        return preparation.run(self._make)

    def _make(self) -> str:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


def lost(errors: dict[int, BaseException], doing: str = "being measured") -> TrainingError:
    error = TrainingError("stages failed")
    error.by_stage, error.doing = errors, doing
    return error


def test_a_stage_that_dies_is_replaced_and_the_arm_is_prepared_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, lost({1: ActorDiedError()}), "ready")
    world.gone = {1}

    assert world.run() == "ready"
    assert world.replaced == [([1], set())]
    assert world.num_introductions == 1
    (failure,) = world.failures
    assert world.told == [failure]
    assert (failure.kind, failure.arm, failure.stage, failure.step) == ("died", "acsgd", 1, 0)
    assert (failure.replaced, failure.resumed_from, failure.source) == ((1,), -1, "fresh")
    assert failure.cause.endswith("(being measured)")
    assert failure.recovery_s is not None


def test_an_arm_that_was_resumed_begins_with_its_checkpoint_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, lost({1: ActorDiedError()}), "ready")

    world.run(after=19)

    assert (world.failures[0].resumed_from, world.failures[0].source) == (19, "checkpoint")
    saved: Any = SimpleNamespace(step=20)
    assert (Start(checkpoint=saved).after, Start(checkpoint=saved).source) == (19, "checkpoint")
    assert (Start().after, Start().source) == (-1, "fresh")
    boxes = BoxStart(run="r", step=23, progress={})
    assert (Start(checkpoint=saved, boxes=boxes).after, Start(boxes=boxes).source) == (23, "box")


def test_the_silent_and_the_stuck_are_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lost({0: Silence([0], 60.0, "being measured")}), "ready")
    world.silent = {2}

    world.run()

    assert world.replaced == [([0, 2], set())]


def test_who_was_lost_while_all_were_introduced_counts_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, NotIntroduced("late", {2: ActorDiedError()}), "ready")

    world.run()

    assert [failure.stage for failure in world.failures] == [2]


@pytest.mark.parametrize(
    "error",
    [
        TrainingError("of another kind"),
        NotIntroduced("a shard", {GUEST: ActorDiedError()}),
        lost({1: RayTaskError("setup", "text", ValueError("a bug"))}),
    ],
    ids=["no stage", "a guest", "an error of its own"],
)
def test_what_is_no_loss_of_a_stage_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    world = World(monkeypatch, error)

    with pytest.raises(TrainingError):
        world.run()

    assert world.replaced == []


def test_max_failures_counts_what_happens_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = lost({1: ActorDiedError()})

    with pytest.raises(StageDied, match="recovery is off"):
        World(monkeypatch, died).run(max_failures=0)
    with pytest.raises(StageDied, match="step 0 failed 3 times in a row"):
        World(monkeypatch, died, died, died, "ready").run(max_failures=-1)
    with pytest.raises(StageDied, match="it is failure 2 of this run, at most 1"):
        World(monkeypatch, died, died, "ready").run(max_failures=1)


def test_a_replica_is_ended_as_a_whole_and_the_next_pipeline_revives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, lost({2: ActorDiedError()}), "ready")
    world.gone = {2}
    actors: Any = ReplicaActors.__new__(ReplicaActors)
    actors.handles, actors.num_stages, actors.dead = world.actors.handles, 2, set()
    ended: list[int] = []
    monkeypatch.setattr(ReplicaActors, "end", lambda self, replica: ended.append(replica))
    world.actors = actors

    assert world.run() == "ready"
    assert ended == [1]
    assert actors.dead == {1}
