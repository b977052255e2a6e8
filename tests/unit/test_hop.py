"""Hop in virtual time: gaps and queues within their bounds, no deadlock, the mean kept."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from compressors.registry import CodecSpec
from netsim.clock import Deadlock, run_virtual
from netsim.faults import FaultyLink
from netsim.topology import Topology
from stages.ends import FRAMES
from stages.sync.fleet import Fleet, num_nodes
from stages.sync.hop import Hop, HopOptions
from stages.sync.mixing import Graph, GraphError, directed_ring, double_ring, ring, ring_based
from stages.sync.patience import Patience
from stages.sync.priced import PRICED_WIRE
from stages.sync.replica import Replica
from stages.sync.strategies import Assembly, SyncSpec, SyncSpecError
from stages.sync.strategy import NOTHING, SyncTimeout
from stages.sync.updates import Updates
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

STD = SyncSpec(name="hop")
BACKUP = SyncSpec(name="hop", backup_workers=1)
STALE = SyncSpec(name="hop", staleness=3)
JUMP = SyncSpec(name="hop", backup_workers=1, skip=8, max_gap=8)
LOSSY = SyncSpec(name="hop", codec=CodecSpec(name="directq", bits=4))


def two_ahead(num: int) -> Graph:
    """Edges i -> {i+1, i+5}: directed, on which a jump without the cap deadlocks."""
    return Graph(range(num), [(i, (i + d) % num) for i in range(num) for d in (1, 5)])


def hop_with(graph: Graph, kind: type[Hop] = Hop) -> type[Assembly]:
    """An assembly with any graph and a Hop that may be a mutant."""

    class Mine(Assembly):
        def strategy(self, post: Any, exchanges: Any) -> Any:
            spec = self.spec
            return kind(
                post=post,
                exchanges=exchanges,
                graph=graph,
                options=HopOptions(
                    max_gap=spec.max_gap,
                    backup_workers=spec.backup_workers,
                    staleness=spec.staleness,
                    max_jump=spec.skip,
                ),
                patience=Patience(first_s=1e6, floor_s=1e6),  # a deadlock must show as one
            )

    return Mine


class Watch:
    """Largest differences of iterations between all pairs, seen at every entry."""

    def __init__(self, num: int) -> None:
        self.iteration = [0] * num
        self.gaps: dict[tuple[int, int], int] = defaultdict(int)

    def __call__(self, replica: int, k: int) -> None:
        self.iteration[replica] = k
        for other, there in enumerate(self.iteration):
            self.gaps[replica, other] = max(self.gaps[replica, other], k - there)


def run_hop(
    graph: Graph,
    sync: SyncSpec,
    num_steps: int = 60,
    *,
    slow: str = "random:6x@0.06",
    kind: type[Hop] = Hop,
    seed: int = 0,
    trainers: Sequence[Any] | None = None,
    **options: Any,
) -> tuple[Fleet, Watch]:
    num = len(graph.nodes)
    watch = Watch(num)
    if trainers is None:
        options = priced(num, uniform_time(num, slow, seed=seed)) | options
        trainers = options.pop("trainers")
    fleet = run_fleet(
        trainers,
        replace(sync, graph="ring"),
        num_steps,
        assembly=hop_with(graph, kind),
        topology=Topology.uniform(num_nodes(num), latency_s=0.02),
        on_step=watch,
        limit_s=1e5,
        **options,
    )
    return fleet, watch


def bounds(graph: Graph, sync: SyncSpec) -> dict[tuple[int, int], int]:
    """Largest Iter(i) - Iter(j), section 1.4 of the spec."""
    far = {node: graph.distances(node) for node in graph.nodes}
    found = {}
    for i in graph.nodes:
        for j in graph.nodes:
            by_token = sync.max_gap * far[i][j]
            by_update = (sync.staleness + 1) * far[j][i]
            found[i, j] = by_token if sync.backup_workers else min(by_token, by_update)
    return found


def violations(graph: Graph, sync: SyncSpec, watch: Watch) -> list[tuple[int, int]]:
    limit = bounds(graph, sync)
    return [pair for pair, gap in watch.gaps.items() if gap > limit[pair]]


GRAPHS = {
    "ring": ring(8),
    "directed ring": directed_ring(8),
    "ring-based": ring_based(8),
    "double-ring": double_ring(8),
}
MODES = {
    "standard": STD,
    "backup": replace(BACKUP, max_gap=3),
    "stale": replace(STALE, max_gap=3),
    "jump": replace(JUMP, max_gap=3),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("mode", MODES)
def test_gaps_stay_within_their_bounds_and_reach_them(graph: str, mode: str) -> None:
    sync, net = MODES[mode], GRAPHS[graph]
    if sync.backup_workers >= min(len(net.into(i)) for i in net.nodes):
        sync = replace(sync, backup_workers=0)
    _, watch = run_hop(net, sync, 150, slow="2:4x,random:6x@0.1")

    assert violations(net, sync, watch) == []
    limit = bounds(net, sync)
    assert any(gap == limit[pair] > 0 for pair, gap in watch.gaps.items())


@pytest.mark.slow
def test_gaps_stay_within_their_bounds_in_a_long_run_of_sixteen() -> None:
    graph, sync = ring_based(16), MODES["backup"]
    _, watch = run_hop(graph, sync, 1000, slow="2:4x,random:6x@0.06")

    assert violations(graph, sync, watch) == []
    assert sum(gap == bounds(graph, sync)[pair] for pair, gap in watch.gaps.items()) > 50


class TokenOnFinishing(Hop):
    """Grants the next iteration when this one is done, before it is itself let in."""

    def entered(self, k: int) -> None:
        self.k = k

    async def gate(self, k: int) -> int:
        self._grant(k)
        return await super().gate(k)


class OneTokenTooMany(Hop):
    def _tokens(self, out_neighbour: int) -> int:
        return super()._tokens(out_neighbour) + 1


class TokensAlongTheEdges(Hop):
    def _grant(self, k: int) -> None:
        for target in self.graph.out_of(self._me):
            self._post.send(target, "token", epoch=self.epoch, number=k)

    async def gate(self, k: int) -> int:
        into = self.graph.into(self._me)
        await self._until(lambda: all(self._tokens(j) >= 1 for j in into), list, "token")
        return k


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("mutant", "graph"),
    [
        (TokenOnFinishing, ring(8)),  # where the slow one's neighbours hold others back
        (OneTokenTooMany, ring_based(8)),
        (TokensAlongTheEdges, directed_ring(8)),
    ],
)
def test_mutant_tokens_break_the_bounds(mutant: type[Hop], graph: Graph) -> None:
    # On the directed ring updates may be old, so that nothing but tokens holds the fast back.
    sync = (
        MODES["backup"] if len(graph.into(0)) > 1 else SyncSpec(name="hop", staleness=60, max_gap=2)
    )
    _, right = run_hop(graph, sync, 120, slow="random:6x@0.1")
    _, watch = run_hop(graph, sync, 120, slow="random:6x@0.1", kind=mutant)

    assert violations(graph, sync, right) == []
    assert len(violations(graph, sync, watch)) >= 10


@pytest.mark.slow
def test_queues_stay_within_their_slots_and_fill_them() -> None:
    graph, sync = ring_based(8), replace(BACKUP, max_gap=3)
    fleet, _ = run_hop(graph, sync, 200, slow="2:4x,random:6x@0.1")
    sizes = [replica.strategy.max_queue for replica in fleet.replicas.values()]  # type: ignore[attr-defined]

    assert max(sizes) == (1 + 3) * 3
    held = [replica.exchanges[0].updates.num_held for replica in fleet.replicas.values()]
    assert max(held) <= (2 + 3) * 3


class KeepsOldTags(Hop):
    def _forget_before(self, source: int, tag: int) -> None:
        self._mixed = -1


def test_mutant_old_tags_fill_the_queue() -> None:
    fleet, _ = run_hop(ring_based(8), replace(BACKUP, max_gap=3), 60, kind=KeepsOldTags)

    assert max(r.strategy.max_queue for r in fleet.replicas.values()) > 60  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_everybody_finishes_whoever_is_slow(mode: str, seed: int) -> None:
    for graph in (ring_based(8), two_ahead(11)):
        slow = "1:4x,5:6x,random:6x@0.06"
        fleet, _ = run_hop(graph, MODES[mode], 60, slow=slow, seed=seed)

        assert {replica.k for replica in fleet.replicas.values()} == {60}


class JumpsByTokens(Hop):
    def _step(self) -> int:
        tokens = min(self._tokens(o) for o in self.graph.out_of(self._me))
        return max(1, min(tokens, self.options.max_gap)) if tokens >= 2 else 1


class JumpsWithoutCap(Hop):
    def _step(self) -> int:
        behind = min(self._tokens(o) for o in self.graph.out_of(self._me)) - self.options.max_gap
        return max(1, behind)


@pytest.mark.parametrize("seed", range(12))
def test_mutant_jumping_by_tokens_deadlocks(seed: int) -> None:
    sync = SyncSpec(name="hop", skip=8, max_gap=4)
    with pytest.raises((Deadlock, SyncTimeout, TimeoutError)):
        run_hop(ring(8), sync, 60, slow="1:4x,5:6x,random:6x@0.06", kind=JumpsByTokens, seed=seed)


@pytest.mark.slow
def test_mutant_jumping_without_the_cap_deadlocks_on_a_directed_graph() -> None:
    failed = 0
    for seed in range(12):
        sync = SyncSpec(name="hop", backup_workers=1, skip=64, max_gap=2)
        slow = "1:8x,6:8x,random:6x@0.1"
        run_hop(two_ahead(11), sync, 120, slow=slow, seed=seed)
        try:
            run_hop(two_ahead(11), sync, 120, slow=slow, seed=seed, kind=JumpsWithoutCap)
        except (Deadlock, SyncTimeout, TimeoutError):
            failed += 1

    assert failed == 12


class TokensInFlight:
    """A `wrap_link` that knows which token letters have left and not yet come."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], list[int]] = defaultdict(list)

    def __call__(self, link: Any) -> Any:
        source, target = map(int, link.name.split("->"))
        flying, send, deliver = self.numbers[source, target], link.send, link.deliver

        def number_of(frame: Any) -> int | None:
            header, _ = PRICED_WIRE.unpack(frame)
            return header.step if header.body["op"] == "token" else None

        def watched_send(frame: Any, *, kind: str) -> None:
            flying.extend(n for n in [number_of(frame)] if n is not None)
            send(frame, kind=kind)

        def watched_deliver(frame: Any) -> None:
            deliver(frame)
            if number_of(frame) is not None:
                flying.remove(number_of(frame))

        link.send, link.deliver = watched_send, watched_deliver
        return link


