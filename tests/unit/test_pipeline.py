"""The driver's side of a pipeline without Ray: whom it waits for, what it hands out."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("ray")

from test_deadlines import fed

from netsim.topology import Topology
from ray_pipe import pipeline as module
from ray_pipe import pulse
from ray_pipe.calls import CallsFailed, Item
from ray_pipe.errors import TrainingError
from ray_pipe.failures import Silent
from ray_pipe.pipeline import Pipeline
from ray_pipe.recovery import Failure
from ray_pipe.refs_pipeline import RefsPipeline
from stages.record import StepRecord


def bare(**attributes: Any) -> Pipeline:
    """A pipeline whose stages were never started."""
    made = Pipeline.__new__(Pipeline)
    made.deadlines = fed(*[0.1] * 4)
    made.losses = OrderedDict()
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
        self.silent: set[int] = set()
        self.handles = [
            SimpleNamespace(ping=SimpleNamespace(remote=lambda i=i: self._ping(i)))
            for i in range(3)
        ]
        for one in (module, pulse):
            monkeypatch.setattr(one.ray, "wait", self.wait)
            monkeypatch.setattr(one.ray, "get", self.get)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "crowding", lambda: 1.0)  # whatever else this machine does

    def _ping(self, index: int) -> str:
        self.num_pings += 1
        return "silence" if index in self.silent else "ping"

    def wait(self, refs: list[str], *, num_returns: int, timeout: float) -> tuple[list, list]:
        done = [ref for ref in refs if ref in self.ready or ref == "ping"][:num_returns]
        self.now += 0.0 if done else timeout
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: str) -> Any:
        return self.ready.get(ref)

    def results(
        self, calls: dict[Any, int], doing: str, *, options: Any = (), **attributes: Any
    ) -> dict[int, Any]:
        made = bare(handles=self.handles, infos=[], **attributes)
        return made.results(calls, doing, **dict(options))


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


def test_a_step_that_black_boxes_had_the_records_of_is_not_run_again_with_refs() -> None:
    """Its last stage died with the step kept, before it could tell: all stages are after it."""
    made = RefsPipeline.__new__(RefsPipeline)
    made.handles = [None, None]
    made.on_sent = None
    item = Item(plan=cast(Any, SimpleNamespace(step=5)), results=cast(Any, {0: "a", 1: "b"}))

    made.finish(item)  # else it would call the stages, which are none

    assert item.results == {0: "a", 1: "b"}


def test_the_patience_is_a_minute_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, {})

    with pytest.raises(CallsFailed):
        answers.results({"a": 0}, "being set up", deadlines=fed(*[0.1] * 4, floor_s=0.5))

    assert answers.now == 60.0


def test_whom_a_stage_waits_for_is_watched_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe: stage 0 answers every ping, and waits for stage 1, which was stopped."""
    answers = Answers(monkeypatch, {})
    answers.silent = {1}

    with pytest.raises(CallsFailed) as failed:
        answers.results({"a": 0}, "being measured", options={"watch": (1,)})

    assert isinstance(failed.value.errors[1], Silent)
    assert answers.now < 60.0


def test_a_state_on_its_way_is_waited_for_as_long_as_its_bytes_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten billion bytes over 100 Mbit/s, four times as long."""
    arm = SimpleNamespace(topology=Topology.uniform(2, bandwidth_bps=100e6))
    specs = [SimpleNamespace(rows_nbytes=4 * 10**9)]
    pipeline = bare(infos=[{"num_parameters": 250_000_000}] * 2, specs=specs, arm=arm)
    answers = Answers(monkeypatch, {})

    assert pipeline.patience_s() == pytest.approx(4 * 8 * 10**10 / 100e6)
    with pytest.raises(CallsFailed):
        answers.results({"a": 0}, "loading", options={"patience_s": pipeline.patience_s()})

    assert answers.now == pytest.approx(3200.0)


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
    pipeline = bare(losses={3: 1.5}, on_replay=told.append, hardware={LAPTOP})

    pipeline._check_replay(3, [record(1.5)])
    with pytest.raises(TrainingError, match=r"step 3 was run again .* 1.25 instead of 1.5; .*same"):
        pipeline._check_replay(3, [record(1.25)])

    assert told == [[record(1.5)], [record(1.25)]]


LAPTOP, SERVER = (("cpu", "AVX2", "i5"),), (("cpu", "AVX512", "Xeon"),)
FAILED = Failure(kind="died", stage=0, step=4, cause="killed", arm="fp32", resumed_from=2)


def moved(*hardware: Any, loss: float = 1.5) -> tuple[Pipeline, list[str]]:
    """A pipeline that has computed on these, after one failure, and what it warns of."""
    told: list[str] = []
    arm = SimpleNamespace(name="fp32")
    pipeline = bare(losses={3: loss, 4: loss}, arm=arm, hardware=set(hardware))
    pipeline.failures, pipeline.on_warning = [FAILED], told.append
    return pipeline, told


def test_a_loss_that_is_no_number_twice_is_the_same_loss() -> None:
    pipeline, told = moved(LAPTOP, loss=float("nan"))

    pipeline._check_replay(3, [record(float("nan"))])

    assert told == []
    with pytest.raises(TrainingError, match=r"gave the loss 1.25 instead of nan"):
        pipeline._check_replay(3, [record(1.25)])


def test_other_bits_on_the_same_hardware_end_the_run() -> None:
    pipeline, _ = moved(LAPTOP)

    with pytest.raises(TrainingError, match="not the same twice"):
        pipeline._check_replay(3, [record(1.25)])


@pytest.mark.parametrize(
    ("hardware", "why"),
    [
        ((LAPTOP, SERVER), "a stage has moved to a machine with another processor"),
        (((("NVIDIA A100", "AVX2", "i5"),),), "kernels of a GPU may add in any order"),
    ],
)
def test_other_bits_on_other_hardware_are_told_once_and_stand_in_the_failures_entry(
    hardware: Any, why: str
) -> None:
    pipeline, told = moved(*hardware)

    pipeline._check_replay(3, [record(1.25)])
    pipeline._check_replay(4, [record(1.0)])

    assert told == [
        f"step 3 was run again after a failure and gave the loss 1.25 instead of 1.5: {why}"
    ]
    assert [one.as_dict()["mismatch"] for one in pipeline.failures] == told
    assert pipeline.losses == {3: 1.25, 4: 1.0}  # what the next replay is compared with


def test_losses_to_compare_are_those_of_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_LOSSES", 3)
    pipeline = bare()
    for step in range(5):
        pipeline._note_loss(step, 5.0 - step)

    assert pipeline.losses == {2: 3.0, 3: 2.0, 4: 1.0}
    pipeline._check_replay(1, [record(0.5)])  # too long ago to tell


def test_a_pipeline_notes_each_hardware_that_it_computes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "refuse_other_source", lambda infos: None)
    handle = SimpleNamespace(_actor_id=b"a")
    pipeline = bare(handles=[handle], hardware=set())

    for (own,) in (LAPTOP, LAPTOP, SERVER):
        pipeline.check_infos([{"hardware": dict(zip("dcp", own, strict=True))}])

    assert pipeline.hardware == {LAPTOP, SERVER}


def test_the_busiest_machine_of_the_run_counts_not_only_the_drivers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "crowding", lambda: 2.0)

    assert bare(infos=[{"crowding": 1.0}, {"crowding": 9.0}]).crowding() == 9.0
    assert bare(infos=[{"crowding": 1.0}]).crowding() == 2.0
