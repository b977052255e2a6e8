"""Resuming: to the bit, onto another cut, and refusing by name what is not this run's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_pipeline import fingerprint
from saved_runs import SavedRun

from ray_pipe.checkpoint_files import CheckpointError, locate
from ray_pipe.config import RunConfig
from ray_pipe.resume import Resume, default_folder, find_resume, load
from ray_pipe.trainer import Result
from stages.digest import hardware


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """A run of 6 steps, saved after 2, 4 and 6."""
    return SavedRun(path=tmp_path_factory.mktemp("runs") / "demo").train()


@pytest.fixture
def done(made: SavedRun, tmp_path: Path) -> SavedRun:
    """A copy of it that a test may spoil."""
    shutil.copytree(made.path, tmp_path / "demo")
    return replace(made, path=tmp_path / "demo", warnings=[])


def at(run: SavedRun, step: int) -> Any:
    return locate(f"{run.path}/checkpoints/acsgd/checkpoint_{step:06d}")


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", ["fp32", "acsgd", "directq+ef", "acsgd+zstd"])
def test_a_resumed_run_ends_with_the_same_bits(codec: str, tmp_path: Path) -> None:
    whole = SavedRun(path=tmp_path / "whole", settings={"codec__name": codec}).train()
    SavedRun(path=tmp_path / "half", settings={"codec__name": codec}).train(steps=5)
    again = SavedRun(path=tmp_path / "half", settings={"codec__name": codec})
    again.start = Resume(store=again.store).start(again.arm)
    again.train()

    assert again.start.checkpoint is not None
    assert again.start.checkpoint.step == 4
    assert again.losses == whole.losses
    assert fingerprint([s.arrays for s in again.final]) == fingerprint(
        [s.arrays for s in whole.final]
    )
    assert again.warnings == []


def test_an_arm_that_is_done_is_not_trained_again(done: SavedRun) -> None:
    start = Resume(store=done.store).start(done.arm)

    assert start.is_done
    assert start.progress is not None
    assert [row["loss"] for row in start.progress["rows"]] == done.losses


def test_more_steps_than_before_go_on_from_the_end(done: SavedRun, tmp_path: Path) -> None:
    longer = SavedRun(path=done.path, steps=8)
    longer.start = Resume(store=longer.store).start(longer.arm)
    longer.train()
    whole = SavedRun(path=tmp_path / "whole", steps=8).train()

    assert not longer.start.is_done
    assert longer.losses == whole.losses


def test_one_checkpoint_can_be_chosen_and_newer_ones_give_way(done: SavedRun) -> None:
    store, chosen = at(done, 2)
    again = replace(done, start=Resume(store=store, chosen=chosen).start(done.arm))
    again.train(steps=4)

    newest, _ = done.store.newest("acsgd")
    assert newest is not None
    assert newest.step == 4
    assert [one.manifest.serial for one in done.store.checkpoints("acsgd")] == [1, 3, 4]


def test_another_number_of_stages_keeps_weights_and_says_what_is_cold(done: SavedRun) -> None:
    other = SavedRun(path=done.path, settings={"pipeline__stages": 4})
    store, chosen = at(done, 4)
    other.start = Resume(store=store, chosen=chosen).start(other.arm)
    other.train()

    (text,) = other.warnings
    assert "is of 2 stages, this run has 4: weights and optimizer go on exactly" in text
    assert text.endswith("what acsgd remembers begins cold before block 1, 2")  # not 3: it stays
    assert other.losses[:4] == done.losses[:4]


def test_without_memory_another_number_of_stages_is_exact(tmp_path: Path) -> None:
    plain = {"codec__name": "fp32"}
    whole = SavedRun(path=tmp_path / "whole", settings=plain).train()
    other = SavedRun(path=tmp_path / "other", settings={**plain, "pipeline__stages": 4})
    store, chosen = at_codec(whole, "fp32", 4)
    other.start = Resume(store=store, chosen=chosen).start(other.arm)
    other.train()

    assert other.losses == whole.losses


def at_codec(run: SavedRun, codec: str, step: int) -> Any:
    return locate(f"{run.path}/checkpoints/{codec}/checkpoint_{step:06d}")


# --- refused by name ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model__width": 32}, "another run: model.width is 16 there and 32 here"),
        ({"model__layers": 2}, "model.layers is 4 there and 2 here"),
        ({"seed": 1}, "another run: seed is 0 there and 1 here. Resume with the same"),
        ({"data__num_samples": 11}, "trained on other data"),
        ({"model__context": 16}, "another run: model.context is 8 there and 16 here"),
        ({"optim__name": "sgd"}, "optim.name is 'adamw' there and 'sgd' here"),
        ({"pipeline__micro_batch_size": 2}, "pipeline.micro_batch_size is 3 there and 2 here"),
        ({"codec__rows": "fp32"}, "codec.rows is 'bf16' there and 'fp32' here"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(
    made: SavedRun, settings: dict[str, Any], words: str
) -> None:
    other = replace(made, settings=settings)

    with pytest.raises(CheckpointError) as caught:
        Resume(store=made.store).start(other.arm)
    assert words in str(caught.value)


def test_fewer_steps_than_were_done_are_refused(made: SavedRun) -> None:
    with pytest.raises(CheckpointError, match="saved after 6 steps, this run has only 5"):
        Resume(store=made.store).start(replace(made, steps=5).arm)


def test_a_changed_rate_is_a_warning(made: SavedRun) -> None:
    start = Resume(store=made.store).start(replace(made, settings={"optim__lr": 0.5}).arm)

    assert [note for note in start.notes if "optim.lr was 0.001 up to step 6 and is 0.5" in note]


def spoil(path: Path, how: str) -> None:
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif how == "edited":
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(bytes(raw))
    else:
        path.unlink()


@pytest.mark.parametrize(
    "name", ["stage_0.safetensors", "stage_1.safetensors", "progress.json.zst"]
)
@pytest.mark.parametrize("how", ["cut", "edited", "gone"])
def test_a_spoilt_file_is_named_and_the_one_before_is_taken(
    done: SavedRun, name: str, how: str
) -> None:
    spoil(done.path / "checkpoints" / "acsgd" / "checkpoint_000006" / name, how)

    start = Resume(store=done.store).start(done.arm)

    assert start.checkpoint is not None
    assert start.checkpoint.step == 4
    assert name in start.notes[0]
    assert "The newest whole one is taken" in start.notes[0]
    store, chosen = at(done, 6)
    with pytest.raises(CheckpointError, match=name):
        Resume(store=store, chosen=chosen).start(done.arm)


def test_a_manifest_that_was_edited_is_refused(done: SavedRun) -> None:
    path = done.path / "checkpoints" / "acsgd" / "checkpoint_000006" / "manifest.json"
    body = json.loads(path.read_text())
    body["step"] = 5
    path.write_text(json.dumps(body))

    with pytest.raises(CheckpointError, match="was edited"):
        at(done, 6)
    start = Resume(store=done.store).start(done.arm)
    assert start.checkpoint is not None
    assert start.checkpoint.step == 4


def test_nothing_whole_is_refused_with_all_reasons(done: SavedRun) -> None:
    for step in (2, 4, 6):
        spoil(
            done.path / "checkpoints" / "acsgd" / f"checkpoint_{step:06d}" / "stage_0.safetensors",
            "cut",
        )

    with pytest.raises(CheckpointError, match="acsgd has no whole checkpoint"):
        Resume(store=done.store).start(done.arm)


def test_other_code_is_a_warning(done: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_pipe.resume.code_version", lambda: {"ray_pipe": "9.9"})

    start = Resume(store=done.store).start(done.arm)

    assert "written by other code (ray_pipe 0.1.0 there, 9.9 here)" in start.notes[-1]


def test_other_processors_are_a_warning_once_the_stages_are_known(done: SavedRun) -> None:
    start = Resume(store=done.store).start(done.arm)
    assert start.checkpoint is not None
    blocks = [{"blocks": start.checkpoint.manifest.blocks, "hardware": hardware("cpu")}]
    pipeline: Any = SimpleNamespace(infos=blocks, load_states=lambda states: None)

    assert load(pipeline, start, done.arm) == []
    blocks[0]["hardware"] = {**hardware("cpu"), "capability": "AVX9000"}
    (note,) = load(pipeline, start, done.arm)

    assert "this run computes on cpu AVX9000: the last bits may differ" in note


# --- what `--resume` finds --------------------------------------------------------------------


def test_auto_without_a_checkpoint_starts_at_the_beginning(tmp_path: Path) -> None:
    config = RunConfig.from_dict({"checkpoint.resume": "auto", "out": str(tmp_path)})

    assert find_resume(config, default_folder(config, str(tmp_path / "x"))) is None


def test_a_run_without_that_arm_is_refused(made: SavedRun) -> None:
    config = replace(
        made, settings={"codec__name": "directq", "checkpoint__resume": str(made.path)}
    )

    with pytest.raises(
        CheckpointError, match="holds checkpoints of acsgd, this run trains directq"
    ):
        find_resume(config.config, made.store.folder)


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/acsgd"])
def test_a_run_is_found_by_any_of_its_folders(made: SavedRun, below: str) -> None:
    store, chosen = locate(f"{made.path}/{below}".rstrip("/"))

    assert str(store) == f"{made.path}/checkpoints"
    assert chosen is None


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in it"):
        locate(str(tmp_path))
    (tmp_path / "checkpoint_000002").mkdir()
    with pytest.raises(CheckpointError, match="its writing never ended"):
        locate(str(tmp_path / "checkpoint_000002"))


def test_a_result_tells_the_checkpoints_that_were_kept_with_the_numbers_of_their_steps(
    made: SavedRun,
) -> None:
    saved = made.store.checkpoints("acsgd")
    losses = [(0.5 * (step + 1), step, 3.0 - step / 10) for step in range(6)]
    rest: dict[str, Any] = {"path": str(made.path), "results": {}, "model_state": {}}

    result = Result(metrics={"losses": losses}, checkpoint=saved[-1], **rest)
    before = Result(metrics={"losses": losses}, checkpoint=saved[-2], **rest)

    assert [one.path for one, _ in result.best_checkpoints] == [one.path for one in saved]
    assert [numbers for _, numbers in result.best_checkpoints] == [
        {"step": 2, "loss": 2.9, "wall_s": 1.0},
        {"step": 4, "loss": 2.7, "wall_s": 2.0},
        {"step": 6, "loss": 2.5, "wall_s": 3.0},
    ]
    assert [one.step for one, _ in before.best_checkpoints] == [2, 4]
    assert Result(metrics={"losses": losses}, **rest).best_checkpoints == []
