"""Replicas on real Ray actors: equal to one process where they must be, alive after a death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from ray_pipe.config import RunConfig
from ray_pipe.driver import run
from ray_pipe.plans import Arm, arms_of, optim_spec
from ray_pipe.replica_actors import ReplicaActors
from ray_pipe.replicas import ReplicaPipeline
from ray_pipe.report_replicas import replicas_section
from ray_pipe.trainer import Silent
from ray_pipe.workload import gpt_workload
from stages.optim import clip_factor, make_optimizer, set_lr, squared_norms
from stages.record import StepRecord

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def make_arm(sync: str, *, replicas: int, stages: int = 1, steps: int = 4, **changes: Any) -> Arm:
    config = RunConfig.from_dict(
        {
            "compare": [],
            "codec.name": "fp32",
            "steps": steps,
            "model.name": "gpt-nano",
            "model.layers": 2,
            "data.num_samples": 24 * replicas,
            "pipeline.stages": stages,
            "pipeline.micro_batches": 2,
            "pipeline.micro_batch_size": 2,
            "network.bandwidth_bps": "unlimited",
            "optim.clip": 0.5,
            "deadline_s": 20.0,
            "sync.replicas": replicas,
            "sync.name": sync,
            **changes,
        }
    )
    config.validate()
    return arms_of(config, gpt_workload(config))[0]


@pytest.fixture(scope="module")
def four(cluster: None) -> Iterator[ReplicaActors]:
    """Four actors, as four replicas of one stage."""
    torch.set_num_threads(1)
    with ReplicaActors(4, 1, label="test") as pool:
        yield pool


@pytest.fixture(scope="module")
def two_by_two(cluster: None) -> Iterator[ReplicaActors]:
    """Four actors, as two replicas of two stages."""
    torch.set_num_threads(1)
    with ReplicaActors(2, 2, label="test") as pool:
        yield pool


def loss_of(row: list[StepRecord]) -> float:
    losses = [record.loss for record in row if record.loss is not None]
    return sum(losses) / len(losses)


def weights_of(pipeline: ReplicaPipeline) -> list[torch.Tensor]:
    """All weights of each replica as one vector."""
    found = []
    for replica in pipeline.alive:
        states = ray.get([handle.state_dict.remote() for handle in pipeline.actors.of(replica)])
        found.append(torch.cat([t.reshape(-1) for s in states for t in s["module"].values()]))
    return found


def joined_training(arm: Arm) -> tuple[list[float], torch.Tensor]:
    """One process that trains on the batches of all replicas at once."""
    work = arm.workload
    model = work.build(0, work.num_blocks)
    parameters = list(model.parameters())
    optimizer = make_optimizer(optim_spec(arm.config), parameters)
    losses = []
    for step in range(arm.num_steps):
        plans = [arm.plan(step, replica) for replica in range(arm.num_replicas)]
        ids = tuple(i for plan in plans for micro_batch in plan.micro_batches for i in micro_batch)
        batch = work.samples.batch(ids)
        loss = work.loss(model(batch.inputs), batch.targets)[0] / batch.targets.numel()
        loss.backward()
        norm, factor = clip_factor(squared_norms(parameters), clip=arm.config.optim.clip)
        assert norm > arm.config.optim.clip  # else the test would not see clipping
        for parameter in parameters:
            parameter.grad *= factor
        set_lr(optimizer, plans[0].lr)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, torch.cat([t.reshape(-1) for t in model.state_dict().values()])


@pytest.mark.parametrize(("replicas", "stages"), [(2, 2), (4, 1)])
def test_all_reduce_equals_one_process_on_the_joined_batch(
    request: pytest.FixtureRequest, replicas: int, stages: int
) -> None:
    actors = request.getfixturevalue("two_by_two" if stages == 2 else "four")
    arm = make_arm("allreduce", replicas=replicas, stages=stages)
    pipeline = ReplicaPipeline(actors, arm, epoch_s=time.time())

    rows = list(pipeline.train())

    losses, weights = joined_training(arm)
    assert [loss_of(row) for row in rows] == pytest.approx(losses, abs=1e-5)
    first, *others = weights_of(pipeline)
    assert all(torch.equal(other, first) for other in others)
    assert torch.allclose(first, weights, atol=1e-5)
    # 2 (n-1)/n models from every replica, and their headers: the ledger's own bytes.
    sent = sum(k.get("replica", 0) for row in rows for r in row for k in r.sent.values())
    ideal = 4 * len(first) * 2 * (replicas - 1) * arm.num_steps
    assert ideal < sent < 1.05 * ideal


def test_groups_of_ripples_average_and_say_who_was_in_them(two_by_two: ReplicaActors) -> None:
    arm = make_arm("ripples", replicas=2, stages=2, steps=5)
    pipeline = ReplicaPipeline(two_by_two, arm, epoch_s=time.time())

    rows = list(pipeline.train())

    leaders = [record.sync for row in rows for record in row if "iteration" in record.sync]
    assert [0, 1] in [numbers["group"] for numbers in leaders]
    # One ticket for all stages: both parts of the model are equal after the last common group.
    assert len(rows) == 5
    one, other = weights_of(pipeline)
    # Two that never average are 0.048 of their norm apart after five steps, 0.01 after one.
    assert torch.linalg.vector_norm(one - other) < 0.02 * torch.linalg.vector_norm(one)
    assert pipeline.book.as_dict()["generator"]["groups"] >= 3
    # Tickets are bytes as well: the generator is the last node, requests come from the leaders.
    tickets = pipeline.book.take_sent()
    assert sorted(tickets) == ["8->0", "8->2"]
    assert all(kinds["control"] > 5 * 50 for kinds in tickets.values())
    asked = [link for row in rows for record in row for link in record.sent if link.endswith("->8")]
    assert set(asked) == {"0->8", "2->8"}


def test_hop_lets_a_slow_replica_skip(four: ReplicaActors) -> None:
    options = {"sync.graph": "complete", "sync.backup_workers": 1, "sync.skip": 4}
    arm = make_arm("hop", replicas=4, steps=24, **options, **{"sync.slow": "1:6x"})
    pipeline = ReplicaPipeline(four, arm, epoch_s=time.time())

    rows = list(pipeline.train())

    members = pipeline.book.as_dict()["members"]
    assert [member["iteration"] for member in members] == [24] * 4
    assert members[1]["skipped"] >= 1
    assert members[1]["run"] + members[1]["skipped"] == 24
    assert [member["skipped"] for member in members if member["replica"] != 1] == [0, 0, 0]
    assert 1 <= pipeline.book.largest_gap <= 24
    assert len(rows) == 24


def kill(pipeline: ReplicaPipeline, replica: int, stage: int = 0) -> None:
    """Without a word, as the machine would."""
    os.kill(pipeline.infos[replica * pipeline.num_stages + stage]["pid"], signal.SIGKILL)


MEMBERSHIP: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "local": {"sync.local_steps": 2},
    "ripples": {"sync.group_size": 2},
    "hop": {"sync.graph": "ring-based"},
    "ad-psgd": {},
}


@pytest.mark.parametrize("sync", sorted(MEMBERSHIP))
def test_after_a_death_the_others_go_on_and_a_new_replica_joins_them(
    four: ReplicaActors, sync: str
) -> None:
    options = {"sync.rejoin": True, **MEMBERSHIP[sync]}
    arm = make_arm(sync, replicas=4, steps=1000, **options)
    pipeline = ReplicaPipeline(four, arm, epoch_s=time.time())
    told: list[str] = []
    pipeline.on_failure = lambda failure: told.append(str(failure))
    pipeline.on_event = told.append

    there: list[set[int]] = []
    met = []  # groups of the newcomer
    for row in pipeline.train(range(arm.num_steps)):
        there.append({record.replica for record in row})
        if len(there) == 3:
            kill(pipeline, 2)
        if pipeline.book.joined:
            met += [r.sync["group"] for r in row if r.replica == 2 and r.sync.get("group")]
        if len([group for group in met if len(group) > 1]) == 3:
            break
    pipeline.settle()

    assert any(2 not in row for row in there)  # they went on without it
    assert 2 in there[-1]  # and with it again
    assert len(told) == 2
    assert "replica 2, stage 0 died" in told[0]
    assert "3 others go on without it" in told[0]
    assert "replica 2 joined before step" in told[1]
    first, *others = weights_of(pipeline)
    assert len(others) == 3
    if sync == "allreduce":
        assert all(torch.equal(other, first) for other in others)
    apart = max(float(torch.linalg.vector_norm(other - first)) for other in others)
    assert apart < 0.05 * float(torch.linalg.vector_norm(first))
    book = pipeline.book.as_dict()
    assert book["events"] == told  # what the report says
    assert book["members"][2]["joined_at"] is not None
    html = replicas_section([{"name": "fp32", "replicas": book}])
    assert "joined before step" in html


@pytest.mark.parametrize("sync", ["allreduce", "ripples"])
def test_a_replica_that_is_stopped_is_ended_and_no_other(cluster: None, sync: str) -> None:
    arm = make_arm(
        sync, replicas=3, steps=12, **{"sync.group_size": 2} if sync == "ripples" else {}
    )
    with ReplicaActors(3, 1, label=f"stopped-{sync}") as actors:
        pipeline = ReplicaPipeline(actors, arm, epoch_s=time.time())
        start = time.monotonic()
        rows = 0
        for rows, _ in enumerate(pipeline.train(), start=1):
            if rows == 3:
                os.kill(pipeline.infos[1]["pid"], signal.SIGSTOP)

        assert rows >= 12
        assert time.monotonic() - start < 50.0
        (failure,) = pipeline.failures
        assert (failure.replica, failure.kind) == (1, "hung")
        assert pipeline.alive == [0, 2]


def test_a_replica_more_than_there_were_joins_a_graph_of_hop(cluster: None) -> None:
    arm = make_arm("hop", replicas=2, steps=1000, **{"sync.graph": "ring"})
    with ReplicaActors(2, 1, label="grow") as actors:
        pipeline = ReplicaPipeline(actors, arm, epoch_s=time.time())
        told: list[str] = []
        pipeline.on_event = told.append
        met: list[list[int]] = []
        for num_rows, row in enumerate(pipeline.train(range(arm.num_steps))):
            if num_rows == 2:
                assert pipeline.join() == 2
            met += [r.sync["group"] for r in row if r.replica == 2 and len(r.sync["group"]) > 1]
            if len(met) == 3:
                break
        pipeline.settle()

        assert told == [f"replica 2 joined before step {pipeline.book.joined[2]} with the state of "
                        "replica 0"]  # fmt: skip
        assert {2} < set(met[-1])  # it mixes with its neighbours
        assert {member["iteration"] for member in pipeline.book.as_dict()["members"]} != {0}
        assert pipeline.alive == [0, 1, 2]


def test_a_dead_group_generator_comes_back_and_nobody_stops(two_by_two: ReplicaActors) -> None:
    arm = make_arm("ripples", replicas=2, stages=2, steps=400, deadline_s=1.0)
    pipeline = ReplicaPipeline(two_by_two, arm, epoch_s=time.time())
    told: list[str] = []
    pipeline.on_event = told.append
    generator = pipeline.actors.generator

    groups = 0.0
    for num_rows, _ in enumerate(pipeline.train(range(arm.num_steps))):
        if num_rows == 3:
            os.kill(ray.get(generator.stats.remote())["pid"], signal.SIGKILL)
        counted = pipeline.book.generator.get("groups", 0.0)
        groups = groups or (counted if told else 0.0)
        if told and counted > groups:
            break
    pipeline.settle()

    assert told == ["the Group Generator was restarted, empty; replicas went on alone meanwhile"]
    assert pipeline.dead == set()
    assert pipeline.failures == []


def test_a_hop_neighbour_that_dies_with_a_later_stage_is_let_go(two_by_two: ReplicaActors) -> None:
    arm = make_arm("hop", replicas=2, stages=2, steps=12, **{"sync.graph": "ring"})
    pipeline = ReplicaPipeline(two_by_two, arm, epoch_s=time.time())

    sizes = []
    for row in pipeline.train():
        sizes.append(len({record.replica for record in row}))
        if len(sizes) == 3:
            kill(pipeline, 1, stage=1)

    assert len(sizes) == 12
    assert sizes[-1] == 1
    assert [failure.replica for failure in pipeline.failures] == [1]
    assert pipeline.book.as_dict()["members"][0]["iteration"] == 12
    assert pipeline.book.dead[1] <= 6


def test_a_run_of_replicas_is_saved_shown_and_resumed_to_the_same_bits(
    cluster: None, tmp_path: Path
) -> None:
    def train(name: str, **changes: Any) -> dict[str, Any]:
        config = make_arm(
            "quantized-adam",
            replicas=2,
            stages=2,
            steps=8,
            **{
                "codec.name": "acsgd",
                "sync.warmup": 2,
                "checkpoint.every": 4,
                "data.num_samples": 16,
                "out": str(tmp_path),
                "name": name,
                **changes,
            },
        ).config
        results = run(config, Silent()).results
        (arm,) = results["arms"]
        return dict(arm)

    whole = train("whole")
    saved = tmp_path / "whole/checkpoints/acsgd/checkpoint_000004"
    resumed = train("resumed", **{"checkpoint.resume": str(saved)})

    assert [loss for _, _, loss in resumed["losses"]] == [loss for _, _, loss in whole["losses"]]
    assert whole["replicas"]["strategy"] == "quantized-adam"
    assert [member["iteration"] for member in whole["replicas"]["members"]] == [8, 8]
    fp32 = whole["replicas"]["fp32_bytes"]
    for kind in ("activation", "gradient", "replica"):  # every kind of bytes shrank
        assert whole["bytes_total"][kind] < 0.6 * fp32[kind]
    assert "replica 1" in (tmp_path / "whole/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("sync", "options"),
    [
        ("hop", {"sync.graph": "ring"}),
        ("ripples", {"sync.groups": "ruler"}),
        ("ripples", {"sync.groups": "by-node"}),
    ],
    ids=["hop", "ruler", "by-node"],
)
def test_whoever_meets_by_the_step_resumes_to_the_same_bits(
    cluster: None, tmp_path: Path, sync: str, options: dict[str, Any]
) -> None:
    def losses(name: str, **changes: Any) -> list[float]:
        settings = {
            "data.num_samples": 16,
            "checkpoint.every": 3,
            "out": str(tmp_path),
            "name": name,
            **options,
            **changes,
        }
        config = make_arm(sync, replicas=2, steps=6, **settings).config
        (arm,) = run(config, Silent()).results["arms"]
        return [loss for _, _, loss in arm["losses"]]

    whole = losses("whole")
    saved = tmp_path / "whole/checkpoints/fp32/checkpoint_000003"

    assert losses("resumed", **{"checkpoint.resume": str(saved)}) == whole
