"""A link in virtual time: when frames arrive, what is counted, what is traced."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from netsim.clock import LoopThread, run_virtual
from netsim.link import Link, Span, frame_nbytes
from netsim.shaper import Uplink
from netsim.topology import LinkSpec

Arrivals = list[tuple[float, int]]


def recorder(arrived: Arrivals) -> Callable[[Any], None]:
    loop = asyncio.get_running_loop()
    return lambda frame: arrived.append((loop.time(), len(frame)))


def arrivals_of(
    spec: LinkSpec, uplink_bps: float, send: Callable[[Link], Coroutine[Any, Any, None]]
) -> Arrivals:
    async def main() -> Arrivals:
        arrived: Arrivals = []
        link = Link(spec, Uplink(uplink_bps), recorder(arrived), seed=1)
        await send(link)
        await asyncio.sleep(1e6)
        return arrived

    return run_virtual(main())


def test_ten_megabytes_over_eighty_megabits_and_fifty_milliseconds_arrive_at_1_05_s() -> None:
    async def send(link: Link) -> None:
        link.send(bytes(10_000_000), kind="activation")

    assert arrivals_of(LinkSpec(latency_s=0.05), 80e6, send) == [(1.05, 10_000_000)]
    assert arrivals_of(LinkSpec(bandwidth_bps=80e6, latency_s=0.05), math.inf, send) == [
        (1.05, 10_000_000)
    ]


@pytest.mark.parametrize(("uplink_bps", "last"), [(1e6, 48.02), (10e6, 4.82), (100e6, 0.5)])
def test_a_hundred_messages_of_sixty_kilobytes_take_what_the_rate_says(uplink_bps, last) -> None:
    async def send(link: Link) -> None:
        for _ in range(100):
            link.send(bytes(60_000), kind="activation")

    arrived = arrivals_of(LinkSpec(latency_s=0.02), uplink_bps, send)

    assert len(arrived) == 100
    assert arrived[-1][0] == pytest.approx(last)
    gaps = [b[0] - a[0] for a, b in pairwise(arrived)]
    assert gaps == pytest.approx([480_000 / uplink_bps] * 99)


def test_two_flows_share_an_uplink() -> None:
    async def main() -> tuple[Arrivals, Arrivals]:
        uplink = Uplink(8e6)
        one: Arrivals = []
        two: Arrivals = []
        links = [Link(LinkSpec(), uplink, recorder(arrived)) for arrived in (one, two)]
        for _ in range(2):
            for link in links:
                link.send(bytes(1_000_000), kind="activation")
        await asyncio.sleep(100)
        return one, two

    one, two = run_virtual(main())

    assert [at for at, _ in one] == [1.0, 3.0]
    assert [at for at, _ in two] == [2.0, 4.0]


def test_a_slow_link_leaves_the_rest_of_the_uplink_to_the_others() -> None:
    async def main() -> tuple[Arrivals, Arrivals]:
        uplink = Uplink(80e6)
        slow: Arrivals = []
        fast: Arrivals = []
        slow_link = Link(LinkSpec(bandwidth_bps=8e6), uplink, recorder(slow))
        fast_link = Link(LinkSpec(), uplink, recorder(fast))
        for _ in range(10):
            slow_link.send(bytes(1_000_000), kind="activation")
        fast_link.send(bytes(1_000_000), kind="activation")
        await asyncio.sleep(100)
        return slow, fast

    slow, fast = run_virtual(main())

    # The fast frame waits for one slow frame on the uplink (0.1 s), not for ten; the slow link
    # still carries a megabyte each second.
    assert fast == [(pytest.approx(0.2), 1_000_000)]
    assert [at for at, _ in slow] == pytest.approx([1.0 * (n + 1) for n in range(10)])


def test_control_overtakes_bulk_and_later_bulk_pays_for_it() -> None:
    async def send(link: Link) -> None:
        link.send(bytes(1_000_000), kind="activation")
        link.send(bytes(1_000), kind="control")
        link.send(bytes(1_000_000), kind="activation")

    assert arrivals_of(LinkSpec(), 8e6, send) == [
        (0.001, 1_000),
        (1.0, 1_000_000),
        (pytest.approx(2.001), 1_000_000),
    ]


def test_control_overtakes_bulk_that_waits_for_the_links_own_rate() -> None:
    async def send(link: Link) -> None:
        for _ in range(3):
            link.send(bytes(1_000_000), kind="activation")
        link.send(bytes(1_000), kind="control")

    arrived = arrivals_of(LinkSpec(bandwidth_bps=8e6), 80e6, send)

    assert arrived[0] == (pytest.approx(0.001), 1_000)
    assert arrived[-1][0] == pytest.approx(3.001)


def test_an_ideal_link_delivers_in_order_at_the_same_instant_but_not_inside_send() -> None:
    async def main() -> None:
        arrived: Arrivals = []
        link = Link(LinkSpec(), Uplink(), recorder(arrived))
        for nbytes in (3, 1, 2):
            link.send(bytes(nbytes), kind="control" if nbytes == 1 else "activation")
        assert arrived == []
        await asyncio.sleep(0)
        assert arrived == [(0.0, 3), (0.0, 1), (0.0, 2)]

    run_virtual(main())


def test_jitter_keeps_order_and_its_bound() -> None:
    async def send(link: Link) -> None:
        for nbytes in range(1, 101):
            link.send(bytes(nbytes), kind="activation")
            await asyncio.sleep(0.01)

    arrived = arrivals_of(LinkSpec(latency_s=0.1, jitter_s=0.05), math.inf, send)

    assert [nbytes for _, nbytes in arrived] == list(range(1, 101))
    late = [at - 0.01 * number - 0.1 for number, (at, _) in enumerate(arrived)]
    assert min(late) >= -1e-9
    assert max(late) <= 0.05 + 1e-9
    assert len({round(x, 6) for x in late}) > 50


def test_loss_costs_the_uplink_and_a_round_trip_but_is_not_counted_as_sent() -> None:
    async def main() -> tuple[Link, Arrivals]:
        arrived: Arrivals = []
        spec = LinkSpec(latency_s=0.05, loss_rate=0.1)
        link = Link(spec, Uplink(8e6), recorder(arrived), seed=5)
        link.send(bytes(1_460_000), kind="gradient")
        await asyncio.sleep(100)
        return link, arrived

    link, arrived = run_virtual(main())

    assert link.sent == {"gradient": 1_460_000}
    resent_nbytes = link.busy_until * 1e6 - 1_460_000
    assert resent_nbytes == pytest.approx(1_460_000 / 9, rel=0.3)
    rounds = (arrived[0][0] - 0.05 - link.busy_until) / 0.1
    assert rounds == pytest.approx(round(rounds))
    assert rounds >= 1


def test_the_same_seed_gives_the_same_arrivals() -> None:
    async def send(link: Link) -> None:
        for _ in range(50):
            link.send(bytes(50_000), kind="activation")

    spec = LinkSpec(latency_s=0.01, jitter_s=0.05, loss_rate=0.02)

    assert arrivals_of(spec, 80e6, send) == arrivals_of(spec, 80e6, send)


def test_spans_tell_when_a_frame_queued_started_left_and_arrived() -> None:
    async def main() -> list[Span]:
        link = Link(LinkSpec(latency_s=0.5), Uplink(8e6), lambda frame: None)
        link.send(bytes(1_000_000), kind="activation")
        link.send(bytes(2_000_000), kind="gradient")
        assert link.busy_until == 3.0
        return link.drain_spans()

    assert run_virtual(main()) == [
        Span(1_000_000, 0.0, 0.0, 1.0, 1.5, "activation"),
        Span(2_000_000, 0.0, 1.0, 3.0, 3.5, "gradient"),
    ]


def test_queued_bytes_fall_as_frames_leave_not_as_they_arrive() -> None:
    async def main(spec: LinkSpec, uplink_bps: float) -> list[int]:
        link = Link(spec, Uplink(uplink_bps), lambda frame: None)
        for _ in range(3):
            link.send(bytes(1_000_000), kind="activation")
        queued = []
        for _ in range(4):
            queued.append(link.queued_nbytes())
            await asyncio.sleep(1.0001)
        return queued

    for spec, uplink_bps in (
        (LinkSpec(latency_s=50), 8e6),
        (LinkSpec(bandwidth_bps=8e6, latency_s=50), 80e6),
    ):
        assert run_virtual(main(spec, uplink_bps)) == [3_000_000, 2_000_000, 1_000_000, 0]


def test_deliver_may_send_on_the_same_link() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        at: list[float] = []

        def echo(frame: bytes) -> None:
            at.append(loop.time())
            if len(at) < 5:
                link.send(frame, kind="activation")

        link = Link(LinkSpec(latency_s=1), Uplink(8e6), echo)
        link.send(bytes(1_000_000), kind="activation")
        await asyncio.sleep(100)
        return at

    assert run_virtual(main()) == [2.0, 4.0, 6.0, 8.0, 10.0]


def test_frames_behind_one_that_cannot_be_delivered_still_arrive() -> None:
    arrived: list[int] = []

    def deliver(frame: bytes) -> None:
        arrived.append(len(frame))
        if len(frame) == 1:
            raise LookupError("nobody there")

    heard: list[BaseException] = []
    done = threading.Event()
    thread = LoopThread("deliver", on_error=heard.append)

    async def main() -> None:
        link = Link(LinkSpec(latency_s=0.001), Uplink(), deliver)
        for nbytes in (1, 2, 3):
            link.send(bytes(nbytes), kind="activation")
        while len(arrived) < 3:
            await asyncio.sleep(0.001)
        done.set()

    thread.submit(main()).result(timeout=60)
    thread.stop()

    assert done.is_set()
    assert arrived == [1, 2, 3]
    assert [type(error) for error in heard] == [LookupError]


def test_a_closed_link_delivers_and_takes_nothing() -> None:
    async def main(spec: LinkSpec) -> None:
        arrived: Arrivals = []
        link = Link(spec, Uplink(), recorder(arrived), name="0->1")
        link.send(b"abc", kind="activation")
        link.send(b"abc", kind="activation")
        link.close()
        await asyncio.sleep(100)
        assert arrived == []
        with pytest.raises(RuntimeError, match="link 0->1 is closed"):
            link.send(b"abc", kind="activation")

    for spec in (LinkSpec(), LinkSpec(latency_s=1), LinkSpec(bandwidth_bps=8)):
        run_virtual(main(spec))


def test_a_frame_weighs_its_bytes_not_its_items() -> None:
    array = np.zeros((10, 3), dtype=np.float32)

    assert frame_nbytes(b"abc") == 3
    assert frame_nbytes(bytearray(5)) == 5
    assert frame_nbytes(array) == 120
    assert frame_nbytes(memoryview(array)) == 120


def test_the_same_link_runs_on_a_real_loop() -> None:
    thread = LoopThread("real")

    async def main() -> tuple[float, list[int]]:
        loop = asyncio.get_running_loop()
        arrived: list[int] = []
        done = loop.create_future()

        def deliver(frame: bytes) -> None:
            arrived.append(len(frame))
            if len(arrived) == 20:
                done.set_result(None)

        link = Link(LinkSpec(latency_s=0.01), Uplink(80e6), deliver)
        started = loop.time()
        for number in range(20):
            link.send(bytes(10_000 + number), kind="activation")
        await done
        return loop.time() - started, arrived

    took_s, arrived = thread.submit(main()).result(timeout=60)
    thread.stop()

    assert arrived == [10_000 + number for number in range(20)]
    assert (
        took_s >= 0.03
    )  # never before 20 ms of rate and 10 ms of latency; later on a busy machine
