"""A click run from start to end: dense stages in step, embedding rows on shards that are not.

Path: ray_pipe.driver -> ray_pipe.ctr_run -> ray_pipe.ctr_pipeline
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from netsim.units import show_bandwidth, show_duration
from ray_pipe.arms import compare
from ray_pipe.checkpointing import RunCheckpoints
from ray_pipe.cluster import connect, is_cluster, nodes, show_dashboard
from ray_pipe.config import RunConfig
from ray_pipe.ctr_checks import check_capacity, check_prune, check_rows
from ray_pipe.ctr_metrics import ScoreCounts
from ray_pipe.ctr_pipeline import CtrPipeline, rows_of, saved_rows
from ray_pipe.ctr_table import compare_arms
from ray_pipe.ctr_workload import (
    ClickTask,
    CtrArm,
    click_task,
    ctr_arms,
)
from ray_pipe.driver import Outcome, preparation, start_actors
from ray_pipe.errors import ConfigError
from ray_pipe.metrics import ArmMeter, MetricsFile
from ray_pipe.monitoring.monitor import watch
from ray_pipe.planner.placement import place
from ray_pipe.progress import Observer
from ray_pipe.recovery import Failure
from ray_pipe.results import results_of, write_all
from ray_pipe.resume import Start
from ray_pipe.shard_totals import ShardTotals
from ray_pipe.shards import Shards
from ray_pipe.trained import Trained

LOSSES = ("lost_pushes", "lost_versions", "refused")


@dataclass(kw_only=True)
class Clicked(Trained):
    """One arm of a click run."""

    scores: ScoreCounts | None = None
    totals: ShardTotals = field(default_factory=ShardTotals)
    tau: int = 0
    """The largest bound that the arm had; it moves with `--staleness auto`."""

    best_auc: float | None = None
    evaluations: list[tuple[float, int, float, float]] = field(default_factory=list)
    """(wall_s, step, AUC, log-loss) after each epoch."""

    client: dict[str, Any] = field(default_factory=dict)
    """The counts of stage 0 as it lives now: lost, voided and refused pushes."""

    past: Counter[str] = field(default_factory=Counter)
    """The same of its earlier lives."""

    before: dict[str, Any] = field(default_factory=dict)
    """`extra` of the run that this one goes on from."""

    def note_client(self, told: Mapping[str, Any]) -> None:
        """What stage 0 counted so far in its present life, which may be a new one."""
        if self.client.get("session") != told.get("session"):
            self.past.update({key: self.client.get(key, 0) for key in LOSSES})
        self.client = dict(told)

    def _counted(self, key: str) -> int:
        return self.past[key] + int(self.client.get(key, 0))

    def extra(self) -> dict[str, Any]:
        """What a checkpoint keeps of the arm besides rows and bytes."""
        return {"numbers": self.numbers(), "evaluations": self.evaluations}

    def restore_extra(self, saved: Mapping[str, Any]) -> None:
        """Counts go on from those of before."""
        self.before = dict(saved.get("numbers", {}))
        self.evaluations = [
            (wall_s, step, auc, log_loss)
            for wall_s, step, auc, log_loss in saved.get("evaluations", [])
        ]
        self.tau = self.before.get("tau", self.tau)

    def numbers(self) -> dict[str, Any]:
        """What results.json says of an arm beside the common fields."""
        rows, totals = self.meter.rows, self.totals
        num_samples = self.meter.num_tokens
        wall_s = rows[-1].wall_s if rows else 0.0
        before = self.before
        histogram = Counter(totals.staleness) or Counter(
            {int(age): num for age, num in before.get("staleness_histogram", {}).items()}
        )
        _, _, auc, log_loss = self.evaluations[-1] if self.evaluations else (None, None, None, None)

        def so_far(key: str, now: int) -> int:
            return int(before.get(key, 0)) + now

        def with_before(key: str, told: int) -> int:
            """Of shards, which take their counts over with the rows; they may not have told yet."""
            return max(told, int(before.get(key, 0)))

        return {
            "auc": auc,
            "log_loss": log_loss,
            "best_auc": self.best_auc,
            "num_test": self.arm.workload.num_held_out,
            "samples_per_s": num_samples / wall_s if wall_s else None,
            "bytes_per_sample": self.meter.ledger.nbytes / num_samples if num_samples else None,
            "rows": totals.rows or before.get("rows", 0),
            "row_bytes": totals.real_bytes or before.get("row_bytes", 0),
            "resident_bytes": totals.resident_bytes or before.get("resident_bytes", 0),
            "tau": self.tau,
            "staleness_max": max(histogram, default=0),
            "staleness_histogram": {str(key): histogram[key] for key in sorted(histogram)},
            # What a stage 0 counted after it last told died with it; shards count lost ones too.
            "lost_pushes": max(
                so_far("lost_pushes", self._counted("lost_pushes")), totals.lost_pushes
            ),
            "unsent_pushes": with_before("unsent_pushes", totals.unsent_pushes),
            "lost_versions": so_far("lost_versions", self._counted("lost_versions")),
            "refused_pushes": so_far("refused_pushes", self._counted("refused")),
            "replayed_pushes": with_before("replayed_pushes", totals.replayed),
            "dropped_gradients": with_before("dropped_gradients", totals.dropped_rows),
            "prunes": with_before("prunes", totals.prunes),
            "evicted_rows": with_before("evicted_rows", totals.evictions),
            "spilled_rows": totals.spilled_rows or before.get("spilled_rows", 0),
            "recalled_rows": with_before("recalled_rows", totals.recalled),
        }


def run(config: RunConfig, observer: Observer) -> Outcome:
    """Train every arm of a validated click configuration and write `runs/<name>/`."""
    observer.on_phase("reading the clicks")
    task = click_task(config)
    arms = ctr_arms(config, task)
    plan = plan_of(config, task, arms)
    observer.on_start(plan)
    if task.workload.num_train < config.pipeline.samples_per_step:
        raise ConfigError(
            f"--data {config.data.source}: {task.workload.num_train} samples to train on, but one "
            f"step takes {config.pipeline.samples_per_step}; lower --batch-size."
        )
    check_capacity(config, task)
    check_rows(config, task)
    check_prune(config, task)
    checkpoints = RunCheckpoints.find(
        config, arms, on_warning=observer.on_warning, on_phase=observer.on_phase
    )
    trained: list[Clicked] = []
    failures = checkpoints.failures
    epoch_s = time.time()
    observer.on_phase("starting Ray")
    with connect(config.address, dashboard=config.dashboard, job_name=config.name) as dashboard:
        placement = place(config.pipeline.stages, nodes())
        config, notes = config.on_nodes(placement.num_nodes)
        if is_cluster(config.address):
            for text in (*placement.notes(), *notes):
                observer.on_warning(text)
        arms = ctr_arms(config, task)
        path = config.make_folder()
        checkpoints.open(config, path)
        if config.dashboard or dashboard:
            observer.on_note(show_dashboard(dashboard))
        observer.on_phase(
            f"starting {_num(config.pipeline.stages, 'stage')} and "
            f"{_num(config.embedding.shards, 'shard')}"
        )
        try:
            with (
                MetricsFile(path / "metrics.jsonl", on_warning=observer.on_warning) as sink,
                start_actors(config, label=path.name, placement=placement) as actors,
                Shards(
                    config.embedding.shards,
                    label=path.name,
                    nodes=nodes(),
                    num_stages=config.pipeline.stages,
                    max_failures=config.faults.max_failures,
                ) as shards,
                watch(path.name, failures) as monitor,
            ):
                shards.on_warning = observer.on_warning

                def begin(arm: CtrArm) -> tuple[CtrPipeline, Clicked]:
                    observer.on_phase(f"preparing {arm.name}")
                    pipeline = CtrPipeline(
                        actors, arm, shards=shards, epoch_s=epoch_s, failures=failures
                    )
                    one = Clicked(
                        arm=arm,
                        prediction=None,
                        meter=ArmMeter(arm.name, sink=sink),
                        monitor=monitor,
                        best_auc=task.best_auc,
                    )
                    for text in pipeline.notes():
                        observer.on_warning(text)
                    pipeline.on_failure = lambda failure: _tell(observer, monitor, failure)
                    pipeline.on_replay = one.add_again
                    pipeline.on_warning = observer.on_warning
                    checkpoints.begin(pipeline, one)
                    return pipeline, one

                for index, arm in enumerate(arms):
                    if checkpoints.is_done(arm):
                        one = Clicked(arm=arm, prediction=None, meter=ArmMeter(arm.name, sink=sink))
                        one.best_auc = task.best_auc
                        checkpoints.restore(one)
                        trained.append(one)
                        observer.on_arm(arm.name, index, len(arms), arm.num_steps)
                        observer.on_arm_end(one.summary().as_dict() | one.numbers())
                        continue
                    tell = partial(_tell, observer, monitor)
                    pipeline, one = preparation(
                        actors, arm, checkpoints, tell, epoch_s=epoch_s, failures=failures
                    ).run(partial(begin, arm))
                    trained.append(one)
                    observer.on_arm(arm.name, index, len(arms), arm.num_steps)
                    monitor.on_arm(arm.name, index, len(arms), arm.num_steps, None)
                    start = checkpoints.starts.get(arm.name)
                    if start is not None and start.checkpoint is not None:
                        pipeline.load_shards(start.checkpoint)
                    elif config.embedding.rows is not None:
                        shards.fill(_first_rows(config, shards.handles), with_counts=False)
                    shards.rows_from = partial(_saved_rows, config, one, start)
                    train(pipeline, one, observer)
                    checkpoints.end_steps(pipeline, one)
                    checkpoints.end(one)
                    monitor.on_arm_end(one.summary())
                    observer.on_arm_end(one.summary().as_dict() | one.numbers())
        finally:
            results = ctr_results(config, task, trained, failures) | checkpoints.results()
            results["name"] = path.name
            write_all(path, results, trained, observer)
    observer.on_end(results, path)
    return Outcome(
        results=results,
        path=path,
        summaries=compare([one.summary() for one in trained]),
        checkpoint=checkpoints.newest,
    )


def _first_rows(config: RunConfig, shards: Sequence[Any]) -> list[Any]:
    """What all shards begin with, as the configuration says."""
    return [] if config.embedding.rows is None else rows_of(Path(config.embedding.rows), shards)


def _saved_rows(config: RunConfig, one: Clicked, start: Start | None, shard: Any) -> list[Any]:
    """The rows of the newest checkpoint, for a shard that died; without one, what it began with."""
    newest = None if one.saver is None else one.saver.newest
    newest = newest or (None if start is None else start.checkpoint)
    return _first_rows(config, [shard]) if newest is None else saved_rows(newest, [shard])


def train(pipeline: CtrPipeline, one: Clicked, observer: Observer) -> None:
    """All steps of an arm; the held-out samples are scored after each epoch and at the end."""
    num_steps, per_epoch = one.arm.num_steps, one.arm.order.steps_per_epoch
    done = len(one.meter.rows)  # more than 0 in a run that was resumed
    for first in range(0, num_steps, per_epoch):
        last = min(first + per_epoch, num_steps) - 1
        if last in [step for _, step, _, _ in one.evaluations]:
            continue
        for records in pipeline.train(range(max(first, done), last + 1)):
            row = one.add(records)
            pipeline.deadlines.add(row.step_s)
            for event in row.events:
                observer.on_phase(f"{one.arm.name}, step {row.step}: {event}")
            one.tau = max(one.tau, records[0].embedding.get("tau", 0))
            one.note_client(records[0].embedding)
            one.totals = pipeline.shards.totals()
            scored = one.evaluations[-1:]
            held_out = [{"auc": auc, "log_loss": log_loss} for _, _, auc, log_loss in scored]
            line = row.as_dict()
            line["embedding"] = {**line.get("embedding", {}), **dict(*held_out)}
            observer.on_step(one.arm.name, line)
        observer.on_phase(f"{one.arm.name}: scoring the held-out samples")
        one.note_client(pipeline.settle_embeddings())
        one.meter.ledger.add_late(pipeline.shards.settle())
        one.totals = pipeline.shards.totals()
        one.scores, seen = pipeline.score(last)
        pipeline.shards.settle()  # what the shards sent for it is no training
        one.meter.skip(seen)
        one.evaluations.append(
            (one.meter.rows[-1].wall_s, last, one.scores.auc(), one.scores.log_loss())
        )
        one.monitor.on_eval(one.scores.log_loss())
        one.monitor.on_auc(one.scores.auc())
        observer.on_phase(
            f"{one.arm.name}: AUC {one.scores.auc():.4f}, log-loss {one.scores.log_loss():.4f} "
            f"after {last + 1} steps"
        )


def ctr_results(
    config: RunConfig, task: ClickTask, trained: list[Clicked], failures: list[Failure]
) -> dict[str, Any]:
    """The object of results.json."""
    summaries = compare([one.summary() for one in trained if one.meter.rows])
    results = results_of(config, summaries, trained, failures)
    by_name = {one.arm.name: one for one in trained}
    for arm in results["arms"]:
        arm |= by_name[arm["name"]].numbers()
        arm["evaluations"] = by_name[arm["name"]].evaluations
        arm["wire"] = _spec(by_name[arm["name"]]).wire.rows
        arm["codec_name"] = by_name[arm["name"]].arm.codec.name
    compare_arms(results["arms"])
    results["clicks"] = {
        "text": task.text,
        "best_auc": task.best_auc,
        "num_train": task.workload.num_train,
        "num_test": task.workload.num_held_out,
        "tables": [table.name for table in task.tables],
    }
    return results


def _spec(one: Clicked) -> Any:
    assert isinstance(one.arm, CtrArm)
    return one.arm.embedding


def _tell(observer: Observer, monitor: Any, failure: Failure) -> None:
    observer.on_warning(str(failure))
    monitor.on_failures()


def _num(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def plan_of(config: RunConfig, task: ClickTask, arms: list[CtrArm]) -> dict[str, Any]:
    """What is going to happen, for people."""
    network, pipeline = config.network, config.pipeline
    shaped = network.topology is None
    rate = show_bandwidth(network.bandwidth_bps) if shaped else str(network.topology)
    late = f" with {show_duration(network.latency_s)} of latency" if network.latency_s else ""
    return {
        "text": (
            f"click model on {task.text}; rows of {config.embedding.dim} on "
            f"{_num(config.embedding.shards, 'shard')}, {_num(pipeline.stages, 'dense stage')}, "
            f"over {rate} links"
            f"{late}; {pipeline.samples_per_step} samples a step"
        ),
        "bandwidth_bps": network.bandwidth_bps if shaped else None,
        "arms": [arm.name for arm in arms],
        "unit": "samples",
    }
