"""Ray's errors, read: the root before what followed from it, the culprit before the messenger."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from ray_pipe.failures import cause_of, is_death, is_out_of_reach, name_failure, to_error
from stages.ends import StageTimeout
from stages.stage import StageAborted

INFOS = [{"pid": 10, "actor": "aa"}, {"pid": 11, "actor": "bb"}, {"pid": 12, "actor": "cc"}]


def raised(cause: Exception, *, pid: int, through: str = "") -> RayError:
    """What `ray.get` raises for an error of a task."""
    text = f"{through}ray::PipelineStage.run_step() (pid={pid}, ip=1.2.3.4)\n{cause!r}"
    error: Any = RayTaskError("run_step", text, cause, pid=pid, ip="1.2.3.4")
    made: RayError = error.as_instanceof_cause()
    return made


def died(actor: str) -> ActorDiedError:
    error = ActorDiedError()
    error.actor_id = actor
    return error


def test_a_death_comes_before_an_error_and_an_error_before_a_wait_in_vain() -> None:
    timeout = raised(StageTimeout("waited"), pid=10)
    bug = raised(ArithmeticError("bad"), pid=12)

    first = name_failure({0: timeout, 2: bug, 1: died("bb")}, step=4, infos=INFOS)
    second = name_failure({0: timeout, 2: bug}, step=4, infos=INFOS)
    third = name_failure({0: raised(StageAborted("stop"), pid=10), 1: timeout}, step=4)

    assert (first.kind, first.stage) == ("died", 1)
    assert (second.kind, second.stage, second.cause) == ("error", 2, "ArithmeticError: bad")
    assert (third.kind, third.cause) == ("timeout", "StageTimeout: waited")


def test_an_error_that_came_along_with_another_stages_call_is_named_by_its_own() -> None:
    """With refs the call of stage 2 fails because its argument came from stage 0."""
    chain = "ray::PipelineStage.forward() (pid=12, ip=1.2.3.4)\nan argument failed: "
    failure = name_failure(
        {2: raised(ArithmeticError("bad"), pid=10, through=chain)}, step=1, infos=INFOS
    )
    dependency = RayTaskError("f", "text", died("bb"), pid=12, ip="1.2.3.4")

    assert failure.stage == 0
    assert name_failure({2: dependency}, step=1, infos=INFOS).stage == 1
    assert not is_death(dependency)  # of the stage that was called


def test_who_does_not_answer_is_named_before_who_waited_for_it() -> None:
    waited = {0: raised(StageTimeout("waited for stage 1"), pid=10)}

    failure = name_failure(waited, step=3, infos=INFOS, hung={1})

    assert (failure.kind, failure.stage) == ("hung", 1)
    assert "does not answer" in failure.cause
    assert name_failure({}, step=3, hung={2}).stage == 2


def test_the_error_of_the_end_says_why_it_is_the_end() -> None:
    failure = name_failure({1: died("bb")}, step=3, infos=INFOS)

    text = str(to_error(failure, doing="in step 3", hint="recovery is off (--max-failures 0)"))

    assert text.startswith("stage 1 died in step 3: its process ended unexpectedly")
    assert text.endswith("; recovery is off (--max-failures 0)")
    bug = name_failure({2: raised(ArithmeticError("bad"), pid=12)}, step=4, infos=INFOS)
    assert str(to_error(bug, doing="in step 4", hint="x")) == (
        "stage 2 failed in step 4: ArithmeticError: bad"
    )


def test_causes_are_found_inside_what_ray_made_of_them() -> None:
    assert isinstance(cause_of(raised(StageTimeout("x"), pid=1)), StageTimeout)
    assert isinstance(cause_of(died("aa")), ActorDiedError)


def test_a_stage_that_was_killed_because_it_hung_did_not_die() -> None:
    """With refs the calls that waited for it bring its death along."""
    dependency = RayTaskError("f", "text", died("bb"), pid=12, ip="1.2.3.4")

    failure = name_failure({2: dependency}, step=1, infos=INFOS, hung={1})

    assert (failure.kind, failure.stage) == ("hung", 1)


def test_what_lies_on_a_node_that_is_gone_or_cannot_be_reached_is_lost() -> None:
    gone = died("aa")
    gone.error_msg = "The actor died: its node has\ndied. Node Id: x"

    assert is_out_of_reach(gone)
    assert is_out_of_reach(ActorUnavailableError("unreachable", None))
    assert not is_out_of_reach(died("aa"))
