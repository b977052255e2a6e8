"""What a node says of the boxes that a killed run has left there; looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compressors.buffers import Change, Mark
from stages.black_box import BlackBox, Image
from stages.box_places import open_box
from stages.left_boxes import LeftBox, look, nbytes_of
from stages.record import StepRecord

NUM_STAGES = 2


def record(stage: int, step: int) -> StepRecord:
    return StepRecord(
        stage=stage, step=step, loss=None, num_tokens=1, start_s=0.0, end_s=1.0, seconds={},
        sent={}, codec={}, grad_norm=None,
    )  # fmt: skip


def fill(folder: Path, *, stage: int, steps: range, num_stages: int = NUM_STAGES) -> BlackBox:
    box = open_box(str(folder), run="r", stage=stage, need_nbytes=1)
    for step in steps:
        box.write(
            Image(
                step=step,
                arrays={"weights/0.w": torch.full((2000,), float(step))},
                notes={
                    "stage": stage,
                    "num_stages": num_stages,
                    "records": [record(stage, s).as_dict() for s in range(max(0, step - 2), step)]
                    + [record(stage, step).as_dict()],
                },
                changes={"end": [Change(step, Mark(0, 1, (4,), True), torch.ones(4).byte())]},
            )
        )
    box.close()
    return box


def both(folder: Path) -> list[LeftBox]:
    return look(str(folder), run="r", num_stages=NUM_STAGES, patience_s=0.0)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_last_two_steps_and_their_records_are_told_and_nothing_is_touched(
    tmp_path: Path,
) -> None:
    for stage in range(NUM_STAGES):
        fill(tmp_path, stage=stage, steps=range(6))
    before = files(tmp_path)

    found = both(tmp_path)

    assert [(box.stage, box.steps, box.trouble) for box in found] == [
        (0, (4, 5), ""), (1, (4, 5), ""),
    ]  # fmt: skip
    assert [record.step for record in found[0].records] == [2, 3, 4, 5]
    assert files(tmp_path) == before


def test_a_stage_whose_box_is_not_here_is_left_out_and_so_are_boxes_of_another_run(
    tmp_path: Path,
) -> None:
    fill(tmp_path, stage=1, steps=range(3))

    assert [box.stage for box in both(tmp_path)] == [1]
    assert look(str(tmp_path), run="other", num_stages=NUM_STAGES) == []


def test_a_node_tells_how_much_there_is_to_read(tmp_path: Path) -> None:
    fill(tmp_path, stage=0, steps=range(3))
    fill(tmp_path, stage=1, steps=range(3))

    found = nbytes_of(str(tmp_path), run="r", num_stages=NUM_STAGES)

    assert found == sum(len(data) for data in files(tmp_path).values())
    assert found > 4 * 8000  # two images of two stages
    assert nbytes_of(str(tmp_path), run="other", num_stages=NUM_STAGES) is None


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) - 100] ^= 1
    path.write_bytes(raw)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [_flip, _cut])
def test_of_a_damaged_box_the_step_that_is_whole_is_left(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    box = fill(tmp_path, stage=0, steps=range(6))
    newest = max((box.folder / f"slot-{i}" for i in (0, 1)), key=lambda p: b'"step": 5' in _raw(p))
    damage(newest)

    (found,) = both(tmp_path)

    assert found.steps == (4,)
    assert "wrong checksum" in found.trouble


def _raw(path: Path) -> bytes:
    return path.read_bytes()


def test_a_damaged_row_takes_both_steps_and_the_files_stay_as_they_were(tmp_path: Path) -> None:
    box = fill(tmp_path, stage=0, steps=range(3))
    rows = box.folder / "rows.values"
    rows.write_bytes(bytes(len(rows.read_bytes())))
    before = files(tmp_path)

    (found,) = both(tmp_path)

    assert found.steps == ()
    assert "checksum is wrong" in found.trouble
    assert files(tmp_path) == before


def test_a_box_of_another_number_of_stages_is_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path, stage=0, steps=range(3), num_stages=4)

    (found,) = both(tmp_path)

    assert found.steps == ()
    assert "is of stage 0 of 4, not of stage 0 of 2" in found.trouble


def test_a_box_that_somebody_holds_is_said_to_be_held(tmp_path: Path) -> None:
    fill(tmp_path, stage=0, steps=range(3))
    held = open_box(str(tmp_path), run="r", stage=0, need_nbytes=1)

    (found,) = both(tmp_path)

    assert found.is_held
    assert found.steps == ()
    held.close()


def test_opened_again_by_its_stage_a_box_with_one_damaged_step_keeps_the_other(
    tmp_path: Path,
) -> None:
    box = fill(tmp_path, stage=0, steps=range(6))
    for slot in (box.folder / "slot-0", box.folder / "slot-1"):
        raw = bytearray(slot.read_bytes())
        if b'"step": 5' in raw:
            raw[raw.index(b'"step": 5') - 1] ^= 1  # its notes are no JSON any more
            slot.write_bytes(raw)

    again = open_box(str(tmp_path), run="r", stage=0, need_nbytes=1)

    assert again.steps() == [4]
    assert again.read(4).arrays["weights/0.w"][0] == 4.0
    again.close()
