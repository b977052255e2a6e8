"""Where everybody goes back to, with fakes: boxes and checkpoints that turn out damaged."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from ray_pipe import calls
from ray_pipe import pipeline as pipelines
from ray_pipe import rescue as module
from ray_pipe.calls import CallsFailed
from ray_pipe.checkpoint_files import CheckpointError
from ray_pipe.errors import ClusterError, StageDied
from ray_pipe.failures import Silent
from ray_pipe.pulse import PULSE_S
from ray_pipe.recovery import PHASES, Failure, Status
from ray_pipe.rescue import Interrupted, Rescue
from ray_pipe.stage_actors import GUEST, NotIntroduced
from stages.state import StateError


class FakeRay:
    """Calls are their results, or the errors that they end in."""

    def get(self, calls: Any, timeout: float | None = None) -> Any:
        if isinstance(calls, list):
            return [self.get(call) for call in calls]
        if isinstance(calls[-1], Exception):
            raise calls[-1]
        return calls[-1]

    def put(self, value: Any) -> Any:
        return value.tobytes()

    def wait(self, calls: list[Any], *, num_returns: int, timeout: float) -> Any:
        ready = [call for call in calls if call[-1] != "never"]
        return ready, [call for call in calls if call not in ready]


class Saves:
    """Checkpoints of steps 5 and 3; some are damaged."""

    def __init__(self, *, damaged: set[int]) -> None:
        self._steps = [3, 5]
        self._damaged = damaged
        self.refused: list[str] = []

    def newest(self) -> int | None:
        return self._steps[-1] if self._steps else None

    def load(self, step: int) -> list[bytes]:
        if step in self._damaged:
            raise CheckpointError(f"step {step} was cut off.")
        return [b"first", b"second"]

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
        self.pulse = lambda doing: SimpleNamespace(look=lambda waiting: {})
        self.patience_s = lambda: 300.0

    def set_up(self, stages: range) -> dict[Any, int]:
        self.num_set_ups += 1
        return {("set up", index, None): index for index in stages}

    def results(self, calls: dict[Any, int], doing: str) -> dict[int, Any]:
        return {index: call[-1] for call, index in calls.items()}

    def _stage(self, index: int) -> Any:
        def restore(step: int, saved: Any) -> Any:
            if step == self._refuse:
                return "restore", index, RayTaskError("restore", "text", StateError("not mine"))
            self.restored.append((index, step, saved))
            return "restore", index, None

        return SimpleNamespace(restore=SimpleNamespace(remote=restore))


def restore(pipeline: Any, statuses: list[Status], monkeypatch: pytest.MonkeyPatch) -> Any:
    for one in (module, calls):
        monkeypatch.setattr(one, "ray", FakeRay())
    item: Any = SimpleNamespace(plan=SimpleNamespace(step=7))
    return Rescue(pipeline, item, {})._restore(statuses)


LOST = [Status(index=0, live=6, box=(5, 6)), Status(index=1, live=None)]


def test_a_lost_box_sends_all_to_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(Saves(damaged=set()))

    assert restore(pipeline, LOST, monkeypatch).step == 5
    assert pipeline.restored == [(0, 5, [b"first"]), (1, 5, [b"second"])]  # lent, see `lend`


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


# --- failures on the way back ---------------------------------------------------------------------


class Crew:
    """Three stages on three nodes, all of them at step 6; who dies when is scripted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, heard: list[tuple[set, set]]) -> None:
        """`heard` is what each hearing finds: the dead, and the hung."""
        self.replaced: list[tuple[tuple[int, ...], set[str]]] = []
        self.introductions: list[NotIntroduced | None] = []
        self.set_ups: list[tuple[int, ...]] = []
        self.asked: list[str] = []
        self.fail_at: dict[str, list[dict[int, Exception]]] = {}
        self.ended: list[int] = []
        self.looked: list[set[int]] = []
        self.silent: dict[int, Exception] = {}
        found = iter(heard)
        self.blamed: list[set[int]] = []

        class Heard:
            def __init__(self, pipeline: Any, errors: dict[int, Any], *, why: str) -> None:
                crew.blamed.append(set(errors))
                for index in crew.coming[0]:
                    errors.setdefault(index, ActorDiedError())

            def hold(self) -> tuple[set[int], set[int]]:
                crew.coming = crew.coming[1:]
                return next(found)

        crew = self
        self.coming = [dead for dead, _ in heard]
        monkeypatch.setattr(module, "Hearing", Heard)
        monkeypatch.setattr(module, "ray", FakeRay())
        handles = [self._handle(index) for index in range(3)]
        self.pipeline: Any = SimpleNamespace(
            handles=handles,
            actors=SimpleNamespace(replace=self._replace, introduce=self._introduce),
            infos=[
                {"node": f"node {i}", "actor": f"{i}", "pid": i, "box_trouble": ""}
                for i in range(3)
            ],
            checkpoints=None,
            epoch_s=0.0,
            attempt=0,
            losses={},
            last_known=-1,
            queue=deque(),
            failures=[],
            told=[],
            arm=SimpleNamespace(
                name="acsgd", config=SimpleNamespace(faults=SimpleNamespace(max_failures=-1))
            ),
            check_infos=lambda infos: None,
            set_up=self._set_up,
            results=self._results,
            excuses=lambda failure: False,
            pulse=lambda doing: SimpleNamespace(look=self._look),
            patience_s=lambda: 1200.0,
        )
        self.pipeline.on_failure = self.pipeline.told.append
        self.pipeline.counted = lambda: self.pipeline.failures

    def _handle(self, index: int) -> Any:
        def call(name: str) -> Any:
            return SimpleNamespace(remote=lambda *args: (name, index, None))

        def end(info: Any) -> None:
            self.ended.append(index)

        return SimpleNamespace(
            status=call("status"),
            restore=call("restore"),
            end_process=SimpleNamespace(remote=end),
            _actor_id=b"%d" % index,
        )

    def _replace(self, stages: Any, *, avoid: set[str]) -> set[int]:
        self.replaced.append((tuple(stages), set(avoid)))
        return set(stages)

    def _look(self, waiting: Any) -> dict[int, Exception]:
        self.looked.append(set(waiting))
        return {index: error for index, error in self.silent.items() if index in waiting}

    def _introduce(self, *, look: Any) -> None:
        look([0, 1, 2, GUEST])
        error = self.introductions.pop(0) if self.introductions else None
        if error is not None:
            raise error

    def _set_up(self, stages: tuple[int, ...], *, reborn: bool) -> dict[Any, int]:
        assert reborn
        self.set_ups.append(stages)
        return {("set up", index): index for index in stages}

    def _results(self, calls: dict[Any, int], doing: str) -> dict[int, Any]:
        what = next(iter(calls))[0]
        if self.fail_at.get(what):
            raise CallsFailed(dict(self.fail_at[what].pop(0)))
        if what == "set up":
            return {i: {**self.pipeline.infos[i]} for i in calls.values()}
        return {i: SimpleNamespace(live=6, box=(5, 6), records=()) for i in calls.values()}

    def recover(self, first: int = 1) -> list[Failure]:
        item: Any = SimpleNamespace(plan=SimpleNamespace(step=7))
        Rescue(self.pipeline, item, {first: ActorDiedError()}).recover()
        found: list[Failure] = self.pipeline.failures
        return found


