"""Where everybody goes back to, with fakes: boxes and checkpoints that turn out damaged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayTaskError

from ray_pipe import rescue as module
from ray_pipe.checkpoint_files import CheckpointError
from ray_pipe.recovery import Status
from ray_pipe.rescue import Rescue
from stages.state import StateError


class FakeRay:
    """Calls are their results, or the errors that they end in."""

    def get(self, calls: Any, timeout: float | None = None) -> Any:
        if isinstance(calls, list):
            return [self.get(call) for call in calls]
        if isinstance(calls[-1], Exception):
            raise calls[-1]
        return calls[-1]

    def wait(self, calls: list[Any], *, num_returns: int, timeout: float) -> Any:
        return calls, []


class Saves:
    """Checkpoints of steps 5 and 3; some are damaged."""

    def __init__(self, *, damaged: set[int]) -> None:
        self._steps = [3, 5]
        self._damaged = damaged
        self.refused: list[str] = []

    def newest(self) -> int | None:
        return self._steps[-1] if self._steps else None

    def load(self, step: int) -> list[Any]:
        if step in self._damaged:
            raise CheckpointError(f"step {step} was cut off.")
        return ["first", "second"]

    def refuse(self, why: str) -> None:
        self._steps.pop()
        self.refused.append(why)


class Pipeline:
    def __init__(self, saves: Saves, *, refuse: int | None = None) -> None:
        self.checkpoints = saves
        self.handles = [self._stage(index) for index in range(2)]
        self.restored: list[tuple[int, int, Any]] = []
        self.num_set_ups = 0
        self._refuse = refuse
        self.epoch_s = 0.0

    def set_up(self, stages: range) -> dict[Any, int]:
        self.num_set_ups += 1
        return {("set up", index, None): index for index in stages}

    def _stage(self, index: int) -> Any:
        def restore(step: int, saved: Any) -> Any:
            if step == self._refuse:
                return "restore", index, RayTaskError("restore", "text", StateError("not mine"))
            self.restored.append((index, step, saved))
            return "restore", index, None

        return SimpleNamespace(restore=SimpleNamespace(remote=restore))


def restore(pipeline: Any, statuses: list[Status], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "ray", FakeRay())
    item: Any = SimpleNamespace(plan=SimpleNamespace(step=7))
    return Rescue(pipeline, item, {})._restore(statuses)


LOST = [Status(index=0, live=6, box=(5, 6)), Status(index=1, live=None)]


def test_a_lost_box_sends_all_to_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(Saves(damaged=set()))

    assert restore(pipeline, LOST, monkeypatch).step == 5
    assert pipeline.restored == [(0, 5, "first"), (1, 5, "second")]


def test_a_damaged_checkpoint_sends_all_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(Saves(damaged={5}))

    assert restore(pipeline, LOST, monkeypatch).step == 3
    assert pipeline.checkpoints.refused == ["step 5 was cut off."]
    assert pipeline.num_set_ups == 1  # nobody lost anything for the damaged one


def test_without_any_that_is_whole_the_run_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(Saves(damaged={3, 5}))

    decision = restore(pipeline, LOST, monkeypatch)

    assert (decision.step, decision.sources) == (-1, ("fresh", "fresh"))


def test_a_checkpoint_that_a_stage_refuses_is_done_without_and_boxes_are_gone_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To load it the stages were set up anew, which emptied their boxes."""
    pipeline = Pipeline(Saves(damaged=set()), refuse=5)
    both = [Status(index=i, live=None, box=(4,)) for i in range(2)]

    decision = restore(pipeline, both, monkeypatch)

    assert (decision.step, decision.sources) == (3, ("checkpoint", "checkpoint"))
    assert pipeline.checkpoints.refused == ["not mine"]
