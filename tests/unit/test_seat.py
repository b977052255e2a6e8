"""Leaders and followers: replicas of two stages in virtual time, the classes that run in actors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_pipeline import Bench, acsgd, plain_loop
from replica_bench import Replicas

from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from ray_pipe.replica_members import _mean
from stages.optim import OptimSpec
from stages.sync.stage_shard import StageShard
from stages.sync.strategies import SyncSpec

BENCH = Bench(num_stages=2, num_samples=24, micro_batches=2, micro_batch_size=2)
LOW = CodecSpec(name="directq", bits=4)
EXACT = {
    "allreduce": SyncSpec(name="allreduce"),
    "allreduce, 4 bits and error feedback": SyncSpec(
        name="allreduce", codec=CodecSpec(name="directq+ef", bits=4)
    ),
    "quantized-adam": SyncSpec(name="quantized-adam", codec=LOW, warmup=2),
    "local": SyncSpec(name="local", local_steps=2, codec=LOW),
    "ripples, ruler": SyncSpec(name="ripples", groups="ruler", group_size=2),
    "hop": SyncSpec(name="hop", graph="complete"),
    "hop, 4 bits": SyncSpec(name="hop", graph="complete", codec=LOW),
}
LOOSE = {
    "ripples": SyncSpec(name="ripples", group_size=2),
    "hop, backup": SyncSpec(name="hop", graph="complete", backup_workers=1),
    "ad-psgd": SyncSpec(name="ad-psgd"),
}


def trained(sync: SyncSpec, bench: Bench = BENCH, **options: Any) -> Replicas:
    async def main() -> Replicas:
        replicas = Replicas(sync=sync, bench=bench, **options)
        await replicas.run()
        await asyncio.sleep(100)
        return replicas

    return run_virtual(main())


@pytest.mark.quick(1)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_all_reduce_equals_one_process_on_the_joined_batch(num_stages: int) -> None:
    bench = Bench(num_stages=num_stages, num_samples=24, micro_batches=2, micro_batch_size=2)

    replicas = trained(EXACT["allreduce"], bench)

    plans = [[replicas.plan(step, r).micro_batches for r in range(3)] for step in range(6)]
    joined = Bench(
        num_stages=1,
        num_samples=24,
        order=tuple(tuple(ids for part in step for ids in part) for step in plans),
    )
    losses, weights = plain_loop(joined, steps=6)
    found = [
        sum(replicas.records[r][step][-1].loss or 0.0 for r in range(3)) / 3 for step in range(6)
    ]
    assert found == pytest.approx(losses, abs=1e-5)
    whole = torch.cat([w.reshape(-1) for w in weights])
    assert torch.allclose(replicas.weights(0), whole, atol=1e-5)
    assert all(torch.equal(replicas.weights(0), replicas.weights(r)) for r in (1, 2))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["allreduce", "quantized-adam"])
def test_replicas_that_agree_on_gradients_stay_bit_identical_under_any_codec(name: str) -> None:
    bench = Bench(
        num_stages=2, num_samples=24, micro_batches=2, micro_batch_size=2, activation=acsgd()
    )

    replicas = trained(EXACT[name], bench)

    assert all(torch.equal(replicas.weights(0), replicas.weights(r)) for r in (1, 2))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", LOOSE)
def test_other_strategies_keep_replicas_near_each_other_in_all_their_stages(name: str) -> None:
    replicas = trained(LOOSE[name])

    for stage in (0, 1):  # not one half of the model only
        first, other = (
            torch.cat([p.detach().reshape(-1) for p in stages[stage].compute.parameters])
            for stages in (replicas.pipelines[0].stages, replicas.pipelines[1].stages)
        )
        begun = torch.cat([p.detach().reshape(-1) for p in BENCH.compute(stage).parameters])
        apart = torch.linalg.vector_norm(first - other)
        assert apart < 0.7 * torch.linalg.vector_norm(first - begun)


@pytest.mark.slow
def test_both_stages_of_a_replica_meet_the_same_group() -> None:
    replicas = trained(SyncSpec(name="ripples", group_size=2), num_replicas=4, num_steps=8)

    for r in range(4):
        leader = replicas.leader(r)
        assert leader.loop.num_run == 8
        assert len(set(leader.loop.groups)) == 1  # what its follower reported, too
    stats = replicas.desk.generator.stats() if replicas.desk else {}
    assert stats["groups"] >= 8
    assert "half_applied" not in stats


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", EXACT)
def test_resuming_gives_the_same_bits_as_never_having_stopped(name: str) -> None:
    sync = EXACT[name]
    bench = Bench(
        num_stages=2, num_samples=24, micro_batches=2, micro_batch_size=2, activation=acsgd()
    )
    whole = trained(sync, bench)

    async def before() -> list[list[bytes]]:
        replicas = Replicas(sync=sync, bench=bench)
        await replicas.run(last=3)
        await asyncio.sleep(10)
        return await replicas.save()

    async def after(saved: list[list[bytes]]) -> Replicas:
        replicas = Replicas(sync=sync, bench=bench)
        await replicas.load(saved)
        await replicas.run(first=3)
        return replicas

    resumed = run_virtual(after(run_virtual(before())))

    for replica in range(3):
        assert torch.equal(resumed.weights(replica), whole.weights(replica))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", LOOSE)
def test_strategies_whose_meetings_depend_on_time_resume_and_finish(name: str) -> None:
    sync = LOOSE[name]

    async def before() -> list[list[bytes]]:
        replicas = Replicas(sync=sync, bench=BENCH, slow={1: 1.5})
        await replicas.run(last=3)
        return await replicas.save()

    async def after(saved: list[list[bytes]]) -> Replicas:
        replicas = Replicas(sync=sync, bench=BENCH)
        await replicas.load(saved)
        await replicas.run(first=3)
        return replicas

    resumed = run_virtual(after(run_virtual(before())), limit_s=2000)

    assert [len(resumed.records[r]) for r in range(3)] == [3, 3, 3]
    assert all(
        record[0].step == 5 for records in resumed.records.values() for record in records[2:]
    )


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", [*EXACT, *LOOSE])
@pytest.mark.parametrize("when_s", [0.45, 1.2, 2.3])
def test_after_a_death_the_others_finish(name: str, when_s: float) -> None:
    sync = (EXACT | LOOSE)[name]

    async def main() -> Replicas:
        replicas = Replicas(sync=sync, bench=BENCH, num_replicas=4, num_steps=8)
        asyncio.get_running_loop().call_later(when_s, replicas.kill, 2)
        await replicas.run()
        return replicas

    replicas = run_virtual(main(), limit_s=5000)

    for replica in (0, 1, 3):
        assert len(replicas.records[replica]) == 8
    if name in EXACT and "ripples" not in name and "hop" not in name:
        assert torch.equal(replicas.weights(0), replicas.weights(1))
        assert torch.equal(replicas.weights(0), replicas.weights(3))


@pytest.mark.slow
def test_a_slow_replica_of_two_stages_skips_and_says_so() -> None:
    sync = SyncSpec(name="hop", graph="complete", backup_workers=1, skip=4)

    replicas = trained(sync, num_steps=24, slow={1: 6.0})

    skipped = [step for step in replicas.records[1] if step[0].grad_norm is None]
    assert replicas.leader(1).loop.num_skipped == len(skipped) > 5
    assert all(record.loss is None for step in skipped for record in step)
    assert len(replicas.records[1]) == 24
    last = replicas.records[1][-1][0].sync
    assert last["run"] + last["skipped"] == 24


def test_a_gradient_that_is_not_finite_skips_the_step_of_every_replica() -> None:
    async def main() -> Replicas:
        replicas = Replicas(sync=EXACT["allreduce"], bench=BENCH)
        stage = replicas.pipelines[1].stages[1]
        whole = stage.compute.squared_norms

        def spoil(micro_batch: int, gradient: Any, own: Any = stage.compute.backward) -> Any:
            sent_back = own(micro_batch, gradient)
            if stage.turn.step == 2:
                stage.compute.parameters[0].grad[0] = float("nan")
            return sent_back

        stage.compute.backward = spoil  # type: ignore[method-assign]
        await replicas.run()
        assert whole
        return replicas

    replicas = run_virtual(main())

    norms = [[step[0].grad_norm for step in replicas.records[r]] for r in range(3)]
    assert [norm == float("inf") for norm in norms[0]] == [False, False, True, False, False, False]
    assert norms[0] == norms[1] == norms[2]
    assert all(torch.equal(replicas.weights(0), replicas.weights(r)) for r in (1, 2))
    assert bool(torch.isfinite(replicas.weights(0)).all())


def test_quantized_adam_decays_matrices_only() -> None:
    optim = OptimSpec(clip=0.5)
    decayed = SyncSpec(name="quantized-adam", warmup=2, weight_decay=100.0)
    plain = SyncSpec(name="quantized-adam", warmup=2, weight_decay=0.0)
    bench = Bench(
        num_stages=2, num_samples=24, micro_batches=2, micro_batch_size=2, optim=optim, lr=1e-4
    )

    with_decay, without = (trained(s, bench, num_steps=1) for s in (decayed, plain))

    for mine, theirs in zip(
        with_decay.pipelines[0].stages, without.pipelines[0].stages, strict=True
    ):
        for one, other in zip(mine.compute.parameters, theirs.compute.parameters, strict=True):
            assert torch.equal(one, other) == (one.dim() < 2)


def test_buffers_of_a_batch_norm_stay_the_replicas_own() -> None:
    norm = torch.nn.BatchNorm1d(3)
    norm(torch.arange(12.0).view(4, 3))
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    compute: Any = SimpleNamespace(parameters=list(norm.parameters()))
    shard = StageShard(compute)

    assert len(shard.parameters()) == 6  # weight and bias; neither running mean nor variance
    shard.set_parameters(torch.full((6,), 7.0))

    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
    assert bool((norm.weight == 7.0).all())


def test_an_exported_batch_norm_has_the_mean_of_the_buffers() -> None:
    modules = []
    for shift in (0.0, 10.0):
        norm = torch.nn.BatchNorm1d(2, momentum=1.0)
        norm(shift + torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
        modules.append(norm.state_dict())

    found = _mean(modules)

    assert found["running_mean"].tolist() == [6.0, 7.0]
    assert found["num_batches_tracked"] == 1
