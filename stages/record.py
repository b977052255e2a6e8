"""What one stage did in one step, in one frozen record.

Path: stages.optim -> stages.record -> ray_pipe.metrics

A stage returns one `StepRecord` a step. Metrics, the byte ledger, the progress line, the trace and
the report all read it; nobody measures anything a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

LANES = ("compute", "encode", "decode", "wire", "wait", "update")
PHASES = (
    "load",
    "forward",
    "backward",
    "encode",
    "decode",
    "wait_forward",
    "wait_backward",
    "update",
    "sync",
)
KINDS = ("activation", "gradient", "replica", "embedding", "control")


class Span(NamedTuple):
    """One stretch of time in one lane of a stage. A tuple: a step's record carries hundreds."""

    lane: str
    """One of `LANES`. A "wire" span belongs to the sender and is named after its link."""

    name: str
    """What happened: "F3", "B3", "update"; on the wire "0->1 F3"."""

    start_s: float
    """Seconds since the start of the run, on a clock that all stages share."""

    end_s: float
    micro_batch: int = -1
    arrive_s: float | None = None
    """On the wire: when the frame was there. `end_s` is when it had left, and the link was free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one stage did in one step."""

    stage: int
    step: int
    loss: float | None
    """Mean over the batch; None on every stage but the last."""

    num_tokens: int
    start_s: float
    end_s: float
    seconds: dict[str, float]
    """By phase, see `PHASES`."""

    sent: dict[str, dict[str, int]]
    """Bytes that left this stage: link "0->1" -> kind (see `KINDS`) -> bytes."""

    codec: dict[str, dict[str, float]]
    """What the codecs saw: edge "0->1" -> hit_rate, delta_ratio, error, cold, nacks, …"""

    grad_norm: float | None
    spans: tuple[Span, ...] = ()
    events: tuple[str, ...] = ()
    """Things an operator would act on."""

    embedding: dict[str, Any] = field(default_factory=dict)
    """Of stage 0, where rows are on shards: tau, staleness, lost and refused pushes."""

    crowding: float = 1.0
    """Threads that wanted each core of the stage's machine; see `stages.crowding`."""

    replica: int = 0
    """With several, `stage` counts the stages of all of them: replica 1 of two stages has 2, 3."""

    sync: dict[str, Any] = field(default_factory=dict)
    """With replicas: what this stage's part of the synchronisation did, see `stages.sync.seat`."""

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON can hold it."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `as_dict` was called on, also after a way through JSON."""
        spans = tuple(Span(*span) for span in values["spans"])
        return cls(**{**values, "spans": spans, "events": tuple(values["events"])})