def test_each_failure_on_the_way_back_says_where_the_run_went_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew(monkeypatch, heard=[({1}, set()), ({2}, set())])
    crew.fail_at["status"] = [{2: ActorDiedError()}]

    first, second = crew.recover()

    assert (first.stage, second.stage) == (1, 2)
    assert first.resumed_from == second.resumed_from == 6
    assert (first.replaced, second.replaced) == ((1,), (2,))
    assert (first.source, second.source) == ("box", "box")
    assert first.recovery_s is not None
    assert second.recovery_s is not None
    assert first.recovery_s >= second.recovery_s
    assert set(first.phases) == set(second.phases) == {*PHASES}
    assert crew.pipeline.told == [first, second]


def test_who_is_excused_has_no_entry_and_takes_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew(monkeypatch, heard=[({1}, set()), ({2}, set())])
    crew.fail_at["status"] = [{2: ActorDiedError()}]

    def excuses(failure: Any) -> bool:
        if failure.stage == 2:
            crew.pipeline.failures.append("of a shard, meanwhile")
        return failure.stage == 2

    crew.pipeline.excuses = excuses
    first, meanwhile = crew.recover()

    assert meanwhile == "of a shard, meanwhile"
    assert (first.stage, first.resumed_from) == (1, 6)
    assert crew.pipeline.told == [first]