def assert_tokens_follow_the_invariant(kind: type[Hop]) -> None:
    """held + in flight = max_gap + Iter(o) - Iter(i), for every edge, whenever somebody enters."""
    flight = TokensInFlight()
    looked = 0

    def look(fleet: Fleet) -> None:
        nonlocal looked
        hops: dict[int, Any] = {i: replica.strategy for i, replica in fleet.replicas.items()}
        for i, hop in hops.items():
            for o in hop.graph.out_of(i):
                known = hop._entered[o]
                flying = max([0, *(n - known for n in flight.numbers[o, i])])
                right = hop.options.max_gap + hops[o].k - hop.k
                assert hop._tokens(o) + flying == right, f"{i} of {o} at {hop.k}: {flying} fly"
                looked += 1

    def during(fleet: Fleet) -> None:
        fleet.on_step = lambda replica, k: look(fleet)

    graph = ring_based(8)
    fleet = run_fleet(
        sync=replace(MODES["jump"], graph="ring"),
        num_steps=80,
        assembly=hop_with(graph, kind),
        topology=Topology.uniform(num_nodes(8), latency_s=0.3),
        wrap_link=flight,
        during=during,
        **priced(8, uniform_time(8, "2:6x")),
    )

    assert sum(replica.num_skipped for replica in fleet.replicas.values()) > 0
    assert looked > 80 * 8


