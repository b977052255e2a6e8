"""Faults on purpose: they strike once, at their own step, however late its box is written."""

from __future__ import annotations

from stages.mishap import Deed, Mishap, Mishaps
from stages.plan import StepPlan


def plan(step: int, attempt: int = 0) -> StepPlan:
    return StepPlan(step=step, attempt=attempt, micro_batches=((0,),), schedule="gpipe", lr=0.1)


def watch(point: str) -> tuple[Mishaps, list[Deed]]:
    struck: list[Deed] = []
    return Mishaps((Mishap(point=point, step=2),), strike=struck.append), struck


def test_a_point_strikes_once_at_its_own_step() -> None:
    mishaps, struck = watch("F1")
    for step in (1, 2, 2, 3):
        mishaps.on_point("F1", plan(step))

    assert struck == ["kill"]


def test_a_replay_passes() -> None:
    mishaps, struck = watch("F1")
    mishaps.on_point("F1", plan(2, attempt=1))

    assert struck == []


def test_a_box_that_is_written_when_the_next_step_has_begun_is_still_that_of_its_step() -> None:
    mishaps, struck = watch("box mark")
    mishaps.on_point("committed", plan(2))
    mishaps.on_point("F0", plan(3))
    mishaps.on_write("mark", 1)
    assert struck == []

    mishaps.on_write("mark", 2)
    assert struck == ["kill"]
