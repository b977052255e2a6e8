"""What to do after a failure: policies that turn what is known into a decision. No Ray, no effects.

    a failure      -> try again, or give up and say why      `verdict`
    who has what   -> the newest step that all can go back to `common_step`

Stages differ by at most one step: none commits step s+1 before every stage has sent its norms of
it, and a stage sends them only when its black box holds step s (`stages.keeper`). So the newest
step that every stage has, alive or in its box, is the last or the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Kind = Literal["died", "hung", "timeout", "error", "driver"]
Source = Literal["live", "box", "checkpoint", "fresh"]
PHASES = ("hear_out", "process", "set_up", "ask", "restore")
"""What a recovery consists of: everybody is stopped and heard out; a process for each stage that
was lost, known to all; it becomes the stage; all tell what they have; all go back to one step."""

FRESH = -1
"""The step before the first: every stage can be built anew."""

DRIVER = -1
"""In place of a stage's number."""

SAME_STEP_LIMIT = 3
"""A step that fails so often in a row will not succeed by being tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that ended a step, and what became of it."""

    kind: Kind
    """died: a process is gone; hung: it was there but did not answer; timeout: all are alive, but
    something did not come in time; error: a stage's own code raised; driver: the driver itself
    ended, and the run was resumed."""

    stage: int
    """Who failed first, or who waited in vain; `DRIVER` is no stage."""

    step: int
    cause: str
    arm: str = ""
    at_s: float = 0.0
    """When it was noticed, seconds since the start of the run."""

    replaced: tuple[int, ...] = ()
    """Stages that got a new process."""

    resumed_from: int | None = None
    """The step that all stages went back to; None if the run ended here."""

    source: str = ""
    """Where the replaced stages' state came from: box, checkpoint or fresh."""

    replayed_steps: int = 0
    """Steps that had been recorded before and were run again."""

    replica: int | None = None
    """Of several replicas the one that was lost; `stage` is its own."""

    num_left: int = 0
    """Replicas that go on without it; 0 if the run ended here."""

    recovery_s: float | None = None
    """From the failure being noticed until all stages were sent to work again."""

    spares: tuple[int, ...] = ()
    """Those of `replaced` that a warm spare took over."""

    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the recovery by what they went to, see `PHASES`."""

    mismatch: str = ""
    """Where a step that was run again gave another loss, on hardware that allows it."""

    def as_dict(self) -> dict[str, Any]:
        """The entry of results.json."""
        lists = {"replaced": list(self.replaced), "spares": list(self.spares)}
        return {**asdict(self), **lists}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Failure:
        """Of what `as_dict` gave, also after JSON, and of an earlier version."""
        known = {one.name for one in fields(Failure)}
        lists = {name: tuple(entry.get(name, ())) for name in ("replaced", "spares")}
        return Failure(**{**{k: v for k, v in entry.items() if k in known}, **lists})

    def __str__(self) -> str:
        if self.kind == "driver":
            return self._of_driver()
        what = {
            "died": "died",
            "hung": "did not answer",
            "timeout": "waited in vain",
            "error": "failed",
        }[self.kind]
        who = "" if self.replica is None else f"replica {self.replica}, "
        text = f"{who}stage {self.stage} {what} in step {self.step}: {self.cause}"
        if self.num_left:
            others = "the last one goes" if self.num_left == 1 else f"{self.num_left} others go"
            return f"{text}; the replica was ended, {others} on without it"
        if self.resumed_from is None:
            return text
        new = ""
        if self.replaced:
            names = ", ".join(map(str, self.replaced))
            what = "a warm spare" if set(self.replaced) == set(self.spares) else "a new process"
            new = f"; stage {names} has {what} with the state of its {_SOURCES[self.source]}"
        where = "the beginning" if self.resumed_from == FRESH else f"step {self.resumed_from}"
        return f"{text}{new}; the run went on from {where} after {self.recovery_s or 0.0:.1f} s"

    def _of_driver(self) -> str:
        text = f"the driver ended in step {self.step}: {self.cause}"
        if self.resumed_from is None:
            return text
        where = {
            "box": f"goes on after step {self.resumed_from}, from the black boxes of its stages",
            "checkpoint": f"goes on after step {self.resumed_from}, from a checkpoint",
        }.get(self.source, "begins anew")
        again = {0: "", 1: " (1 step is run again)"}.get(
            self.replayed_steps, f" ({self.replayed_steps} steps are run again)"
        )
        return f"{text}; the run {where}{again}, {self.recovery_s or 0.0:.1f} s after its new start"


_SOURCES = {"box": "black box", "checkpoint": "checkpoint", "fresh": "first step", "": "black box"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What one stage can go back to."""

    index: int
    live: int | None
    """The step its process has committed; None if it is new, or was caught in its update."""

    box: tuple[int, ...] = ()
    """Steps in its black box."""

    @property
    def steps(self) -> set[int]:
        return {*self.box, *(() if self.live is None else (self.live,))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where to go on, and where each stage finds that step."""

    step: int
    sources: tuple[Source, ...]


def verdict(failure: Failure, before: Sequence[Failure], *, max_failures: int) -> str:
    """Why the run must end; empty if it may be tried again. `before`: failures so far, of which
    deaths of the driver do not count: whoever started it again has decided that."""
    before = [earlier for earlier in before if earlier.kind != "driver"]
    if failure.kind == "error":
        return "an error in a stage's own work would come again"
    if max_failures == 0:
        return "recovery is off (--max-failures 0)"
    if 0 < max_failures <= len(before):
        return (
            f"it is failure {len(before) + 1} of this run, at most {max_failures} are allowed "
            "(--max-failures)"
        )
    same = 0
    for earlier in reversed(before):
        if (earlier.arm, earlier.step) != (failure.arm, failure.step):
            break
        same += 1
    if same + 1 >= SAME_STEP_LIMIT:
        return f"step {failure.step} failed {same + 1} times in a row"
    return ""


def replica_verdict(failure: Failure, before: Sequence[Failure], *, max_failures: int) -> str:
    """Why the run must end when a replica is lost; empty if the others may go on."""
    if failure.kind == "error":
        return "an error in a stage's own work would come to every replica"
    if not failure.num_left:
        return "no replica is left"
    if max_failures == 0:
        return "the run ends with the first failure (--max-failures 0)"
    if 0 < max_failures <= len(before):
        return (
            f"it is failure {len(before) + 1} of this run, at most {max_failures} are allowed "
            "(--max-failures)"
        )
    return ""


def common_step(statuses: Sequence[Status], *, checkpoint: int | None = None) -> Decision:
    """The newest step that every stage can go back to, or the checkpoint if that is newer.

    Without either, the beginning: the same seed gives the same bits again.
    """
    common = set.intersection(*(status.steps for status in statuses))
    newest = max(common, default=FRESH - 1)
    source: Source = "box"
    if checkpoint is not None and checkpoint > newest:
        newest, source = checkpoint, "checkpoint"
    elif newest < FRESH:
        newest, source = FRESH, "fresh"
    sources: tuple[Source, ...] = tuple(
        "live" if status.live == newest and source == "box" else source for status in statuses
    )
    return Decision(step=newest, sources=sources)
