"""The pipeline on real Ray actors: equal to a plain loop, both transports alike, deaths named."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.cloudpickle
import torch

from ray_pipe.config import RunConfig
from ray_pipe.driver import prepare
from ray_pipe.errors import StageDied, TrainingError
from ray_pipe.pipeline import Pipeline
from ray_pipe.planner.cost import measure_costs, predict
from ray_pipe.plans import Arm, arms_of, optim_spec
from ray_pipe.refs_pipeline import RefsPipeline
from ray_pipe.stage_actors import StageActors
from ray_pipe.trainer import Silent
from ray_pipe.workload import gpt_workload
from stages.crowding import crowding
from stages.loss import count_targets
from stages.optim import clip_factor, make_optimizer, set_lr, squared_norms

pytestmark = pytest.mark.ray

STEPS = 5


def make_arm(codec: str, *, stages: int, schedule: str = "gpipe", **changes: Any) -> Arm:
    config = RunConfig.from_dict(
        {
            "compare": [],
            "codec.name": codec,
            "steps": STEPS,
            "model.name": "gpt-nano",
            "data.num_samples": 24,
            "pipeline.stages": stages,
            "pipeline.schedule": schedule,
            "pipeline.micro_batches": 4,
            "pipeline.micro_batch_size": 2,
            "network.bandwidth_bps": "unlimited",
            "optim.clip": 0.5,
            **changes,
        }
    )
    return arms_of(config, gpt_workload(config))[0]


def plain_losses(arm: Arm) -> list[float]:
    """The same training in one process: no stages, no frames, no Ray."""
    work = arm.workload
    model = work.build(0, work.num_blocks)
    parameters = list(model.parameters())
    optimizer = make_optimizer(optim_spec(arm.config), parameters)
    losses = []
    for step in range(arm.num_steps):
        plan = arm.plan(step)
        batches = [work.samples.batch(ids) for ids in plan.micro_batches]
        num_items = sum(count_targets(work.loss, batch.targets) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = work.loss(model(batch.inputs), batch.targets)[0] / num_items
            loss.backward()
            total += float(loss.detach())
        norm, factor = clip_factor(squared_norms(parameters), clip=arm.config.optim.clip)
        assert norm > arm.config.optim.clip  # else the test would not see clipping
        for parameter in parameters:
            parameter.grad *= factor
        set_lr(optimizer, plan.lr)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.fixture(scope="module")
def actors(cluster: None) -> Iterator[StageActors]:
    torch.set_num_threads(1)
    with StageActors(4) as pool:
        yield pool


def first(actors: StageActors, count: int) -> Any:
    return SimpleNamespace(handles=actors.handles[:count], tend=lambda spec: None)


def losses_of(pipeline: Pipeline) -> list[float]:
    return [records[-1].loss for records in pipeline.train()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_an_uncompressed_pipeline_equals_a_plain_loop_at_every_step(
    actors: StageActors, stages: int, schedule: str
) -> None:
    arm = make_arm("fp32", stages=stages, schedule=schedule)

    losses = losses_of(Pipeline(first(actors, stages), arm, epoch_s=time.time()))

    assert losses == pytest.approx(plain_losses(arm), abs=1e-5)


@pytest.mark.parametrize(
    ("codec", "schedule"),
    [
        *product(("fp32", "acsgd", "directq+zstd"), ("gpipe", "1f1b")),
        ("acsgd", "eager-1f1b"),
    ],
)
def test_push_and_refs_train_to_the_same_bits(
    actors: StageActors, codec: str, schedule: str
) -> None:
    arm = make_arm(codec, stages=3, schedule=schedule)

    pushed = losses_of(Pipeline(first(actors, 3), arm, epoch_s=0.0))
    passed = losses_of(RefsPipeline(first(actors, 3), arm, epoch_s=0.0))

    assert pushed == passed


def test_both_transports_count_the_same_tensor_bytes(actors: StageActors) -> None:
    arm = replace(make_arm("acsgd", stages=2), num_steps=1)

    counted = []
    for kind in (Pipeline, RefsPipeline):
        (records,) = kind(first(actors, 2), arm, epoch_s=0.0).train()
        counted.append([dict(record.sent) for record in records])
        for sent in counted[-1]:
            for kinds in sent.values():
                kinds.pop("control", None)

    assert counted[0] == counted[1]
    assert counted[0][0]["0->1"]["activation"] > 0


def test_frames_over_a_shaped_link_arrive_no_sooner_than_its_rate_says(actors: StageActors) -> None:
    arm = replace(make_arm("fp32", stages=2, **{"network.bandwidth_bps": "20Mbps"}), num_steps=2)

    records = list(Pipeline(first(actors, 2), arm, epoch_s=0.0).train())

    sender, receiver = records[-1]
    sent_at = next(s.start_s for s in sender.spans if (s.lane, s.name) == ("encode", "F0"))
    arrived = [s.start_s for s in receiver.spans if (s.lane, s.name) == ("decode", "F")]
    nbytes = sender.sent["0->1"]["activation"]
    # Both processes read one clock. Later is a busy machine, sooner would be a link that is none;
    # tests/unit/test_shaped_stages.py has both bounds.
    assert len(arrived) == 4
    assert arrived[-1] - sent_at >= 0.97 * 8 * nbytes / 20e6


def test_costs_can_be_measured_without_touching_the_training(actors: StageActors) -> None:
    arm = make_arm("acsgd", stages=2)
    plain = losses_of(Pipeline(first(actors, 2), arm, epoch_s=0.0))

    pipeline = Pipeline(first(actors, 2), arm, epoch_s=0.0)
    costs, shapes = measure_costs(pipeline)
    prediction = predict(arm, costs, shapes, homes=[("here", 2.0)] * 2)

    assert shapes == ((64, 64),)
    assert prediction.step_s > prediction.compute_step_s > 0
    assert losses_of(pipeline) == plain


@pytest.mark.parametrize("transport", ["push", "refs"])
def test_a_run_is_predicted_over_either_transport(actors: StageActors, transport: str) -> None:
    arm = make_arm("fp32", stages=2, **{"pipeline.transport": transport})
    sink: Any = None

    _, one = prepare(first(actors, 2), arm, Silent(), sink=sink, epoch_s=0.0, failures=[])

    assert one.not_predicted is None
    assert one.predicted_step_s is not None
    assert one.predicted_step_s > 0
    assert one.prediction is not None
    assert len(one.prediction.homes) == 2


def test_evaluation_changes_nothing(actors: StageActors) -> None:
    arm = make_arm("acsgd", stages=2)
    plain = losses_of(Pipeline(first(actors, 2), arm, epoch_s=0.0))

    pipeline = Pipeline(first(actors, 2), arm, epoch_s=0.0)
    training = pipeline.train()
    losses = [next(training)[-1].loss for _ in range(2)]
    pipeline.settle()
    plan = replace(arm.plan(2), train=False, schedule="forward", part=1)
    evaluated = pipeline.evaluate(plan)[-1].loss
    losses += [None]  # step 2 was in flight; its record was not asked for
    losses += [records[-1].loss for records in pipeline.train(range(3, STEPS))]

    assert losses == [*plain[:2], None, *plain[3:]]
    assert evaluated is not None
    assert plain[-1] < evaluated < plain[0]


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


class Poison(torch.nn.Module):
    """A block that fails on its third forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == 3:
            raise ArithmeticError("the third pass is too much")
        return x


