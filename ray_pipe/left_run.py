"""A run whose driver was killed: what it left, and whether its black boxes are the place to go on.

    unfinished.json   which arms were done, whose boxes there are, on which nodes
    metrics.jsonl     a line for each step that the driver had heard of
    black boxes       on each stage's node, the last two steps, and their records

The newest step that all boxes hold is at most two ahead of the lines, and the boxes have the
records of those. So rows, losses and bytes of the run that goes on are those of an unbroken one.
No Ray: `ray_pipe.cluster` asks the nodes, `ray_pipe.checkpointing` has the effects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray_pipe.arm_progress import eval_losses_of, prediction_of, progress_of
from ray_pipe.checkpoint import code_version, data_of
from ray_pipe.checkpoint_files import CheckpointError
from ray_pipe.config import RunConfig
from ray_pipe.errors import ConfigError
from ray_pipe.ledger import Ledger, Sent
from ray_pipe.metrics import ArmMeter
from ray_pipe.plans import Arm
from ray_pipe.recovery import FRESH, Failure, Source, Status, common_step
from ray_pipe.resume import other_settings
from ray_pipe.step_row import StepRow, row_of_line, row_to
from ray_pipe.unfinished import has_record, is_alive, read_record
from stages.left_boxes import LeftBox

BOXES_LIE_BY = ("pipeline.stages", "faults.black_box", "codec.spill_dir")
"""Settings that a checkpoint does not mind, but that say whose boxes lie where."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where an arm goes on, and what speaks against its boxes."""

    step: int
    source: Source
    homes: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Ids of the nodes where each stage's box of that step lies."""

    troubles: tuple[str, ...] = ()


def choose(
    found: Mapping[str, Sequence[LeftBox]],
    *,
    num_stages: int,
    recorded: int,
    checkpoint: int | None,
    latest: int | None = None,
) -> Choice:
    """The newest of the checkpoint and the newest common step in the boxes that nodes have `found`.

    `recorded` is the last step that metrics.jsonl has a line of: one that came later counts only if
    the boxes have the records of all steps between. Steps after `latest` are of no use.
    """
    boxes = [(node, box) for node, own in found.items() for box in own]
    told = [
        {record.step for _, box in boxes if box.stage == stage for record in box.records}
        for stage in range(num_stages)
    ]

    def is_told(step: int) -> bool:
        if latest is not None and step > latest:
            return False
        return all(own.issuperset(range(recorded + 1, step + 1)) for own in told)

    steps = [
        {step for _, box in boxes if box.stage == stage for step in box.steps}
        for stage in range(num_stages)
    ]
    statuses = [
        Status(index=stage, live=None, box=tuple(sorted(filter(is_told, own))))
        for stage, own in enumerate(steps)
    ]
    decision = common_step(statuses, checkpoint=checkpoint)
    source = "fresh" if decision.step == FRESH else decision.sources[0]
    troubles = [box.trouble for _, box in boxes if box.trouble]
    lost = [stage for stage in range(num_stages) if not any(b.stage == stage for _, b in boxes)]
    if lost:
        troubles.append(f"no node has the black box of stage {', '.join(map(str, lost))}")
    common = set.intersection(*steps)
    if not troubles and common and not any(map(is_told, common)):
        troubles.append(
            f"the black boxes hold step {max(common)}, metrics.jsonl ends at step {recorded}"
            + (f", and what came after step {latest} is of no use" if latest is not None else "")
        )
    if not troubles and not common:
        listed = "; ".join(f"stage {i} {sorted(own)}" for i, own in enumerate(steps))
        troubles.append(f"the black boxes have no step in common ({listed})")
    return Choice(
        step=decision.step,
        source=source,
        homes={
            stage: [node for node, b in boxes if b.stage == stage and decision.step in b.steps]
            for stage in range(num_stages)
        },
        troubles=tuple(troubles),
    )


