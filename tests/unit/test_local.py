"""LocalSGD, DiLoCo and QuantizedAdam: what they agree on, and that it is the same everywhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from compressors.registry import CodecSpec
from stages.sync.fleet import Fleet
from stages.sync.problems import VectorShard
from stages.sync.rules import FrozenAdam, OuterStep
from stages.sync.strategies import Assembly, SyncSpec, SyncSpecError
from stages.sync.strategy import SyncResult
from tests.unit.fleets import mean_of, quadratics, run_fleet, slow_net

AVERAGE = SyncSpec(name="local", outer_lr=1.0, outer_momentum=0.0)
DILOCO = SyncSpec(name="local", local_steps=5)
ADAM = SyncSpec(name="quantized-adam", warmup=5, codec=CodecSpec(name="directq", bits=4))


def test_every_step_with_outer_rate_one_is_parameter_averaging() -> None:
    ours = quadratics(4, spread=1.0)
    run_fleet(ours, AVERAGE, 30)
    theirs = quadratics(4, spread=1.0)
    run_fleet(theirs, SyncSpec(name="allreduce"), 30)

    torch.testing.assert_close(ours[0].x, theirs[0].x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("codec", ["fp32", "directq", "directq+ef", "topk+ef"])
def test_anchors_are_the_same_bits_everywhere(codec: str) -> None:
    trainers = quadratics(4, spread=1.0, dtype=torch.float32, dim=700)
    fleet = run_fleet(trainers, replace(DILOCO, codec=CodecSpec(name=codec)), 20)
    anchors = [replica.rules[0].anchor for replica in fleet.replicas.values()]  # type: ignore[attr-defined]

    assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
    assert all(torch.equal(trainer.x, anchors[0]) for trainer in trainers)


def test_diloco_learns_and_the_outer_step_is_nesterovs() -> None:
    rule = OuterStep(lr=0.5, momentum=0.9)
    rule.open(torch.tensor([1.0]))

    class One:
        def parameters(self) -> torch.Tensor:
            return torch.tensor([0.8])

        def set_parameters(self, vector: torch.Tensor) -> None:
            self.x = vector

    shard: Any = One()
    assert float(rule.outgoing(shard, 0)) == pytest.approx(0.2)
    rule.incoming(shard, 0, SyncResult(value=torch.tensor([0.2])))
    assert float(shard.x) == pytest.approx(1.0 - 0.5 * (0.2 + 0.9 * 0.2))
    rule.incoming(shard, 0, SyncResult(value=torch.tensor([0.1])))
    assert float(shard.x) == pytest.approx(0.81 - 0.5 * (0.1 + 0.9 * (0.9 * 0.2 + 0.1)))


def test_mutant_the_wrong_sign_of_the_pseudo_gradient_runs_away() -> None:
    class Wrong(OuterStep):
        def outgoing(self, shard: Any, k: int) -> Any:
            return -super().outgoing(shard, k)

    class Mine(Assembly):
        def rule(self) -> Any:
            return Wrong(lr=0.7, momentum=0.9)

    for assembly, learns in ((Assembly, True), (Mine, False)):
        trainers = quadratics(3, spread=0.2)
        run_fleet(trainers, DILOCO, 60, assembly=assembly)
        distance = float((mean_of(trainers) - 1).norm())
        assert (distance < 1.0) == learns


def test_a_death_in_the_outer_step_leaves_the_others_agreed() -> None:
    trainers = quadratics(4, spread=1.0)

    def during(fleet: Fleet) -> None:
        asyncio.get_running_loop().call_later(20.4, fleet.kill, 2)

    fleet = run_fleet(trainers, DILOCO, 60, during=during, topology=slow_net(4))
    left = [trainers[r] for r in (0, 1, 3)]

    assert all(torch.equal(trainer.x, left[0].x) for trainer in left)
    assert fleet.replicas[0].groups == [(0, 1, 3)]


def test_local_steps_divide_the_bytes() -> None:
    each = run_fleet(quadratics(4), AVERAGE, 20).nbytes()
    fifth = run_fleet(quadratics(4), DILOCO, 20).nbytes()

    assert fifth * 5 == each


# --- QuantizedAdam ---------------------------------------------------------------------------


def run_adam(sync: SyncSpec, num_steps: int = 120) -> tuple[list[Any], Fleet]:
    trainers = quadratics(4, spread=1.0, noise=0.3, lr=0.03, dtype=torch.float32, dim=600)
    fleet = run_fleet(trainers, sync, num_steps)
    return trainers, fleet


def gap(trainers: list[Any]) -> float:
    optimum = torch.stack([trainer._optimum for trainer in trainers]).mean(0)
    return float((trainers[0].x - optimum).pow(2).mean())


def test_in_the_warm_up_it_is_adam() -> None:
    trainers, _ = run_adam(replace(ADAM, warmup=50), 20)
    x = torch.zeros(600, requires_grad=True)
    adam = torch.optim.Adam([x], lr=0.03, betas=(0.9, 0.95), eps=1e-8)
    twins = quadratics(4, spread=1.0, noise=0.3, lr=0.03, dtype=torch.float32, dim=600)

    async def main() -> None:
        for k in range(20):
            for twin in twins:
                twin.shards[0].x = x.detach().clone()
                await twin.compute(k)
            x.grad = torch.stack([twin.shards[0].gradient for twin in twins]).mean(0)
            adam.step()

    from netsim.clock import run_virtual

    run_virtual(main())
    torch.testing.assert_close(trainers[0].x, x.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_four_bits_learn_as_well_as_exact_momenta_and_replicas_stay_identical() -> None:
    exact, _ = run_adam(replace(ADAM, codec=CodecSpec(name="fp32")))
    coded, _ = run_adam(ADAM)

    assert all(torch.equal(trainer.x, coded[0].x) for trainer in coded)
    assert gap(coded) < 1.3 * gap(exact) + 0.02


def test_both_errors_are_kept() -> None:
    assert ADAM.payload.name == "directq+ef"
    _, fleet = run_adam(ADAM, 10)
    slots = fleet.replicas[1].exchanges[0].coder.state_dict()

    assert sorted(slots) == ["down/4/1", "up/4/0", "up/4/2", "up/4/3"]
    assert all(slot["residuals"] for slot in slots.values())


@pytest.mark.slow
def test_mutant_without_error_feedback_two_bits_learn_worse() -> None:
    with_it = replace(ADAM, codec=CodecSpec(name="topk", density=0.05))
    fed, _ = run_adam(with_it)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyncSpec, "payload", property(lambda self: self.codec))
        starved, _ = run_adam(with_it)

    assert gap(fed) < 0.5 * gap(starved)


def test_every_byte_after_the_warm_up_is_coded() -> None:
    short = run_adam(replace(ADAM, warmup=5), 5)[1].nbytes()
    more = run_adam(replace(ADAM, warmup=5), 10)[1].nbytes() - short

    assert more < short / 3


def test_adam_goes_on_as_if_nothing_was_after_a_resume() -> None:
    expected, _ = run_adam(ADAM, 20)
    first, fleet = run_adam(ADAM, 12)
    saved = [replica.state_dict() for replica in fleet.replicas.values()]
    second = quadratics(4, spread=1.0, noise=0.3, lr=0.03, dtype=torch.float32, dim=600)

    def load(fleet: Fleet) -> None:
        for index, replica in fleet.replicas.items():
            replica.load_state_dict(saved[index])
            second[index].shards[0].x = first[index].x.clone()

    run_fleet(second, ADAM, 20, during=load)

    assert all(torch.equal(a.x, b.x) for a, b in zip(second, expected))


def test_frozen_adam_without_a_warm_up_is_refused() -> None:
    with pytest.raises(SyncSpecError, match="no variance to freeze"):
        Assembly(SyncSpec(name="quantized-adam", warmup=0), range(2))
    assert FrozenAdam(warmup=1).state_dict() == {"count": 0, "warmup": 1}


def way_after_the_freeze(
    gradient_of: Any, *, num: int, sizes: tuple[int, ...] = (), warmup: int = 10
) -> torch.Tensor:
    """How far each coordinate moves in the ten steps after the warm-up."""
    shard, rule = VectorShard(torch.zeros(num), lr=1e-3), FrozenAdam(warmup=warmup)
    rule.cut_at(sizes)
    for k in range(warmup + 10):
        if k == warmup:
            before = shard.x.clone()
        shard.gradient = gradient_of(k)
        rule.incoming(shard, k, SyncResult(value=rule.outgoing(shard, k)))
    return (shard.x - before).abs()


def test_a_coordinate_first_seen_after_the_warm_up_moves_about_as_fast_as_the_others() -> None:
    seen = torch.ones(20)
    seen[3] = 0.0

    way = way_after_the_freeze(lambda k: 1e-2 * (seen if k < 10 else torch.ones(20)), num=20)

    assert 1.0 < float(way[3] / way[0]) < 6.0  # it was 10,000 times as fast


def test_a_coordinate_whose_gradients_are_small_keeps_its_own_scale() -> None:
    """A floor for all below a fifth of the mean would have it at a twentieth of its speed."""
    scale = torch.ones(20)
    scale[3] = 0.01

    way = way_after_the_freeze(lambda k: 1e-2 * scale, num=20)

    assert float(way[3] / way[0]) == pytest.approx(1.0, rel=0.01)


def test_a_tensor_has_a_floor_of_its_own_and_one_never_used_that_of_all() -> None:
    scale = torch.cat([torch.full((10,), 1.0), torch.full((10,), 1e-4), torch.full((10,), 1.0)])
    seen = torch.cat([torch.ones(20), torch.zeros(10)])

    way = way_after_the_freeze(
        lambda k: scale * (seen if k < 10 else 1.0), num=30, sizes=(10, 10, 10)
    )

    # The small gradients of the second are no less than others' by its own measure.
    assert float(way[15] / way[0]) == pytest.approx(1.0, rel=0.01)
    assert 1.0 < float(way[25] / way[0]) < 6.0


def test_the_warm_up_that_was_saved_counts_in_a_longer_run_too() -> None:
    first, fleet = run_adam(ADAM, 12)
    saved = [replica.state_dict() for replica in fleet.replicas.values()]

    def goes_on(sync: SyncSpec) -> tuple[list[Any], Fleet]:
        trainers = quadratics(4, spread=1.0, noise=0.3, lr=0.03, dtype=torch.float32, dim=600)

        def load(fleet: Fleet) -> None:
            for index, replica in fleet.replicas.items():
                replica.load_state_dict(saved[index])
                trainers[index].shards[0].x = first[index].x.clone()

        return trainers, run_fleet(trainers, sync, 20, during=load)

    same, as_before = goes_on(ADAM)
    longer, with_more = goes_on(replace(ADAM, warmup=100))

    assert all(torch.equal(a.x, b.x) for a, b in zip(longer, same))
    assert with_more.nbytes() == as_before.nbytes()  # the plan, too: no exact letters again
