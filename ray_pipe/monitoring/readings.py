"""Numbers for the metrics, read from what a step left behind. Plain functions, no Ray.

Everything comes from the row that metrics.jsonl gets and from the records it was made of, so the
exported numbers are those of results.json: bytes, steps, tokens and losses to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ray_pipe.arms import ArmSummary
    from ray_pipe.ledger import Sent
    from ray_pipe.recovery import Failure
    from ray_pipe.step_row import StepRow
    from stages.record import StepRecord

CODEC_WORK = ("encode", "decode")
WAITS = {"wait_forward": "forward", "wait_backward": "backward"}
TIERS = {"resident_bytes": "memory", "spilled_bytes": "disk"}


class Reading(NamedTuple):
    """One number for one series: added to a counter, or the new value of a gauge."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def of_step(row: StepRow, records: Sequence[StepRecord]) -> Iterator[Reading]:
    """What one step adds, each number finite; a counter's only if it is above zero."""
    for reading in _of_row(row):
        if math.isfinite(reading.value):
            yield reading
    yield from _of_links(row)
    for record in records:
        yield from _of_phases(record)
    yield from _of_embedding(row)
    for stage, time in enumerate(row.stage_s):
        for share, seconds in time.as_dict().items():
            yield from _above_zero("pipe_stage_seconds_total", seconds, stage=stage, share=share)


def of_arm_start(*, num_steps: int, predicted_step_s: float | None) -> Iterator[Reading]:
    """What is known before the first step."""
    yield Reading("pipe_planned_steps", num_steps)
    if predicted_step_s is not None:
        yield Reading("pipe_predicted_step_seconds", predicted_step_s)


def of_arm_end(summary: ArmSummary) -> Iterator[Reading]:
    """What is known after the last step, as results.json says it."""
    if summary.final_loss is not None:
        yield Reading("pipe_final_loss", summary.final_loss)
    if summary.prediction_error is not None:
        yield Reading("pipe_prediction_error_ratio", summary.prediction_error)


FLEET = {
    "skipped": "pipe_replica_skipped_steps",
    "groups": "pipe_replica_groups",
    "conflicts": "pipe_replica_conflicts",
}
"""Counts of a row's `fleet`, and what they are exported as."""


def of_replay(sent: Sent, records: Sequence[StepRecord]) -> Iterator[Reading]:
    """What a step adds that a failure made run again: its bytes, as results.json counts them."""
    yield from _of_sent(sent)
    if sent:
        for record in records:
            for link, seen in record.codec.items():
                nbytes = seen.get("fp32_bytes", 0.0)
                yield from _above_zero("pipe_fp32_bytes_total", nbytes, link=link)


def of_failure(failure: Failure) -> Iterator[Reading]:
    """A failure, and the recovery if there was one."""
    yield Reading("pipe_failures_total", 1)
    if failure.recovery_s is not None:
        yield Reading("pipe_recoveries_total", 1)
        yield from _above_zero("pipe_recovery_seconds_total", failure.recovery_s)


def _of_row(row: StepRow) -> Iterator[Reading]:
    yield Reading("pipe_steps_total", 1)
    yield from _above_zero("pipe_step_seconds_total", row.step_s)
    yield from _above_zero("pipe_tokens_total", row.num_tokens)
    yield from _above_zero("pipe_events_total", len(row.events))
    yield Reading("pipe_step", row.step + 1)
    if row.loss is not None:
        yield Reading("pipe_loss", row.loss)
    if row.grad_norm is not None:
        yield Reading("pipe_grad_norm", row.grad_norm)
    places = row.fleet.get("iterations") or {
        replica: int(one["iteration"]) for replica, one in row.replicas.items()
    }
    for replica, iteration in places.items():
        gap = iteration - min(places.values())
        yield _reading("pipe_replica_gap_steps", gap, replica=replica)
        yield _reading("pipe_replica_iterations", iteration, replica=replica)
    for key, name in FLEET.items():
        if key in row.fleet:
            yield _reading(name, row.fleet[key])
    for cause, seconds in row.fleet.get("waited_s", {}).items():
        yield _reading("pipe_replica_waited_seconds", seconds, cause=cause)
    for replica, one in row.replicas.items():
        stale = float(one.get("staleness", 0))
        yield _reading("pipe_replica_staleness_steps", stale, replica=replica)


def _of_sent(sent: Sent) -> Iterator[Reading]:
    for link, kinds in sent.items():
        for kind, nbytes in kinds.items():
            yield from _above_zero("pipe_link_bytes_total", nbytes, link=link, kind=kind)


def _of_links(row: StepRow) -> Iterator[Reading]:
    yield from _of_sent(row.sent)
    for link, seen in row.codec.items():
        yield from _above_zero("pipe_fp32_bytes_total", seen.get("fp32_bytes", 0.0), link=link)
        yield from _above_zero("pipe_frames_resent_total", seen.get("resent", 0.0), link=link)
        yield from _above_zero("pipe_buffer_hits_total", seen.get("hits", 0.0), link=link)
        yield from _above_zero("pipe_buffer_misses_total", seen.get("cold", 0.0), link=link)
        for key, tier in TIERS.items():
            if key in seen:
                yield _reading("pipe_buffer_bytes", seen[key], link=link, tier=tier)
        if math.isfinite(seen.get("error", math.nan)):
            yield _reading("pipe_codec_error_ratio", seen["error"], link=link)


def _of_embedding(row: StepRow) -> Iterator[Reading]:
    """Of a click model: rows on shards, and how old they were."""
    seen = row.embedding
    if not seen:
        return
    yield Reading("pipe_staleness_bound", seen["tau"])
    if "rows" in seen:
        yield Reading("pipe_embedding_rows", seen["rows"])
        yield _reading("pipe_embedding_bytes", seen["row_bytes"], what="rows")
        yield _reading("pipe_embedding_bytes", seen["resident_bytes"], what="process")
    for age, num in seen["staleness"].items():
        yield from _above_zero("pipe_embedding_pushes_total", num, staleness=age)
    yield from _above_zero("pipe_embedding_lost_pushes_total", seen.get("new_lost_pushes", 0))


def _of_phases(record: StepRecord) -> Iterator[Reading]:
    stage = record.stage
    for phase, seconds in record.seconds.items():
        if phase in WAITS:
            labels = {"stage": stage, "direction": WAITS[phase]}
            yield from _above_zero("pipe_wait_seconds_total", seconds, **labels)
        elif phase in CODEC_WORK:
            yield from _above_zero("pipe_codec_seconds_total", seconds, stage=stage, work=phase)
        else:
            yield from _above_zero("pipe_compute_seconds_total", seconds, stage=stage, phase=phase)


def _above_zero(name: str, value: float, **labels: object) -> Iterator[Reading]:
    """Ray refuses to add nothing to a counter."""
    if value > 0:
        yield _reading(name, value, **labels)


def _reading(name: str, value: float, **labels: object) -> Reading:
    return Reading(name, value, tuple((key, str(label)) for key, label in labels.items()))
