"""What every link promises, and mutants that break each promise and are caught.

A new kind of link joins by one line in `CASES`; a test fails if a link class is missing there.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import netsim
from netsim.clock import run_virtual
from netsim.faults import FaultyLink
from netsim.link import CONTROL, Link, LinkLike
from netsim.shaper import Uplink
from netsim.topology import LinkSpec

Deliver = Callable[[Any], object]
Build = Callable[[LinkSpec, Uplink, Deliver], LinkLike]

KINDS = ["activation", "gradient", CONTROL]


@dataclass(frozen=True)
class Case:
    """A link under test, and how late it may be beyond rate and latency."""

    name: str
    spec: LinkSpec
    uplink_bps: float
    slack_s: float = 0.0
    build: Build = field(default=lambda spec, uplink, deliver: Link(spec, uplink, deliver, seed=3))
    uplink_type: type[Uplink] = Uplink

    @property
    def rate_bps(self) -> float:
        return min(self.spec.bandwidth_bps, self.uplink_bps)

    def uplink(self) -> Uplink:
        return self.uplink_type(self.uplink_bps)


def _faulty(spec: LinkSpec, uplink: Uplink, deliver: Deliver) -> LinkLike:
    return FaultyLink(Link(spec, uplink, deliver, seed=3))


SHAPED = Case("shaped", LinkSpec(latency_s=0.05), 8e6)
CASES = [
    Case("ideal", LinkSpec(), math.inf),
    Case("latency only", LinkSpec(latency_s=0.2), math.inf),
    SHAPED,
    Case("own rate below the uplink", LinkSpec(bandwidth_bps=2e6, latency_s=0.05), 8e6),
    Case("own rate, no uplink limit", LinkSpec(bandwidth_bps=2e6), math.inf),
    Case("jittered", LinkSpec(latency_s=0.05, jitter_s=0.1), 8e6, slack_s=0.1),
    Case("lossy", LinkSpec(latency_s=0.05, loss_rate=0.05), 8e6, slack_s=2.0),
    Case("faulty without rules", LinkSpec(latency_s=0.05), 8e6, build=_faulty),
]


class Frame(bytes):
    """Bytes with a number, so that arrivals can be told apart."""

    number: int


def make_frame(number: int, nbytes: int) -> Frame:
    frame = Frame(nbytes)
    frame.number = number
    return frame


@dataclass
class Sent:
    at: float
    kind: str
    frame: Frame


def run_traffic(case: Case, traffic: list[tuple[float, str, int]]) -> tuple[Any, ...]:
    """Send (at, kind, nbytes) over one link; return what was sent, what arrived when, the link."""

    async def main() -> tuple[Any, ...]:
        loop = asyncio.get_running_loop()
        arrived: list[tuple[float, Frame]] = []
        link = case.build(
            case.spec, case.uplink(), lambda frame: arrived.append((loop.time(), frame))
        )
        sent = []
        for number, (at, kind, nbytes) in enumerate(traffic):
            await asyncio.sleep(at - loop.time())
            sent.append(Sent(loop.time(), kind, make_frame(number, nbytes)))
            link.send(sent[-1].frame, kind=kind)
        await asyncio.sleep(10_000)
        return sent, arrived, link

    return run_virtual(main())


# Bursts of mixed frames, large and tiny; a pause that empties the link; single frames.
TRAFFIC = [
    *[(0.0, KINDS[number % 3], 500 + 7919 * number % 60_000) for number in range(60)],
    *[(0.5 + number / 1000, "activation", 100) for number in range(100)],
    *[(40.0 + number, KINDS[number % 2], 60_000) for number in range(10)],
    (60.0, CONTROL, 200),
]


def check_arrives_once_and_in_order(case: Case) -> None:
    sent, arrived, _ = run_traffic(case, TRAFFIC)
    kinds = {item.frame.number: item.kind for item in sent}
    numbers = [frame.number for _, frame in arrived]

    assert sorted(numbers) == list(range(len(TRAFFIC)))
    for control in (True, False):
        one_class = [number for number in numbers if (kinds[number] == CONTROL) is control]
        assert one_class == sorted(one_class)
    assert all(frame is sent[frame.number].frame for _, frame in arrived)


def check_never_earlier_than_physics(case: Case) -> None:
    sent, arrived, _ = run_traffic(case, TRAFFIC)
    at = {frame.number: when for when, frame in arrived}

    for control in (True, False):
        flow = [item for item in sent if (item.kind == CONTROL) is control]
        for first, start in enumerate(flow):
            nbytes = 0
            for item in flow[first:]:  # what was sent after `start` and before `item` lies between
                nbytes += len(item.frame)
                earliest = start.at + 8 * nbytes / case.rate_bps + case.spec.latency_s
                assert at[item.frame.number] >= earliest - 1e-9


def check_no_later_than_it_must_be(case: Case) -> None:
    traffic = [(0.0, "activation", 60_000)] * 100
    _, arrived, _ = run_traffic(case, traffic)

    latest = 8 * 100 * 60_000 / case.rate_bps + case.spec.latency_s
    assert arrived[-1][0] <= latest * (1.1 if case.spec.loss_rate else 1) + case.slack_s + 1e-9


def check_control_goes_first_and_is_paid_for(case: Case) -> None:
    traffic = [
        (0.0, "activation", 2_000_000),
        (0.0, "activation", 2_000_000),
        (0.1, CONTROL, 50_000),
        (0.2, "activation", 1_000),
    ]
    _, arrived, _ = run_traffic(case, traffic)
    at = {frame.number: when for when, frame in arrived}

    control_s = 8 * 50_000 / case.rate_bps + case.spec.latency_s
    assert at[2] <= 0.1 + control_s + case.slack_s + 1e-9
    everything_s = 8 * 4_051_000 / case.rate_bps + case.spec.latency_s
    assert at[3] >= everything_s - 1e-9


def check_two_links_share_the_uplink(case: Case) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        arrived: list[float] = []
        uplink = case.uplink()
        links = [
            case.build(case.spec, uplink, lambda _: arrived.append(loop.time())) for _ in range(8)
        ]
        for _ in range(20):
            for link in links:
                link.send(bytes(10_000), kind="activation")
        await asyncio.sleep(10_000)
        assert len(arrived) == 160
        return max(arrived)

    last = run_virtual(main())

    shared = 8 * 160 * 10_000 / case.uplink_bps
    own = 8 * 20 * 10_000 / case.rate_bps
    assert last >= max(shared, own) + case.spec.latency_s - 1e-9


def check_bytes_are_counted_once_by_kind(case: Case) -> None:
    sent, _, link = run_traffic(case, TRAFFIC)

    for kind in KINDS:
        frames = [item.frame for item in sent if item.kind == kind]
        assert link.sent[kind] == sum(map(len, frames))
        assert link.messages[kind] == len(frames)
    assert set(link.sent) == set(link.messages) == set(KINDS)


def check_spans_tell_the_life_of_each_frame(case: Case) -> None:
    sent, arrived, link = run_traffic(case, TRAFFIC)
    spans = link.drain_spans()

    assert sum(span.nbytes for span in spans) == sum(len(item.frame) for item in sent)
    assert sorted(span.arrive for span in spans) == pytest.approx(sorted(at for at, _ in arrived))
    for span in spans:
        assert span.queued_at <= span.start + 1e-9
        assert span.start <= span.depart <= span.arrive
    assert link.drain_spans() == []


CHECKS = [
    check_arrives_once_and_in_order,
    check_never_earlier_than_physics,
    check_no_later_than_it_must_be,
    check_control_goes_first_and_is_paid_for,
    check_two_links_share_the_uplink,
    check_bytes_are_counted_once_by_kind,
    check_spans_tell_the_life_of_each_frame,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_link_keeps_the_promise(case, check) -> None:
    check(case)


def test_every_link_class_is_under_contract() -> None:
    found = set()
    for module in pkgutil.iter_modules(netsim.__path__):
        for value in vars(importlib.import_module(f"netsim.{module.name}")).values():
            if inspect.isclass(value) and {"send", "drain_spans"} <= set(dir(value)):
                found.add(value)

    async def main() -> set[type]:
        return {type(case.build(case.spec, case.uplink(), id)) for case in CASES}

    assert found - {LinkLike} == run_virtual(main())


class LatencyEatsBandwidth(Uplink):
    def book(self, now: float, nbytes: int, *, control: bool = False) -> float:
        depart = super().book(now, nbytes, control=control)
        self.free += SHAPED.spec.latency_s  # as a sender does that sleeps the latency itself
        return depart


class ControlBehindBulk(Uplink):
    def book(self, now: float, nbytes: int, *, control: bool = False) -> float:
        return super().book(now, nbytes)


class ControlForFree(Uplink):
    def book(self, now: float, nbytes: int, *, control: bool = False) -> float:
        return now + 8 * nbytes / self.rate_bps if control else super().book(now, nbytes)


class BurstPassesUnshaped(Uplink):
    def book(self, now: float, nbytes: int, *, control: bool = False) -> float:
        depart = super().book(now, nbytes, control=control)
        return max(now, depart - 8 * 128_000 / self.rate_bps)


class UplinkNotShared(Link):
    def __init__(self, spec: LinkSpec, uplink: Uplink, deliver: Deliver, **options: Any) -> None:
        super().__init__(spec, Uplink(uplink.rate_bps), deliver, **options)


class CountsTwice(Link):
    def send(self, frame: Any, *, kind: str) -> None:
        super().send(frame, kind=kind)
        self.sent[kind] += len(frame)


class JitterReorders(Link):
    def send(self, frame: Any, *, kind: str) -> None:
        super().send(frame, kind=kind)
        if self.messages[kind] % 5 == 0:
            flight = self._control if kind == CONTROL else self._bulk
            flight._pending.rotate(1)


class LatencyForgotten(Link):
    def __init__(self, spec: LinkSpec, uplink: Uplink, deliver: Deliver, **options: Any) -> None:
        super().__init__(LinkSpec(), uplink, deliver, **options)


def _drops_one(spec: LinkSpec, uplink: Uplink, deliver: Deliver) -> LinkLike:
    return FaultyLink(Link(spec, uplink, deliver)).drop("gradient", nth=4)


def _duplicates_one(spec: LinkSpec, uplink: Uplink, deliver: Deliver) -> LinkLike:
    return FaultyLink(Link(spec, uplink, deliver)).duplicate("gradient", nth=4)


def _mutant(name: str, build: Build | None = None, uplink_type: type[Uplink] = Uplink) -> Case:
    return Case(
        name, SHAPED.spec, SHAPED.uplink_bps, build=build or SHAPED.build, uplink_type=uplink_type
    )


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (
            _mutant("latency eats bandwidth", uplink_type=LatencyEatsBandwidth),
            check_no_later_than_it_must_be,
        ),
        (
            _mutant("control behind bulk", uplink_type=ControlBehindBulk),
            check_control_goes_first_and_is_paid_for,
        ),
        (
            _mutant("control for free", uplink_type=ControlForFree),
            check_control_goes_first_and_is_paid_for,
        ),
        (
            _mutant("burst passes unshaped", uplink_type=BurstPassesUnshaped),
            check_never_earlier_than_physics,
        ),
        (_mutant("uplink not shared", UplinkNotShared), check_two_links_share_the_uplink),
        (_mutant("counts twice", CountsTwice), check_bytes_are_counted_once_by_kind),
        (_mutant("jitter reorders", JitterReorders), check_arrives_once_and_in_order),
        (_mutant("latency forgotten", LatencyForgotten), check_never_earlier_than_physics),
        (_mutant("drops one", _drops_one), check_arrives_once_and_in_order),
        (_mutant("duplicates one", _duplicates_one), check_arrives_once_and_in_order),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_a_link_that_breaks_the_promise_is_caught(mutant, check) -> None:
    check(SHAPED)

    with pytest.raises(AssertionError):
        check(mutant)
