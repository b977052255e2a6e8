"""Saving behind training: when, what counts, what is kept, and a disk that gives up."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saved_runs import FakePipeline, SavedRun

from ray_pipe.checkpoint_files import CheckpointError, CheckpointStore, locate
from ray_pipe.checkpointing import Fallback
from ray_pipe.resume import Resume
from stages.storage import Folder, StorageError


def steps_of(run: SavedRun, arm: str = "acsgd") -> list[int]:
    return [one.step for one in run.store.checkpoints(arm)]


def test_every_n_steps_and_at_the_end_and_the_last_k_stay(tmp_path: Path) -> None:
    run = SavedRun(
        path=tmp_path / "demo", steps=7, every=2, settings={"checkpoint__keep": 2}
    ).train()

    assert steps_of(run) == [6, 7]
    folder = tmp_path / "demo" / "checkpoints" / "acsgd"
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoint_000006", "checkpoint_000007", "finished.json.zst",
    ]  # fmt: skip
    assert sorted(p.name for p in (folder / "checkpoint_000007").iterdir()) == [
        "manifest.json", "progress.json.zst", "stage_0.safetensors", "stage_1.safetensors",
    ]  # fmt: skip
    assert run.warnings == []


def test_saving_every_step_works_though_two_are_under_way(tmp_path: Path) -> None:
    run = SavedRun(path=tmp_path / "demo", steps=4, every=1, settings={"checkpoint__keep": 9})

    assert steps_of(run.train()) == [1, 2, 3, 4]


def test_a_slow_disk_holds_up_only_the_third(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def slow(pipeline: FakePipeline, step: int) -> None:
        pipeline.slow = True
        seen.append(steps_of(run))

    run = SavedRun(
        path=tmp_path / "demo", steps=4, every=1, settings={"checkpoint__keep": 9}, at_step=slow
    )
    run.train()

    assert seen == [[], [], [], [1]]  # the copy of step 2 makes the first be waited for
    assert steps_of(run) == [1, 2, 3, 4]


def test_without_shared_storage_the_driver_writes(tmp_path: Path) -> None:
    far = SavedRun(path=tmp_path / "far", steps=2, shared=False).train()
    near = SavedRun(path=tmp_path / "near", steps=2).train()

    files = [run.store.checkpoints("acsgd")[-1].manifest.files for run in (far, near)]
    assert [note for note in files[0] if "stage" in note.name] == [
        note for note in files[1] if "stage" in note.name
    ]


def test_behind_a_uri_it_is_the_same(tmp_path: Path) -> None:
    uri = f"memory://{tmp_path.name}"
    run = SavedRun(
        path=tmp_path / "demo", steps=6, settings={"checkpoint__dir": uri, "checkpoint__keep": 2}
    ).train()

    assert steps_of(run) == [4, 6]
    store, chosen = locate(f"{uri}/acsgd/checkpoint_000004")
    assert chosen is not None
    assert chosen.step == 4
    chosen.verify()
    assert Resume(store=store).start(run.arm).is_done


def test_a_stage_that_cannot_write_costs_a_checkpoint_not_the_run(tmp_path: Path) -> None:
    def break_once(pipeline: FakePipeline, step: int) -> None:
        error = StorageError(28, "cannot write x: the disk is full; free space")
        pipeline.fail = {1: error} if step == 3 else {}

    run = SavedRun(path=tmp_path / "demo", steps=6, at_step=break_once).train()

    assert steps_of(run) == [2, 6]
    (text,) = run.warnings
    assert "the checkpoint of step 4 could not be written" in text
    assert "the disk is full" in text
    assert "checkpoint_000002 stays, and training goes on" in text
    assert not list((tmp_path / "demo" / "checkpoints" / "acsgd").glob("*.part"))


def test_what_is_left_of_a_checkpoint_and_stays_costs_neither_the_run_nor_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Folder) -> None:
        raise StorageError(5, f"cannot remove {folder.name}: the store does not answer")

    def break_once(pipeline: FakePipeline, step: int) -> None:
        pipeline.fail = {1: StorageError(28, "the disk is full")} if step == 3 else {}

    monkeypatch.setattr(Folder, "remove", refuse)
    run = SavedRun(
        path=tmp_path / "demo",
        steps=6,
        at_step=break_once,
        settings={"checkpoint__dir": f"memory://{tmp_path.name}"},
    ).train()

    assert steps_of(run) == [2, 6]
    left = [text for text in run.warnings if "cannot remove attempt-" in text]
    assert len(left) == 4  # before each of the three, and what the second left


def test_a_stage_that_died_is_named(tmp_path: Path) -> None:
    def die(pipeline: FakePipeline, step: int) -> None:
        pipeline.fail = {0: RuntimeError("the actor is dead")} if step == 1 else {}

    run = SavedRun(path=tmp_path / "demo", steps=4, at_step=die).train()

    assert steps_of(run) == [4]
    assert (
        "stage 0 did not save its state: the actor is dead; there is none before it"
        in (run.warnings[0])
    )


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    options = ["-o", "size=420k"]
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", *options, "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        run = SavedRun(
            path=tmp_path / "demo",
            steps=6,
            settings={"checkpoint__dir": str(place), "checkpoint__keep": 9},
        ).train()

        found = run.store.checkpoints("acsgd")
        assert 0 < len(found) < 3, "the disk was to be full at the second or third"
        for one in found:
            one.verify()
        assert (
            "the disk is full; free space, or choose another --checkpoint-dir" in run.warnings[-1]
        )
        assert not list((place / "acsgd").glob("*.part"))
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("heals", [True, False])
def test_the_checkpoint_of_the_last_step_is_tried_again_and_if_it_is_lost_that_is_known(
    tmp_path: Path, heals: bool
) -> None:
    def break_at_the_end(pipeline: FakePipeline, step: int) -> None:
        pipeline.heals = heals
        pipeline.fail = {1: StorageError(5, "the store does not answer")} if step == 5 else {}

    run = SavedRun(path=tmp_path / "demo", steps=6, at_step=break_at_the_end).train()

    assert steps_of(run) == ([2, 4, 6] if heals else [2, 4])
    assert run.saver.lost == ("" if heals else "the store does not answer")
    assert run.pauses == ([2.0] if heals else [2.0, 2.0])
    assert "checkpoint_000004 stays, and it was of the last step" in run.warnings[-1]


def test_a_checkpoint_that_is_lost_on_the_way_is_not_lost_at_the_end(tmp_path: Path) -> None:
    def break_once(pipeline: FakePipeline, step: int) -> None:
        pipeline.fail = {1: StorageError(5, "the store does not answer")} if step == 3 else {}

    run = SavedRun(path=tmp_path / "demo", steps=6, at_step=break_once).train()

    assert (run.saver.lost, run.pauses) == ("", [])


def test_a_damaged_newest_checkpoint_is_not_the_end_of_a_recovery(tmp_path: Path) -> None:
    run = SavedRun(path=tmp_path / "demo", settings={"checkpoint__keep": 2}).train()
    damaged = run.store.checkpoints("acsgd")[-1]
    (Path(damaged.path) / "stage_1.safetensors").write_bytes(b"x")
    one: Any = SimpleNamespace(arm=run.arm, saver=run.saver)
    warnings: list[str] = []
    fallback = Fallback(one, None, warnings.append)

    assert fallback.newest() == 5
    with pytest.raises(CheckpointError, match="it was cut off or changed"):
        fallback.load(5)
    fallback.refuse("it was cut off")
    assert fallback.newest() == 3
    assert len(fallback.load(3)) == 2
    fallback.refuse("a test")
    assert fallback.newest() is None
    assert "checkpoint_000006 cannot be used: it was cut off; " in warnings[0]
    assert warnings[0].endswith("checkpoint_000004 is tried")
    assert warnings[1].endswith("cannot be used: a test; the run begins anew")


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = SavedRun(
        path=tmp_path / "demo", settings={"checkpoint__dir": str(tmp_path / "file" / "x")}
    )

    with pytest.raises(CheckpointError, match="checkpoints cannot be written"):
        run.train()
    assert run.losses == []


@pytest.mark.parametrize("when", ["stage_1.safetensors", "progress.json.zst", "manifest.json"])
def test_a_kill_at_any_moment_leaves_the_last_one_to_resume_from(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill -9 would leave: the writing stops there and nothing is cleaned up."""

    class Killed(BaseException):
        pass

    write = Folder.write

    def stop(self: Folder, name: str, chunks: Any) -> Any:
        if name == when and "000004" in self.uri:
            write(self, name, [b"half"])
            raise Killed
        return write(self, name, chunks)

    monkeypatch.setattr(Folder, "write", stop)
    run = SavedRun(path=tmp_path / "demo", steps=6)
    with pytest.raises(Killed):
        run.train()
    monkeypatch.undo()

    assert steps_of(run) == [2]
    start = Resume(store=run.store).start(run.arm)
    assert start.checkpoint is not None
    assert start.checkpoint.step == 2


