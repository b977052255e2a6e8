"""Saving behind training: when, what counts, what is kept, and a disk that gives up."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saved_runs import FakePipeline, SavedRun

from ray_pipe.checkpoint import Pace
from ray_pipe.checkpoint_files import CheckpointError, CheckpointStore, locate
from ray_pipe.checkpointing import Fallback
from ray_pipe.errors import TrainingError
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


def test_a_checkpoint_has_the_rows_of_its_own_steps_though_others_were_added_since(
    tmp_path: Path,
) -> None:
    def slow(pipeline: FakePipeline, step: int) -> None:
        pipeline.slow = True

    run = SavedRun(
        path=tmp_path / "demo", steps=5, every=1, settings={"checkpoint__keep": 9}, at_step=slow
    ).train()

    saved = [one.progress()["rows"] for one in run.store.checkpoints("acsgd")]
    assert [[row["step"] for row in rows] for rows in saved] == [
        [*range(steps)] for steps in (1, 2, 3, 4, 5)
    ]


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


def test_between_two_arms_it_costs_only_what_cannot_be_written(tmp_path: Path) -> None:
    """An arm was trained already: its results are worth more than a checkpoint."""
    (tmp_path / "file").write_text("in the way")

    def clear(pipeline: FakePipeline, step: int) -> None:
        if step == 2:
            (tmp_path / "file").unlink()

    run = SavedRun(
        path=tmp_path / "demo",
        settings={"checkpoint__dir": str(tmp_path / "file" / "x")},
        must_write=False,
        at_step=clear,
    ).train()

    assert steps_of(run) == [4, 6]
    first, second = run.warnings
    assert first.startswith("checkpoints of acsgd cannot be written: ")
    assert first.endswith("training goes on, and the next one tries again")
    assert "the checkpoint of step 2 could not be written" in second


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


class Gate:
    """Holds up whoever writes a file of that name, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.threads: set[threading.Thread] = set()
        write = Folder.write

        def slow(folder: Folder, own: str, chunks: Any, **how: Any) -> Any:
            if own == name:
                self.threads.add(threading.current_thread())
                self.reached.set()
                assert self.opened.wait(30)
            return write(folder, own, chunks, **how)

        monkeypatch.setattr(Folder, "write", slow)


@pytest.mark.parametrize("shared", [True, False])
def test_training_does_not_wait_while_the_driver_writes_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """The gate is opened from the step after: a driver that waited would never get there."""
    gate = Gate(monkeypatch, "manifest.json" if shared else "stage_0.safetensors")
    seen: list[list[int]] = []

    def at_step(pipeline: FakePipeline, step: int) -> None:
        if step == 2:
            assert gate.reached.wait(30)
            seen.append(steps_of(run))
            gate.opened.set()

    run = SavedRun(path=tmp_path / "demo", steps=5, shared=shared, at_step=at_step)
    run.train()

    assert seen == [[]]  # of step 2 nothing counted yet, and step 3 was trained
    assert steps_of(run) == [2, 4, 5]
    assert all(thread.name.startswith("checkpoint") for thread in gate.threads)
    assert not any(thread.is_alive() for thread in gate.threads)


def test_what_fails_beside_training_is_told_at_the_next_step_and_tidied_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = CheckpointStore.commit

    def refuse(store: CheckpointStore, place: Folder, aside: Folder, manifest: Any) -> Any:
        if manifest.step == 2:
            raise StorageError(5, "the store does not answer")
        return publish(store, place, aside, manifest)

    monkeypatch.setattr(CheckpointStore, "commit", refuse)
    run = SavedRun(path=tmp_path / "demo", steps=6).train()

    assert steps_of(run) == [4, 6]
    assert "the checkpoint of step 2 could not be written: the store" in run.warnings[0]
    assert not list((tmp_path / "demo" / "checkpoints" / "acsgd").glob("*.part"))


