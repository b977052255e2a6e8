"""The mean of large vectors: read where they arrive, in memory used again, to the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from compressors.scattered import Scattered
from netsim.clock import run_virtual
from netsim.faults import FaultyLink
from netsim.link import Link
from netsim.shaper import Uplink
from netsim.topology import LinkSpec
from stages.sync.exchange import Exchange
from stages.sync.payload import VectorCoder
from stages.sync.post import Post
from stages.sync.strategy import SyncPlan

SIZE = 1_200_003
Route = Literal["ring", "direct"]


class Group:
    """Members joined by links; what travels arrives as Ray hands it over, in read-only memory."""

    def __init__(self, num: int, rate_bps: float = float("inf")) -> None:
        self.num = num
        self.posts = [Post(replica=i, link_to=self._links(i, rate_bps)) for i in range(num)]
        self.exchanges = [Exchange(post, VectorCoder()) for post in self.posts]
        self.frames: list[list[int]] = []
        self.faulty: list[FaultyLink] = []

    def _links(self, source: int, rate_bps: float) -> Callable[[int], Any]:
        uplink, links = Uplink(rate_bps), {}

        def link_to(target: int) -> Any:
            if target not in links:
                link = Link(LinkSpec(), uplink, lambda frame: self._arrive(target, frame))
                links[target] = FaultyLink(link)
                self.faulty.append(links[target])
            return links[target]

        return link_to

    def _arrive(self, target: int, frame: Any) -> None:
        if isinstance(frame, Scattered):
            self.frames.append([piece.nbytes for piece in frame.pieces])
            frame = [bytes(piece) for piece in frame.pieces]
        self.posts[target].on_frame(frame)

    async def reduce(self, vectors: list[torch.Tensor], number: int, route: Route) -> list[Any]:
        plan = SyncPlan(
            epoch=0, number=number, op="reduce", peers=tuple(range(self.num)), route=route
        )
        handles = [
            exchange.begin(plan, vector)
            for exchange, vector in zip(self.exchanges, vectors, strict=True)
        ]
        return [
            (await exchange.finish(handle)).value
            for exchange, handle in zip(self.exchanges, handles, strict=True)
        ]


def vectors_of(num: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) for _ in range(num)]


def mean_by_hand(vectors: list[torch.Tensor], route: Route) -> torch.Tensor:
    """The definition: `direct` adds in the order of ids, a ring from its owner on."""
    num = len(vectors)
    if route == "direct":
        total = vectors[0].clone()
        for vector in vectors[1:]:
            total += vector
        return total / num
    pieces = []
    for part in range(num):
        piece = slice(SIZE * part // num, SIZE * (part + 1) // num)
        total = vectors[part][piece].clone()
        for step in range(1, num):
            total = total + vectors[(part + step) % num][piece]
        pieces.append(total * (1.0 / num))
    return torch.cat(pieces)


@pytest.mark.parametrize("route", ["ring", "direct"])
@pytest.mark.parametrize("num", [2, 3])
def test_the_mean_has_the_bits_of_the_definition_at_every_member(num: int, route: Route) -> None:
    async def main() -> list[Any]:
        return await Group(num).reduce(vectors_of(num, 1), 1, route)

    expected = mean_by_hand(vectors_of(num, 1), route)
    assert all(torch.equal(mean, expected) for mean in run_virtual(main()))


@pytest.mark.parametrize("route", ["ring", "direct"])
def test_a_result_that_is_kept_is_not_touched_by_later_exchanges(route: Route) -> None:
    async def main() -> list[list[Any]]:
        group = Group(2)
        return [await group.reduce(vectors_of(2, n), n, route) for n in range(5)]

    for n, means in enumerate(run_virtual(main())):
        assert all(torch.equal(mean, mean_by_hand(vectors_of(2, n), route)) for mean in means)


@pytest.mark.parametrize("route", ["ring", "direct"])
def test_exchanges_ask_for_no_new_memory_once_they_have_come_twice(route: Route) -> None:
    async def main() -> list[int]:
        group = Group(3)
        made = []
        for n in range(6):
            await group.reduce(vectors_of(3, n), n, route)
            made.append(sum(e.coder._memory.num_made for e in group.exchanges))  # type: ignore[attr-defined]
        return made

    made = run_virtual(main())
    assert made[2] == made[5]


def test_what_was_sent_is_never_the_memory_that_the_caller_gets() -> None:
    """He may write to it at once, while frames of a slow link still wait for their turn."""

    async def main() -> list[Any]:
        group = Group(2, rate_bps=8e6)
        plan = SyncPlan(epoch=0, number=1, op="reduce", peers=(0, 1), route="direct")
        vectors = vectors_of(2, 1)

        async def one(index: int) -> Any:
            exchange = group.exchanges[index]
            value = (await exchange.finish(exchange.begin(plan, vectors[index]))).value
            kept = value.clone()
            value.fill_(float("nan"))
            return kept

        return list(await asyncio.gather(one(0), one(1)))

    expected = mean_by_hand(vectors_of(2, 1), "direct")
    assert all(torch.equal(mean, expected) for mean in run_virtual(main()))


def test_a_damaged_piece_is_asked_for_again() -> None:
    async def main() -> tuple[list[Any], int]:
        group = Group(2)
        first = await group.reduce(vectors_of(2, 0), 0, "direct")
        for link in group.faulty:
            link.corrupt("replica", nth=3)
        second = await group.reduce(vectors_of(2, 1), 1, "direct")
        del first
        return second, sum(post.num_damaged for post in group.posts)

    means, num_damaged = run_virtual(main())
    assert num_damaged == 2
    assert all(torch.equal(mean, mean_by_hand(vectors_of(2, 1), "direct")) for mean in means)


def test_pieces_travel_unjoined_and_weigh_what_they_always_did() -> None:
    async def main() -> list[list[int]]:
        group = Group(2)
        await group.reduce(vectors_of(2, 1), 1, "direct")
        return group.frames

    frames = run_virtual(main())
    assert len(frames) == 4
    assert {part for _, part, _ in frames} == {4 * (SIZE // 2), 4 * (SIZE // 2 + 1)}
    assert all(0 < head + tail < 120 for head, _, tail in frames)
