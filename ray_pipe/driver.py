"""A run from start to end: connect, train each arm, write what was found.

Path: ray_pipe.run -> ray_pipe.driver -> ray_pipe.data
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from netsim.units import show_bandwidth, show_duration
from ray_pipe.arms import REFERENCE, ArmSummary, compare, time_to_target
from ray_pipe.checkpoint_files import Checkpoint
from ray_pipe.checkpointing import RunCheckpoints
from ray_pipe.cluster import connect, is_cluster, nodes, show_dashboard
from ray_pipe.config import (
    RunConfig,
    check_corpus,
    check_memory,
    check_memory_cap,
    check_repeat_visits,
)
from ray_pipe.delta_watch import DeltaWatch
from ray_pipe.metrics import ArmMeter, MetricsFile
from ray_pipe.monitoring.monitor import watch
from ray_pipe.pipeline import Boxes, Pipeline
from ray_pipe.planner.cost import measure_costs, predict, simulated_step_s
from ray_pipe.planner.placement import Placement, place
from ray_pipe.plans import Arm, arms_of
from ray_pipe.preparing import Preparation
from ray_pipe.progress import Observer
from ray_pipe.recovery import Failure
from ray_pipe.refs_pipeline import TRANSPORTS
from ray_pipe.replica_actors import ReplicaActors
from ray_pipe.replicas import ReplicaPipeline
from ray_pipe.results import results_of, write_all
from ray_pipe.resume import Start
from ray_pipe.row_memory import rooms_of
from ray_pipe.stage_actors import StageActors
from ray_pipe.trained import Trained
from ray_pipe.workload import Workload, gpt_workload

OVERTIME_SHARE = 0.25
OVERTIME_MIN_STEPS = 4


@dataclass(kw_only=True)
class Outcome:
    """What a run leaves behind."""

    results: dict[str, Any]
    path: Path
    summaries: list[ArmSummary]
    states: list[dict[str, Any]] = field(default_factory=list)
    """Weights and optimizer of each stage of the last arm."""

    checkpoint: Checkpoint | None = None
    """The newest of the last arm, after its own steps."""


def run(
    config: RunConfig,
    observer: Observer,
    workload: Workload | None = None,
    *,
    want_states: bool = False,
) -> Outcome:
    """Train every arm of a validated `config` and write `runs/<name>/`.

    Raises a `RayPipeError` with the reason. Stopped or failed, it still writes what it has.
    """
    if config.task == "ctr":
        from ray_pipe import ctr_run  # it uses what is here

        return ctr_run.run(config, observer)
    own = workload if workload is not None and workload.is_own else None
    plan = _plan_of(config, own)
    observer.on_start(plan)
    observer.on_phase("reading the data")
    work = workload or gpt_workload(config)
    work.check_ties(config.pipeline.stages)
    check_corpus(config, work.num_train, dataset=work.dataset)
    for text in (*work.notes, *check_repeat_visits(config, work.num_train)):
        observer.on_warning(text)
    checkpoints = RunCheckpoints.find(
        config,
        arms_of(config, work),
        on_warning=observer.on_warning,
        on_phase=observer.on_phase,
        want_states=want_states,
    )
    taking_up = checkpoints.taking_up

    trained: list[Trained] = []
    failures = checkpoints.failures
    epoch_s = time.time()
    observer.on_phase("starting Ray")
    with connect(config.address, dashboard=config.dashboard, job_name=config.name) as dashboard:
        if is_cluster(config.address):
            taking_up.await_nodes(observer.on_phase)
        placement = place(config.pipeline.stages * config.sync.replicas, nodes())
        if taking_up.left is not None:
            observer.on_phase(f"asking every node what {taking_up.left.folder} has left there")
        placement = taking_up.ask(
            arms_of(config, work), checkpoints.starts, placement, want_states=want_states
        )
        config, notes = config.on_nodes(placement.num_nodes)
        if is_cluster(config.address):
            for text in (*placement.notes(), *notes):
                observer.on_warning(text)
        plan |= _plan_of(config, own)
        arms = arms_of(config, work)
        path = config.make_folder()
        checkpoints.open(config, path)
        if config.sync.replicas == 1:
            taking_up.open(config, path, failures, epoch_s=epoch_s)
        if config.dashboard or dashboard:
            observer.on_note(show_dashboard(dashboard))
        observer.on_phase(f"starting {_how_many(config)}")
        actors: StageActors | None = None
        try:
            with (
                MetricsFile(
                    path / "metrics.jsonl",
                    on_warning=observer.on_warning,
                    aside=taking_up.left is not None,
                ) as sink,
                start_actors(config, label=path.name, placement=placement) as actors,
                watch(path.name, failures) as monitor,
            ):
                actors.may_leave_boxes = taking_up.is_open

                def tell(failure: Failure) -> None:
                    observer.on_warning(str(failure))
                    monitor.on_failures()

                def survived(pipeline: Pipeline, failure: Failure) -> None:
                    tell(failure)
                    taking_up.failed(pipeline)

                def begin(arm: Arm) -> tuple[Pipeline, Trained]:
                    pipeline, one = prepare(
                        actors,
                        arm,
                        observer,
                        sink=sink,
                        epoch_s=epoch_s,
                        failures=failures,
                        boxes=checkpoints.boxes_of(arm),
                    )
                    one.monitor = monitor
                    pipeline.on_failure = partial(survived, pipeline)
                    checkpoints.begin(pipeline, one)
                    sink.publish()
                    ended = checkpoints.begun(pipeline, one)
                    if ended is not None:
                        tell(ended)
                    return pipeline, one

                for index, arm in enumerate(arms):
                    if checkpoints.is_done(arm):
                        one = Trained(arm=arm, prediction=None, meter=ArmMeter(arm.name, sink=sink))
                        checkpoints.restore(one)
                        trained.append(one)
                        observer.on_phase(f"{arm.name} was done before, and is not trained again")
                        observer.on_arm(arm.name, index, len(arms), arm.num_steps)
                        observer.on_arm_end(one.summary().as_dict())
                        continue
                    pipeline, one = preparation(
                        actors, arm, checkpoints, tell, epoch_s=epoch_s, failures=failures
                    ).run(partial(begin, arm))
                    trained.append(one)
                    plan["predicted_step_s"] = _guess(arms, one)
                    observer.on_arm(arm.name, index, len(arms), arm.num_steps)
                    monitor.on_arm(arm.name, index, len(arms), arm.num_steps, one.predicted_step_s)
                    train(pipeline, one, observer.on_step)
                    checkpoints.end_steps(pipeline, one)
                    if want_states and index == len(arms) - 1:
                        one.states = pipeline.state_dicts()
                    target = target_of(trained)
                    if target is not None and pipeline.can_train_on:
                        observer.on_phase(f"{arm.name}: on to fp32's final loss of {target:.4f}")
                        train_on(pipeline, one, target)
                    checkpoints.end(one)
                    summary = one.summary()
                    monitor.on_arm_end(summary)
                    observer.on_arm_end(summary.as_dict())
                sink.publish()
        except BaseException as error:
            if taking_up.over(error, leaves_boxes=actors is None or actors.leaves_boxes):
                observer.on_note(f"--resume {path} goes on from the last step that was done")
            raise
        finally:
            summaries = compare([one.summary() for one in trained if one.meter.rows])
            results = results_of(config, summaries, trained, failures, own=own)
            results |= {"name": path.name} | checkpoints.results()
            write_all(path, results, trained, observer)
    taking_up.over(None, leaves_boxes=False)
    observer.on_end(results, path)
    return Outcome(
        results=results,
        path=path,
        summaries=summaries,
        states=trained[-1].states if trained else [],
        checkpoint=checkpoints.newest,
    )


def preparation(
    actors: StageActors,
    arm: Arm,
    checkpoints: RunCheckpoints,
    tell: Callable[[Failure], None],
    *,
    epoch_s: float,
    failures: list[Failure],
) -> Preparation:
    """For the beginning of an arm, in which stages may be lost, too."""
    start = checkpoints.starts.get(arm.name, Start())
    return Preparation(
        actors,
        arm=arm.name,
        max_failures=arm.config.faults.max_failures,
        failures=failures,
        epoch_s=epoch_s,
        on_failure=tell,
        begins_after=start.after,
        begins_from=start.source,
    )


def prepare(
    actors: StageActors,
    arm: Arm,
    observer: Observer,
    *,
    sink: MetricsFile,
    epoch_s: float,
    failures: list[Failure],
    boxes: Boxes | None = None,
) -> tuple[Pipeline, Trained]:
    """Set the stages up for an arm, measure their costs, and predict the step time.

    What the arm has to survive is added to `failures`.
    """
    observer.on_phase(f"preparing {arm.name}: building stages, measuring their costs")
    pipeline = make_pipeline(actors, arm, epoch_s=epoch_s, failures=failures, boxes=boxes)
    for text in pipeline.notes():
        observer.on_warning(text)
    costs, cut_shapes = measure_costs(pipeline) if arm.fleet is None else ([], ())
    row_elements = max(map(math.prod, cut_shapes), default=arm.row_elements)
    rooms = rooms_of(
        pipeline.infos,
        num_stages=arm.config.pipeline.stages,
        addresses={node.id: node.ip for node in nodes()},
    )
    check_memory(arm.config, arm.workload.num_train, rooms, row_elements=row_elements)
    if arm.codec.has_memory:
        for text in check_memory_cap(arm.config, arm.workload.num_train, row_elements=row_elements):
            observer.on_warning(text)
    homes = [(str(info["node"]), float(info["num_cores"])) for info in pipeline.infos]
    prediction = None
    if arm.fleet is None:  # the simulator's stages are those of one pipeline
        prediction = predict(arm, costs, cut_shapes, homes=homes)
        pipeline.expect(prediction.step_s)
    one = Trained(arm=arm, prediction=prediction, meter=ArmMeter(arm.name, sink=sink))
    one.deltas = DeltaWatch(arm.codec.name, steps_per_epoch=arm.order.steps_per_epoch)
    one.on_warning = observer.on_warning
    one.sees_links = len(dict(homes)) == 1 or not arm.topology.is_unlimited

    if isinstance(pipeline, ReplicaPipeline):
        one.fleet = pipeline.book
        pipeline.on_event = observer.on_warning
    pipeline.on_failure = lambda failure: observer.on_warning(str(failure))
    pipeline.on_warning = observer.on_warning
    pipeline.on_replay = one.add_again
    return pipeline, one


def start_actors(config: RunConfig, *, label: str, placement: Placement) -> StageActors:
    """An actor for each stage, of each replica."""
    replicas, stages = config.sync.replicas, config.pipeline.stages
    if replicas == 1:
        return StageActors(
            stages,
            label=label,
            placement=placement,
            spares=config.faults.spares if config.faults.max_failures else 0,
            spare_after_s=config.faults.spare_after_s,
        )
    return ReplicaActors(replicas, stages, label=label, placement=placement)


def make_pipeline(
    actors: StageActors,
    arm: Arm,
    *,
    epoch_s: float,
    failures: list[Failure],
    boxes: Boxes | None = None,
) -> Pipeline:
    """The pipeline of an arm, or all its replicas."""
    if isinstance(actors, ReplicaActors):
        return ReplicaPipeline(actors, arm, epoch_s=epoch_s, failures=failures)
    make = TRANSPORTS[arm.config.pipeline.transport]
    return make(actors, arm, epoch_s=epoch_s, failures=failures, boxes=boxes)


def _how_many(config: RunConfig) -> str:
    stages, replicas = config.pipeline.stages, config.sync.replicas
    text = "1 stage" if stages == 1 else f"{stages} stages"
    return text if replicas == 1 else f"{replicas} replicas of {text}"


def _guess(arms: Sequence[Arm], one: Trained) -> dict[str, float]:
    """Step times of all arms as far as they can be known now, for the estimate of the time left."""
    if one.prediction is None or not one.sees_links:
        return {}
    costs, shapes = one.prediction.costs, one.prediction.cut_shapes
    homes = one.prediction.homes
    return {arm.name: simulated_step_s(arm, costs, shapes, homes=homes) for arm in arms} | {
        one.arm.name: one.prediction.step_s
    }


def train(
    pipeline: Pipeline, one: Trained, on_step: Callable[[str, Mapping[str, Any]], None]
) -> None:
    """The training loop: the stages work, the driver notes what they did."""
    arm = one.arm
    per_round = arm.order.steps_per_epoch if arm.workload.num_held_out else arm.num_steps
    done = len(one.meter.rows)  # more than 0 in a run that was resumed
    for first in range(0, arm.num_steps, per_round):
        last = min(first + per_round, arm.num_steps) - 1
        steps = range(max(first, done), last + 1)
        for records in pipeline.train(steps):
            row = one.add(records)
            pipeline.deadlines.add(row.step_s)
            on_step(arm.name, row.as_dict())
        if arm.workload.num_held_out and last not in [step for _, step, _ in one.eval_losses]:
            records = pipeline.evaluate(arm.evaluation(last))
            one.meter.skip(records)
            one.eval_losses.append((one.meter.rows[-1].wall_s, last, records[-1].loss))
            one.monitor.on_eval(records[-1].loss)
            if one.on_evaluated is not None:
                one.on_evaluated()


def target_of(trained: Sequence[Trained]) -> float | None:
    """The fp32 arm's final loss, if the newest arm has not reached it within its own steps."""
    *before, newest = [one.summary() for one in trained]
    target = next((arm.final_loss for arm in before if arm.name == REFERENCE), None)
    if target is None or newest.final_loss is None:
        return None
    window = newest.final_window
    reached = time_to_target(newest.losses, target=target, window=window) is not None
    return None if reached else target


