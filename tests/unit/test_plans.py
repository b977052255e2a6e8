"""An arm as data: what each stage is told, as pure functions of configuration and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_pipe.config import RunConfig
from ray_pipe.errors import ConfigError
from ray_pipe.plans import Arm, arms_of
from ray_pipe.replica_plans import fleet_spec, sync_spec
from ray_pipe.workload import gpt_workload
from stages.plan import StepPlan, Turn


def arms(**changes: Any) -> list[Arm]:
    config = RunConfig.from_dict(
        {
            "compare": ["fp32", "acsgd"],
            "steps": 5,
            "model.name": "gpt-nano",
            "data.num_samples": 10,
            "pipeline.stages": 2,
            "pipeline.micro_batches": 2,
            "pipeline.micro_batch_size": 2,
            **changes,
        }
    )
    return arms_of(config, gpt_workload(config))


def test_arms_see_the_same_samples_in_the_same_order_at_the_same_rate() -> None:
    fp32, acsgd = arms()

    assert [fp32.name, acsgd.name] == ["fp32", "acsgd"]
    assert [fp32.plan(step) for step in range(5)] == [acsgd.plan(step) for step in range(5)]


def test_arms_differ_in_their_codecs_alone() -> None:
    from dataclasses import replace

    fp32, acsgd = (arm.specs()[0] for arm in arms())

    assert (fp32.activation_codec.name, acsgd.activation_codec.name) == ("fp32", "acsgd")
    assert acsgd.gradient_codec.name == "directq"
    same = replace(
        acsgd,
        activation_codec=fp32.activation_codec,
        gradient_codec=fp32.gradient_codec,
        build=fp32.build,
        rows_nbytes=0,  # what the codec remembers
    )
    assert same == fp32
    assert acsgd.rows_nbytes > 0


def test_a_plan_names_the_samples_of_the_next_step() -> None:
    arm = arms()[0]

    coming = arm.plan(0).coming

    assert sorted(coming) == sorted(s for micro in arm.plan(1).micro_batches for s in micro)


def test_the_last_batch_of_an_epoch_has_what_is_left() -> None:
    arm = arms()[0]

    sizes = [[len(micro) for micro in arm.plan(step).micro_batches] for step in range(3)]

    assert sizes == [[2, 2], [2, 2], [2]]


def test_epochs_and_steps_set_the_length() -> None:
    assert arms()[0].num_steps == 5
    assert arms(steps=None, epochs=2)[0].num_steps == 6


def test_only_the_last_stage_has_the_loss_and_each_its_own_blocks() -> None:
    specs = arms()[0].specs()

    assert [spec.index for spec in specs] == [0, 1]
    assert [spec.loss is None for spec in specs] == [True, False]
    names = [sum(p.numel() for p in spec.build().parameters()) for spec in specs]
    assert len(set(names)) == 2


def test_the_data_s_digest_is_in_every_spec() -> None:
    arm = arms()[0]

    assert {spec.dataset for spec in arm.specs()} == {arm.workload.samples.digest}


def test_a_topology_file_replaces_the_uniform_one(tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text("default: {bandwidth: 5Mbps, latency: 7ms}\n")

    topology = arms(**{"network.topology": str(path)})[0].specs()[0].topology

    assert topology.uplink_bps(0) == 5e6
    assert topology.link(0, 1).latency_s == 0.007


def test_turns_rise_with_attempt_then_step_then_part() -> None:
    plans = [
        StepPlan(step=step, attempt=attempt, part=part, micro_batches=(), schedule="gpipe", lr=0)
        for attempt, step, part in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 2)]
    ]

    assert [plan.turn for plan in plans] == sorted(plan.turn for plan in plans)
    assert str(Turn(0, 3, 0)) == "step 3"
    assert str(Turn(2, 3, 1)) == "step 3, part 1, attempt 2"


def test_an_evaluation_reads_held_out_samples_that_training_never_sees() -> None:
    arm = arms(eval=True)[0]

    plan = arm.evaluation(2)

    held_out = {sample for micro in plan.micro_batches for sample in micro}
    trained = {s for n in range(5) for micro in arm.plan(n).micro_batches for s in micro}
    assert held_out == {9}
    assert trained.isdisjoint(held_out)
    assert (plan.train, plan.schedule) == (False, "forward")
    assert plan.turn > arm.plan(2).turn
    assert plan.turn < arm.plan(3).turn


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_the_schedule_is_the_configuration_s(schedule: str) -> None:
    assert arms(**{"pipeline.schedule": schedule})[0].plan(0).schedule == schedule


@pytest.mark.parametrize(("replicas", "size"), [(2, 2), (4, 2), (6, 3), (8, 4), (16, 4)])
def test_groups_of_ripples_are_smaller_than_the_fleet_where_they_can_be(
    replicas: int, size: int
) -> None:
    config = RunConfig.from_dict({"sync.replicas": replicas, "sync.name": "ripples"})

    assert sync_spec(config, "fp32", num_steps=9).group_size == size
    assert sync_spec(config, "fp32", num_steps=9).warmup == 4


def test_quantized_adam_sends_few_bits_in_every_arm_but_fp32() -> None:
    config = RunConfig.from_dict({"sync.replicas": 2, "sync.name": "quantized-adam"})

    names = [sync_spec(config, codec, num_steps=99).payload.name for codec in ("fp32", "acsgd")]
    assert names == ["fp32", "directq+ef"]
    given = config.with_overrides(["sync.codec=fp16"])
    assert sync_spec(given, "fp32", num_steps=99).payload.name == "fp16+ef"


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ("local", r"sync.local_steps=8 \(the default\): the run has 6 steps"),
        ("quantized-adam", r"sync.warmup=9: the run has 6 steps"),
    ],
)
def test_what_would_begin_after_the_last_epoch_is_refused(sync: str, message: str) -> None:
    """How many steps an epoch has is known when the data is: still before Ray starts."""
    options = {"sync.warmup": 9} if sync == "quantized-adam" else {}
    config = RunConfig.from_dict({"sync.replicas": 2, "sync.name": sync, "epochs": 2, **options})

    with pytest.raises(ConfigError, match=message):
        fleet_spec(config, "fp32", num_steps=6)
