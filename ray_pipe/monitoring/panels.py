"""The panels of the Grafana dashboard: which questions are put to Prometheus, and how.

Queries are built from the names in the catalogue; a name that is not there is refused. Every query
can be asked of Prometheus by hand once `VARIABLES` are filled in, and the tests do so.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_pipe.monitoring.catalogue import BY_NAME, RUN_LABELS

WINDOW = "$__rate_interval"
"""Grafana's window for rates: four scrapes at least."""

RANGE = "$__range"
"""The time that the dashboard shows."""

VARIABLES = {"run": "pipe_steps_total", "arm": "pipe_steps_total"}
"""Label that can be chosen on the dashboard -> metric whose values are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question in PromQL, and how its lines are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    unit: str
    """As Grafana names it: s, Bps, bytes, percentunit, short."""

    queries: tuple[Query, ...]
    help: str
    kind: str = "timeseries"
    width: int = 8


def select(name: str, extra: str = "") -> str:
    """The series of a metric that belong to the chosen runs and arms."""
    metric = BY_NAME[name]
    chosen = ",".join(f'{label}=~"${label}"' for label in RUN_LABELS)
    return f"{metric.exported_name}{{{chosen}{',' + extra if extra else ''}}}"


def by(*labels: str) -> str:
    return f"by ({', '.join((*RUN_LABELS, *labels))})"


def latest(name: str, *labels: str) -> str:
    """A gauge."""
    assert BY_NAME[name].kind == "gauge", name
    return f"max {by(*labels)} ({select(name)})"


def last_seen(name: str) -> str:
    """A gauge as it was last: Ray forgets gauges soon after their driver has gone."""
    assert BY_NAME[name].kind == "gauge", name
    return f"max {by()} (last_over_time({select(name)}[{RANGE}]))"


def rate(name: str, *labels: str, extra: str = "") -> str:
    """How fast a counter grows, per second."""
    assert BY_NAME[name].kind == "counter", name
    return f"sum {by(*labels)} (rate({select(name, extra)}[{WINDOW}]))"


def total(name: str, *labels: str) -> str:
    """A counter since the run began."""
    assert BY_NAME[name].kind == "counter", name
    return f"sum {by(*labels)} ({select(name)})"


def total_or_zero(name: str) -> str:
    """A counter of rare things: 0 for every run in which none has happened yet."""
    assert BY_NAME[name].rare, name
    return f"{total(name)} or 0 * {total('pipe_steps_total')}"


def lines(expr: str, *labels: str, legend: str = "") -> Query:
    shown = " ".join(f"{{{{{label}}}}}" for label in (*RUN_LABELS, *labels))
    return Query(expr=expr, legend=f"{shown} {legend}".rstrip())


TENSORS = 'kind=~"activation|gradient"'

ROWS: dict[str, tuple[Panel, ...]] = {
    "The run": (
        Panel(
            title="Loss",
            unit="short",
            queries=(
                lines(latest("pipe_loss")),
                lines(latest("pipe_eval_loss"), legend="held out"),
            ),
            help="Training loss of the last step; held-out loss with --eval.",
        ),
        Panel(
            title="Step time",
            unit="s",
            queries=(
                lines(f"{rate('pipe_step_seconds_total')} / {rate('pipe_steps_total')}"),
                lines(latest("pipe_predicted_step_seconds"), legend="predicted"),
            ),
            help="Mean over the window, and what the simulator predicted before the arm began.",
        ),
        Panel(
            title="Tokens per second",
            unit="short",
            queries=(lines(rate("pipe_tokens_total")),),
            help="Tokens of trained batches.",
        ),
        Panel(
            title="Progress",
            unit="percentunit",
            kind="bargauge",
            width=6,
            queries=(lines(f"{last_seen('pipe_step')} / {last_seen('pipe_planned_steps')}"),),
            help="Steps done of those planned.",
        ),
        Panel(
            title="Final loss",
            unit="short",
            kind="stat",
            width=6,
            queries=(lines(last_seen("pipe_final_loss")),),
            help="As in results.json; there once an arm has ended.",
        ),
        Panel(
            title="Prediction error",
            unit="percentunit",
            kind="stat",
            width=6,
            queries=(lines(last_seen("pipe_prediction_error_ratio")),),
            help="(measured - predicted) / measured step time; there once an arm has ended.",
        ),
        Panel(
            title="Gradient norm",
            unit="short",
            width=6,
            queries=(lines(latest("pipe_grad_norm")),),
            help="Of the whole pipeline, before clipping.",
        ),
    ),
    "Links": (
        Panel(
            title="Bytes per second by link",
            unit="Bps",
            queries=(lines(rate("pipe_link_bytes_total", "link"), "link"),),
            help="All kinds, as counted when they leave on the link.",
        ),
        Panel(
            title="Bytes per step by kind",
            unit="bytes",
            queries=(
                lines(
                    f"{rate('pipe_link_bytes_total', 'kind')} / ignoring (kind) group_left "
                    f"{rate('pipe_steps_total')}",
                    "kind",
                ),
            ),
            help="All links together.",
        ),
        Panel(
            title="Bytes so far by kind",
            unit="bytes",
            queries=(lines(total("pipe_link_bytes_total", "kind"), "kind"),),
            help="bytes_total of results.json.",
        ),
        Panel(
            title="Compression ratio by link",
            unit="short",
            width=12,
            queries=(
                lines(
                    f"{rate('pipe_fp32_bytes_total', 'link')} / "
                    f"{rate('pipe_link_bytes_total', 'link', extra=TENSORS)}",
                    "link",
                ),
            ),
            help="fp32 size of the tensors over the bytes sent for them, headers included.",
        ),
        Panel(
            title="Frames resent",
            unit="short",
            width=12,
            queries=(lines(total_or_zero("pipe_frames_resent_total")),),
            help="Lost or damaged on the way, and healed.",
        ),
    ),
    "Codecs": (
        Panel(
            title="Buffer hit rate by link",
            unit="percentunit",
            queries=(
                lines(
                    f"{rate('pipe_buffer_hits_total', 'link')} / "
                    f"({rate('pipe_buffer_hits_total', 'link')} + "
                    f"{rate('pipe_buffer_misses_total', 'link')})",
                    "link",
                ),
            ),
            help="Samples of which only the change was sent; codecs with memory only.",
        ),
        Panel(
            title="What codecs remember",
            unit="bytes",
            queries=(lines(latest("pipe_buffer_bytes", "link", "tier"), "link", "tier"),),
            help="At the sending end; the receiving end holds as much.",
        ),
        Panel(
            title="Relative error by link",
            unit="short",
            queries=(lines(latest("pipe_codec_error_ratio", "link"), "link"),),
            help="Norm of what was lost over the norm of what was sent.",
        ),
        Panel(
            title="Codec seconds per second",
            unit="percentunit",
            width=24,
            queries=(lines(rate("pipe_codec_seconds_total", "stage", "work"), "stage", "work"),),
            help="How busy the encode and decode lanes of each stage are.",
        ),
    ),
    "Stages": (
        Panel(
            title="Where each stage's time goes",
            unit="percentunit",
            queries=(lines(rate("pipe_stage_seconds_total", "stage", "share"), "stage", "share"),),
            help="Compute, visible codec time, waiting for the wire, bubble: they add up to 1.",
        ),
        Panel(
            title="Queue waits",
            unit="percentunit",
            queries=(
                lines(rate("pipe_wait_seconds_total", "stage", "direction"), "stage", "direction"),
            ),
            help="Seconds per second that compute waited for an activation or a gradient.",
        ),
        Panel(
            title="Compute by phase",
            unit="percentunit",
            queries=(
                lines(rate("pipe_compute_seconds_total", "stage", "phase"), "stage", "phase"),
            ),
            help="Seconds per second of the compute lane.",
        ),
    ),
    "Embeddings": (
        Panel(
            title="AUC",
            unit="short",
            queries=(lines(latest("pipe_auc")),),
            help="On held-out clicks, after each epoch (--task ctr).",
        ),
        Panel(
            title="Rows",
            unit="short",
            queries=(lines(latest("pipe_embedding_rows")),),
            help="On all shards.",
        ),
        Panel(
            title="Memory of the rows",
            unit="bytes",
            queries=(lines(latest("pipe_embedding_bytes", "what"), "what"),),
            help="As the stores count it, and what the shards' processes hold.",
        ),
        Panel(
            title="Gradients applied, by the age of their rows",
            unit="short",
            width=12,
            queries=(
                lines(rate("pipe_embedding_pushes_total", "staleness"), "staleness"),
                lines(latest("pipe_staleness_bound"), legend="bound"),
            ),
            help="Per second, by versions behind; the bound is never passed.",
        ),
        Panel(
            title="Gradients lost",
            unit="short",
            width=12,
            queries=(lines(total_or_zero("pipe_embedding_lost_pushes_total")),),
            help="With a shard that died.",
        ),
    ),
    "Replicas": (
        Panel(
            title="Steps ahead of the slowest replica",
            unit="short",
            queries=(lines(latest("pipe_replica_gap_steps", "replica"), "replica"),),
            help="Empty with one replica; how far they may part is the strategy's business.",
        ),
        Panel(
            title="Age of what was mixed",
            unit="short",
            queries=(lines(latest("pipe_replica_staleness_steps", "replica"), "replica"),),
            help="Iterations that the oldest parameters mixed last were behind (Hop).",
        ),
        Panel(
            title="Iterations of each replica",
            unit="short",
            queries=(
                lines(latest("pipe_replica_iterations", "replica"), "replica"),
                lines(latest("pipe_replica_skipped_steps"), legend="skipped"),
            ),
            help="Skipped ones included; those that were skipped, of all replicas, beside them.",
        ),
        Panel(
            title="Groups and conflicts",
            unit="short",
            queries=(
                lines(latest("pipe_replica_groups"), legend="groups"),
                lines(latest("pipe_replica_conflicts"), legend="conflicts"),
            ),
            help="Of Ripples' Group Generator, since the run began.",
        ),
        Panel(
            title="What replicas waited for",
            unit="s",
            queries=(lines(latest("pipe_replica_waited_seconds", "cause"), "cause"),),
            help="Seconds of the mean replica since the run began, by cause.",
        ),
    ),
    "Faults": (
        Panel(
            title="Events",
            unit="short",
            queries=(lines(total_or_zero("pipe_events_total")),),
            help="Things an operator would act on; metrics.jsonl says which.",
        ),
        Panel(
            title="Failures and recoveries",
            unit="short",
            queries=(
                lines(total_or_zero("pipe_failures_total"), legend="failures"),
                lines(total_or_zero("pipe_recoveries_total"), legend="recoveries"),
            ),
            help="Stages or nodes lost, and how often training went on.",
        ),
        Panel(
            title="Seconds spent recovering",
            unit="s",
            queries=(lines(total_or_zero("pipe_recovery_seconds_total")),),
            help="From noticing a failure to training again.",
        ),
    ),
}
