"""Births and deaths in fleets of every strategy, and how fast the strategies are."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from netsim.clock import run_virtual
from netsim.topology import Topology
from stages.sync.fleet import Fleet, num_nodes
from stages.sync.strategies import STRATEGIES, SyncSpec
from tests.unit.fleets import disagreement, priced, quadratics, slow_net, uniform_time

SPECS = {name: SyncSpec(name=name, group_size=2, warmup=5) for name in STRATEGIES}
SPECS["ripples, ruler"] = SyncSpec(name="ripples", groups="ruler")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("newcomer", [2, 4], ids=["a dead one again", "a new one"])
def test_a_replica_joins_while_the_others_go_on(name: str, newcomer: int) -> None:
    trainers = quadratics(5, spread=0.3)
    entered: dict[int, list[float]] = {}

    async def main() -> Fleet:
        loop = asyncio.get_running_loop()
        fleet = Fleet(
            sync=replace(SPECS[name], deadline_s=10.0),
            trainers=trainers[:4],
            capacity=5,
            topology=slow_net(5, rate_bps=1e6),
            on_step=lambda r, k: entered.setdefault(r, []).append(loop.time()),
        )
        if newcomer == 2:
            loop.call_later(15, fleet.kill, 2)
        fresh = quadratics(5, spread=0.3, seed=1)[newcomer]
        loop.call_later(30, lambda: fleet.join(newcomer, fresh, donor=1, num_steps=80))
        await fleet.run(80)
        await asyncio.sleep(30)
        trainers[newcomer] = fresh
        return fleet

    fleet = run_virtual(main(), limit_s=1e5)
    assert all(replica.k == 80 for replica in fleet.replicas.values())
    assert fleet.replicas[newcomer].num_run < 70  # it began where the others were
    pauses = [b - a for times in entered.values() for a, b in itertools.pairwise(times)]
    assert max(p for p in pauses if p < 12) < 5  # one death apart, nobody was held up
    present = [trainers[r] for r in sorted(fleet.replicas)]
    if name in ("allreduce", "quantized-adam", "local"):
        assert all(torch.equal(trainer.x, present[0].x) for trainer in present)
    assert disagreement(present) < 1.0


def test_a_newcomer_without_a_node_is_refused() -> None:
    async def main() -> None:
        fleet = Fleet(sync=SPECS["allreduce"], trainers=quadratics(2))
        fleet.join(2, quadratics(3)[2], donor=0, num_steps=5)

    with pytest.raises(ValueError, match="replica 2 has no node: the fleet was built for 2"):
        run_virtual(main())


def iteration_s(sync: SyncSpec, slow: str, *, num: int = 16, seconds: float = 100) -> float:
    """Time per iteration of the median replica, with the costs of the spec's reference table."""
    nbytes = 100_000

    async def main() -> float:
        fleet = Fleet(
            sync=sync,
            topology=Topology.uniform(
                num_nodes(num), bandwidth_bps=8 * nbytes / 0.1, latency_s=0.02
            ),
            **priced(num, uniform_time(num, slow), nbytes=nbytes),
        )
        await fleet.run_for(seconds)
        return seconds / statistics.median(r.num_run for r in fleet.replicas.values())

    return run_virtual(main())


SMART = SyncSpec(name="ripples")
SKIP = SyncSpec(name="hop", backup_workers=1, skip=8, max_gap=8)


def test_with_a_straggler_smart_groups_and_skipping_win_and_backup_alone_does_not() -> None:
    ring = iteration_s(SyncSpec(name="allreduce"), "2:4x")

    assert ring == pytest.approx(4.92, rel=0.06)  # the spec's own simulation
    assert ring / iteration_s(SMART, "2:4x") >= 2.5
    assert ring / iteration_s(SKIP, "2:4x") >= 3.0
    backup = SyncSpec(name="hop", backup_workers=1)  # runs ahead at first, until its tokens end
    assert ring / iteration_s(backup, "2:4x", seconds=200) <= 1.5


def test_among_equals_nobody_is_much_behind_all_reduce() -> None:
    direct = iteration_s(SyncSpec(name="allreduce", route="direct"), "", seconds=60)

    for sync in (SMART, SKIP, SyncSpec(name="ad-psgd"), SyncSpec(name="local", local_steps=8)):
        assert iteration_s(sync, "", seconds=60) < 1.1 * direct


# --- the same loss at equal epochs ---------------------------------------------------------------


def trained(sync: SyncSpec, *, num: int = 4, num_steps: int = 40, twice: bool = False) -> float:
    """Loss of the mean model of a small MLP on IID shards after equally many samples."""
    from stages.sync.problems import ModuleTrainer

    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(512, 10, generator=generator)
    targets = (inputs[:, :3].sum(1) + 0.5 * inputs[:, 3] * inputs[:, 4] > 0).float()

    def make(replica: int) -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)

        def loss_at(module: torch.nn.Module, replica: int, k: int) -> torch.Tensor:
            rows = torch.arange(replica * 64, replica * 64 + 64)[(torch.arange(16) + 16 * k) % 64]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                module(inputs[rows])[:, 0], targets[rows]
            )
            return loss * (2 if twice else 1)

        return ModuleTrainer(
            replica, module, loss_at=loss_at, optimizer=optimizer, lr=0.2,
            compute_s=uniform_time(num),
        )  # fmt: skip

    trainers = [make(replica) for replica in range(num)]

    async def main() -> None:
        fleet = Fleet(sync=sync, trainers=trainers, topology=slow_net(num, rate_bps=1e7))
        await fleet.run(num_steps)

    run_virtual(main())
    vector = torch.stack([trainer.shards[0].parameters() for trainer in trainers]).mean(0)
    trainers[0].shards[0].set_parameters(vector)
    with torch.no_grad():
        logits = trainers[0].module(inputs)[:, 0]
    return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, targets))


def test_all_strategies_reach_the_same_loss_at_equal_epochs() -> None:
    exact = trained(SyncSpec(name="allreduce"))
    assert 0.1 < exact < 0.65  # it has learnt something and is not done

    for sync in (
        SyncSpec(name="ripples"),
        SyncSpec(name="hop"),
        SyncSpec(name="ad-psgd"),
        SyncSpec(name="local", local_steps=4, outer_lr=1.0, outer_momentum=0.0),
    ):
        assert trained(sync) == pytest.approx(exact, rel=0.02), sync.name


def test_mutant_the_gradient_applied_twice_is_another_loss() -> None:
    exact = trained(SyncSpec(name="allreduce"))

    assert trained(SyncSpec(name="ripples"), twice=True) != pytest.approx(exact, rel=0.02)