def test_tokens_held_and_in_flight_follow_the_invariant_all_the_time() -> None:
    assert_tokens_follow_the_invariant(Hop)


class OneTokenForAJump(Hop):
    granted = 0

    def _grant(self, k: int) -> None:
        self.granted = min(self.granted + 1, k)
        super()._grant(self.granted)


def test_mutant_one_token_for_a_jump_breaks_the_invariant() -> None:
    with pytest.raises(AssertionError, match="fly"):
        assert_tokens_follow_the_invariant(OneTokenForAJump)


# --- mistakes that are easily made, section 5.4 of the spec ---------------------------------------


class NoTokensAtFirst(Hop):
    def _tokens(self, out_neighbour: int) -> int:
        return super()._tokens(out_neighbour) - self.options.max_gap


def test_mutant_no_tokens_at_first_and_nobody_ever_begins() -> None:
    with pytest.raises((Deadlock, SyncTimeout, TimeoutError)):
        run_hop(ring(4), BACKUP, 10, kind=NoTokensAtFirst)


def test_mutant_sending_after_waiting_and_everybody_waits(monkeypatch: Any) -> None:
    async def late(self: Replica, k: int) -> None:
        plan = await self.strategy.plan(k)
        await self.trainer.compute(k)
        await self._mix(k, plan)
        await self._publish(k, plan)
        await self._update(k)

    monkeypatch.setattr(Replica, "_step_overlapped", late)
    with pytest.raises((Deadlock, SyncTimeout, TimeoutError)):
        run_hop(ring(4), STD, 10)