class LeftRun:
    """A run that is not over, and whose driver is gone."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` if its record cannot be read, or its driver still lives."""
        self.folder = folder
        self._body = read_record(folder)
        driver = self._body["driver"]
        if is_alive(driver):
            raise CheckpointError(
                f"{folder} is being trained by process {driver['pid']} on this machine; end it "
                "first, or give this run another --name."
            )
        self.failures = [Failure.from_dict(entry) for entry in self._body["failures"]]
        lines = folder / "metrics.jsonl"
        self._lines = _read_lines(lines)
        last_s = lines.stat().st_mtime if lines.exists() else 0.0
        self.at_s = max(0.0, last_s - float(self._body["epoch_s"]))
        """When it last did something, since its start."""

    @property
    def training(self) -> str:
        """The arm that was in training; empty if none had begun, or the last one was done."""
        open_arms = [name for name, note in self._arms.items() if not note.get("is_done")]
        return open_arms[-1] if open_arms else ""

    @property
    def cause(self) -> str:
        """Why its driver is gone, as far as anybody knows."""
        told: str = self._body["stopped_by"]
        return told or "its process ended without a word (killed, crashed, or out of memory)"

    @property
    def _arms(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self._body["arms"]
        return found

    def note(self, arm: str) -> dict[str, Any]:
        """What the record says of an arm."""
        return self._arms.get(arm, {})

    def recorded(self, arm: str) -> int:
        """The last step of an arm that has a line; -1 if none has."""
        return len(self._rows(arm)) - 1

    def trouble(self, arm: Arm) -> str:
        """Why what it left of an arm is not of this training; empty if it is."""
        note = self.note(arm.name)
        settings = other_settings(self._body["config"], arm.config, also=BOXES_LIE_BY)
        if settings.wrong:
            return "; ".join(settings.wrong)
        before, now = note["data"], data_of(arm)
        other = [key for key in now if before.get(key) != now[key]]
        if other:
            listed = ", ".join(f"{key} {before.get(key)} there, {now[key]} here" for key in other)
            return f"it trained on other data or in another order ({listed})"
        cuts = [[cut.start, cut.stop] for cut in arm.workload.cuts(arm.config.pipeline.stages)]
        if note["cuts"] != cuts:
            return f"its stages had the blocks {note['cuts']}, this run's have {cuts}"
        code, here = self._body["code"], code_version()
        other = [key for key in here if code.get(key) != here[key]]
        if other:
            listed = ", ".join(f"{key} {code.get(key)} there, {here[key]} here" for key in other)
            return f"it ran other code ({listed})"
        return ""

    def notes(self, arm: Arm, step: int) -> list[str]:
        """What makes the rest of the run another one than it would have been."""
        return [
            f"{text} from now on: the losses will not be those of an unbroken run."
            for text in other_settings(self._body["config"], arm.config, step=step + 1).changed
        ]

    def other_blocks(self, arm: str, infos: Sequence[Mapping[str, Any]]) -> str:
        """Why the boxes are of another model; empty if they are not."""
        before = self.note(arm)["blocks"]
        now = {str(b): digest for info in infos for b, digest in info["blocks"].items()}
        other = sorted(now.keys() ^ before.keys()) or [b for b in now if before[b] != now[b]]
        return f"it trained another model: block {other[0]} has other weights" if other else ""

    def is_done(self, arm: Arm) -> bool:
        """Whether all of an arm's numbers are here, and it needs no training any more."""
        note = self.note(arm.name)
        return (
            bool(note.get("is_done"))
            and note["num_steps"] == arm.num_steps <= self.recorded(arm.name) + 1
            and not self.trouble(arm)
        )

    def progress(
        self, arm: str, step: int | None = None, boxes: Sequence[LeftBox] = ()
    ) -> dict[str, Any]:
        """The arm's numbers up to a step, as a checkpoint has them; those of steps without a line
        come from the boxes."""
        note = self.note(arm)
        num_steps = int(note["num_steps"])
        last = self.recorded(arm) if step is None else step
        rows = self._rows(arm)[: last + 1]
        meter = ArmMeter(arm)
        own = [row for row in rows if row.step < num_steps]
        meter.restore(
            rows=own,
            overtime=rows[len(own) :],
            sent=_added([note.get("again", {}), *(row.sent for row in own)]),
        )
        for number in range(len(rows), last + 1):
            records = [next(r for r in box.records if r.step == number) for box in boxes]
            meter.add(records, overtime=number >= num_steps)
        evaluations = [one for one in note.get("evaluations", []) if one[1] <= last]
        prediction = prediction_of({"prediction": note.get("prediction")})
        numbers = progress_of(
            meter,
            eval_losses_of({"eval_losses": evaluations}),
            prediction,
            num_steps=num_steps,
        )
        plain = {"rows": [*map(row_to, meter.rows)], "overtime": [*map(row_to, meter.overtime)]}
        return numbers | plain | {"extra": {}}

    def _rows(self, arm: str) -> list[StepRow]:
        return self._lines.get(arm, [])


def find_left(config: RunConfig) -> LeftRun | None:
    """The run that `checkpoint.resume` names, if it is not over; its driver must be gone.

    Click runs and replicas leave no such record: their boxes lack the rows of the shards, or there
    are none. They go on from their checkpoints.
    """
    wish = config.checkpoint.resume
    if wish is None or config.task == "ctr" or config.sync.replicas > 1:
        return None
    folder = Path(config.out, config.name) if wish == "auto" else Path(wish)
    return LeftRun(folder) if has_record(folder) else None


def explain(error: ConfigError) -> str:
    """Why a record is of no use, for a warning."""
    return f"{error} The run goes on from its last checkpoint, if there is one."


def _read_lines(path: Path) -> dict[str, list[StepRow]]:
    """Rows by arm, each step once and none missing; what follows a gap or damage is left out."""
    found: dict[str, list[StepRow]] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for text in lines:
        try:
            row = row_of_line(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            break
        own = found.setdefault(row.arm, [])
        if row.step != len(own):
            break
        own.append(row)
    return found


def _added(parts: Sequence[Sent]) -> Sent:
    ledger = Ledger()
    for sent in parts:
        ledger.add_late(sent)
    return ledger.by_link()
