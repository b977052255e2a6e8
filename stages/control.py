"""Small messages between stages: matched by turn, kept by who told them, repeated when asked.

A message that is lost does not cost the step: whoever waits for it asks for it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from compressors.frame import FrameHeader
from netsim.link import LinkLike
from stages.ends import FRAMES, StageTimeout, WireFormat, part_of, turn_of
from stages.plan import Turn

REQUESTS = ("nack", "want", "sync")
AGAIN = "again"
NUM_ASKS = 8
"""A message is asked for again this often within the deadline: it is small, so asking is cheap."""


class Control:
    """One stage's messages to and from all others. Belongs to the event loop."""

    def __init__(
        self,
        *,
        index: int,
        links: Mapping[int, LinkLike],
        on_request: Callable[[FrameHeader], None],
        replica: int = 0,
        wire: WireFormat = FRAMES,
    ) -> None:
        """`on_request` gets what concerns the edges: requests to send a frame again."""
        self._index = index
        self._links = links
        self._on_request = on_request
        self._replica = replica
        self._wire = wire
        self._turn = Turn(-1, -1, -1)
        self._heard: dict[tuple[str, Turn], asyncio.Future[dict[str, Any]]] = {}
        self._told: dict[tuple[int, str], tuple[Turn, dict[str, Any]]] = {}
        self.events: list[str] = []

    def begin(self, turn: Turn) -> None:
        """Messages of earlier turns are of no use from now on."""
        self._turn = turn
        self._heard = {key: future for key, future in self._heard.items() if key[1] >= turn}

    def tell(self, target: int, turn: Turn, body: dict[str, Any]) -> None:
        """Send a message that the target waits for, and keep it in case it gets lost."""
        self._told[target, body["op"]] = (turn, body)
        self.request(target, turn, body)

    def request(self, target: int, turn: Turn, body: dict[str, Any]) -> None:
        """Send a message that nobody waits for."""
        header = FrameHeader(
            kind="control",
            replica=self._replica,
            source=self._index,
            target=target,
            step=turn.step,
            attempt=turn.attempt,
            micro_batch=-1,
            body=part_of(turn) | body,
        )
        self._links[target].send(self._wire.pack(header, None), kind="control")

    async def hear(
        self,
        op: str,
        turn: Turn,
        *,
        source: int,
        deadline_s: float,
        num_deadlines: int = 1,
        ask_first: bool = False,
    ) -> dict[str, Any]:
        """The message `op` of a turn; asks for it again before it gives up.

        `num_deadlines` is for a message that comes after so many waits of somebody else.
        """
        future = self._expect(op, turn)
        for count in range(NUM_ASKS * num_deadlines):
            if count or ask_first:
                self.request(source, turn, {"op": AGAIN, "what": op})
            await asyncio.wait([future], timeout=deadline_s / NUM_ASKS)
            if future.done():
                break
        else:
            raise StageTimeout(
                f"stage {self._index} waited {num_deadlines * deadline_s:.1f} s for {op!r} of "
                f"{turn} from stage {source}; if the links are that slow, raise `deadline_s`"
            )
        self._heard.pop((op, turn), None)
        return future.result()

    def on_message(self, header: FrameHeader) -> None:
        """A message arrived; returns at once."""
        op, turn = header.body.get("op"), turn_of(header)
        if op in REQUESTS:
            self._on_request(header)
        elif op == AGAIN:
            told = self._told.get((header.source, header.body.get("what", "")))
            if told is not None and told[0] == turn:
                self.events.append(
                    f"stage {self._index}: {told[1]['op']!r} of {turn} was told to stage "
                    f"{header.source} again"
                )
                self.request(header.source, turn, told[1])
        elif isinstance(op, str) and ((op, turn) in self._heard or turn >= self._turn):
            future = self._expect(op, turn)
            if not future.done():
                future.set_result(dict(header.body))

    def _expect(self, op: str, turn: Turn) -> asyncio.Future[dict[str, Any]]:
        key = (op, turn)
        if key not in self._heard:
            self._heard[key] = asyncio.get_running_loop().create_future()
        return self._heard[key]