def train_on(pipeline: Pipeline, one: Trained, target: float) -> None:
    """Overtime: a compressed arm that ends a little above fp32 trains on, so that the time to the
    same loss can be told. Its final loss, bytes and rates stay those of its own steps."""
    first = one.arm.num_steps
    extra = max(OVERTIME_MIN_STEPS, round(first * OVERTIME_SHARE))
    window = one.summary().final_window
    done = len(one.meter.overtime)  # more than 0 in a run that was resumed in between
    for records in pipeline.train(range(first + done, first + extra)):
        one.meter.add(records, overtime=True)
        late = one.meter.overtime[-window:]
        latest = [*(one.meter.rows[len(late) - window :] if len(late) < window else ()), *late]
        losses = [(row.wall_s, row.step, row.loss) for row in latest]
        if time_to_target(losses, target=target, window=window) is not None:
            break
    pipeline.settle()


def _plan_of(config: RunConfig, own: Workload | None) -> dict[str, Any]:
    pipeline, size = config.pipeline, config.model.size
    shaped = config.network.topology is None
    rate = show_bandwidth(config.network.bandwidth_bps) if shaped else config.network.topology
    if is_cluster(config.address) and not config.links_are_given:
        rate = "the cluster's"
    late = f" with {show_duration(config.network.latency_s)} of latency"
    batches = f"{pipeline.micro_batches} micro-batch{'' if pipeline.micro_batches == 1 else 'es'}"
    model = (
        f"{config.model.name} ({size.layers} layers, width {size.width}, context {size.context})"
    )
    if own is not None:
        model = f"{own.name} ({own.num_blocks} blocks)"
    text = (
        f"{model} in {_how_many(config)} over {rate} links"
        f"{late if shaped and config.network.latency_s else ''}; {batches} of "
        f"{pipeline.micro_batch_size}, {pipeline.schedule}"
    )
    return {
        "text": text,
        "bandwidth_bps": config.network.bandwidth_bps if shaped else None,
        "arms": [arm.name for arm in config.arms],
    }
