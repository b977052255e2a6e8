"""The order of work of a stage, as data.

Path: ray_pipe.data -> stages.schedule -> stages.stage

A schedule is a list of actions. The stage runs it, the simulator times it, the planner compares
several and a test reads it: nobody else knows what 1F1B means. Backward passes of all schedules
run in the order of the micro-batches, so gradients add up in the same order and every schedule
trains to the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B"]


class ScheduleError(ValueError):
    """A list of actions that cannot be run."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work: the forward or backward pass of a micro-batch."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def gpipe(*, stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """All forward passes, then all backward passes. Holds every activation of the batch."""
    forward = [Action("F", index) for index in range(num_micro_batches)]
    return forward + [Action("B", index) for index in range(num_micro_batches)]


def one_f_one_b(*, stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Fill, alternate, drain. Holds at most `num_stages - stage` activations."""
    return _alternating(num_stages - stage - 1, num_micro_batches)


def eager_one_f_one_b(*, stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """1F1B that counts every link as a stage: enough is under way to fill the wires, too.

    1F1B lets a stage start as many micro-batches as there are stages behind it, so on slow links
    it waits for a gradient that is still on its way. Holds at most twice as many activations.
    """
    return _alternating(2 * (num_stages - stage - 1), num_micro_batches)


def _alternating(num_fill: int, num_micro_batches: int) -> list[Action]:
    """Some forward passes ahead, then one forward, one backward, then what is left."""
    num_fill = min(num_fill, num_micro_batches)
    actions = [Action("F", index) for index in range(num_fill)]
    for index in range(num_fill, num_micro_batches):
        actions += [Action("F", index), Action("B", index - num_fill)]
    drain = range(num_micro_batches - num_fill, num_micro_batches)
    return actions + [Action("B", index) for index in drain]


def forward_only(*, stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Evaluation: nothing flows back."""
    return [Action("F", index) for index in range(num_micro_batches)]


Schedule = Callable[..., list[Action]]
SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "forward": forward_only,
}


def actions_of(name: str, *, stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """The actions of one stage under a schedule known by name."""
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name](stage=stage, num_stages=num_stages, num_micro_batches=num_micro_batches)


def show(actions: Sequence[Action]) -> str:
    """The text form, `F0 F1 B0 B1`."""
    return " ".join(map(str, actions))


def parse(text: str) -> list[Action]:
    """The inverse of `show`."""
    actions = []
    for word in text.split():
        match = re.fullmatch(r"([FB])(\d+)", word)
        if not match:
            raise ScheduleError(f"cannot read action {word!r}; expected F or B and a number, as F0")
        actions.append(Action("F" if match[1] == "F" else "B", int(match[2])))
    return actions


def validate(rows: Sequence[Sequence[Action]]) -> None:
    """Refuse rows (one per stage) that miss or repeat work, or in which stages wait in a circle."""
    expected = set(rows[0]) if rows else set()
    for stage, row in enumerate(rows):
        repeated = sorted({str(action) for action in row if list(row).count(action) > 1})
        if repeated:
            raise ScheduleError(f"stage {stage} runs {', '.join(repeated)} more than once")
        for action in row:
            forward = Action("F", action.micro_batch)
            if action.kind == "B" and forward not in row[: list(row).index(action)]:
                raise ScheduleError(f"stage {stage} runs {action} before {forward}")
        different = sorted(map(str, expected.symmetric_difference(row)))
        if different:
            raise ScheduleError(f"stages 0 and {stage} differ in {', '.join(different)}")
    _refuse_circle(rows)


def _refuse_circle(rows: Sequence[Sequence[Action]]) -> None:
    """Run the rows with unlimited speed; whoever cannot move at the end is in a circle."""
    done: set[tuple[int, Action]] = set()
    cursor = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while cursor[stage] < len(row):
                action = row[cursor[stage]]
                source = stage - 1 if action.kind == "F" else stage + 1
                if 0 <= source < len(rows) and (source, action) not in done:
                    break
                done.add((stage, action))
                cursor[stage] += 1
                moved = True
    stuck = [
        f"stage {stage} before {row[cursor[stage]]}"
        for stage, row in enumerate(rows)
        if cursor[stage] < len(row)
    ]
    if stuck:
        raise ScheduleError(f"the stages wait for each other in a circle: {'; '.join(stuck)}")