def far_behind(kind: type[Hop]) -> float:
    """How far from the others a straggler that jumps is when it goes on, in the mean of all jumps;
    the others move away from it meanwhile."""
    trainers = quadratics(8, spread=0.0, dim=8, lr=0.02, compute_s=uniform_time(8, "2:6x"))
    found = []

    class Sampled(kind):  # type: ignore[misc, valid-type]
        def entered(self, k: int) -> None:
            if self._me == 2 and k > self.k + 1:
                found.append(float((trainers[2].x - trainers[3].x).norm()))
            super().entered(k)

    run_hop(ring_based(8), JUMP, 80, kind=Sampled, trainers=trainers)
    return sum(found) / len(found)


class NoRefresh(Hop):
    def refresh(self, k: int) -> Any:
        return NOTHING


@pytest.mark.slow
def test_mutant_a_jump_without_a_refresh_goes_on_with_what_is_old() -> None:
    assert far_behind(NoRefresh) > 2 * far_behind(Hop)


@pytest.mark.quick(1)
@pytest.mark.parametrize("sync", [STD, LOSSY])
def test_standard_hop_keeps_the_mean(sync: SyncSpec) -> None:
    trainers = quadratics(8, lr=0.0, offset=1.0)
    before = mean_of(trainers)
    spread = disagreement(trainers)
    run_fleet(trainers, sync, 60, topology=slow_net(8))

    torch.testing.assert_close(mean_of(trainers), before, rtol=0, atol=1e-12)
    assert disagreement(trainers) < 1e-3 * spread


