"""A pipeline from Python is saved while stages and shards die. With fakes, on a real folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from ray_pipe import rec_saves
from ray_pipe.checkpoint_files import CheckpointError, open_checkpoint, shard_file, stage_file
from ray_pipe.errors import StageDied, TrainingError
from ray_pipe.rec_arm import LoadedPipeline
from ray_pipe.shards import ShardFailure
from stages.storage import FileNote, Folder, StorageError

FILES = (stage_file(0), stage_file(1), shard_file(0, 1))
EMB: Any = SimpleNamespace(tables=(), seed=0)


@dataclass
class Crew:
    """Two stages and a shard; `deaths` says who is lost in which try, and `disk` when it is full.

    Every file holds the number of the try that wrote it.
    """

    deaths: dict[int, str] = field(default_factory=dict)
    disk: set[int] = field(default_factory=set)
    limit: int = 9
    failures: list[str] = field(default_factory=list)
    trials: int = 0
    settled: list[int] = field(default_factory=list)
    lost: str = ""
    infos: Any = ({"blocks": {0: "a"}, "hardware": {"device": "cpu", "capability": "none"}},)

    @property
    def own(self) -> Any:
        samples = SimpleNamespace(digest="d")
        return SimpleNamespace(
            name="pipeline",
            config=SimpleNamespace(pipeline=SimpleNamespace(stages=2)),
            workload=SimpleNamespace(cuts=lambda num: [range(1), range(1, 2)], samples=samples),
        )

    def settle(self) -> None:
        assert not self.lost, "it is dead, and nobody has noticed"
        self.settled.append(self.trials)

    def see(self, folder: str, name: str, token: bytes) -> bool:
        self.trials += 1
        self.lost = self.deaths.get(self.trials, "")
        if self.lost == "see":
            raise StageDied(1, 7, "killed")
        return Folder(folder).read(name) == token

    def start_save(self, key: str, step: int, folder: str | None) -> Any:
        assert step == 7
        assert folder is not None
        found: list[FileNote | BaseException] = []
        for name in FILES:
            if self.lost == name:
                found.append(ActorDiedError())
            elif self.trials in self.disk:
                found.append(StorageError(28, "the disk is full"))
            else:
                found.append(Folder(folder).write(name, [b"%d" % self.trials]))
        return SimpleNamespace(results=lambda *, wait: found)

    def file_of(self, index: int) -> str:
        return FILES[index]

    def check_in(self) -> None:
        if self.lost:
            self.failures.append(f"{self.lost} died")
            if len(self.failures) > self.limit:
                raise TrainingError("too many")
        self.lost = ""

    def save(self, place: Path) -> None:
        pipeline: Any = self
        rec_saves.save(pipeline, EMB, place, steps=8, settle=self.settle)


def saved_in(place: Path) -> str:
    """The try that a whole checkpoint is of, all of it, with nothing left beside it."""
    checkpoint = open_checkpoint(Folder(place))
    checkpoint.verify()
    assert {note.name for note in checkpoint.manifest.files} == {*FILES}
    (number,) = {checkpoint.read(name) for name in FILES}
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    return number.decode()


@pytest.mark.parametrize("victim", ["see", *FILES])
def test_whoever_dies_while_it_is_written_is_replaced_and_it_is_written_anew(
    tmp_path: Path, victim: str
) -> None:
    crew = Crew(deaths={2: victim, 3: FILES[2]})
    crew.save(tmp_path / "ckpt")
    assert saved_in(tmp_path / "ckpt") == "1"
    crew.save(tmp_path / "ckpt")

    assert saved_in(tmp_path / "ckpt") == "4"
    assert crew.failures == [f"{victim} died", f"{FILES[2]} died"]
    assert crew.settled == [0, 1, 2, 3]  # a step may be under way again after each


def test_if_all_live_it_is_not_tried_again_and_the_old_one_stays(tmp_path: Path) -> None:
    crew = Crew(disk={2})
    crew.save(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"stage_0.*was not saved: the disk is full"):
        crew.save(tmp_path / "ckpt")

    assert saved_in(tmp_path / "ckpt") == "1"
    assert (crew.trials, crew.failures) == (2, [])


def test_whoever_dies_of_it_each_time_ends_the_tries_and_not_the_pipeline(tmp_path: Path) -> None:
    crew = Crew(deaths=dict.fromkeys((2, 3, 4), "see"))
    crew.save(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"in each of 3 tries, last: see died.*as it was"):
        crew.save(tmp_path / "ckpt")

    assert saved_in(tmp_path / "ckpt") == "1"
    assert not crew.lost
    crew.save(tmp_path / "ckpt")
    assert saved_in(tmp_path / "ckpt") == "5"


def test_one_death_too_many_is_told_as_such_and_the_old_one_stays(tmp_path: Path) -> None:
    crew = Crew(deaths={2: FILES[1], 3: FILES[1]}, limit=1)
    crew.save(tmp_path / "ckpt")
    with pytest.raises(TrainingError, match="too many"):
        crew.save(tmp_path / "ckpt")

    assert saved_in(tmp_path / "ckpt") == "1"
    assert crew.trials == 3


def test_mutant_files_of_those_who_lived_that_count_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def what_is_there(pipeline: Any, aside: Folder, *, steps: int) -> list[FileNote]:
        pipeline.see(str(aside), *_token(aside))
        save = pipeline.start_save("key", steps - 1, str(aside))
        return [note for note in save.results(wait=True) if isinstance(note, FileNote)]

    def _token(aside: Folder) -> tuple[str, bytes]:
        aside.write("token", [b"token"])
        return "token", b"token"

    monkeypatch.setattr(rec_saves, "_write_files", what_is_there)
    Crew(deaths={1: FILES[2]}).save(tmp_path / "ckpt")

    with pytest.raises(AssertionError):
        saved_in(tmp_path / "ckpt")


def test_shards_that_were_lost_do_not_use_up_the_stages_limit() -> None:
    pipeline: Any = LoadedPipeline.__new__(LoadedPipeline)
    shard = ShardFailure(kind="died", stage=3, step=7, cause="killed")
    pipeline.failures = [shard, "of a stage", shard]

    assert pipeline.counted() == ["of a stage"]