@pytest.mark.parametrize("when", ["stage_1.safetensors", "progress.json.zst", "manifest.json"])
def test_on_a_store_a_checkpoint_that_is_written_again_is_whole_at_every_moment(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are run again after a fault, and a store cannot rename."""
    settings = {"checkpoint__dir": f"memory://{tmp_path.name}"}
    SavedRun(path=tmp_path / "demo", steps=2, settings=settings).train()
    again = SavedRun(path=tmp_path / "demo", steps=2, settings=settings)
    (right,) = again.store.checkpoints("acsgd")

    class Killed(BaseException):
        pass

    write, seen = Folder.write, []

    def stop(self: Folder, name: str, chunks: Any, **how: Any) -> Any:
        seen.append(name)
        if name == when:
            raise Killed
        return write(self, name, chunks, **how)

    monkeypatch.setattr(Folder, "write", stop)
    with pytest.raises(Killed):
        again.train()
    monkeypatch.undo()

    assert when in seen
    newest, troubles = again.store.newest("acsgd")
    assert newest is not None
    assert (newest.manifest, troubles) == (right.manifest, [])
    assert Resume(store=again.store).start(again.arm).checkpoint is not None

    again.train()
    (newest,) = again.store.checkpoints("acsgd")
    newest.verify()
    assert newest.manifest.serial == right.manifest.serial + 1
    assert newest.folder.children() == [newest.manifest.within]  # the others are gone
    assert again.warnings == []


@pytest.mark.parametrize("given", ["run", "checkpoint"])
def test_a_checkpoint_whose_replacement_was_stopped_half_way_is_found(
    tmp_path: Path, given: str
) -> None:
    run = SavedRun(path=tmp_path / "demo", steps=2).train()
    home = tmp_path / "demo" / "checkpoints" / "acsgd"
    (home / "checkpoint_000002").rename(home / "checkpoint_000002.old")
    (home / "checkpoint_000002.part").mkdir()

    path = run.path if given == "run" else home / "checkpoint_000002"
    store, _ = locate(str(path))

    newest, troubles = store.newest("acsgd")
    assert newest is not None
    assert (newest.step, troubles) == (2, [])
    assert not (home / "checkpoint_000002.old").exists()


def test_a_mutant_that_saves_the_state_of_another_step_is_refused(tmp_path: Path) -> None:
    """As a stage would whose step was aborted before it was told to save."""

    def late(pipeline: FakePipeline, step: int) -> None:
        if step == 1:
            pipeline.now[1].notes["step"] = 0

    run = SavedRun(path=tmp_path / "demo", steps=2, at_step=late).train()

    (one,) = run.store.checkpoints("acsgd")
    with pytest.raises(CheckpointError, match=r"stage_1.* after 1 steps, the checkpoint after 2"):
        one.states()


def test_a_mutant_that_writes_the_manifest_first_is_seen(tmp_path: Path) -> None:
    """Then a checkpoint would count before its files are there."""
    run = SavedRun(path=tmp_path / "demo", steps=2).train()
    (one,) = run.store.checkpoints("acsgd")
    (Path(one.path) / "stage_1.safetensors").unlink()

    newest, troubles = CheckpointStore(run.store.folder).newest("acsgd")
    assert newest is None
    assert "stage_1.safetensors" in troubles[0]
