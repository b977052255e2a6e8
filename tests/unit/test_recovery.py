"""Decisions after a failure: which step all stages go back to, and when to give up."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ray_pipe.recovery import Decision, Failure, Status, common_step, verdict

DIED = Failure(kind="died", stage=1, step=7, cause="killed", arm="acsgd")


def test_survivors_at_the_dead_ones_last_step_stay_as_they_are() -> None:
    statuses = [
        Status(index=0, live=6, box=(5, 6)),
        Status(index=1, live=None, box=(5, 6)),
        Status(index=2, live=6, box=(5, 6)),
    ]

    assert common_step(statuses) == Decision(step=6, sources=("live", "box", "live"))


def test_a_survivor_that_is_a_step_ahead_goes_back_to_its_own_box() -> None:
    statuses = [
        Status(index=0, live=7, box=(6, 7)),
        Status(index=1, live=None, box=(6,)),
        Status(index=2, live=6, box=(5, 6)),
    ]

    assert common_step(statuses) == Decision(step=6, sources=("box", "box", "live"))


def test_a_newer_checkpoint_beats_the_boxes_and_an_older_one_does_not() -> None:
    statuses = [Status(index=0, live=7, box=(6, 7)), Status(index=1, live=None, box=(6,))]

    assert common_step(statuses, checkpoint=5).step == 6
    assert common_step(statuses, checkpoint=9) == Decision(step=9, sources=("checkpoint",) * 2)


def test_a_lost_box_leaves_the_checkpoint_and_without_one_the_beginning() -> None:
    statuses = [Status(index=0, live=7, box=(6, 7)), Status(index=1, live=None)]

    assert common_step(statuses, checkpoint=4) == Decision(step=4, sources=("checkpoint",) * 2)
    assert common_step(statuses) == Decision(step=-1, sources=("fresh", "fresh"))


def test_a_stage_caught_in_its_update_is_not_taken_as_it_is() -> None:
    statuses = [Status(index=0, live=None, box=(5, 6)), Status(index=1, live=6, box=(6,))]

    assert common_step(statuses) == Decision(step=6, sources=("box", "live"))


@given(
    st.integers(0, 20),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=6),
)
def test_the_newest_common_step_is_the_last_or_the_one_before(
    last: int, stages: list[tuple[bool, bool, bool]]
) -> None:
    """Whatever stage has died, committed or finished writing: the rule of the norms holds."""
    statuses = []
    for index, (is_dead, has_committed, has_written) in enumerate(stages):
        box = (last - 1, last) if has_committed and has_written else (last - 1,)
        live = None if is_dead else (last if has_committed else last - 1)
        statuses.append(Status(index=index, live=live, box=box))

    decision = common_step(statuses)

    assert decision.step in (last - 1, last)
    assert "fresh" not in decision.sources
    everybody = all(last in status.steps for status in statuses)
    assert decision.step == (last if everybody else last - 1)


def test_the_first_failures_are_tried_again_and_one_more_ends_the_run() -> None:
    before = [replace(DIED, step=step) for step in (1, 2, 3)]

    assert verdict(DIED, before[:2], max_failures=3) == ""
    assert verdict(DIED, before, max_failures=3) == (
        "it is failure 4 of this run, at most 3 are allowed (--max-failures)"
    )
    assert verdict(DIED, before, max_failures=-1) == ""


def test_recovery_can_be_turned_off() -> None:
    assert verdict(DIED, [], max_failures=0) == "recovery is off (--max-failures 0)"


def test_an_error_in_a_stages_own_code_is_not_tried_again() -> None:
    failure = replace(DIED, kind="error")

    assert verdict(failure, [], max_failures=10) == (
        "an error in a stage's own work would come again"
    )


def test_a_step_that_fails_again_and_again_ends_the_run_whatever_is_allowed() -> None:
    assert verdict(DIED, [DIED], max_failures=-1) == ""
    assert verdict(DIED, [DIED, DIED], max_failures=-1) == "step 7 failed 3 times in a row"
    between = [DIED, replace(DIED, step=8), DIED]
    assert verdict(DIED, between, max_failures=-1) == ""
    other_arm = [replace(DIED, arm="fp32")] * 2
    assert verdict(DIED, other_arm, max_failures=-1) == ""


def test_a_failure_tells_its_story_in_one_sentence() -> None:
    failure = replace(DIED, replaced=(1,), resumed_from=6, source="box", recovery_s=2.345)

    assert str(failure) == (
        "stage 1 died in step 7: killed; stage 1 has a new process with the state of its black "
        "box; the run went on from step 6 after 2.3 s"
    )
    assert "; stage 1 has a warm spare with the" in str(replace(failure, spares=(1,)))
    assert "; stage 1, 2 has a new process" in str(replace(failure, replaced=(1, 2), spares=(1,)))
    assert str(replace(failure, kind="timeout", replaced=(), resumed_from=-1)) == (
        "stage 1 waited in vain in step 7: killed; the run went on from the beginning after 2.3 s"
    )
    assert str(DIED) == "stage 1 died in step 7: killed"
    assert pickle.loads(pickle.dumps(failure)) == failure
    assert failure.as_dict()["replaced"] == [1]


def test_a_failure_comes_back_from_what_was_written_of_it() -> None:
    failure = replace(DIED, replaced=(1,), spares=(1,), resumed_from=6, phases={"ask": 0.5})

    assert Failure.from_dict(json.loads(json.dumps(failure.as_dict()))) == failure
    assert Failure.from_dict({**DIED.as_dict(), "of another version": 1}) == DIED


ENDED = Failure(
    kind="driver", stage=-1, step=7, cause="killed", arm="acsgd", resumed_from=6, source="box",
    recovery_s=12.0,
)  # fmt: skip


def test_deaths_of_the_driver_are_told_and_do_not_use_up_what_stages_may_fail() -> None:
    assert verdict(DIED, [ENDED, ENDED, ENDED], max_failures=1) == ""
    assert "failure 2 of this run" in verdict(DIED, [ENDED, DIED], max_failures=1)
    assert verdict(DIED, [ENDED] * 5, max_failures=-1) == ""
    assert str(ENDED) == (
        "the driver ended in step 7: killed; the run goes on after step 6, from the black boxes of "
        "its stages, 12.0 s after its new start"
    )
    again = replace(ENDED, source="checkpoint", resumed_from=3, replayed_steps=3)
    assert "after step 3, from a checkpoint (3 steps are run again), 12.0 s" in str(again)
    assert "the run begins anew" in str(replace(ENDED, source="fresh", resumed_from=-1))
    assert Failure.from_dict(json.loads(json.dumps(ENDED.as_dict()))) == ENDED
