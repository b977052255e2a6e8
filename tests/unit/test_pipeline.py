"""The driver's side of a pipeline without Ray: whom it waits for, what it hands out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from test_deadlines import fed

from ray_pipe import pipeline as module
from ray_pipe import pulse
from ray_pipe.errors import TrainingError
from ray_pipe.pipeline import CallsFailed, Pipeline
from stages.record import StepRecord


def bare(**attributes: Any) -> Pipeline:
    """A pipeline whose stages were never started."""
    made = Pipeline.__new__(Pipeline)
    made.deadlines = fed(*[0.1] * 4)
    made.losses = {}
    made.on_replay = lambda records: None
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Answers:
    """Stands for Ray in virtual time: some calls answer, the others never do, all stages live."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ready: dict[str, Any]) -> None:
        self.ready = ready
        self.now = 0.0
        self.num_pings = 0
        ping = SimpleNamespace(remote=self._ping)
        self.handles = [SimpleNamespace(ping=ping)] * 3
        for one in (module, pulse):
            monkeypatch.setattr(one.ray, "wait", self.wait)
            monkeypatch.setattr(one.ray, "get", self.get)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def _ping(self) -> str:
        self.num_pings += 1
        return "ping"

    def wait(self, refs: list[str], *, num_returns: int, timeout: float) -> tuple[list, list]:
        done = [ref for ref in refs if ref in self.ready or ref == "ping"][:num_returns]
        self.now += 0.0 if done else timeout
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: str) -> Any:
        return self.ready.get(ref)

    def results(self, calls: dict[Any, int], doing: str, **attributes: Any) -> dict[int, Any]:
        made = bare(handles=self.handles, infos=[], **attributes)
        return made.results(calls, doing)


def test_stages_that_live_but_never_answer_are_named_after_the_patience_has_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(monkeypatch, {"b": "done"})

    with pytest.raises(CallsFailed) as failed:
        answers.results({"a": 0, "b": 1, "c": 2}, "in step 5")

    assert sorted(failed.value.errors) == [0, 2]
    text = str(failed.value.errors[0])
    assert text.startswith("stages [0, 2] did not answer for 200 s in step 5")
    assert answers.now == 200.0  # twenty deadlines of ten seconds


def test_the_patience_is_a_minute_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, {})

    with pytest.raises(CallsFailed):
        answers.results({"a": 0}, "being set up", deadlines=fed(*[0.1] * 4, floor_s=0.5))

    assert answers.now == 60.0


def test_calls_that_are_answered_at_once_cost_no_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, {"a": 1, "b": 2})

    assert answers.results({"a": 0, "b": 1}, "being set up") == {0: 1, 1: 2}
    assert answers.num_pings == 0


def record(loss: float) -> StepRecord:
    return StepRecord(
        stage=0, step=3, loss=loss, num_tokens=1, start_s=0.0, end_s=1.0, seconds={}, sent={},
        codec={}, grad_norm=None,
    )  # fmt: skip


def test_a_replay_that_gives_another_loss_ends_the_run() -> None:
    told: list[Any] = []
    pipeline = bare(losses={3: 1.5}, on_replay=told.append)

    pipeline._check_replay(3, [record(1.5)])
    with pytest.raises(TrainingError, match=r"step 3 was run again .* 1.25 instead of 1.5; .*same"):
        pipeline._check_replay(3, [record(1.25)])

    assert told == [[record(1.5)], [record(1.25)]]


def test_the_busiest_machine_of_the_run_counts_not_only_the_drivers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "crowding", lambda: 2.0)

    assert bare(infos=[{"crowding": 1.0}, {"crowding": 9.0}]).crowding() == 9.0
    assert bare(infos=[{"crowding": 1.0}]).crowding() == 2.0
