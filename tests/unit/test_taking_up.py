"""Taking up a run whose driver was killed: nodes are asked, stages placed, fallbacks told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saved_runs import SavedRun
from test_left_run import boxes_with, leave

from ray_pipe import box_search
from ray_pipe import taking_up as module
from ray_pipe.checkpoint_files import CheckpointError
from ray_pipe.checkpointing import RunCheckpoints
from ray_pipe.errors import Terminated, TrainingError
from ray_pipe.planner.placement import Node, Placement
from ray_pipe.recovery import Failure
from ray_pipe.resume import BoxStart, Start
from ray_pipe.taking_up import TakingUp
from ray_pipe.unfinished import FILE
from stages.left_boxes import LeftBox, nbytes_of

NODES = [Node(id=f"n{i}", ip=f"10.0.0.{i}") for i in range(3)]
PLACED = Placement(nodes=(NODES[0], NODES[1]), num_gpus=0.0)
AUTO = {"checkpoint__resume": "auto"}


class World:
    """A run that was left after five lines, and nodes that answer as they are told to."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        found: dict[str, Any],
        **settings: Any,
    ) -> None:
        leave(folder / "demo", lines=5, black_box="auto", spill=None)
        self.run = SavedRun(path=folder / "demo", steps=8, every=None, settings=AUTO | settings)
        self.told: list[str] = []
        self.asked: list[Any] = []

        def ask_nodes(work: Any, *args: Any, **options: Any) -> dict[str, Any]:
            if work is nbytes_of:
                return {node: 10 << 30 if own else None for node, own in found.items()}
            self.asked.append((args, options))
            return {node: found[node] for node in options["among"]}

        monkeypatch.setattr(box_search, "ask_nodes", ask_nodes)
        monkeypatch.setattr(module, "nodes", lambda: NODES)

    def find(self) -> RunCheckpoints:
        return RunCheckpoints.find(
            self.run.config, [self.run.arm], on_warning=self.told.append, on_phase=lambda text: None
        )

    def ask(self, checkpoints: RunCheckpoints, placement: Placement = PLACED) -> Placement:
        return checkpoints.taking_up.ask([self.run.arm], checkpoints.starts, placement)


def test_stages_are_placed_where_their_boxes_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = boxes_with(3, 4)
    world = World(tmp_path, monkeypatch, {"n0": [first], "n1": [], "n2": [second]})
    checkpoints = world.find()

    placement = world.ask(checkpoints)

    assert [node.id for node in placement.nodes] == ["n0", "n2"]
    start = checkpoints.starts["acsgd"]
    assert start.boxes is not None
    assert (start.boxes.run, start.after, start.source) == ("abc-1", 4, "box")
    assert len(start.boxes.progress["rows"]) == 5
    assert world.told == []
    ((args, options),) = world.asked
    assert args == ("auto",)
    assert (options["run"], options["num_stages"], options["spill"]) == ("abc-1", 2, None)
    assert options["among"] == ["n0", "n2"]  # the other one has none
    assert options["timeout_s"] > 300  # ten gigabytes are not read in two minutes everywhere
    assert checkpoints.failures[0].kind == "died"  # of before the driver's death


