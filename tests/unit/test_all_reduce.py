"""All-reduce over real links in virtual time: exact, alike everywhere, and it survives a death."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from compressors.registry import CodecSpec
from netsim.faults import FaultyLink
from stages.sync.collective import Collective
from stages.sync.fleet import Fleet
from stages.sync.strategies import SyncSpec, SyncSpecError
from tests.unit.fleets import mean_of, quadratics, run_fleet, shuffled, slow_net

RING = SyncSpec(name="allreduce")
DIRECT = SyncSpec(name="allreduce", route="direct")


def alone(num: int, num_steps: int, **options: Any) -> torch.Tensor:
    """The same training in one process: the mean of all gradients at the same point."""
    trainers = quadratics(num, **options)

    async def main() -> torch.Tensor:
        for k in range(num_steps):
            for trainer in trainers:
                await trainer.compute(k)
            mean = torch.stack([t.shards[0].gradient for t in trainers]).mean(0)
            for trainer in trainers:
                trainer.shards[0].gradient = mean
                trainer.shards[0].update(k)
        return trainers[0].x

    from netsim.clock import run_virtual

    return run_virtual(main())


@pytest.mark.parametrize("sync", [RING, DIRECT])
@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_every_replica_follows_the_mean_gradient(sync: SyncSpec, num: int) -> None:
    trainers = quadratics(num, spread=1.0, noise=0.1)
    run_fleet(trainers, sync, 10, topology=slow_net(num))

    torch.testing.assert_close(
        trainers[0].x, alone(num, 10, spread=1.0, noise=0.1), rtol=0, atol=1e-12
    )
    assert all(torch.equal(trainer.x, trainers[0].x) for trainer in trainers)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "directq", "directq+ef+zstd", "topk", "acsgd"])
@pytest.mark.parametrize("route", ["ring", "direct"])
def test_replicas_stay_bit_identical_under_every_codec(codec: str, route: Any) -> None:
    trainers = quadratics(3, spread=1.0, dim=1100, dtype=torch.float32)
    run_fleet(trainers, SyncSpec(route=route, codec=CodecSpec(name=codec, bits=4)), 4)

    assert all(torch.equal(trainer.x, trainers[0].x) for trainer in trainers)
    assert 0.0 < float((mean_of(trainers) - 1).abs().mean()) < 1.0


def test_shuffled_and_repeated_letters_change_nothing() -> None:
    expected = quadratics(4, spread=1.0, noise=0.1)
    run_fleet(expected, RING, 8, topology=slow_net(4))
    trainers = quadratics(4, spread=1.0, noise=0.1)
    fleet = run_fleet(
        trainers, RING, 8, topology=slow_net(4), wrap_link=shuffled(share_twice=0.3, by_s=5.0)
    )

    assert all(torch.equal(a.x, b.x) for a, b in zip(trainers, expected))
    assert sum(r.exchanges[0].inbox.num_duplicates for r in fleet.replicas.values()) > 0


def test_lost_and_damaged_letters_are_asked_for_again() -> None:
    expected = quadratics(3, spread=1.0)
    run_fleet(expected, RING, 6)
    trainers = quadratics(3, spread=1.0)
    count = iter(range(100))
    fleet = run_fleet(
        trainers,
        SyncSpec(deadline_s=5.0),
        6,
        wrap_link=lambda link: (
            FaultyLink(link, seed=next(count))
            .drop("replica", share=0.1)
            .corrupt("replica", share=0.1)
        ),
    )

    assert all(torch.equal(a.x, b.x) for a, b in zip(trainers, expected))
    assert sum(r.exchanges[0].inbox.num_asked for r in fleet.replicas.values()) > 0
    assert sum(r.exchanges[0].post.num_damaged for r in fleet.replicas.values()) > 0


@pytest.mark.parametrize("sync", [RING, DIRECT])
def test_bytes_are_the_closed_form_and_headers(sync: SyncSpec) -> None:
    num, dim, steps = 4, 4096, 5
    fleet = run_fleet(quadratics(num, dim=dim), sync, steps)
    messages = sum(link.messages["replica"] for link in fleet.links.values())

    payload = steps * num * 2 * 8 * dim * (num - 1) // num
    assert messages == steps * num * 2 * (num - 1)
    assert payload < fleet.nbytes() < payload + 160 * messages


def test_values_that_no_grid_holds_travel_exactly_and_show_in_the_bytes() -> None:
    spec = SyncSpec(codec=CodecSpec(name="directq", bits=4))
    quantised = run_fleet(quadratics(4, dim=4096, dtype=torch.float32), spec, 2)
    trainers = quadratics(4, dim=4096, dtype=torch.float32)
    for trainer in trainers:
        trainer._optimum = torch.full_like(trainer._optimum, float("nan"))
    fallen = run_fleet(trainers, spec, 2)

    payload = 2 * 4 * 2 * 3 * (4096 // 4 * 4 // 8 + 4096 // 4 // 32 * 2)
    assert payload < quantised.nbytes() < 1.3 * payload
    assert fallen.nbytes() > 5 * payload
    assert fallen.replicas[0].exchanges[0].coder.num_nonfinite > 0  # type: ignore[attr-defined]


@pytest.mark.quick(3)
@pytest.mark.parametrize("sync", [RING, DIRECT])
@pytest.mark.parametrize("at_s", [20.1, 20.9, 20.95, 21.0, 21.05, 21.4])
def test_survivors_of_a_death_agree_and_go_on(sync: SyncSpec, at_s: float) -> None:
    trainers = quadratics(4, spread=1.0)

    def during(fleet: Fleet) -> None:
        asyncio.get_running_loop().call_later(at_s, fleet.kill, 2)

    fleet = run_fleet(trainers, sync, 70, during=during, topology=slow_net(4, rate_bps=4e4))
    left = [trainers[r] for r in (0, 1, 3)]

    assert all(torch.equal(trainer.x, left[0].x) for trainer in left)
    optimum = torch.stack([trainer._optimum for trainer in left]).mean(0)
    assert float((left[0].x - optimum).norm()) < 2e-2  # divided by those who contribute
    assert all(fleet.replicas[r].k == 70 for r in (0, 1, 3))


def test_mutant_survivors_that_repeat_what_others_have_finished_fall_apart() -> None:
    """Without the roll call one repeats a step that the others have left behind, and all wait."""
    from stages.sync.all_reduce import AllReduce

    async def nobody(self: AllReduce, k: int, members: Any) -> None:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduce, "_call_the_roll", nobody)
        with pytest.raises(TimeoutError):
            run_fleet(
                quadratics(4, spread=1.0),
                RING,
                20,
                during=lambda fleet: asyncio.get_running_loop().call_later(20.95, fleet.kill, 2),
                topology=slow_net(4, rate_bps=4e4),
                limit_s=3000,
            )


def test_mutant_dividing_by_the_configured_number_is_not_the_mean() -> None:
    original = Collective.reduce

    async def mutant(self: Collective, plan: Any, vector: Any) -> Any:
        from dataclasses import replace

        result = await original(self, plan, vector)
        return replace(result, value=result.value * len(plan.peers) / 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "reduce", mutant)
        trainers = quadratics(3, spread=1.0)
        run_fleet(trainers, RING, 10)

    assert float((trainers[0].x - alone(3, 10, spread=1.0)).norm()) > 1e-3


def test_all_stages_of_a_replica_report_the_same_members() -> None:
    fleet = run_fleet(quadratics(4, num_shards=4), RING, 3, topology=slow_net(4, 4))

    assert [r.groups for r in fleet.replicas.values()] == [[(0, 1, 2, 3)] * 4] * 4


def test_a_silent_peer_that_nobody_declares_dead_is_named_in_the_error() -> None:
    from stages.sync.strategy import SyncTimeout

    def during(fleet: Fleet) -> None:
        fleet.detect_s = 1e9
        asyncio.get_running_loop().call_later(3.5, fleet.kill, 1)

    with pytest.raises(SyncTimeout, match=r"replica \d waited .* from replicas \[\d\]"):
        run_fleet(quadratics(2), SyncSpec(deadline_s=2.0), 9, during=during)


def test_an_unknown_strategy_is_refused_with_the_nearest() -> None:
    with pytest.raises(SyncSpecError, match="did you mean 'allreduce'"):
        run_fleet(quadratics(2), SyncSpec(name="all-reduce"), 1)