def test_a_failure_that_ends_the_run_on_the_way_back_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew(monkeypatch, heard=[({1}, set())] * 3)
    crew.fail_at["set up"] = [{1: ActorDiedError()}] * 2

    with pytest.raises(StageDied, match="step 7 failed 3 times in a row"):
        crew.recover()

    assert [failure.resumed_from for failure in crew.pipeline.failures] == [None] * 3
    assert crew.pipeline.told == []


def test_a_survivor_that_dies_meanwhile_does_not_cost_the_lost_stage_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its black box lies there: elsewhere the run would begin anew."""
    crew = Crew(monkeypatch, heard=[({1}, set()), ({2}, set())])
    crew.introductions = [NotIntroduced("lost", {2: ActorDiedError()})]

    first, second = crew.recover()

    assert crew.replaced == [((1,), set()), ((2,), set())]
    assert crew.blamed == [{1}, {2}]
    assert crew.set_ups == [(1, 2)]  # the one that had a new process already as well
    assert (first.source, second.source) == ("box", "box")


def test_a_survivor_that_stops_meanwhile_is_heard_and_the_hung_one_is_still_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew(monkeypatch, heard=[(set(), {1}), (set(), {0})])
    crew.introductions = [NotIntroduced("late", {0: GetTimeoutError("no answer")})]

    crew.recover()

    assert crew.replaced == [((1,), set()), ((0,), set())]
    assert sorted(crew.ended) == [0, 1]


def test_a_new_process_that_cannot_start_is_tried_once_more_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew(monkeypatch, heard=[({1}, set())])
    crew.introductions = [NotIntroduced("late", {1: GetTimeoutError("no answer")})]

    (failure,) = crew.recover()

    assert crew.replaced == [((1,), set()), ((1,), {"node 1"})]
    assert failure.replaced == (1,)


def test_when_it_cannot_start_elsewhere_either_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew(monkeypatch, heard=[({1}, set())])
    crew.introductions = [NotIntroduced("late", {1: GetTimeoutError("no answer")})] * 2

    with pytest.raises(ClusterError):
        crew.recover()


def test_whoever_was_there_before_is_watched_while_a_new_process_takes_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew(monkeypatch, heard=[({1}, set())])

    crew.recover()

    assert crew.looked == [{0, 2}]


def waits(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> tuple[float, dict[int, Any]]:
    """How long the going back of stages 0 and 2, which never ends, is waited for; who is blamed."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module.ray, "wait", clock.wait)
    item: Any = SimpleNamespace(plan=SimpleNamespace(step=7))
    rescue = Rescue(crew.pipeline, item, {})

    with pytest.raises(Interrupted) as interrupted:
        rescue._failed({("restore", i, "never"): i for i in (0, 2)}, 1200.0)

    return clock.now, interrupted.value.errors


class Clock:
    """Virtual time, in which nobody answers."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, calls: list[Any], *, num_returns: int, timeout: float) -> Any:
        self.now += timeout
        return [], calls


def test_a_stage_that_stops_while_going_back_is_missed_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew(monkeypatch, heard=[])
    crew.silent = {2: Silent(15.0, "going back")}

    after_s, blamed = waits(crew, monkeypatch)

    assert (after_s, blamed) == (PULSE_S, crew.silent)


def test_stages_that_live_may_take_as_long_as_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    after_s, blamed = waits(Crew(monkeypatch, heard=[]), monkeypatch)

    assert after_s == 1200.0
    assert sorted(blamed) == [0, 2]
    assert isinstance(blamed[0], GetTimeoutError)


@pytest.mark.parametrize(("losses", "last"), [({}, 4), ({5: 1.0, 6: 1.0}, 6)])
def test_in_a_resumed_run_a_way_back_beyond_its_beginning_repeats_what_came_before_it(
    losses: dict[int, float], last: int
) -> None:
    """It began after step 4, from boxes; its checkpoint is of step 1."""
    pipeline: Any = pipelines.Pipeline.__new__(pipelines.Pipeline)
    pipeline.losses, pipeline.begun_after = losses, 4
    pipeline.handles, pipeline.queue = [0, 1], deque()
    pipeline.arm = SimpleNamespace(plan=lambda step: SimpleNamespace(step=step, train=True))
    item: Any = SimpleNamespace(plan=SimpleNamespace(step=last + 1))
    sent: list[int] = []
    pipeline.on_sent = sent.append

    Rescue(pipeline, item, {})._queue_again(1)

    assert [one.plan.step for one in pipeline.queue] == list(range(2, last + 1))
    for one in pipeline.queue:
        pipeline.tell_sent(one)
    assert sent == [last]
