"""Where a run goes on whose driver was killed: the newest of its boxes and its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_runs import SavedRun
from synthetic_records import make_step

from ray_pipe.arm_progress import progress_of
from ray_pipe.checkpoint import code_version, data_of
from ray_pipe.checkpoint_files import CheckpointError
from ray_pipe.errors import ConfigError
from ray_pipe.left_run import LeftRun, choose, find_left
from ray_pipe.metrics import ArmMeter, MetricsFile, to_json
from ray_pipe.recovery import Failure
from ray_pipe.same_source import CHECKS
from ray_pipe.step_row import row_of_line, row_to
from ray_pipe.unfinished import FILE, RunRecord, has_record, is_alive, newest_record, this_process
from stages.left_boxes import LeftBox
from stages.record import StepRecord


def box(stage: int, *steps: int, records: Sequence[int] = (), trouble: str = "") -> LeftBox:
    told = [
        StepRecord(
            stage=stage, step=step, loss=None, num_tokens=1, start_s=0.0, end_s=1.0, seconds={},
            sent={}, codec={}, grad_norm=None,
        )
        for step in records
    ]  # fmt: skip
    return LeftBox(stage=stage, steps=steps, records=tuple(told), trouble=trouble)


def pick(found: dict[str, list[LeftBox]], *, checkpoint: int | None, **options: Any) -> Any:
    options = {"num_stages": 2, "recorded": 20, **options}
    return choose(found, checkpoint=checkpoint, **options)


BOTH = {"n": [box(0, 9, 10), box(1, 8, 9)]}


def test_the_newest_common_step_beats_an_older_checkpoint_and_a_newer_one_beats_it() -> None:
    older, equal, newer = (pick(BOTH, checkpoint=step) for step in (8, 9, 10))

    assert (older.step, older.source) == (9, "box")
    assert (equal.step, equal.source) == (9, "box")
    assert (newer.step, newer.source) == (10, "checkpoint")
    assert newer.troubles == ()


def test_without_a_checkpoint_boxes_are_enough() -> None:
    choice = pick(BOTH, checkpoint=None)

    assert (choice.step, choice.source, choice.troubles) == (9, "box", ())
    assert choice.homes == {0: ["n"], 1: ["n"]}


def test_a_lost_host_sends_all_to_the_checkpoint_and_is_told_by_stage() -> None:
    choice = pick({"n": [box(0, 9, 10)]}, checkpoint=4)

    assert (choice.step, choice.source) == (4, "checkpoint")
    assert choice.troubles == ("no node has the black box of stage 1",)


def test_without_either_the_run_begins_anew() -> None:
    assert pick({}, checkpoint=None).source == "fresh"
    assert pick({"n": [box(0, -1), box(1, -1)]}, checkpoint=None).source == "fresh"


def test_a_damaged_box_is_told_and_the_step_before_serves_if_all_have_it() -> None:
    worn = box(0, 9, trouble="step 10 has a wrong checksum")

    one = pick({"n": [worn, box(1, 9, 10)]}, checkpoint=4)
    none = pick({"n": [box(0, trouble="no step is whole"), box(1, 9, 10)]}, checkpoint=4)

    assert (one.step, one.source) == (9, "box")
    assert (none.step, none.source, none.troubles) == (4, "checkpoint", ("no step is whole",))


def test_a_step_that_the_driver_had_not_heard_of_counts_only_if_every_box_has_its_record() -> None:
    ahead = {"n": [box(0, 11, 12, records=(10, 11, 12)), box(1, 11, 12, records=(10, 11, 12))]}
    lacking = {"n": [box(0, 11, 12, records=(11, 12)), box(1, 11, 12, records=(10, 11, 12))]}

    assert pick(ahead, checkpoint=None, recorded=9).step == 12
    assert pick(ahead, checkpoint=None, recorded=8).source == "fresh"
    choice = pick(lacking, checkpoint=3, recorded=9)
    assert (choice.step, choice.source) == (3, "checkpoint")
    assert choice.troubles == ("the black boxes hold step 12, metrics.jsonl ends at step 9",)


def test_boxes_without_a_common_step_are_told() -> None:
    choice = pick({"n": [box(0, 9, 10), box(1, 3)]}, checkpoint=None)

    assert choice.source == "fresh"
    assert choice.troubles == (
        "the black boxes have no step in common (stage 0 [9, 10]; stage 1 [3])",
    )


def test_steps_beyond_the_arms_own_are_left_out_where_they_are_of_no_use() -> None:
    assert pick(BOTH, checkpoint=None, latest=9).step == 9
    assert pick(BOTH, checkpoint=None, latest=8).source == "fresh"


def test_a_stage_that_had_moved_is_found_where_its_newest_box_lies() -> None:
    found = {"old": [box(0, 5, 6)], "new": [box(0, 9, 10)], "other": [box(1, 9, 10)]}

    assert pick(found, checkpoint=None).homes == {0: ["new"], 1: ["other"]}


@given(
    st.lists(st.sets(st.integers(-1, 6)), min_size=1, max_size=4),
    st.none() | st.integers(0, 8),
)
def test_what_is_chosen_is_there_and_nothing_newer_is(
    steps: list[set[int]], checkpoint: int | None
) -> None:
    found = {"n": [box(stage, *sorted(own)) for stage, own in enumerate(steps)]}

    choice = pick(found, checkpoint=checkpoint, num_stages=len(steps))

    common = set.intersection(*steps)
    assert choice.step == max([*common, -1, *([] if checkpoint is None else [checkpoint])])
    if choice.source == "box":
        assert choice.step in common
    elif choice.source == "checkpoint":
        assert choice.step == checkpoint


# --- a run's folder ---------------------------------------------------------------------------

NUM_STEPS = 8


def leave(folder: Path, *, lines: int, **noted: Any) -> tuple[SavedRun, ArmMeter]:
    """A run of `NUM_STEPS` whose driver was killed after so many lines; the unbroken meter."""
    run = SavedRun(path=folder, steps=NUM_STEPS, every=None)
    folder.mkdir(parents=True, exist_ok=True)
    whole = ArmMeter("acsgd")
    with MetricsFile(folder / "metrics.jsonl") as sink:
        for step in range(NUM_STEPS):
            row = whole.add(step_of(step))
            if step < lines:
                sink.write(row)
    note(run, **noted)
    return run, whole


def note(run: SavedRun, *, driver: dict[str, Any] | None = None, **values: Any) -> None:
    arm = run.arm
    record = RunRecord(run.path, config=arm.config.to_dict(), code=code_version(), epoch_s=0.0)
    cuts = [[cut.start, cut.stop] for cut in arm.workload.cuts(2)]
    record._body["driver"] = driver or {"pid": 1, "host": "elsewhere", "since": 1}
    told = {
        "run": "abc-1", "num_steps": NUM_STEPS, "data": data_of(arm), "cuts": cuts, "blocks": {},
        "serial": 1, "is_done": False, "evaluations": [], "again": {},
    }  # fmt: skip
    record.arm("acsgd", **{**told, **values})
    record.save([Failure(kind="died", stage=1, step=3, cause="killed", arm="acsgd").as_dict()])


def step_of(step: int) -> list[StepRecord]:
    return make_step(step=step, start_s=0.5 * step, num_stages=2, loss=3.0 - 0.1 * step)


def boxes_with(*steps: int) -> list[LeftBox]:
    return [
        LeftBox(stage=stage, steps=steps, records=tuple(step_of(s)[stage] for s in steps))
        for stage in range(2)
    ]


def without_times(progress: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {k: v for k, v in row.items() if k not in ("wall_s", "step_s", "stage_s")}
        for row in progress["rows"]
    ]
    return {**progress, "rows": rows, "extra": {}}


def test_a_line_of_metrics_is_read_back_as_the_row_that_it_was_written_from() -> None:
    meter = ArmMeter("acsgd")
    row = meter.add(step_of(0))

    assert row_of_line(json.loads(to_json(row.as_dict()))) == row


@pytest.mark.parametrize(("lines", "step"), [(5, 4), (5, 3), (5, 6), (0, 1)])
def test_the_numbers_up_to_a_step_are_those_of_an_unbroken_run(
    tmp_path: Path, lines: int, step: int
) -> None:
    leave(tmp_path / "demo", lines=lines)
    part = ArmMeter("acsgd")
    for number in range(step + 1):
        part.add(step_of(number))
    unbroken = progress_of(part, [], None, num_steps=NUM_STEPS) | {
        "rows": [*map(row_to, part.rows)],
        "overtime": [],
    }

    boxes = boxes_with(*range(max(0, step - 1), step + 1))
    progress = LeftRun(tmp_path / "demo").progress("acsgd", step, boxes)

    assert without_times(progress) == without_times(unbroken)
    walls = [row["wall_s"] for row in progress["rows"]]
    assert walls == sorted(walls)


def test_bytes_of_steps_that_were_run_again_stay_counted_and_evaluations_are_kept(
    tmp_path: Path,
) -> None:
    again = {"0->1": {"activation": 1000}}
    _, whole = leave(
        tmp_path / "demo", lines=8, again=again, evaluations=[[1.0, 3, 2.5], [2.0, 7, 2.0]]
    )

    progress = LeftRun(tmp_path / "demo").progress("acsgd", 5)

    own = sum(row.sent["0->1"]["activation"] for row in whole.rows[:6])
    assert progress["ledger"]["0->1"]["activation"] == own + 1000
    assert progress["eval_losses"] == [[1.0, 3, 2.5]]


def test_lines_after_a_gap_or_half_a_line_do_not_count(tmp_path: Path) -> None:
    leave(tmp_path / "demo", lines=5)
    path = tmp_path / "demo" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert LeftRun(tmp_path / "demo").recorded("acsgd") == 4

    path.write_text("".join(lines[:4]) + lines[4][:40])
    assert LeftRun(tmp_path / "demo").recorded("acsgd") == 3
    path.write_text("".join(lines[:2] + lines[3:]))
    assert LeftRun(tmp_path / "demo").recorded("acsgd") == 1


def test_failures_before_the_drivers_death_are_remembered(tmp_path: Path) -> None:
    leave(tmp_path / "demo", lines=5)

    assert [failure.kind for failure in LeftRun(tmp_path / "demo").failures] == ["died"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, ""),
        ({"optim__lr": 0.5}, ""),  # told as a note, as with a checkpoint
        ({"model__width": 32}, "model.width is 16 there and 32 here"),
        ({"pipeline__stages": 4}, "pipeline.stages is 2 there and 4 here"),
        ({"seed": 7}, "seed is 0 there and 7 here"),
        ({"data__num_samples": 11}, "other data or in another order (digest"),
        ({"faults__black_box": "/boxes"}, "faults.black_box is 'auto' there and '/boxes' here"),
        ({"codec__spill_dir": "/rows"}, "codec.spill_dir is None there and '/rows' here"),
    ],
)
def test_boxes_of_another_training_are_named(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    run, _ = leave(tmp_path / "demo", lines=5)
    other = replace(run, settings=settings)

    trouble = LeftRun(tmp_path / "demo").trouble(other.arm)

    assert told in trouble
    assert bool(trouble) == bool(told)
    if "optim__lr" in settings:
        (text,) = LeftRun(tmp_path / "demo").notes(other.arm, 4)
        assert text.startswith("optim.lr was 0.001 up to step 5 and is 0.5 from now on")


def test_boxes_of_other_code_or_another_model_are_named(tmp_path: Path) -> None:
    run, _ = leave(tmp_path / "demo", lines=5, blocks={"0": "aa", "1": "bb"})
    path = tmp_path / "demo" / FILE
    body = json.loads(path.read_text())
    left = LeftRun(tmp_path / "demo")

    assert left.other_blocks("acsgd", [{"blocks": {0: "aa"}}, {"blocks": {1: "bb"}}]) == ""
    assert "block 1" in left.other_blocks("acsgd", [{"blocks": {0: "aa", 1: "cc"}}])
    assert "block 1" in left.other_blocks("acsgd", [{"blocks": {0: "aa"}}])
    for name in CHECKS:  # whatever a stage of another kind is refused for
        path.write_text(json.dumps({**body, "code": {**body["code"], name: "other"}}))
        told = LeftRun(tmp_path / "demo").trouble(run.arm)
        assert f"it ran other code ({name} other there" in told


def test_an_arm_is_done_only_with_all_its_lines_and_as_many_steps_as_now(tmp_path: Path) -> None:
    run, _ = leave(tmp_path / "demo", lines=8, is_done=True)

    assert LeftRun(tmp_path / "demo").is_done(run.arm)
    assert LeftRun(tmp_path / "demo").training == ""
    assert not LeftRun(tmp_path / "demo").is_done(replace(run, steps=9).arm)
    leave(tmp_path / "demo", lines=7, is_done=True)
    assert not LeftRun(tmp_path / "demo").is_done(run.arm)


def test_a_run_whose_driver_lives_is_refused_and_one_of_this_very_process_is_not(
    tmp_path: Path,
) -> None:
    run, _ = leave(tmp_path / "demo", lines=5, driver={**this_process(), "pid": 1, "since": None})
    assert not is_alive(this_process())
    from ray_pipe import unfinished

    note(run, driver={"pid": 1, "host": this_process()["host"], "since": unfinished._since(1)})
    with pytest.raises(CheckpointError, match="is being trained by process 1 on this machine"):
        LeftRun(tmp_path / "demo")
    note(run, driver={"pid": 1, "host": this_process()["host"], "since": 12345678901})
    LeftRun(tmp_path / "demo")  # the number was used again


def test_it_is_found_by_auto_and_by_its_folder_but_not_for_clicks_or_replicas(
    tmp_path: Path,
) -> None:
    run, _ = leave(tmp_path / "demo", lines=5)

    def find(**settings: Any) -> LeftRun | None:
        return find_left(replace(run, settings=settings).config)

    assert find() is None
    assert find(checkpoint__resume="auto") is not None
    assert find(checkpoint__resume=str(tmp_path / "demo")) is not None
    assert find(checkpoint__resume=str(tmp_path / "demo" / "checkpoints")) is None
    replicas = {"sync__replicas": 2, "sync__name": "allreduce"}
    assert find(checkpoint__resume="auto", **replicas) is None


def test_a_record_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    leave(tmp_path / "demo", lines=5)
    path = tmp_path / "demo" / FILE
    whole = json.loads(path.read_text())

    for text in (path.read_text()[:-20], "[]", json.dumps({**whole, "format": 9})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"unfinished\.json"):
            LeftRun(tmp_path / "demo")


def test_the_newest_run_that_is_not_over_is_found_and_one_that_ended_is_not(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        leave(tmp_path / name, lines=3)
    assert newest_record(str(tmp_path)) is not None
    found = newest_record(str(tmp_path))
    assert found is not None
    assert found[1] == str(tmp_path / "b")
    record = RunRecord(tmp_path / "b", config={}, code={}, epoch_s=0.0)
    record.remove()

    assert not has_record(tmp_path / "b")
    found = newest_record(str(tmp_path))
    assert found is not None
    assert found[1] == str(tmp_path / "a")


def test_a_record_on_a_full_disk_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    record = RunRecord(
        tmp_path / "no folder", config={}, code={}, epoch_s=0.0, on_warning=told.append
    )

    record.save([])
    record.save([])

    assert len(told) == 1
    assert "training goes on" in told[0]