def test_mutant_quantised_parameters_written_over_move_the_mean() -> None:
    from stages.sync.updates import Updates

    def overwrite(self: Updates, vector: Any) -> Any:
        packet, read = self._coder.encode("update", vector)
        self._mutant = read  # type: ignore[attr-defined]
        packet, _ = self._coder.encode("update", read, exact=True)
        return packet, read

    original = Updates.mix

    async def mix(self: Updates, plan: Any, own: Any) -> Any:
        return await original(
            self,
            replace(
                plan, versions={j: v for j, v in plan.versions.items() if j != self._post.replica}
            ),
            own,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updates, "_encode", overwrite)
        patch.setattr(Updates, "mix", mix)
        trainers = quadratics(8, lr=0.0, offset=1.0)
        before = mean_of(trainers)
        run_fleet(trainers, LOSSY, 20, topology=slow_net(8))

    assert float((mean_of(trainers) - before).norm()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("sync", [STD, LOSSY, JUMP, STALE], ids=["std", "4 bit", "jump", "stale"])
def test_hop_learns(sync: SyncSpec) -> None:
    trainers = quadratics(6, spread=0.5, dim=600, compute_s=uniform_time(6, "1:3x"))
    run_fleet(trainers, sync, 120, topology=slow_net(6, rate_bps=1e7))
    optimum = torch.stack([trainer._optimum for trainer in trainers]).mean(0)

    assert float((mean_of(trainers) - optimum).pow(2).mean()) < 0.05


def way_of_the_mean(sync: SyncSpec, slow: str = "") -> float:
    """How far the mean model goes in an iteration, of a step of all replicas with one gradient."""
    steps, lr = 100, 1e-4  # so far from the optimum that gradients do not change
    trainers = quadratics(4, lr=lr, dim=2, compute_s=uniform_time(4, slow))
    run_fleet(trainers, sync, steps, topology=slow_net(4, rate_bps=1e8))
    return float(mean_of(trainers).mean()) / (steps * lr)


def test_parameters_of_another_iteration_are_another_learning_rate() -> None:
    """Old ones of a straggler hold the mean back; the newest of equals, which are from after one's
    own start, pull it ahead. docs/replicas.md says so."""
    assert way_of_the_mean(STD) == pytest.approx(1.0, abs=0.03)
    assert way_of_the_mean(SyncSpec(name="hop", backup_workers=1, skip=4), "2:4x") < 0.65
    assert way_of_the_mean(STALE) > 1.3


class MeanOfReceived(Hop):
    """Renormalises over whoever arrived: rows sum to one, columns do not."""

    async def complete(self, plan: Any) -> Any:
        tag = plan.number
        plan = await super().complete(plan)
        there = {j: w for j, w in plan.weights.items() if plan.versions.get(j) == tag}
        share = 1 / (1 + len(there))
        return replace(plan, weights=dict.fromkeys(there, share))


class AgeLinear(Hop):
    """Weighs neighbours by how fresh they are: rows sum to one, columns do not."""

    async def complete(self, plan: Any) -> Any:
        plan = await super().complete(plan)
        oldest = plan.number - self.options.staleness
        fresh = {j: max(0, plan.versions[j] - oldest + 1) for j in plan.weights}
        total = sum(fresh.values()) + self.options.staleness + 1
        return replace(plan, weights={j: age / total for j, age in fresh.items()})


@cache
def steady_gap(sync: SyncSpec, kind: type[Hop] = Hop) -> float:
    """Loss of the mean model around its optimum on unlike data, late in a run with a straggler.

    Gradients are noisy: without noise standard Hop goes to nothing, and there is no floor to be
    compared with.
    """
    num_steps, found = 160, []
    compute_s = uniform_time(16, "2:4x")
    trainers = quadratics(16, spread=1.0, noise=0.3, dim=8, compute_s=compute_s, seed=5)
    optimum = torch.stack([trainer._optimum for trainer in trainers]).mean(0)

    class Sampled(kind):  # type: ignore[misc, valid-type]
        def entered(self, k: int) -> None:
            super().entered(k)
            if self._me == 0 and 4 * k >= 3 * num_steps:
                found.append(float((mean_of(trainers) - optimum).pow(2).sum() / 2))

    run_hop(ring_based(16), sync, num_steps, kind=Sampled, trainers=trainers)
    return sum(found) / len(found)


OLD = SyncSpec(name="hop", staleness=5)


@pytest.mark.slow
def test_late_neighbours_do_not_pull_the_mean_on_unlike_data() -> None:
    standard = steady_gap(STD)

    assert standard > 1e-4
    assert steady_gap(OLD) < 10 * standard
    assert steady_gap(BACKUP) < 10 * standard


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "mutant"), [(OLD, AgeLinear), (BACKUP, MeanOfReceived)], ids=["stale", "backup"]
)
def test_mutant_weights_that_change_with_who_is_late_pull_the_mean(
    sync: SyncSpec, mutant: type[Hop]
) -> None:
    assert steady_gap(sync, mutant) > 10 * steady_gap(STD)


