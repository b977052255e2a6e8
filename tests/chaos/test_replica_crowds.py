"""Replicas that die, come and are slow at any time, and letters that are lost: nobody stands still.

In virtual time and without tensors: what is tested is who waits for whom. A fleet that is frozen
for good shows as replicas that enter no iteration any more; one that waits ever longer as a pace.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from netsim.clock import run_virtual
from netsim.faults import FaultyLink
from stages.sync import generator
from stages.sync.fleet import Fleet
from stages.sync.generator import GroupGenerator
from stages.sync.problems import Priced
from stages.sync.strategies import STRATEGIES, SyncSpec
from tests.unit.fleets import priced, slow_net, uniform_time

NUM = 8
SPECS = {
    "allreduce": SyncSpec(deadline_s=4.0),
    "allreduce, direct": SyncSpec(route="direct", deadline_s=4.0),
    "quantized-adam": SyncSpec(name="quantized-adam", deadline_s=4.0),
    "local": SyncSpec(name="local", local_steps=3, deadline_s=4.0),
    "ripples, ruler": SyncSpec(name="ripples", groups="ruler", deadline_s=4.0),
    "ripples, by-node": SyncSpec(name="ripples", groups="by-node", deadline_s=4.0),
    "ripples": SyncSpec(name="ripples", group_size=2, deadline_s=4.0),
    "hop": SyncSpec(name="hop", deadline_s=4.0),
    "hop, backup": SyncSpec(name="hop", backup_workers=1, deadline_s=4.0),
    "hop, stale": SyncSpec(name="hop", staleness=3, deadline_s=4.0),
    "hop, skip": SyncSpec(name="hop", backup_workers=1, skip=8, max_gap=8, deadline_s=4.0),
    "ad-psgd": SyncSpec(name="ad-psgd", deadline_s=4.0),
}
SLOW = ("", "2:4x", "random:6x@0.06", "5:3x,random:4x@0.1")
"""The slowest of them needs 4.4 s for a step, and whoever is slow at random 6.6 s."""


def test_every_strategy_is_here() -> None:
    assert {spec.name for spec in SPECS.values()} == set(STRATEGIES)


def iterations_at(
    sync: SyncSpec,
    times_s: tuple[float, ...],
    *,
    slow: str = "",
    seed: int = 0,
    lost: float = 0.0,
    during: Callable[[Fleet], None] = lambda fleet: None,
) -> list[dict[int, int]]:
    """Where all that live are at these times."""
    found: list[dict[int, int]] = []
    count = iter(range(seed * 1000, 1 << 30))

    def wrap(link: Any) -> FaultyLink:
        return FaultyLink(link, seed=next(count)).drop(share=lost)

    async def main() -> None:
        parts = priced(NUM, uniform_time(NUM, slow, seed=seed))
        fleet = Fleet(
            sync=sync,
            topology=slow_net(NUM, rate_bps=1e6),
            wrap_link=wrap if lost else None,
            **parts,
        )
        during(fleet)
        for at_s in times_s:
            asyncio.get_running_loop().call_later(at_s, look, fleet)
        await fleet.run_for(times_s[-1] + 1)

    def look(fleet: Fleet) -> None:
        found.append({i: r.k for i, r in fleet.replicas.items() if i not in fleet.dead})

    run_virtual(main())
    return found


def come_and_go(
    victim: int, dies_s: float, *, comes_s: float | None, donor: int, slow: str, seed: int
) -> Callable[[Fleet], None]:
    """Order a death, and perhaps a birth in its place."""

    def during(fleet: Fleet) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(dies_s, fleet.kill, victim)
        if comes_s is not None:
            trainer = Priced(victim, compute_s=uniform_time(NUM, slow, seed=seed))
            loop.call_later(
                comes_s, lambda: fleet.join(victim, trainer, donor=donor, num_steps=1 << 60)
            )

    return during


NO_TENSORS = {"local", "quantized-adam"}
"""They have a momentum to hand over, see `test_fleet`; who waits for whom is all-reduce's."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted({*SPECS} - NO_TENSORS))
def test_whoever_dies_and_comes_at_whatever_time_the_fleet_goes_on(name: str, seed: int) -> None:
    draw = random.Random(f"{name}/{seed}")
    slow = SLOW[seed % len(SLOW)]
    victim, donor = draw.sample(range(NUM), 2)
    dies_s = draw.uniform(5, 60)
    comes_s = dies_s + draw.uniform(3, 30)
    story = come_and_go(victim, dies_s, comes_s=comes_s, donor=donor, slow=slow, seed=seed)

    then, now = iterations_at(SPECS[name], (110.0, 190.0), slow=slow, seed=seed, during=story)

    where = f"{victim} dies at {dies_s:.2f} s, comes at {comes_s:.2f} s by {donor}; {slow=}"
    assert set(now) == set(range(NUM)), where
    assert min(now[r] - then[r] for r in then) >= 8, f"{where}: {then} and {now}"


