"""Errors meant for the person at the keyboard.

Each message says who, what, the number, the limit and the way out, and reads well without a
traceback: `ray_pipe.run` shows it as one paragraph. All of them survive pickling, because some
are raised inside Ray actors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any


class RayPipeError(Exception):
    """What every error of ray_pipe that is meant for users derives from."""


class ConfigError(RayPipeError, ValueError):
    """A setting, flag, file or folder given by the user cannot be used; nothing was started."""


class DataError(ConfigError):
    """The corpus or dataset cannot be read or used."""


class TrainingError(RayPipeError, RuntimeError):
    """The run started and could not go on."""

    by_stage: Mapping[int, BaseException] = MappingProxyType({})
    """Of calls to all stages: whose failed, and how, for whoever can replace them."""

    doing: str = ""
    """What those stages were at."""


class ClusterError(TrainingError):
    """Ray could not be started or reached."""


class StageDied(TrainingError):
    """A stage is gone: says which one, in which step, and why."""

    def __init__(self, stage: int, step: int, cause: str, hint: str = "") -> None:
        super().__init__(stage, step, cause, hint)  # all of them, so that unpickling works
        self.stage = stage
        self.step = step
        self.cause = cause
        self.hint = hint

    def __str__(self) -> str:
        text = f"stage {self.stage} died in step {self.step}: {self.cause}"
        return f"{text}; {self.hint}" if self.hint else text


class Terminated(KeyboardInterrupt):
    """The machine, not the user, ends this process (SIGTERM): whoever starts the run again wants
    to go on, so what is needed for that stays."""


class CheckpointsLost(TrainingError):
    """All steps were trained, but what they led to is not saved."""


def lost_checkpoints(results: Mapping[str, Any]) -> CheckpointsLost | None:
    """What results.json says about checkpoints of the last step that were lost, as an error."""
    lost = results.get("lost_checkpoints")
    if not lost:
        return None
    arms = "; ".join(f"{arm}: {why}" for arm, why in lost.items())
    return CheckpointsLost(
        "training ended and its results are written, but the state after the last step could not "
        f"be saved ({arms}); mend that, and --resume repeats the steps since the last checkpoint"
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence: `; did you mean 'x'?` after a near miss, else a full stop."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f"; did you mean {found[0]!r}?" if found else "."


def listed(names: Iterable[str]) -> str:
    """`a, b or c`."""
    words = list(names)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
