"""Replicas among faults: letters lost, doubled, late or damaged, and a death at every kind of act.

In virtual time, no Ray, every strategy. Where a strategy promises the same bits whatever the
network does, the run ends in the bits of one that nothing happened to. The others end with every
replica at its last step and the loss of an unbroken run, or nearly so.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from compressors.frame import FrameError, FrameHeader
from compressors.registry import CodecSpec
from netsim.faults import FaultyLink
from netsim.link import Link, LinkLike
from stages.ends import FRAMES
from stages.sync.fleet import Fleet
from stages.sync.post import GENERATOR, LOST
from stages.sync.problems import Quadratic
from stages.sync.strategies import STRATEGIES, SyncSpec
from tests.unit.fleets import mean_of, quadratics, run_fleet, slow_net

NUM, STEPS, STAGES = 4, 24, 2
BITS, FEW = CodecSpec(name="directq", bits=8), CodecSpec(name="directq", bits=4)
SPECS = {
    "allreduce": SyncSpec(deadline_s=4.0),
    "allreduce, direct": SyncSpec(route="direct", codec=BITS, deadline_s=4.0),
    "quantized-adam": SyncSpec(name="quantized-adam", warmup=6, codec=BITS, deadline_s=4.0),
    "local": SyncSpec(name="local", local_steps=3, deadline_s=4.0),
    "ripples, ruler": SyncSpec(name="ripples", groups="ruler", deadline_s=4.0),
    "hop": SyncSpec(name="hop", graph="ring", codec=BITS, deadline_s=4.0),
    "hop, backup": SyncSpec(name="hop", backup_workers=1, deadline_s=4.0),
    "hop, stale": SyncSpec(name="hop", staleness=2, deadline_s=4.0),
    "hop, skip": SyncSpec(name="hop", backup_workers=1, skip=4, deadline_s=4.0),
    "hop, backup, 8 bits": SyncSpec(name="hop", backup_workers=1, codec=BITS, deadline_s=4.0),
    "hop, stale, 8 bits": SyncSpec(name="hop", staleness=2, codec=BITS, deadline_s=4.0),
    "hop, skip, 8 bits": SyncSpec(name="hop", backup_workers=1, skip=4, codec=BITS, deadline_s=4.0),
    "ripples": SyncSpec(name="ripples", group_size=2, deadline_s=4.0),
    "ripples, 4 bits": SyncSpec(name="ripples", group_size=2, codec=FEW, deadline_s=4.0),
    "ripples, ruler, 4 bits": SyncSpec(name="ripples", groups="ruler", codec=FEW, deadline_s=4.0),
    "ad-psgd": SyncSpec(name="ad-psgd", codec=BITS, deadline_s=4.0),
}
SAME_BITS = (
    "allreduce", "allreduce, direct", "quantized-adam", "local", "ripples, ruler", "hop",
    "ripples, ruler, 4 bits",
)  # fmt: skip
"""What they exchange does not depend on who is early."""

AGREED = ("allreduce", "allreduce, direct", "quantized-adam", "local")
"""All replicas have the same bits after the last exchange."""


def make() -> list[Quadratic]:
    return quadratics(NUM, spread=0.3, noise=0.05, num_shards=STAGES, dim=256)


def train(name: str, **options: Any) -> tuple[list[Quadratic], Fleet]:
    trainers = make()
    net = slow_net(NUM, STAGES, rate_bps=2e6)
    return trainers, run_fleet(trainers, SPECS[name], STEPS, topology=net, **options)


@cache
def unbroken(name: str) -> tuple[Tensor, ...]:
    return tuple(trainer.x for trainer in train(name)[0])


def loss_of(x: Tensor) -> float:
    """Of the mean model, on the data of all."""
    optimum = torch.stack([trainer._optimum for trainer in make()]).mean(0)
    return float((x - optimum).pow(2).mean())


def test_every_strategy_is_here() -> None:
    assert {spec.name for spec in SPECS.values()} == set(STRATEGIES)


# --- letters --------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[FaultyLink, str], FaultyLink]] = {
    "drop": lambda link, kind: link.drop(kind, share=0.04),
    "duplicate": lambda link, kind: link.duplicate(kind, share=0.2),
    "delay": lambda link, kind: link.delay(kind, by_s=3.0, share=0.1),
    "corrupt": lambda link, kind: link.corrupt(kind, share=0.04),
}


WITHOUT_CONTROL = {
    "allreduce", "allreduce, direct", "quantized-adam", "local", "ripples, ruler",
    "ripples, ruler, 4 bits",
}  # fmt: skip
"""They say next to nothing to each other as long as nothing is lost."""

CASES = [
    (name, fault, kind)
    for name in sorted(SPECS)
    for fault in sorted(FAULTS)
    for kind in ("replica", "control")
    if kind == "replica" or name not in WITHOUT_CONTROL
]


@pytest.mark.parametrize(("name", "fault", "kind"), CASES)
def test_letters_that_go_wrong_change_nothing_that_was_promised(
    name: str, fault: str, kind: str
) -> None:
    links: list[FaultyLink] = []

    def wrap(link: Link) -> LinkLike:
        seed = random.Random(f"{name}/{fault}/{kind}/{link.name}").randrange(1 << 30)
        links.append(FAULTS[fault](FaultyLink(link, seed=seed), kind))
        return links[-1]

    trainers, fleet = train(name, wrap_link=wrap)

    assert sum(len(link.injected) for link in links) >= 3
    check_promise(name, trainers, fleet)


@pytest.mark.parametrize("name", sorted(WITHOUT_CONTROL))
def test_who_is_not_tested_with_control_letters_has_hardly_any(name: str) -> None:
    fleet = train(name)[1]

    assert fleet.nbytes("control") < 0.01 * fleet.nbytes("replica")


def check_promise(name: str, trainers: list[Quadratic], fleet: Fleet) -> None:
    """The bits of a run that nothing happened to, or nearly its loss."""
    assert [replica.k for replica in fleet.replicas.values()] == [STEPS] * NUM
    right = unbroken(name)
    if name in SAME_BITS:
        assert all(torch.equal(t.x, x) for t, x in zip(trainers, right, strict=True))
    else:
        start = loss_of(torch.zeros_like(right[0]))
        best = loss_of(torch.stack(right).mean(0))
        assert abs(loss_of(mean_of(trainers)) - best) < 0.02 * start


class Unlucky:
    """Loses one bulk letter of replica 1, and then the first letters that would make it good."""

    REPAIRS = ("again", "want", "lost")

    def __init__(self, nth: int, num_repairs: int) -> None:
        self.lost: Counter[str] = Counter()
        self._left = nth
        self._num_repairs = num_repairs

    def wrap(self, link: Link) -> LinkLike:
        send = link.send

        def unlucky(frame: Any, *, kind: str) -> None:
            if not self._loses(FRAMES.unpack(frame)[0], kind):
                send(frame, kind=kind)

        link.send = unlucky  # type: ignore[method-assign]
        return link

    def _loses(self, header: FrameHeader, kind: str) -> bool:
        if kind == "replica" and header.replica == 1 and self._left:
            self._left -= 1
            self.lost["bulk"] += not self._left
            return not self._left
        is_repair = header.body["op"] in self.REPAIRS or header.body.get("loss") == LOST
        if not self.lost["bulk"] or not is_repair or self.lost["repairs"] == self._num_repairs:
            return False
        self.lost["repairs"] += 1
        return True


NOBODY_ASKS = {"hop, backup", "hop, stale", "hop, skip"}
"""An exact update that is missing is replaced by the next."""


@pytest.mark.parametrize("num_repairs", [1, 3])
@pytest.mark.parametrize("nth", [3, 20])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_lost_letter_whose_repair_is_lost_as_well_is_made_good(
    name: str, nth: int, num_repairs: int
) -> None:
    unlucky = Unlucky(nth, num_repairs)

    trainers, fleet = train(name, wrap_link=unlucky.wrap)

    assert unlucky.lost["bulk"] == 1
    assert unlucky.lost["repairs"] == num_repairs or name in NOBODY_ASKS
    check_promise(name, trainers, fleet)


JOINS = ("hop", "hop, backup, 8 bits", "hop, stale, 8 bits", "hop, skip, 8 bits")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", JOINS)
def test_a_newcomer_of_hop_in_few_bits_mixes_with_all_its_neighbours_among_losses(
    name: str, seed: int
) -> None:
    trainers = make()
    fresh = quadratics(NUM, spread=0.3, num_shards=STAGES, dim=256, seed=1)[3]
    count = iter(range(seed * 1000, 1 << 30))

    def during(fleet: Fleet) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(6.0, fleet.kill, 3)
        loop.call_later(12.0, lambda: fleet.join(3, fresh, donor=1, num_steps=STEPS + 16))

    fleet = run_fleet(
        trainers,
        SPECS[name],
        STEPS + 16,
        during=during,
        topology=slow_net(NUM, STAGES, rate_bps=2e6),
        wrap_link=lambda link: FaultyLink(link, seed=next(count)).drop("replica", share=0.1),
    )

    assert [replica.k for replica in fleet.replicas.values()] == [STEPS + 16] * NUM
    for replica in fleet.replicas.values():
        for exchange in replica.exchanges:
            tags = {j: max(exchange.updates.tags_of(j)) for j in exchange.updates._versions}
            # The last letters may be lost, and nobody needs them any more.
            assert min(tags.values()) >= STEPS + 10, f"replica {replica.index}: {tags}"


# --- deaths ---------------------------------------------------------------------------------------


class Witness:
    """A link whose sender dies as it sends its nth letter of an op, or just after."""

    def __init__(self, link: Link, watch: Watch) -> None:
        self.link = link
        self._watch = watch

    def send(self, frame: Any, *, kind: str) -> None:
        try:
            header, _ = FRAMES.unpack(frame)
        except FrameError:
            raise AssertionError("a letter of our own cannot be read") from None
        if self._watch.sees(header.replica, str(header.body.get("op"))):
            self.link.send(frame, kind=kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


class Watch:
    """Counts letters by op, and kills `victim` at one of them."""

    def __init__(self, victim: int, *, op: str = "", nth: int = 0, lets_go: bool = False) -> None:
        self.seen: Counter[str] = Counter()
        self.fleet: Fleet | None = None
        self.has_killed = False
        self._victim = victim
        self._op, self._nth, self._lets_go = op, nth, lets_go

    def wrap(self, link: Link) -> LinkLike:
        return Witness(link, self)  # type: ignore[return-value]

    def sees(self, sender: int, op: str) -> bool:
        """Whether the letter leaves."""
        if sender != self._victim:
            return True
        self.seen[op] += 1
        if op == self._op and self.seen[op] == self._nth and not self.has_killed:
            self.has_killed = True
            assert self.fleet is not None
            self.fleet.kill(sender)
            return self._lets_go
        return not self.has_killed


@cache
def ops_of(name: str) -> tuple[tuple[str, int], ...]:
    """What replica 2 (an active one) and 1 (a passive one) write in an unbroken run, how often."""
    found: Counter[str] = Counter()
    for victim in (1, 2):
        watch = Watch(victim)
        train(name, wrap_link=watch.wrap)
        found |= watch.seen
    return tuple(sorted(found.items()))


ACTS = {
    "allreduce": {"pass", "share"},
    "hop": {"update", "token"},
    "ripples": {"request", "done"},
    "ad-psgd": {"meet", "met"},
}


def test_the_acts_at_which_a_replica_dies_are_those_it_has() -> None:
    for name, expected in ACTS.items():
        assert expected <= {op for op, _ in ops_of(name)}, ops_of(name)


@pytest.mark.parametrize("lets_go", [False, True], ids=["unsent", "sent"])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_replica_that_dies_at_any_kind_of_act_is_survived(name: str, lets_go: bool) -> None:
    draw = random.Random(f"{name}/{lets_go}")
    for op, count in ops_of(name):
        victim = 1 if op == "met" else 2
        nth = draw.randint(2, max(2, count // 2))
        watch = Watch(victim, op=op, nth=nth, lets_go=lets_go)

        def during(fleet: Fleet, watch: Watch = watch) -> None:
            watch.fleet = fleet

        trainers, fleet = train(name, wrap_link=watch.wrap, during=during)

        where = f"{name}: replica {victim} at {op} {nth} of {count}"
        left = [r for r in range(NUM) if r != victim or not watch.has_killed]
        assert [fleet.replicas[r].k for r in left] == [STEPS] * len(left), where
        if name in AGREED:
            assert all(torch.equal(trainers[r].x, trainers[left[0]].x) for r in left), where
        # They went on training: on the data of those who are left.
        own = [trainers[r] for r in left]
        optimum = torch.stack([trainer._optimum for trainer in own]).mean(0)
        off = float((mean_of(own) - optimum).pow(2).mean())
        start = float(optimum.pow(2).mean())
        assert off < 0.1 * start, where


@pytest.mark.parametrize("at_s", [0.3, 7.0, 7.02, 7.5, 15.0])
def test_the_group_generator_may_die_at_any_time(at_s: float) -> None:
    def during(fleet: Fleet) -> None:
        assert fleet.generator is not None
        loop = asyncio.get_running_loop()
        loop.call_later(at_s, fleet.generator.close)
        loop.call_later(at_s + 6.0, fleet.generator.reopen)

    trainers, fleet = train("ripples", during=during)

    assert fleet.generator is not None
    assert fleet.generator.generator.epoch == 1
    assert fleet.generator.generator.stats().get("groups", 0.0) > 0  # it is used again
    assert [replica.k for replica in fleet.replicas.values()] == [STEPS] * NUM
    start = loss_of(torch.zeros(256, dtype=torch.float64))
    best = loss_of(torch.stack(unbroken("ripples")).mean(0))
    assert abs(loss_of(mean_of(trainers)) - best) < 0.02 * start
    assert GENERATOR not in fleet.replicas
