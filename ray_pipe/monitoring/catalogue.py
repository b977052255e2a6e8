"""The one list of metrics: what a run exports, in which unit, with which labels.

The exporter, the table in docs/monitoring.md and the Grafana dashboard are all made from it.
Means are two counters, seconds and events: the sum of a Ray histogram is made of the middles of its
buckets, not of what was observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "ray_"
"""Ray puts it before the name of every metric of its users."""

RUN_LABELS = ("run", "arm")
"""Every metric has them: the run's folder, and the codec that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; the name that Prometheus knows is `exported_name`."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    labels: tuple[str, ...] = ()
    """Besides those of every metric."""

    help: str
    rare: bool = False
    """Counts what may never happen; Prometheus knows nothing of it before it does."""

    task: str = ""
    """Only runs of this task export it."""

    planned: bool = False
    """Defined, but nothing exports it yet."""

    @property
    def exported_name(self) -> str:
        return PREFIX + self.name

    @property
    def all_labels(self) -> tuple[str, ...]:
        return RUN_LABELS + self.labels


METRICS: tuple[Metric, ...] = (
    Metric(
        name="pipe_steps_total",
        kind="counter",
        unit="steps",
        help="Steps trained. Overtime (on to fp32's loss) and evaluations are not counted.",
    ),
    Metric(
        name="pipe_step_seconds_total",
        kind="counter",
        unit="seconds",
        help="Wall time of those steps; over pipe_steps_total it is the mean step time.",
    ),
    Metric(
        name="pipe_tokens_total",
        kind="counter",
        unit="tokens",
        help="Tokens (samples, for models without tokens) trained; its rate is tokens per second.",
    ),
    Metric(
        name="pipe_step",
        kind="gauge",
        unit="steps",
        help="Steps of the arm that are done: the last one's number, counted from 1.",
    ),
    Metric(
        name="pipe_planned_steps",
        kind="gauge",
        unit="steps",
        help="Steps that the arm will have when it ends.",
    ),
    Metric(name="pipe_loss", kind="gauge", unit="nats", help="Training loss of the last step."),
    Metric(
        name="pipe_final_loss",
        kind="gauge",
        unit="nats",
        help="final_loss of results.json, once the arm has ended: the mean of its last epoch.",
    ),
    Metric(
        name="pipe_eval_loss",
        kind="gauge",
        unit="nats",
        help="Loss on held-out samples, with --eval, after each epoch.",
    ),
    Metric(
        name="pipe_grad_norm",
        kind="gauge",
        unit="1",
        help="Norm of the whole pipeline's gradient in the last step, before clipping.",
    ),
    Metric(
        name="pipe_predicted_step_seconds",
        kind="gauge",
        unit="seconds",
        help="Step time that the simulator predicted before the arm began.",
    ),
    Metric(
        name="pipe_prediction_error_ratio",
        kind="gauge",
        unit="ratio",
        help="(measured - predicted) / measured step time, once the arm has ended.",
    ),
    Metric(
        name="pipe_link_bytes_total",
        kind="counter",
        unit="bytes",
        labels=("link", "kind"),
        help="Bytes that left on a link (0->1), by kind: activation, gradient, control, ... "
        "Those of steps that a failure made run again count again.",
    ),
    Metric(
        name="pipe_fp32_bytes_total",
        kind="counter",
        unit="bytes",
        labels=("link",),
        help="What the tensors sent on a link would have taken in fp32; over the activation and "
        "gradient bytes of pipe_link_bytes_total it is the compression ratio.",
    ),
    Metric(
        name="pipe_frames_resent_total",
        kind="counter",
        unit="frames",
        labels=("link",),
        help="Frames that were lost or damaged and sent again.",
        rare=True,
    ),
    Metric(
        name="pipe_buffer_hits_total",
        kind="counter",
        unit="samples",
        labels=("link",),
        help="Samples of which only the change was sent, because the codec remembered them.",
    ),
    Metric(
        name="pipe_buffer_misses_total",
        kind="counter",
        unit="samples",
        labels=("link",),
        help="Samples sent whole: first visits, evicted or lost rows.",
    ),
    Metric(
        name="pipe_buffer_bytes",
        kind="gauge",
        unit="bytes",
        labels=("link", "tier"),
        help="What the sending end remembers, by tier: memory or disk.",
    ),
    Metric(
        name="pipe_codec_error_ratio",
        kind="gauge",
        unit="ratio",
        labels=("link",),
        help="Norm of (received - sent) over the norm of what was sent, last step.",
    ),
    Metric(
        name="pipe_codec_seconds_total",
        kind="counter",
        unit="seconds",
        labels=("stage", "work"),
        help="Time of a stage's encode and decode lanes, hidden behind compute or not.",
    ),
    Metric(
        name="pipe_compute_seconds_total",
        kind="counter",
        unit="seconds",
        labels=("stage", "phase"),
        help="Time of a stage's compute lane by phase: load, forward, backward, update, sync.",
    ),
    Metric(
        name="pipe_wait_seconds_total",
        kind="counter",
        unit="seconds",
        labels=("stage", "direction"),
        help="Time that a stage's compute waited in its queue for an activation (forward) or a "
        "gradient (backward).",
    ),
    Metric(
        name="pipe_stage_seconds_total",
        kind="counter",
        unit="seconds",
        labels=("stage", "share"),
        help="A stage's wall time, each moment counted once: compute, encode, wire or bubble.",
    ),
    Metric(
        name="pipe_events_total",
        kind="counter",
        unit="events",
        help="Things an operator would act on: resends, updates skipped for a gradient that was "
        "not finite.",
        rare=True,
    ),
    Metric(
        name="pipe_failures_total",
        kind="counter",
        unit="failures",
        help="Failures that the arm met: stages that died, hung, waited in vain or raised.",
        rare=True,
    ),
    Metric(
        name="pipe_recoveries_total",
        kind="counter",
        unit="recoveries",
        help="Failures after which training went on.",
        rare=True,
    ),
    Metric(
        name="pipe_recovery_seconds_total",
        kind="counter",
        unit="seconds",
        help="Time from noticing those failures to training again.",
        rare=True,
    ),
    Metric(
        name="pipe_embedding_rows",
        kind="gauge",
        unit="rows",
        help="Embedding rows on all shards (--task ctr).",
        task="ctr",
    ),
    Metric(
        name="pipe_embedding_bytes",
        kind="gauge",
        unit="bytes",
        labels=("what",),
        help="Memory for them: rows (with state, headers and index), and process, what the "
        "shards' processes hold of the machine.",
        task="ctr",
    ),
    Metric(
        name="pipe_embedding_pushes_total",
        kind="counter",
        unit="pushes",
        labels=("staleness",),
        help="Gradients that shards applied, by how many versions their rows were behind.",
        task="ctr",
    ),
    Metric(
        name="pipe_embedding_lost_pushes_total",
        kind="counter",
        unit="pushes",
        help="Gradients lost with a shard that died.",
        rare=True,
        task="ctr",
    ),
    Metric(
        name="pipe_staleness_bound",
        kind="gauge",
        unit="versions",
        help="How many versions rows may be behind now; moves with --staleness auto.",
        task="ctr",
    ),
    Metric(
        name="pipe_auc",
        kind="gauge",
        unit="1",
        help="AUC on held-out clicks, after each epoch.",
        task="ctr",
    ),
    Metric(
        name="pipe_replica_gap_steps",
        kind="gauge",
        unit="steps",
        labels=("replica",),
        help="Steps that a replica is ahead of the slowest one.",
        rare=True,
    ),
    Metric(
        name="pipe_replica_staleness_steps",
        kind="gauge",
        unit="steps",
        labels=("replica",),
        help="Age of the oldest parameters that a replica mixed in its last step.",
        rare=True,
    ),
    Metric(
        name="pipe_replica_iterations",
        kind="gauge",
        unit="steps",
        labels=("replica",),
        help="Iterations that a replica has ended, skipped ones included.",
        rare=True,
    ),
    Metric(
        name="pipe_replica_skipped_steps",
        kind="gauge",
        unit="steps",
        help="Iterations that replicas have skipped so far, together.",
        rare=True,
    ),
    Metric(
        name="pipe_replica_groups",
        kind="gauge",
        unit="groups",
        help="Groups that the Group Generator has formed so far.",
        rare=True,
    ),
    Metric(
        name="pipe_replica_conflicts",
        kind="gauge",
        unit="requests",
        help="Requests for a group while all others were in one, so far.",
        rare=True,
    ),
    Metric(
        name="pipe_replica_waited_seconds",
        kind="gauge",
        unit="seconds",
        labels=("cause",),
        help="What the mean replica has waited for so far, by cause.",
        rare=True,
    ),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}


def markdown_table() -> str:
    """The table of docs/monitoring.md."""
    lines = [
        "| metric in Prometheus | kind | unit | labels besides run, arm | meaning |",
        "|---|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(metric.labels) or " "
        planned = " (Defined for replicas; not exported yet.)" if metric.planned else ""
        lines.append(
            f"| `{metric.exported_name}` | {metric.kind} | {metric.unit} | {labels} | "
            f"{metric.help}{planned} |"
        )
    return "\n".join(lines) + "\n"
