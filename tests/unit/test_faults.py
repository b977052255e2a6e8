"""Faults by rule and by seed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from netsim.clock import run_virtual
from netsim.faults import Fault, FaultyLink
from netsim.link import Link
from netsim.shaper import Uplink
from netsim.topology import LinkSpec


def run(
    rules: Callable[[FaultyLink], FaultyLink],
    frames: list[tuple[str, Any]],
    *,
    seed: int = 0,
    **options: Any,
) -> tuple[list[tuple[float, Any]], FaultyLink]:
    """Send the frames a second apart over a link of 0.5 s; return what arrived when."""

    async def main() -> tuple[list[tuple[float, Any]], FaultyLink]:
        loop = asyncio.get_running_loop()
        arrived: list[tuple[float, Any]] = []
        inner = Link(
            LinkSpec(latency_s=0.5), Uplink(math.inf), lambda x: arrived.append((loop.time(), x))
        )
        link = rules(FaultyLink(inner, seed=seed, **options))
        for kind, frame in frames:
            link.send(frame, kind=kind)
            await asyncio.sleep(1)
        await asyncio.sleep(100)
        return arrived, link

    return run_virtual(main())


ABC = [("activation", b"a"), ("gradient", b"b"), ("activation", b"c")]


def test_without_rules_everything_arrives() -> None:
    arrived, link = run(lambda link: link, ABC)

    assert arrived == [(0.5, b"a"), (1.5, b"b"), (2.5, b"c")]
    assert link.injected == []


def test_the_nth_frame_of_a_kind_is_dropped_but_counted_as_sent() -> None:
    arrived, link = run(lambda link: link.drop("activation", nth=2), ABC)

    assert arrived == [(0.5, b"a"), (1.5, b"b")]
    assert link.injected == [Fault(action="drop", kind="activation", nth=2, at=2.0)]
    assert link.sent == {"activation": 2, "gradient": 1}


def test_without_a_kind_the_nth_frame_of_all_is_meant() -> None:
    arrived, link = run(lambda link: link.drop(nth=2), ABC)

    assert [frame for _, frame in arrived] == [b"a", b"c"]
    assert link.injected == [Fault(action="drop", kind="gradient", nth=1, at=1.0)]


def test_a_duplicate_arrives_twice_and_is_counted_once() -> None:
    arrived, link = run(lambda link: link.duplicate("gradient", nth=1), ABC)

    assert [frame for _, frame in arrived] == [b"a", b"b", b"b", b"c"]
    assert link.sent["gradient"] == 1


def test_a_delayed_frame_is_overtaken() -> None:
    arrived, _ = run(lambda link: link.delay("gradient", nth=1, by_s=5), ABC)

    assert arrived == [(0.5, b"a"), (2.5, b"c"), (6.5, b"b")]


def test_a_corrupted_frame_differs_in_one_bit_and_the_senders_copy_is_intact() -> None:
    frame = bytearray(range(100))
    arrived, link = run(lambda link: link.corrupt("activation", nth=1), [("activation", frame)])

    (_, damaged), *_ = arrived
    different = int.from_bytes(damaged, "big") ^ int.from_bytes(bytes(range(100)), "big")
    assert different.bit_count() == 1
    assert frame == bytearray(range(100))
    assert [fault.action for fault in link.injected] == ["corrupt"]


def test_rules_add_up() -> None:
    arrived, link = run(
        lambda link: link.duplicate("gradient", nth=1).delay("gradient", by_s=3).drop(nth=3), ABC
    )

    assert arrived == [(0.5, b"a"), (4.5, b"b"), (4.5, b"b")]
    assert [fault.action for fault in link.injected] == ["duplicate", "delay", "drop"]


def test_a_share_of_the_frames_is_hit_and_the_seed_says_which() -> None:
    frames = [("activation", bytes([n % 256])) for n in range(2000)]

    one, link = run(lambda link: link.drop(share=0.25), frames, seed=1)
    again, _ = run(lambda link: link.drop(share=0.25), frames, seed=1)
    other, _ = run(lambda link: link.drop(share=0.25), frames, seed=2)

    assert len(link.injected) == 2000 - len(one)
    assert len(link.injected) == pytest.approx(500, abs=80)
    assert one == again
    assert one != other


def test_frames_that_are_not_bytes_need_their_own_damage() -> None:
    class Parcel:
        nbytes = 10

        def __init__(self, value: int) -> None:
            self.value = value

    def damage(frame: Any, source: random.Random) -> Parcel:
        return Parcel(-frame.value)

    with pytest.raises(TypeError, match="cannot flip a bit of a Parcel"):
        run(lambda link: link.corrupt(), [("activation", Parcel(5))])

    arrived, link = run(lambda link: link.corrupt(), [("activation", Parcel(5))], corrupt=damage)
    assert arrived[0][1].value == -5
    assert link.sent == {"activation": 10}


def test_impossible_rules_are_refused() -> None:
    link = FaultyLink(Link(LinkSpec(), Uplink(), lambda frame: None))

    with pytest.raises(ValueError, match="nth is 0, the first frame is 1"):
        link.drop(nth=0)
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        link.corrupt(share=1.5)
    with pytest.raises(ValueError, match="by_s is 0"):
        link.delay(by_s=0)
