"""What a node has of the black boxes of a run whose driver is gone. Looks, and changes nothing.

`ray_pipe.taking_up` has every node look, `ray_pipe.left_run` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages.black_box import BlackBox, BoxError, BoxHeld
from stages.box_places import beside_spill, existing, when_free
from stages.keeper import records_in
from stages.record import StepRecord

HELD_PATIENCE_S = 30.0
"""How long the stages of a driver that was killed may take to end: Ray ends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBox:
    """One stage's box, every byte of it read and checked."""

    stage: int
    steps: tuple[int, ...] = ()
    """That it can bring back."""

    records: tuple[StepRecord, ...] = ()
    """Of the last steps, oldest first."""

    trouble: str = ""
    """What is wrong with it, or with one of its two steps."""

    is_held: bool = False
    """Another process has it open: the run may still be alive."""


def nbytes_of(setting: str, *, run: str, num_stages: int, spill: str | None = None) -> int | None:
    """How much there is for `look` to read on this node; None if it has no box of the run."""
    folders = [
        folder
        for stage in range(num_stages)
        if (own := existing(setting, run, stage)) is not None
        for folder in (own, beside_spill(setting, run, stage, spill))
        if folder is not None and folder.is_dir()
    ]
    if not folders:
        return None
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    return sum(path.stat().st_size for path in files)


def look(
    setting: str,
    *,
    run: str,
    num_stages: int,
    spill: str | None = None,
    patience_s: float = HELD_PATIENCE_S,
) -> list[LeftBox]:
    """The boxes of a run on this node."""
    found = []
    for stage in range(num_stages):
        folder = existing(setting, run, stage)
        if folder is not None:
            rows = beside_spill(setting, run, stage, spill)
            rows = rows if rows is not None and rows.is_dir() else None
            found.append(_look(stage, folder, rows, num_stages, patience_s))
            if found[-1].is_held:
                patience_s = 0.0
    return found


def _look(
    stage: int, folder: Path, rows: Path | None, num_stages: int, patience_s: float
) -> LeftBox:
    try:
        box = when_free(lambda: BlackBox(folder, rows=rows, as_found=True), patience_s)
    except BoxHeld as error:
        return LeftBox(stage=stage, trouble=str(error), is_held=True)
    except OSError as error:
        return LeftBox(stage=stage, trouble=f"the black box {folder}: {error}")
    steps: list[int] = []
    records: dict[int, StepRecord] = {}
    troubles: list[str] = []
    try:
        for step in reversed(box.steps()):  # the newest step of each image has its spans
            try:
                kept = box.read(step)
                notes = kept.notes
                if (notes["stage"], notes["num_stages"]) != (stage, num_stages):
                    raise BoxError(
                        f"the black box {folder} is of stage {notes['stage']} of "
                        f"{notes['num_stages']}, not of stage {stage} of {num_stages}"
                    )
            except Exception as error:  # damage may show in any way
                troubles.append(str(error) or type(error).__name__)
                continue
            steps.append(step)
            for record in records_in(notes):
                if record.spans or record.step not in records:
                    records[record.step] = record
        if not steps and not troubles:
            troubles.append(f"the black box {folder} holds no whole step")
    finally:
        box.close()
    return LeftBox(
        stage=stage,
        steps=tuple(sorted(steps)),
        records=tuple(records[step] for step in sorted(records)),
        trouble="; ".join(troubles),
    )
