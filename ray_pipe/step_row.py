"""The row of a step: what all stages together did in it, and its forms in files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ray_pipe.ledger import Sent, total_by_kind
from ray_pipe.time_share import StageTime, shares


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of one arm, all stages together."""

    arm: str
    step: int
    loss: float | None
    grad_norm: float | None
    wall_s: float
    """When the step ended, since the start of the arm's first step."""

    step_s: float
    num_tokens: int
    sent: Sent
    stage_s: tuple[StageTime, ...] = ()
    """Where each stage's time went, in order of stages; empty when the records had no spans."""

    codec: dict[str, dict[str, float]]
    events: tuple[str, ...] = ()
    replicas: dict[int, dict[str, Any]] = field(default_factory=dict)
    """With several: what the leader of each that ended a step says, see `stages.sync.leader`."""

    fleet: dict[str, Any] = field(default_factory=dict)
    """With several: where all of them are, gaps, groups, waits; see `ray_pipe.fleet_book`."""

    embedding: dict[str, Any] = field(default_factory=dict)
    """Of a click model: rows, memory, staleness; see `stages.record`."""

    @property
    def tokens_per_s(self) -> float | None:
        """None for a step that took no time."""
        return self.num_tokens / self.step_s if self.step_s > 0 else None

    @property
    def nbytes(self) -> int:
        """All bytes sent in this step."""
        return sum(total_by_kind(self.sent).values())

    @property
    def time_share(self) -> dict[str, float] | None:
        """Compute, encode, wire and bubble over all stages; they add up to 1."""
        return shares(self.stage_s)

    def as_dict(self) -> dict[str, Any]:
        """The line of metrics.jsonl. Never NaN or infinite: null instead."""
        line = {
            "arm": self.arm,
            "step": self.step,
            "loss": self.loss,
            "wall_s": self.wall_s,
            "step_s": self.step_s,
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.tokens_per_s,
            "grad_norm": self.grad_norm,
            "bytes": total_by_kind(self.sent),
            "links": self.sent,
            "time_share": self.time_share,
            "stages": [time.as_dict() for time in self.stage_s],
            "codec": self.codec,
            "events": list(self.events),
        }
        if self.replicas:
            line["replicas"] = self.replicas
        if self.fleet:
            line["fleet"] = self.fleet
        if self.embedding:
            line["embedding"] = self.embedding
        cleaned: dict[str, Any] = finite(line)
        return cleaned


def finite(value: Any) -> Any:
    """The same value with null for every NaN and infinity, tuples as lists: fit for JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def row_to(row: StepRow) -> dict[str, Any]:
    """Plain values for JSON."""
    return {field.name: _plain(getattr(row, field.name)) for field in fields(row)}


def row_from(saved: Mapping[str, Any]) -> StepRow:
    """What `row_to` was given, also after JSON."""
    values = dict(saved)
    values["stage_s"] = tuple(StageTime(**times) for times in saved["stage_s"])
    values["events"] = tuple(saved["events"])
    values["replicas"] = {int(key): item for key, item in values.get("replicas", {}).items()}
    if values.get("fleet"):
        places = values["fleet"]["iterations"]
        values["fleet"] = {**values["fleet"], "iterations": {int(r): k for r, k in places.items()}}
    return StepRow(**values)


def row_of_line(line: Mapping[str, Any]) -> StepRow:
    """The row that a line of metrics.jsonl was written from; what was NaN is None."""
    names = {field.name for field in fields(StepRow)} - {"sent", "stage_s"}
    values = {name: value for name, value in line.items() if name in names}
    return row_from({**values, "sent": line["links"], "stage_s": line["stages"]})


def _plain(value: Any) -> Any:
    if isinstance(value, StageTime):
        return asdict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
