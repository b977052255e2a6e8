"""What a step of a pipeline from Python comes to: its loss once it has ended, or why it did not."""

from __future__ import annotations

from collections.abc import Callable

from ray_pipe.errors import ClusterError, StageDied, TrainingError

WAY_ON = "`load` of a folder that `save` wrote starts the pipeline anew from there"
FLAGS = {
    "recovery is off (--max-failures 0)": "max_stage_failures is 0",
    "(--max-failures)": "(max_stage_failures)",
    "--max-failures is": "max_shard_failures is",
    "--capacity": "`capacity`",
}
"""What a command says, and what it is called in Python."""


def told_in_python(error: TrainingError, *, so: str = "") -> TrainingError:
    """The same with arguments instead of flags, with what came of it (`so`), and with what can be
    done now."""
    if WAY_ON in str(error):
        return error
    if isinstance(error, StageDied):
        hint = "; ".join(filter(None, [_translated(error.hint), so, WAY_ON]))
        return StageDied(error.stage, error.step, error.cause, hint)
    kind = ClusterError if isinstance(error, ClusterError) else TrainingError
    return kind("; ".join(filter(None, [_translated(str(error)), so, WAY_ON])))


def _translated(text: str) -> str:
    for flag, argument in FLAGS.items():
        text = text.replace(flag, argument)
    return text


class StepLoss:
    """The loss of a step that may still be under way. `float(loss)` waits for it."""

    def __init__(self, step: int, look_up: Callable[[int], float]) -> None:
        self.step = step
        self._look_up = look_up

    def item(self) -> float:
        """The mean over the batch, as the last stage saw it."""
        return self._look_up(self.step)

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"StepLoss(step={self.step})"
