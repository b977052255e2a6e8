"""Schedules are data: literal rows, and what the validator refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.schedule import (
    Action,
    ScheduleError,
    actions_of,
    eager_one_f_one_b,
    gpipe,
    one_f_one_b,
    parse,
    show,
    validate,
)


def test_1f1b_fills_alternates_and_drains() -> None:
    rows = [show(one_f_one_b(stage=s, num_stages=3, num_micro_batches=4)) for s in range(3)]

    assert rows == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_gpipe_runs_all_forward_passes_first() -> None:
    assert show(gpipe(stage=1, num_stages=3, num_micro_batches=3)) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_with_fewer_micro_batches_than_stages_still_drains() -> None:
    assert show(one_f_one_b(stage=0, num_stages=4, num_micro_batches=2)) == "F0 F1 B0 B1"


def test_eager_1f1b_starts_two_more_forward_passes_for_each_stage_behind() -> None:
    rows = [show(eager_one_f_one_b(stage=s, num_stages=3, num_micro_batches=6)) for s in range(3)]

    assert rows == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


@given(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]), st.integers(1, 8), st.integers(1, 12))
def test_every_schedule_is_valid_and_survives_its_text_form(
    name: str, num_stages: int, num_micro_batches: int
) -> None:
    rows = [
        actions_of(name, stage=s, num_stages=num_stages, num_micro_batches=num_micro_batches)
        for s in range(num_stages)
    ]

    validate(rows)
    assert [parse(show(row)) for row in rows] == rows


@given(st.sampled_from([("1f1b", 1), ("eager-1f1b", 2)]), st.integers(1, 8), st.integers(1, 12))
def test_1f1b_holds_one_activation_for_each_stage_behind_and_the_eager_kind_two(
    schedule: tuple[str, int], num_stages: int, num_micro_batches: int
) -> None:
    name, per_stage = schedule
    for stage in range(num_stages):
        held = peak = 0
        for action in actions_of(
            name, stage=stage, num_stages=num_stages, num_micro_batches=num_micro_batches
        ):
            held += 1 if action.kind == "F" else -1
            peak = max(peak, held)

        assert peak == min(per_stage * (num_stages - stage - 1) + 1, num_micro_batches)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["F0 B0", "F0 F0 B0"], "stage 1 runs F0 more than once"),
        (["B0 F0"], "stage 0 runs B0 before F0"),
        (["F0 F1 B0 B1", "F0 B0"], "stages 0 and 1 differ in B1, F1"),
        (
            ["F0 B0 F1 B1", "F1 B1 F0 B0"],
            "in a circle: stage 0 before B0; stage 1 before F1",
        ),
    ],
)
def test_validator_names_what_is_wrong(rows: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate([parse(row) for row in rows])


def test_unknown_schedule_and_action_are_refused_by_name() -> None:
    with pytest.raises(ScheduleError, match="unknown schedule 'zb'; known: gpipe, 1f1b"):
        actions_of("zb", stage=0, num_stages=1, num_micro_batches=1)
    with pytest.raises(ScheduleError, match="cannot read action 'W0'"):
        parse("F0 W0")


def test_actions_read_as_text() -> None:
    assert str(Action("B", 12)) == "B12"
