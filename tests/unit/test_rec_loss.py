"""What a pipeline from Python says when it ends."""

from __future__ import annotations

import pytest

from ray_pipe.errors import ClusterError, StageDied, TrainingError
from ray_pipe.rec_loss import WAY_ON, told_in_python


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        ("", "stage 1 died in step 7: killed; "),
        (
            "recovery is off (--max-failures 0)",
            "stage 1 died in step 7: killed; max_stage_failures is 0; ",
        ),
        (
            "it is failure 4 of this run, at most 3 are allowed (--max-failures)",
            "stage 1 died in step 7: killed; it is failure 4 of this run, at most 3 are allowed "
            "(max_stage_failures); ",
        ),
    ],
)
def test_a_stage_that_died_is_told_in_arguments_and_with_the_way_on(hint: str, told: str) -> None:
    error = told_in_python(StageDied(1, 7, "killed", hint))

    assert str(error) == told + WAY_ON
    assert isinstance(error, StageDied)
    assert (error.stage, error.step) == (1, 7)
    assert told_in_python(error) is error


def test_what_came_of_it_is_told_before_the_way_on() -> None:
    died = told_in_python(StageDied(1, 7, "killed", "step 7 failed 3 times"), so="x is unwritten")
    other = told_in_python(TrainingError("no room"), so="x is unwritten")

    assert str(died).endswith(f"step 7 failed 3 times; x is unwritten; {WAY_ON}")
    assert str(other) == f"no room; x is unwritten; {WAY_ON}"


def test_other_ends_keep_their_kind_and_have_the_way_on_once() -> None:
    shard = TrainingError("3 shards have died before it, and --max-failures is 3; lower --capacity")
    start = told_in_python(ClusterError("no room"))

    assert str(told_in_python(shard)) == (
        f"3 shards have died before it, and max_shard_failures is 3; lower `capacity`; {WAY_ON}"
    )
    assert isinstance(start, ClusterError)
    assert str(start).count(WAY_ON) == 1
