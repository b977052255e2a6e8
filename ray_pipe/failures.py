"""Ray's errors, read: who failed, how, and in words for the person at the keyboard."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from ray_pipe.errors import StageDied, TrainingError
from ray_pipe.recovery import Failure, Kind
from stages.ends import StageTimeout
from stages.stage import StageAborted
from stages.sync.strategy import SyncTimeout


class Silent(RayError):
    """A stage owes an answer and gives no sign of life."""

    def __init__(self, silent_s: float, doing: str, *, stopped_pid: int | None = None) -> None:
        why = (
            "its machine hangs, or is out of reach"
            if stopped_pid is None
            else f"its process {stopped_pid} is stopped (SIGSTOP, or a debugger)"
        )
        super().__init__(f"no sign of life for {silent_s:.0f} s {doing}: {why}")


RANK: dict[Kind, int] = {"died": 0, "error": 1, "hung": 2, "timeout": 3}
"""Of several errors of one failure the root comes first: a death before an error, an error
before a wait in vain."""


def name_failure(
    errors: Mapping[int, BaseException],
    *,
    step: int,
    infos: Sequence[Mapping[str, Any]] = (),
    hung: Collection[int] = (),
    arm: str = "",
) -> Failure:
    """The root of several errors, by the stage whose call brought them. `hung`: no answer."""

    def rank(item: tuple[int, BaseException]) -> tuple[int, bool]:
        return RANK[_kind(item[1])], isinstance(cause_of(item[1]), StageAborted)

    index, error = min(errors.items(), key=rank) if errors else (-1, None)
    kind: Kind = _kind(error) if error is not None else "hung"
    who = -1 if error is None else _who(index, error, infos)
    if hung and (kind in ("hung", "timeout") or who in hung):  # it died because it was killed
        return Failure(
            kind="hung", stage=who if who in hung else min(hung), step=step, arm=arm,
            cause="its process is there but does not answer (stopped, or stuck in its work)",
        )  # fmt: skip
    assert error is not None
    cause = cause_of(error)
    text = _death(cause) if isinstance(cause, RayActorError) else _words(cause)
    return Failure(kind=kind, stage=who, step=step, cause=text, arm=arm)


def to_error(failure: Failure, *, doing: str, hint: str = "") -> TrainingError:
    """What the user is told when the run ends here."""
    if failure.kind == "died":
        return StageDied(failure.stage, failure.step, failure.cause, hint)
    hint = f"; {hint}" if hint and failure.kind != "error" else ""
    return TrainingError(f"stage {failure.stage} failed {doing}: {failure.cause}{hint}")


def cause_of(error: BaseException) -> BaseException:
    """What a stage raised, inside what Ray made of it."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def is_death(error: BaseException) -> bool:
    """Whether the actor that was called is gone, not one that its argument came from."""
    return isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)


def is_out_of_reach(error: BaseException) -> bool:
    """Whether an actor was lost with its node, or with the way to it: what lay there is, too."""
    if isinstance(error, ActorUnavailableError):
        return True
    return is_death(error) and "its node has died" in " ".join(str(error).split())


def _kind(error: BaseException) -> Kind:
    cause = cause_of(error)
    if isinstance(cause, RayActorError):
        return "died"
    if isinstance(cause, Silent):
        return "hung"
    # An object that was lost was lost with somebody: who it was shows when all are asked.
    if isinstance(cause, (StageTimeout, SyncTimeout, StageAborted, RayError)):
        return "timeout"
    return "error"


def _who(index: int, error: BaseException, infos: Sequence[Mapping[str, Any]]) -> int:
    """The stage that failed, where the call of another one only brought its error along."""
    cause = cause_of(error)
    if isinstance(cause, RayActorError):
        ids = [info.get("actor") for info in infos]
        return ids.index(cause.actor_id) if cause.actor_id in ids else index
    # Of calls that depend on each other Ray quotes the whole chain, the root last.
    told = re.findall(r"\bpid=(\d+)", str(error)) if isinstance(error, RayTaskError) else []
    pids = [info["pid"] for info in infos]
    if told and pids.count(int(told[-1])) == 1:
        return pids.index(int(told[-1]))
    return index


def _words(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {cause}"


def _death(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if "unexpectedly" in text or "SYSTEM_ERROR" in text:
        return "its process ended unexpectedly (killed from outside, crashed, or out of memory)"
    return text[:300]
