"""Boxes lie where there is room, are found again, and those of dead runs are removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from compressors.buffers import Change, Mark
from stages import box_places
from stages.black_box import BlackBox, BoxError, Image
from stages.box_places import KEEP_S, candidates, open_box, sweep


def test_boxes_of_dead_runs_are_swept_and_held_or_young_ones_are_not(tmp_path: Path) -> None:
    held = BlackBox(tmp_path / "held" / "stage-0")
    BlackBox(tmp_path / "dead" / "stage-0").close()
    now = (tmp_path / "dead").stat().st_mtime

    assert sweep(tmp_path, now=now + KEEP_S - 60) == []
    assert sweep(tmp_path, now=now + KEEP_S + 60, spare="dead") == []  # it is being resumed
    assert sweep(tmp_path, now=now + KEEP_S + 60) == [tmp_path / "dead"]
    assert [path.name for path in tmp_path.iterdir()] == ["held"]
    held.close()


def test_the_oldest_dead_boxes_give_way_where_room_is_short_but_none_younger_than_ten_minutes(
    tmp_path: Path,
) -> None:
    for age_s, name in ((900, "older"), (700, "old"), (60, "young")):
        box = BlackBox(tmp_path / name / "stage-0")
        box.close()
        for path in [*(tmp_path / name).rglob("*"), tmp_path / name]:
            os.utime(path, (1e9 - age_s, 1e9 - age_s))

    def left() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    BlackBox(tmp_path / "brief-x" / "stage-0").close()
    for path in [*(tmp_path / "brief-x").rglob("*"), tmp_path / "brief-x"]:
        os.utime(path, (1e9 - 700, 1e9 - 700))

    assert sweep(tmp_path, now=1e9) == [tmp_path / "brief-x"]  # of no use without its driver
    sweep(tmp_path, now=1e9, has_room=lambda: "older" not in left())
    assert left() == ["old", "young"]
    sweep(tmp_path, now=1e9, has_room=lambda: False)
    assert left() == ["young"]


def test_boxes_of_a_training_that_was_left_go_at_once_unless_somebody_holds_them(
    tmp_path: Path,
) -> None:
    for name in ("left", "other"):
        BlackBox(candidates(str(tmp_path))[0] / name / "stage-0").close()
    held = BlackBox(candidates(str(tmp_path))[0] / "held" / "stage-0")

    box = open_box(str(tmp_path), run="new", stage=0, need_nbytes=1, gone=("left", "held"))

    names = sorted(path.name for path in candidates(str(tmp_path))[0].iterdir())
    assert names == ["held", "new", "other"]
    box.close()
    held.close()


def test_sweeping_a_folder_that_is_not_there_does_nothing(tmp_path: Path) -> None:
    assert sweep(tmp_path / "nowhere") == []


def test_a_box_is_made_in_the_folder_given_and_found_again(tmp_path: Path) -> None:
    first = open_box(str(tmp_path), run="r", stage=2, need_nbytes=10)
    first.close()
    again = open_box(str(tmp_path), run="r", stage=2, need_nbytes=10)

    assert first.folder == again.folder
    assert again.folder.is_relative_to(tmp_path)
    assert again.folder.name == "stage-2"
    again.close()


def test_shared_memory_is_taken_if_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_places, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(box_places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "shm").mkdir()

    small = open_box("auto", run="small", stage=0, need_nbytes=10)
    large = open_box("auto", run="large", stage=0, need_nbytes=1 << 60)

    assert small.folder.is_relative_to(tmp_path / "shm")
    assert large.folder.is_relative_to(tmp_path / "tmp")
    monkeypatch.setattr(box_places, "MIN_FREE_NBYTES", 1 << 60)
    small.close()
    found = open_box("auto", run="small", stage=0, need_nbytes=10)
    assert found.folder == small.folder  # a box is found where it is, room or not
    found.close()
    large.close()


def test_without_shared_memory_the_temporary_folder_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_places, "SHARED_MEMORY", tmp_path / "none")

    assert len(candidates("auto")) == 1


def test_a_box_that_stays_held_is_refused_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_places, "LOCK_PATIENCE_S", 0.05)
    box = open_box(str(tmp_path), run="r", stage=0, need_nbytes=10)

    with pytest.raises(BoxError, match="held by another process"):
        open_box(str(tmp_path), run="r", stage=0, need_nbytes=10)
    box.close()


def test_rows_that_are_spilled_have_their_log_beside_the_spill_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_places, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    spill = str(tmp_path / "disk" / "spill")  # not made yet
    change = Change(0, Mark(0, 1, (4,), True), torch.arange(4, dtype=torch.uint8))

    def open_again() -> BlackBox:
        return open_box("auto", run="r", stage=1, need_nbytes=10, rows_nbytes=50, spill=spill)

    box = open_again()
    box.write(Image(step=0, arrays={}, notes={}, changes={"end": [change]}))
    logs = [path for path in tmp_path.rglob("*") if path.name.startswith("rows-")]
    assert logs
    assert all(path.is_relative_to(spill) for path in logs)
    assert (box.folder / "slot-0").is_relative_to(tmp_path / "shm")
    box.close()
    again = open_again()
    assert list(again.read(0).rows) == ["end"]
    again.remove()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_spill_disk_without_room_for_both_has_only_the_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_places, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(box_places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "spill").mkdir()

    box = open_box(
        "auto", run="r", stage=1, need_nbytes=10, rows_nbytes=1 << 60, spill=str(tmp_path / "spill")
    )

    assert list((tmp_path / "spill").iterdir()) == []
    box.close()
    assert box.folder == open_and_close(rows_nbytes=10, spill=str(tmp_path / "spill"))
    assert list((tmp_path / "spill").iterdir()) == []  # where its rows were they stay


def test_a_folder_that_was_asked_for_holds_the_whole_box(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    spill = str(tmp_path / "spill")

    box = open_box(str(tmp_path), run="r", stage=1, need_nbytes=1, rows_nbytes=1, spill=spill)

    assert list((tmp_path / "spill").iterdir()) == []
    box.remove()


def test_left_over_logs_beside_a_spill_are_swept_unless_they_are_held(tmp_path: Path) -> None:
    held = BlackBox(tmp_path / "a" / "held" / "stage-0", rows=tmp_path / "b" / "held" / "stage-0")
    dead = BlackBox(tmp_path / "a" / "dead" / "stage-0", rows=tmp_path / "b" / "dead" / "stage-0")
    dead.close()
    now = (tmp_path / "b" / "dead").stat().st_mtime

    assert sweep(tmp_path / "b", now=now + KEEP_S + 60) == [tmp_path / "b" / "dead"]
    held.close()


def open_and_close(**options: Any) -> Path:
    box = open_box("auto", run="r", stage=1, need_nbytes=10, **options)
    box.close()
    return box.folder