@pytest.mark.parametrize("comes_s", [37.91, 33.2, 46.4])
def test_a_newcomer_of_hop_is_waited_for_by_tags_that_are_still_to_come(comes_s: float) -> None:
    slow = "5:3x,random:4x@0.1"
    story = come_and_go(6, 8.85, comes_s=comes_s, donor=0, slow=slow, seed=0)

    then, now = iterations_at(SyncSpec(name="hop"), (90.0, 170.0), slow=slow, during=story)

    assert min(now[r] - then[r] for r in then) >= 8, f"{then} and {now}"


@pytest.mark.parametrize("dies_s", [50.0, 52.0])
@pytest.mark.parametrize("groups", ["ruler", "by-node"])
def test_a_death_finds_the_slow_behind_and_static_groups_go_on(groups: str, dies_s: float) -> None:
    """The ranks move: who is behind plans groups with some who are past them."""
    story = come_and_go(3, dies_s, comes_s=None, donor=0, slow="6:4x", seed=0)
    sync = SyncSpec(name="ripples", groups=groups)  # type: ignore[arg-type]

    then, now = iterations_at(sync, (110.0, 190.0), slow="6:4x", during=story)

    assert min(now[r] - then[r] for r in then) >= 16, f"{then} and {now}"


@pytest.mark.parametrize(
    ("name", "lost", "least"), [*((name, 0.005, 0.6) for name in sorted(SPECS)), ("hop", 0.03, 0.3)]
)
def test_lost_letters_cost_a_deadline_each_and_deadlines_do_not_run_away(
    name: str, lost: float, least: float
) -> None:
    """Waits for what was lost, counted as such waits, would make the next ones longer still."""
    (unbroken,) = iterations_at(SPECS[name], (190.0,))
    half, whole = iterations_at(SPECS[name], (95.0, 190.0), lost=lost)

    # What runs away does so with time. An all-reduce of 8 waits for all of 112 letters.
    pace = 2 * (min(whole.values()) - min(half.values())) / min(unbroken.values())
    assert pace > least, f"{pace:.2f} of the unbroken pace"


def silent_at_20(seconds: float, *, sync: SyncSpec = SPECS["ripples"]) -> tuple[Fleet, list[Any]]:
    """Replica 3 computes its step 20 for so long; groups formed and iterations at some times."""
    found: list[Any] = []
    base = uniform_time(NUM)

    async def main() -> Fleet:
        parts = priced(NUM, lambda r, k: seconds if (r, k) == (3, 20) else base(r, k))
        fleet = Fleet(sync=sync, topology=slow_net(NUM, rate_bps=1e6), **parts)

        def look() -> None:
            groups = fleet.generator.generator.counts["groups"]  # type: ignore[union-attr]
            found.append((groups, [replica.k for replica in fleet.replicas.values()]))

        for at_s in (100.0, 300.0):
            asyncio.get_running_loop().call_later(at_s, look)
        await fleet.run_for(301.0)
        return fleet

    return run_virtual(main()), found


def averages_a_step(found: list[Any]) -> float:
    (before, then), (after, now) = found
    return float((after - before) / (now[1] - then[1]))


@pytest.mark.parametrize("rounds", [16, 0], ids=["guard", "no guard"])
def test_one_silent_replica_does_not_end_the_averaging_of_the_others(rounds: int) -> None:
    fleet, found = silent_at_20(1e9, sync=replace(SPECS["ripples"], isolation_rounds=rounds))

    steps = [now - then for then, now in zip(found[0][1], found[1][1], strict=True)]
    assert min(steps[:3] + steps[4:]) >= 150  # they average at their own pace of 1.17 s a step
    assert averages_a_step(found) > 2.5  # seven replicas, in pairs and one group of three
    assert all(replica.strategy.stats()["orphaned"] == 0 for replica in fleet.replicas.values())


def test_the_mutant_that_goes_on_missing_the_silent_one_ends_all_averaging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GroupGenerator, "_mark_late", lambda self, replicas: None)
    monkeypatch.setattr(generator, "BRIDGE_LEASES", 1e9)
    monkeypatch.setattr(generator, "HELD_LEASES", 1e9)

    assert averages_a_step(silent_at_20(1e9)[1]) < 0.5


def test_whoever_was_silent_and_asks_again_is_averaged_with() -> None:
    fleet, found = silent_at_20(60.0)

    assert found[1][1][3] - found[0][1][3] >= 150
    assert fleet.generator is not None
    assert not fleet.generator.generator._members[3].is_late
    assert len(fleet.replicas[3].groups[0]) >= 2
