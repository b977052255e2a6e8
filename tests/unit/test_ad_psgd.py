"""AD-PSGD in virtual time: pairs meet half way, nobody waits for a slow one, the mean stays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from netsim.faults import FaultyLink
from stages.sync.fleet import Fleet
from stages.sync.strategies import SyncSpec
from stages.sync.swap import Swap
from tests.unit.fleets import (
    disagreement,
    mean_of,
    priced,
    quadratics,
    run_fleet,
    shuffled,
    slow_net,
    uniform_time,
)

PAIRS = SyncSpec(name="ad-psgd")
FOUR_BITS = SyncSpec(name="ad-psgd", codec=CodecSpec(name="directq", bits=4))


def settled(fleet: Fleet, trainers: list[Any]) -> torch.Tensor:
    """The mean with what was agreed on and not taken in yet."""
    total = []
    for index, trainer in enumerate(trainers):
        pending = fleet.replicas[index].exchanges[0].swap._pending
        total.append(trainer.x if pending is None else trainer.x + pending)
    return torch.stack(total).mean(0)


@pytest.mark.parametrize("sync", [PAIRS, FOUR_BITS], ids=["exact", "4 bit"])
@pytest.mark.parametrize("num", [2, 5, 8])
def test_pairs_agree_and_keep_the_mean(sync: SyncSpec, num: int) -> None:
    trainers = quadratics(num, lr=0.0, offset=1.0)
    before, spread = mean_of(trainers), disagreement(trainers)
    fleet = run_fleet(trainers, sync, 40, topology=slow_net(num))

    torch.testing.assert_close(settled(fleet, trainers), before, rtol=0, atol=1e-12)
    assert disagreement(trainers) < 0.2 * spread


def test_mutant_an_answer_that_counts_twice_moves_the_mean() -> None:
    original = Swap._take_part

    async def forgetful(self: Swap, header: Any, packet: Any) -> None:
        self._answers.clear()
        await original(self, header, packet)

    moved = []
    for patch_it in (False, True):
        trainers = quadratics(4, lr=0.0, offset=1.0)
        before = mean_of(trainers)
        with pytest.MonkeyPatch.context() as patch:
            if patch_it:
                patch.setattr(Swap, "_take_part", forgetful)
            fleet = run_fleet(
                trainers, PAIRS, 20, topology=slow_net(4),
                wrap_link=shuffled(share_twice=0.3, by_s=1.0),
            )  # fmt: skip
        moved.append(float((settled(fleet, trainers) - before).norm()))

    assert moved[0] < 1e-12
    assert moved[1] > 1e-3


def test_lost_questions_and_answers_are_made_good() -> None:
    count = iter(range(100))
    trainers = quadratics(4, lr=0.0, offset=1.0)
    before = mean_of(trainers)
    fleet = run_fleet(
        trainers,
        replace(PAIRS, deadline_s=2.0),
        20,
        wrap_link=lambda link: FaultyLink(link, seed=next(count)).drop("replica", share=0.2),
    )

    torch.testing.assert_close(settled(fleet, trainers), before, rtol=0, atol=1e-12)
    assert sum(r.exchanges[0].inbox.num_asked for r in fleet.replicas.values()) > 0


def test_it_learns_and_a_straggler_costs_nothing() -> None:
    trainers = quadratics(8, spread=0.3, compute_s=uniform_time(8, "3:4x"))

    async def main() -> Fleet:
        fleet = Fleet(sync=PAIRS, trainers=trainers, topology=slow_net(8, rate_bps=1e6))
        await fleet.run_for(100)
        return fleet

    fleet = run_virtual(main())
    optimum = torch.stack([trainer._optimum for trainer in trainers]).mean(0)

    assert sorted(r.k for r in fleet.replicas.values())[4] > 85
    assert float((mean_of(trainers) - optimum).pow(2).mean()) < 0.05


@pytest.mark.parametrize("dead", [2, 3], ids=["one who asks", "one who answers"])
def test_survivors_of_a_death_keep_their_pace(dead: int) -> None:
    async def main(dies: bool) -> int:
        fleet = Fleet(sync=PAIRS, topology=slow_net(6, rate_bps=1e6), **priced(6, uniform_time(6)))
        if dies:
            asyncio.get_running_loop().call_later(50, fleet.kill, dead)
        await fleet.run_for(400)
        return min(r.k for i, r in fleet.replicas.items() if i not in fleet.dead)

    assert run_virtual(main(True)) >= 0.95 * run_virtual(main(False))


def test_bytes_are_one_model_from_each_who_asks_and_one_answer() -> None:
    fleet = run_fleet(quadratics(4, dim=4096), PAIRS, 5)
    messages = sum(link.messages.get("replica", 0) for link in fleet.links.values())

    assert messages == 5 * 2 * 2
    assert 0 < fleet.nbytes() - messages * 8 * 4096 < 160 * messages


def answers_kept(num: int) -> int:
    """Most answers that anybody keeps after 60 steps."""
    fleet = run_fleet(quadratics(num, dim=8), PAIRS, 60, topology=slow_net(num, rate_bps=1e7))
    kept = [r.exchanges[0].swap._answers.values() for r in fleet.replicas.values()]
    return max(sum(packet is not None for _, packet in answers) for answers in kept)


@pytest.mark.slow
def test_an_answer_is_kept_until_it_arrived_not_for_every_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert answers_kept(12) == 0

    monkeypatch.setattr(Swap, "_on_got", lambda self, header, packet: None)
    assert answers_kept(12) == 6  # one model for each who asks


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_of_three_the_two_that_are_left_go_on_meeting(dead: int) -> None:
    """Replica 1 is the only odd one: by parity nobody would be left to answer."""
    trainers = quadratics(3, spread=1.0)

    def during(fleet: Fleet) -> None:
        asyncio.get_running_loop().call_later(20, fleet.kill, dead)

    fleet = run_fleet(trainers, replace(PAIRS, deadline_s=4.0), 120, during=during)

    left = [trainer for index, trainer in enumerate(trainers) if index != dead]
    met = [r.strategy.num_met for i, r in fleet.replicas.items() if i != dead]  # type: ignore[attr-defined]
    alone = float((left[0]._optimum - left[1]._optimum).norm()) / 2
    assert disagreement(left) < 0.2 * alone
    assert max(met) >= 90