@pytest.mark.slow
def test_shuffled_and_repeated_letters_change_nothing_in_standard_hop() -> None:
    for sync in (STD, LOSSY):
        expected = quadratics(6, spread=1.0)
        run_fleet(expected, sync, 20, topology=slow_net(6))
        trainers = quadratics(6, spread=1.0)
        run_fleet(
            trainers, sync, 20, topology=slow_net(6),
            wrap_link=shuffled(share_twice=0.2, by_s=8.0),
        )  # fmt: skip

        assert all(torch.equal(a.x, b.x) for a, b in zip(trainers, expected))


@pytest.mark.parametrize("sync", [STD, LOSSY], ids=["std", "4 bit"])
def test_lost_updates_and_tokens_are_asked_for_again(sync: SyncSpec) -> None:
    count = iter(range(100))
    trainers = quadratics(4, spread=1.0)
    expected = quadratics(4, spread=1.0)
    run_fleet(expected, sync, 15)
    run_fleet(
        trainers,
        replace(sync, deadline_s=4.0),
        15,
        wrap_link=lambda link: FaultyLink(link, seed=next(count)).drop(share=0.05),
    )

    assert all(torch.equal(a.x, b.x) for a, b in zip(trainers, expected))


class LosesOnce:
    """A link that loses the first letter with the update of one iteration."""

    def __init__(self, link: Any, tag: int) -> None:
        self.link = link
        self._tag: int | None = tag

    def send(self, frame: Any, *, kind: str) -> None:
        if kind == "replica" and FRAMES.unpack(frame)[0].step == self._tag:
            self._tag = None
            return
        self.link.send(frame, kind=kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


def test_an_update_is_there_for_whoever_may_still_ask_for_it() -> None:
    """The others are `max_gap` ahead when the slow one finds that it lacks two updates."""
    slow, tag = 2, 20
    fleet = run_fleet(
        quadratics(4, compute_s=uniform_time(4, f"{slow}:20x")),
        SyncSpec(name="hop", graph="complete", backup_workers=1, max_gap=12, deadline_s=4.0),
        tag + 4,
        wrap_link=lambda link: LosesOnce(link, tag if link.name.endswith(f">{slow}") else -1),
    )

    assert [replica.k for replica in fleet.replicas.values()] == [tag + 4] * 4


class Loses:
    """A link that loses its bulk letters of some numbers, the first is 1."""

    def __init__(self, link: Any, numbers: Sequence[int]) -> None:
        self.link = link
        self._numbers = numbers
        self._count = 0

    def send(self, frame: Any, *, kind: str) -> None:
        self._count += kind == "replica"
        if kind != "replica" or self._count not in self._numbers:
            self.link.send(frame, kind=kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


TOLERANT = {
    "backup": replace(BACKUP, graph="complete", codec=LOSSY.codec, deadline_s=60.0),
    "stale": replace(STALE, graph="complete", codec=LOSSY.codec, deadline_s=60.0),
    "jump": replace(JUMP, graph="complete", codec=LOSSY.codec, deadline_s=60.0),
}
LOST = {"one": (5,), "and its repair": (5, 6, 7, 8), "the first": (1,)}


def neighbour_after_loss(sync: SyncSpec, numbers: Sequence[int]) -> tuple[int, int]:
    """The newest that replica 0 has of replica 1 after 40 steps, and letters it could not read."""
    fleet = run_fleet(
        quadratics(4, spread=0.3, dim=64),
        sync,
        40,
        topology=slow_net(4, rate_bps=2e6),
        wrap_link=lambda link: Loses(link, numbers if link.name == "1->0" else ()),
    )
    updates = fleet.replicas[0].exchanges[0].updates
    return max(updates.tags_of(1), default=-1), len(updates._early.get(1, ()))


@pytest.mark.quick(2)
@pytest.mark.parametrize("lost", sorted(LOST))
@pytest.mark.parametrize("mode", sorted(TOLERANT))
def test_a_lost_difference_cuts_no_neighbour_off(mode: str, lost: str) -> None:
    assert neighbour_after_loss(TOLERANT[mode], LOST[lost]) == (39, 0)


def test_mutant_asking_for_no_base_cuts_the_neighbour_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, so nobody asks: it counts with what it was once, for ever."""
    monkeypatch.setattr(Updates, "ask", lambda self, source, tag: None)

    newest, early = neighbour_after_loss(TOLERANT["backup"], LOST["one"])

    assert newest < 5
    assert early == TOLERANT["backup"].max_gap + 2  # but no more than that is kept


def test_a_newcomer_whose_first_letters_are_lost_hears_its_neighbours() -> None:
    trainers = quadratics(5, spread=0.3, dim=64)
    fresh = quadratics(5, spread=0.3, dim=64, seed=1)[4]

    def during(fleet: Fleet) -> None:
        asyncio.get_running_loop().call_later(
            20, lambda: fleet.join(4, fresh, donor=1, num_steps=60)
        )

    fleet = run_fleet(
        trainers[:4],
        replace(LOSSY, graph="ring", deadline_s=10.0),
        60,
        during=during,
        capacity=5,
        topology=slow_net(5, rate_bps=2e6),
        wrap_link=lambda link: Loses(link, (1,) if link.name.endswith("->4") else ()),
    )

    updates = fleet.replicas[4].exchanges[0].updates
    assert {max(updates.tags_of(source)) for source in (0, 3)} == {59}
    assert fleet.replicas[4].groups == [(0, 3, 4)]


@pytest.mark.parametrize("mode", sorted(TOLERANT))
def test_a_resume_that_lost_what_was_on_the_wire_cuts_nobody_off(mode: str) -> None:
    first = quadratics(4, spread=0.3, dim=64)
    sync = TOLERANT[mode]
    fleet = run_fleet(
        first, sync, 12, topology=slow_net(4, rate_bps=2e6),
        # What replica 1 sent last is on the wire when the state is saved.
        wrap_link=lambda link: Loses(link, (11, 12) if link.name == "1->0" else ()),
    )  # fmt: skip
    saved = [replica.state_dict() for replica in fleet.replicas.values()]
    saved[0]["exchanges"][0]["updates"]["versions"][1] = {
        tag: x for tag, x in saved[0]["exchanges"][0]["updates"]["versions"][1].items() if tag < 10
    }
    second = quadratics(4, spread=0.3, dim=64)

    def load(fleet: Fleet) -> None:
        for index, replica in fleet.replicas.items():
            replica.load_state_dict(saved[index])
            replica.strategy.resumed()
            replica.exchanges[0].updates.resumed()
            second[index].shards[0].x = first[index].x.clone()

    again = run_fleet(second, sync, 30, during=load, topology=slow_net(4, rate_bps=2e6))

    assert max(again.replicas[0].exchanges[0].updates.tags_of(1)) == 29


def progress_after_death(sync: SyncSpec, kind: type[Hop] = Hop) -> float:
    """Iterations of the slowest survivor in 400 s with a death at 50 s, over those without."""

    async def main(dies: bool) -> int:
        fleet = Fleet(
            sync=sync,
            topology=slow_net(8, rate_bps=1e7),
            assembly=hop_with(ring_based(8), kind),
            **priced(8, uniform_time(8)),
        )
        if dies:
            asyncio.get_running_loop().call_later(50, fleet.kill, 3)
        await fleet.run_for(400)
        return min(r.k for i, r in fleet.replicas.items() if i not in fleet.dead)

    return run_virtual(main(True)) / run_virtual(main(False))


@pytest.mark.slow
@pytest.mark.parametrize("sync", [STD, BACKUP, STALE, JUMP], ids=["std", "backup", "stale", "jump"])
def test_survivors_of_a_death_keep_their_pace(sync: SyncSpec) -> None:
    assert progress_after_death(sync) >= 0.95


class TokenOfTheDead(Hop):
    def on_member(self, event: Any) -> None:
        graph = self.graph
        super().on_member(event)
        self._ghost = event.replica if event.replica in graph.out_of(self._me) else None
        self._entered[event.replica] = self.k

    def _tokens(self, out_neighbour: int) -> int:
        ghost = getattr(self, "_ghost", None)
        return super()._tokens(out_neighbour if ghost is None else ghost)


@pytest.mark.slow
def test_mutant_still_requiring_the_token_of_the_dead_freezes_the_graph() -> None:
    assert progress_after_death(BACKUP, TokenOfTheDead) < 0.5


@pytest.mark.slow
def test_all_stages_mix_the_same_versions() -> None:
    trainers = quadratics(6, num_shards=3, compute_s=uniform_time(6, "1:4x,random:6x@0.1"))
    whole = quadratics(6, compute_s=uniform_time(6, "1:4x,random:6x@0.1"))
    run_fleet(trainers, BACKUP, 40, topology=Topology.uniform(num_nodes(6, 3), latency_s=0.02))
    run_fleet(whole, BACKUP, 40, topology=Topology.uniform(num_nodes(6), latency_s=0.02))

    assert all(torch.equal(a.x, b.x) for a, b in zip(trainers, whole))


def test_bytes_are_degree_times_model() -> None:
    fleet = run_fleet(quadratics(8, dim=4096), STD, 5)
    messages = sum(link.messages["replica"] for link in fleet.links.values())

    assert messages == 5 * 8 * 3
    assert 0 < fleet.nbytes() - messages * 8 * 4096 < 160 * messages


def test_its_state_is_saved_and_loaded_and_the_run_goes_on_as_if_nothing_was() -> None:
    expected = quadratics(6, spread=1.0)
    run_fleet(expected, LOSSY, 20)

    first = quadratics(6, spread=1.0)
    fleet = run_fleet(first, LOSSY, 12)
    saved = [replica.state_dict() for replica in fleet.replicas.values()]
    second = quadratics(6, spread=1.0)

    def load(fleet: Fleet) -> None:
        for index, replica in fleet.replicas.items():
            replica.load_state_dict(saved[index])
            second[index].shards[0].x = first[index].x.clone()

    run_fleet(second, LOSSY, 20, during=load)

    assert all(torch.equal(a.x, b.x) for a, b in zip(second, expected))


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (SyncSpec(name="hop", max_gap=0), "sync.max_gap is 0: nobody could ever enter"),
        (SyncSpec(name="hop", backup_workers=3), "has only 3 neighbours .* set at most 2"),
        (SyncSpec(name="hop", staleness=-1), "sync.staleness is -1"),
        (SyncSpec(name="hop", staleness=1, backup_workers=1), "either sync.backup_workers or"),
        (SyncSpec(name="hop", skip=4, max_gap=1), "skipping needs a gap of 2"),
    ],
)
def test_options_that_cannot_work_are_refused(sync: SyncSpec, message: str) -> None:
    with pytest.raises(SyncSpecError, match=message):
        Assembly(sync, range(8))


def test_an_unknown_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="neither a known graph nor a file"):
        Assembly(SyncSpec(name="hop", graph="torus"), range(8))