class Joining:
    """A cluster whose nodes come one after the other, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after_s: dict[str, float]) -> None:
        self.now = 0.0
        self.phases: list[str] = []
        self.told: list[str] = []
        monkeypatch.setattr(
            box_search,
            "nodes",
            lambda: [Node(id=ip, ip=ip) for ip, s in after_s.items() if self.now >= s],
        )

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, *wanted: str) -> None:
        box_search.await_nodes(
            wanted,
            folder=Path("runs/demo"),
            on_phase=self.phases.append,
            on_warning=self.told.append,
            clock=lambda: self.now,
            pause=self.pause,
        )


def test_nodes_that_are_on_their_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    joining = Joining(monkeypatch, {"10.0.0.0": 0.0, "10.0.0.1": 20.0, "10.0.0.2": 30.0})

    joining.wait("10.0.0.0", "10.0.0.1", "10.0.0.2", "10.0.0.2")

    assert joining.now == 30.0
    assert joining.told == []
    assert joining.phases == [
        "waiting for node 10.0.0.1, 10.0.0.2, where stages of runs/demo were",
        "waiting for node 10.0.0.2, where stages of runs/demo were",
    ]


def test_a_node_that_does_not_come_is_named_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joining = Joining(monkeypatch, {"10.0.0.0": 0.0})

    joining.wait("10.0.0.0", "10.0.0.7")

    assert joining.now == 60.0
    assert joining.told == [
        "node 10.0.0.7, where stages of runs/demo were, did not join the cluster within 60 s"
    ]


def test_who_has_nothing_to_wait_for_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = Joining(monkeypatch, {})
    joining.wait()
    TakingUp().await_nodes(joining.phases.append)

    assert joining.phases == []


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"n0": boxes_with(3, 4)[:1]}, "no node has the black box of stage 1"),
        (
            {"n0": [LeftBox(stage=0, trouble="a wrong checksum"), boxes_with(3, 4)[1]]},
            "a wrong checksum",
        ),
        ({"n0": RuntimeError("no answer")}, "no node has the black box of stage 0, 1"),
    ],
    ids=["lost", "damaged", "no answer"],
)
def test_boxes_that_are_of_no_use_are_told_with_what_happens_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], why: str
) -> None:
    world = World(tmp_path, monkeypatch, found)
    checkpoints = world.find()

    assert world.ask(checkpoints) == PLACED
    assert checkpoints.starts["acsgd"] == Start()
    assert why in world.told[-1]
    assert world.told[-1].endswith("There is no checkpoint, so the arm begins at step 0.")
    assert checkpoints.boxes_of(world.run.arm).gone == ("abc-1",)  # they may be removed


def test_a_run_that_is_still_held_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [LeftBox(stage=0, trouble="held by another process", is_held=True)]
    world = World(tmp_path, monkeypatch, {"n0": held})

    with pytest.raises(CheckpointError, match="is still being trained: held by another process"):
        world.ask(world.find())


def test_boxes_of_other_settings_are_left_alone_by_auto_and_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, {"n0": boxes_with(3, 4)}, model__width=32)
    world.ask(world.find())
    assert "model.width is 16 there and 32 here" in world.told[-1]
    assert world.asked == []

    world.run = replace(
        world.run, settings={"checkpoint__resume": str(tmp_path / "demo"), "model__width": 32}
    )
    with pytest.raises(CheckpointError, match=r"its black boxes cannot be used: model\.width is"):
        world.ask(world.find())


def test_a_run_that_keeps_no_boxes_does_not_begin_with_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, {"n0": boxes_with(3, 4)}, faults__max_failures=0)

    world.ask(world.find())

    assert "this run keeps none (--max-failures 0" in world.told[-1]


def test_the_boxes_beat_an_older_checkpoint_and_keep_it_to_fall_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SavedRun(path=tmp_path / "demo", steps=8, every=2).train(2)
    world = World(tmp_path, monkeypatch, {"n0": boxes_with(3, 4)})
    checkpoints = world.find()

    world.ask(checkpoints)

    start = checkpoints.starts["acsgd"]
    assert (start.after, start.source) == (4, "box")
    assert start.checkpoint is not None
    assert start.checkpoint.step == 2


def test_a_newer_checkpoint_beats_the_boxes_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SavedRun(path=tmp_path / "demo", steps=8, every=6).train(6)
    world = World(tmp_path, monkeypatch, {"n0": boxes_with(3, 4)})
    checkpoints = world.find()

    world.ask(checkpoints)

    assert (checkpoints.starts["acsgd"].after, checkpoints.starts["acsgd"].source) == (
        5, "checkpoint",
    )  # fmt: skip
    assert world.told == []


def test_a_checkpoint_that_an_earlier_run_left_in_the_folder_does_not_beat_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SavedRun(path=tmp_path / "demo", steps=8, every=6).train(6)
    world = World(tmp_path, monkeypatch, {"n0": boxes_with(3, 4)})
    path = tmp_path / "demo" / FILE
    body = json.loads(path.read_text())
    body["arms"]["acsgd"]["serial"] = 2  # the dead run began at step 0, beside that checkpoint
    path.write_text(json.dumps(body))
    checkpoints = world.find()

    world.ask(checkpoints)

    start = checkpoints.starts["acsgd"]
    assert (start.after, start.source, start.checkpoint) == (4, "box", None)


def test_damaged_checkpoints_do_not_matter_where_boxes_are_whole_and_end_the_run_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SavedRun(path=tmp_path / "demo", steps=8, every=2).train(2)
    for file in (tmp_path / "demo").rglob("stage_0.safetensors"):
        file.write_bytes(b"damaged")

    world = World(tmp_path, monkeypatch, {"n0": boxes_with(3, 4)})
    checkpoints = world.find()
    world.ask(checkpoints)
    assert checkpoints.starts["acsgd"].source == "box"

    world = World(tmp_path, monkeypatch, {})
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        world.ask(world.find())


def test_a_stage_that_cannot_go_back_after_all_sends_the_arm_to_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, {"n0": boxes_with(3, 4)})
    checkpoints = world.find()
    world.ask(checkpoints)
    calls: list[Any] = []
    pipeline: Any = SimpleNamespace(
        arm=world.run.arm, infos=[], start_anew=lambda: calls.append("anew"),
        go_back=lambda step: calls.append(step) or ["the black box of stage 1 holds steps []"],
    )  # fmt: skip

    start = checkpoints.taking_up.go_back(pipeline, checkpoints.starts["acsgd"])

    assert start == Start()
    assert calls == [4, "anew"]
    assert "holds steps []" in world.told[-1]


# --- the record of this run -------------------------------------------------------------------


def begin(folder: Path, taking_up: TakingUp, start: Start) -> Failure | None:
    run = SavedRun(path=folder, steps=8, every=None)
    folder.mkdir(exist_ok=True)
    failures: list[Failure] = [] if taking_up.left is None else taking_up.left.failures
    taking_up.open(run.config, folder, failures, epoch_s=0.0)
    pipeline: Any = SimpleNamespace(
        arm=run.arm, run="abc-1", infos=[], handles=[0, 1],
        specs=[SimpleNamespace(black_box="auto")],
        actors=SimpleNamespace(placement=PLACED),
    )  # fmt: skip
    return taking_up.begun(pipeline, start, serial=1, evaluations=[])


@pytest.mark.parametrize(
    ("error", "leaves_boxes", "stays"),
    [
        (None, False, False),
        (KeyboardInterrupt(), False, False),
        (KeyboardInterrupt(), True, False),
        (Terminated(), True, True),
        (TrainingError("too many failures"), False, False),
        (TrainingError("Ray is gone"), True, True),
    ],
)
def test_the_record_stays_only_where_the_run_can_be_taken_up(
    tmp_path: Path, error: BaseException | None, leaves_boxes: bool, stays: bool
) -> None:
    taking_up = TakingUp()
    begin(tmp_path / "demo", taking_up, Start())
    assert (tmp_path / "demo" / FILE).exists()

    assert taking_up.over(error, leaves_boxes=leaves_boxes) == stays
    assert (tmp_path / "demo" / FILE).exists() == stays


def test_a_start_that_fails_before_an_arm_begins_leaves_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, {"n0": boxes_with(3, 4)})
    before = (tmp_path / "demo" / FILE).read_text()
    taking_up = world.find().taking_up
    taking_up.open(world.run.config, tmp_path / "demo", [], epoch_s=0.0)

    assert not taking_up.over(TrainingError("no room"), leaves_boxes=False)
    assert (tmp_path / "demo" / FILE).read_text() == before


def test_a_run_that_begins_anew_in_the_folder_forgets_the_dead_one(tmp_path: Path) -> None:
    leave(tmp_path / "demo", lines=5)

    TakingUp().open(SavedRun(path=tmp_path / "demo").config, tmp_path / "demo", [], epoch_s=0.0)

    assert not (tmp_path / "demo" / FILE).exists()


def test_the_drivers_end_has_an_entry_that_says_where_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, {"n0": boxes_with(2, 3)})
    checkpoints = world.find()
    world.ask(checkpoints)

    failure = begin(tmp_path / "demo", checkpoints.taking_up, checkpoints.starts["acsgd"])

    assert failure is not None
    assert (failure.kind, failure.step, failure.resumed_from, failure.source) == (
        "driver", 5, 3, "box",
    )  # fmt: skip
    assert failure.replayed_steps == 1
    assert "goes on after step 3, from the black boxes of its stages (1 step is" in str(failure)
    noted = json.loads((tmp_path / "demo" / FILE).read_text())
    assert [entry["kind"] for entry in noted["failures"]] == ["died", "driver"]
    assert noted["arms"]["acsgd"]["run"] == "abc-1"


def test_a_run_that_goes_on_in_another_folder_leaves_no_record_in_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, {})
    taking_up = world.find().taking_up

    begin(tmp_path / "other", taking_up, Start(boxes=BoxStart(run="abc-1", step=3, progress={})))

    assert not (tmp_path / "demo" / FILE).exists()
    assert (tmp_path / "other" / FILE).exists()