def test_a_recovery_waits_for_what_is_being_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `keep` 1 the older one is removed with it: whoever chose that one would find nothing."""
    gate = Gate(monkeypatch, "manifest.json")
    gate.opened.set()
    found: list[int | None] = []

    def at_step(pipeline: FakePipeline, step: int) -> None:
        if step == 3:
            run.saver.settle()  # that of step 2
            gate.opened.clear()
        if step == 4:
            threading.Timer(0.1, gate.opened.set).start()
            one: Any = SimpleNamespace(arm=run.arm, saver=run.saver)
            fallback = Fallback(one, None, run.warnings.append)
            found.append(fallback.newest())
            fallback.load(3)

    run = SavedRun(path=tmp_path / "demo", settings={"checkpoint__keep": 1}, at_step=at_step)
    run.train()

    assert found == [3]
    assert run.warnings == []


def test_files_that_were_read_back_are_not_read_again_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, read = Folder.check, []

    def count(folder: Folder, note: Any) -> None:
        read.append(note.name)
        check(folder, note)

    monkeypatch.setattr(Folder, "check", count)
    SavedRun(path=tmp_path / "demo", steps=2).train()

    assert sorted(read).count("stage_0.safetensors") == 1


def test_a_mutant_that_publishes_a_file_cut_short_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Folder.publish

    def cut(place: Folder, aside: Folder) -> None:
        (Path(aside.path) / "stage_1.safetensors").write_bytes(b"x")
        publish(place, aside)

    monkeypatch.setattr(Folder, "publish", cut)
    run = SavedRun(path=tmp_path / "demo", steps=2).train()

    assert "it was cut off or changed" in run.saver.lost


# --- saving by time, where nobody said when -------------------------------------------------------


class Steps:
    """A clock that a step moves on by 100 s, and what was saved before each step."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.now = 0.0
        self.seen: list[list[int]] = []
        pace = Pace(options.pop("every_s"), clock=lambda: self.now)
        self.run = SavedRun(path=path, every=None, pace=pace, at_step=self._step, **options)

    def _step(self, pipeline: FakePipeline, step: int) -> None:
        self.run.saver.settle()
        self.seen.append(steps_of(self.run))
        self.now += 100.0


def test_without_being_told_a_long_run_saves_by_time_and_at_its_end(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "demo", every_s=250.0, steps=8)
    run = steps.run.train()

    assert steps.seen[:4] == [[], [], [], [3]]
    assert steps.seen[6:] == [[6], [6]]  # one is kept
    assert steps_of(run) == [8]
    assert run.warnings == []
    assert Resume(store=run.store).start(run.arm).is_done


def test_a_run_shorter_than_that_writes_nothing(tmp_path: Path) -> None:
    Steps(tmp_path / "demo", every_s=900.0).run.train()

    assert not (tmp_path / "demo" / "checkpoints" / "acsgd" / "checkpoint_000006").exists()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_resumed_run_saves_its_end_however_soon_it_comes(tmp_path: Path) -> None:
    SavedRun(path=tmp_path / "demo").train(steps=5)
    again = Steps(tmp_path / "demo", every_s=900.0).run
    again.start = Resume(store=again.store).start(again.arm)
    again.train()

    assert steps_of(again) == [6]


def test_a_step_that_is_sent_again_is_saved_again(tmp_path: Path) -> None:
    """Its copy was void, and the time for the next one has just begun."""
    steps = Steps(tmp_path / "demo", every_s=100.0, steps=4)
    asked: list[bool] = []

    def at_step(pipeline: FakePipeline, step: int) -> None:
        steps._step(pipeline, step)
        if step == 2:
            saver = steps.run.saver
            saver.sent(step)
            asked.extend([saver.is_due(step), saver.is_due(step + 1)])

    steps.run.at_step = at_step
    steps.run.train()

    assert asked == [True, True]  # the last step is due in any case
    assert steps_of(steps.run) == [4]


def test_a_stage_that_is_lost_while_the_folder_is_looked_for_ends_nothing(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "demo", every_s=250.0, steps=4)
    lost = iter([TrainingError("stage 1 failed looking for the folder")])

    def at_step(pipeline: FakePipeline, step: int) -> None:
        steps._step(pipeline, step)
        see = type(pipeline).see

        def fail(*words: Any) -> bool:
            for error in lost:
                raise error
            return see(pipeline, *words)

        pipeline.see = fail  # type: ignore[method-assign]

    steps.run.at_step = at_step

    assert steps_of(steps.run.train()) == [4]
    assert steps.seen[3] == [3]  # through the driver
