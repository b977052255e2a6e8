"""Births and deaths in fleets of every strategy, and how fast the strategies are."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from dataclasses import replace

import pytest
import torch

from netsim.clock import run_virtual
from netsim.topology import Topology
from stages.sync.fleet import Fleet, num_nodes
from stages.sync.strategies import STRATEGIES, SyncSpec
from tests.unit.fleets import disagreement, priced, quadratics, slow_net, uniform_time

SPECS = {name: SyncSpec(name=name, group_size=2, warmup=5) for name in STRATEGIES}
SPECS["ripples, ruler"] = SyncSpec(name="ripples", groups="ruler")


@pytest.mark.quick(2)
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


@pytest.mark.slow
def test_with_a_straggler_smart_groups_and_skipping_win_and_backup_alone_does_not() -> None:
    ring = iteration_s(SyncSpec(name="allreduce"), "2:4x")

    assert ring == pytest.approx(4.92, rel=0.06)  # the spec's own simulation
    assert ring / iteration_s(SMART, "2:4x") >= 2.5
    assert ring / iteration_s(SKIP, "2:4x") >= 3.0
    backup = SyncSpec(name="hop", backup_workers=1)  # runs ahead at first, until its tokens end
    assert ring / iteration_s(backup, "2:4x", seconds=200) <= 1.5


@pytest.mark.slow
def test_among_equals_nobody_is_much_behind_all_reduce() -> None:
    direct = iteration_s(SyncSpec(name="allreduce", route="direct"), "", seconds=60)

    for sync in (SMART, SKIP, SyncSpec(name="ad-psgd"), SyncSpec(name="local", local_steps=8)):
        assert iteration_s(sync, "", seconds=60) < 1.1 * direct