def test_an_error_inside_a_stage_names_the_stage_the_step_and_the_cause(cluster: None) -> None:
    arm = make_arm("fp32", stages=2)
    build = arm.workload.build

    def poisoned(start: int, stop: int) -> torch.nn.Module:
        module = build(start, stop)
        return torch.nn.Sequential(module, Poison()) if start > 0 else module

    arm = replace(arm, workload=replace(arm.workload, build=poisoned))
    with (
        StageActors(2) as own,
        pytest.raises(TrainingError, match=r"stage 1 failed in step 0: Arith.*third pass"),
    ):
        losses_of(Pipeline(own, arm, epoch_s=0.0))


def test_a_killed_stage_is_named_within_seconds_and_nobody_hangs(cluster: None) -> None:
    arm = make_arm("acsgd", stages=3, **{"faults.max_failures": 0})
    arm = replace(arm, num_steps=10_000)
    with StageActors(3) as own:
        pipeline = Pipeline(own, arm, epoch_s=0.0)
        training = pipeline.train()
        next(training)
        os.kill(pipeline.infos[1]["pid"], signal.SIGKILL)
        killed = time.monotonic()

        with pytest.raises(StageDied, match=r"stage 1 died in step \d+: its process ended") as died:
            for _ in training:
                pass

        assert died.value.stage == 1
        assert time.monotonic() - killed < 10.0 * crowding()
        survivors = ray.get([own.handles[0].ping.remote(), own.handles[2].ping.remote()])
        assert survivors == [pipeline.infos[0]["pid"], pipeline.infos[2]["pid"]]
