"""Letters of exchanges: kept for those who may still lack them, and no longer."""

from __future__ import annotations

import torch

from compressors.base import Packet
from compressors.frame import FrameHeader
from stages.ends import FRAMES
from stages.sync.post import Inbox, Post
from stages.sync.strategies import Assembly, SyncSpec


class Wire:
    """A link that only remembers."""

    busy_until = 0.0

    def __init__(self) -> None:
        self.headers: list[FrameHeader] = []

    def send(self, frame: object, *, kind: str) -> None:
        self.headers.append(FRAMES.unpack(frame)[0])


def packet() -> Packet:
    coder = Assembly(SyncSpec(), range(3)).coder(0)
    return coder.encode("test", torch.ones(3), exact=True)[0]


def inbox() -> tuple[Inbox, dict[int, Wire]]:
    wires = {replica: Wire() for replica in (1, 2)}
    post = Post(replica=0, link_to=lambda target: wires[target])  # type: ignore[arg-type,return-value]
    return Inbox(post, ("up", "down")), wires


def asks(box: Inbox, replica: int, number: int) -> None:
    body = {"op": "again", "what": "down"}
    header = FrameHeader(
        kind="control", replica=replica, source=0, target=0, step=number, body=body
    )
    box.answer(header, None)


def test_a_letter_is_kept_while_exchanges_with_others_are_over() -> None:
    box, wires = inbox()
    box.send(1, "down", (0, 5), part=0, packet=packet())
    box.close((0, 5))
    for number in (6, 7):
        box.send(2, "down", (0, number), part=0, packet=packet())
        box.close((0, number))

    asks(box, 1, 5)

    assert [header.step for header in wires[1].headers] == [5, 5]


def test_a_letter_is_let_go_when_a_later_exchange_with_the_same_peer_is_over() -> None:
    box, wires = inbox()
    for number in (5, 6):
        box.send(1, "down", (0, number), part=0, packet=packet())
        box.close((0, number))

    asks(box, 1, 5)
    assert [header.step for header in wires[1].headers] == [5, 6]
    asks(box, 1, 6)
    assert [header.step for header in wires[1].headers] == [5, 6, 6]


def test_a_peer_that_has_everything_costs_nothing() -> None:
    box, wires = inbox()
    box.send(1, "down", (0, 5), part=0, packet=packet())
    box.forget_sent(1)
    box.close((0, 5))

    asks(box, 1, 5)

    assert len(wires[1].headers) == 1


def test_one_letter_to_several_is_one_frame() -> None:
    frames: dict[int, list[object]] = {1: [], 2: []}

    class Keeps:
        busy_until = 0.0

        def __init__(self, target: int) -> None:
            self._target = target

        def send(self, frame: object, *, kind: str) -> None:
            frames[self._target].append(frame)

    post = Post(replica=0, link_to=Keeps)  # type: ignore[arg-type,return-value]
    box = Inbox(post, ("down",))
    alone = box.send(1, "down", (0, 4), part=0, packet=packet())

    assert box.send_all((1, 2), "down", (0, 5), part=0, packet=packet()) == 2 * alone
    assert frames[1][1] is frames[2][0]
    assert post.fp32_nbytes == 3 * 12
    asks(box, 2, 5)  # each of them may ask for it again
    assert len(frames[2]) == 2
