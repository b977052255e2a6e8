"""A black box gives back the last steps, whenever the process that wrote it was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressors.buffers import Change, Mark
from stages.black_box import BlackBox, BoxError, Image


class Killed(BaseException):
    """Stands for kill -9."""


def arrays_of(step: int) -> dict[str, Tensor]:
    return {
        "weights/0.weight": torch.full((3, 4), float(step)),
        "optimizer/step": torch.tensor(float(step)),
        "random/0": torch.arange(5, dtype=torch.uint8) + step % 100,
        "half": torch.ones(2, dtype=torch.bfloat16) * step,
        "empty": torch.empty(0),
    }


def change(sample: int, visit: int) -> Change:
    value = torch.full((2, 4), float(visit), dtype=torch.bfloat16)
    return Change(sample, Mark(1, visit, (2, 4)), value)


def image(step: int) -> Image:
    return Image(
        step=step,
        arrays=arrays_of(step),
        notes={"step": step, "who": "me"},
        changes={"out": [change(step % 3, step + 2)]},
    )


def check(box: BlackBox, step: int) -> None:
    kept = box.read(step)
    assert kept.step == step
    assert kept.notes == {"step": step, "who": "me"}
    assert kept.arrays.keys() == arrays_of(step).keys()
    for name, tensor in arrays_of(step).items():
        assert torch.equal(kept.arrays[name], tensor)
        assert kept.arrays[name].dtype == tensor.dtype
    last = list(range(step, -1, -1))[:3]  # each step changed another of three rows
    rows = kept.rows["out"]
    assert rows["ids"].tolist() == [s % 3 for s in reversed(last)]
    assert rows["visits"].tolist() == [s + 2 for s in reversed(last)]


def filled(folder: Path, steps: int) -> BlackBox:
    box = BlackBox(folder)
    for step in range(steps):
        box.write(image(step))
    return box


def test_a_new_box_is_empty(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "stage-0")

    assert box.steps() == []
    with pytest.raises(BoxError, match=r"holds steps \[\], not 3"):
        box.read(3)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_the_last_two_steps_can_be_read_by_the_next_process(tmp_path: Path, steps: int) -> None:
    filled(tmp_path / "b", steps).close()

    box = BlackBox(tmp_path / "b")

    assert box.steps() == list(range(max(0, steps - 2), steps))
    for step in box.steps():
        check(box, step)


@pytest.mark.parametrize("part", ["rows", "arrays", "mark"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_kill_in_the_middle_of_a_write_leaves_the_step_before(
    tmp_path: Path, part: str, steps: int
) -> None:
    box = filled(tmp_path / "b", steps)

    def die(name: str, step: int) -> None:
        if name == part:
            raise Killed

    box.on_write = die
    with pytest.raises(Killed):
        box.write(image(steps))
    box.close()
    again = BlackBox(tmp_path / "b")

    assert again.steps() == [steps - 1]
    check(again, steps - 1)
    again.write(image(steps))
    assert again.steps() == [steps - 1, steps]
    check(again, steps)


def test_mutant_a_slot_marked_before_it_is_written_is_caught(tmp_path: Path) -> None:
    """The write above, with the mark of the next step put first."""
    box = filled(tmp_path / "b", 2)
    path = tmp_path / "b" / "slot-1"
    os.pwrite(box._slots[1], b"old", path.stat().st_size - 8)  # as a half written image

    with pytest.raises(BoxError, match="wrong checksum"):
        box.read(1)


def test_a_box_rewound_forgets_what_came_after(tmp_path: Path) -> None:
    box = filled(tmp_path / "b", 5)

    box.rewind(3)

    assert box.steps() == [3]
    check(box, 3)
    box.write(image(4))
    check(box, 4)
    check(box, 3)


def test_a_box_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "b")

    with pytest.raises(BoxError, match="held by another process"):
        BlackBox(tmp_path / "b")
    box.close()
    BlackBox(tmp_path / "b").close()


def test_a_damaged_log_of_rows_makes_the_box_empty(tmp_path: Path) -> None:
    filled(tmp_path / "b", 3).close()
    log = tmp_path / "b" / "rows-0000.log"
    log.write_bytes(b"x" * log.stat().st_size)

    assert BlackBox(tmp_path / "b").steps() == []


def test_a_cleared_box_is_as_new(tmp_path: Path) -> None:
    box = filled(tmp_path / "b", 3)

    box.clear()

    assert box.steps() == []
    box.write(image(0))
    check(box, 0)


def test_a_removed_box_leaves_no_folder_and_refuses_work(tmp_path: Path) -> None:
    one, two = BlackBox(tmp_path / "run" / "stage-0"), BlackBox(tmp_path / "run" / "stage-1")

    one.remove()
    assert (tmp_path / "run").exists()
    two.remove()

    assert list(tmp_path.iterdir()) == []
    assert one.steps() == []
    with pytest.raises(BoxError, match="closed"):
        one.write(image(0))


def test_an_array_larger_than_one_call_of_the_system_reads_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = filled(tmp_path / "b", 2)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:7]], at))

    check(box, 1)


def test_a_box_opened_again_can_still_go_back_one_step(tmp_path: Path) -> None:
    filled(tmp_path / "b", 9).close()

    box = BlackBox(tmp_path / "b")

    check(box, 7)
    box.rewind(7)
    box.write(image(8))
    check(box, 8)
    check(box, 7)
