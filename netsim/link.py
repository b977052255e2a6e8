"""One direction between two nodes: frames go in, and come out as late as physics says.

Path: compressors.frame -> netsim.link -> stages.receiving

A frame first queues for the link's own rate if it has one, then for the uplink that it shares with
the node's other links; then it flies for the latency, while the next one is sent. Everything
arrives once and in order; only control frames overtake bulk. Bytes are counted here, once, by kind.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from netsim.shaper import Delays, Uplink
from netsim.topology import LinkSpec

CONTROL = "control"
MAX_SPANS = 100_000


class Sized(Protocol):
    """A frame that knows its bytes on the wire; `bytes` and the like need no more than `len`."""

    @property
    def nbytes(self) -> int: ...


Frame = Any  # bytes, bytearray, memoryview, numpy arrays, or `Sized`


class Span(NamedTuple):
    """The life of one frame on a link, in loop time."""

    nbytes: int
    queued_at: float
    start: float
    depart: float
    arrive: float
    kind: str


class LinkLike(Protocol):
    """What a sender may do with a link, faulty or not."""

    @property
    def name(self) -> str: ...
    @property
    def sent(self) -> dict[str, int]: ...
    @property
    def messages(self) -> dict[str, int]: ...
    @property
    def busy_until(self) -> float: ...

    def send(self, frame: Frame, *, kind: str) -> None: ...
    def queued_nbytes(self) -> int: ...
    def drain_spans(self) -> list[Span]: ...
    def close(self) -> None: ...


def frame_nbytes(frame: Frame) -> int:
    """What a frame weighs on the wire."""
    nbytes = getattr(frame, "nbytes", None)  # a memoryview's len counts items, not bytes
    return len(frame) if nbytes is None else int(nbytes)


class Link:
    """Carries frames to `deliver`. All calls must come from the event loop; none blocks."""

    def __init__(
        self,
        spec: LinkSpec,
        uplink: Uplink,
        deliver: Callable[[Frame], object],
        *,
        seed: int = 0,
        name: str = "link",
    ) -> None:
        self.spec = spec
        self.uplink = uplink
        self.deliver = deliver
        self.name = name
        self.sent: dict[str, int] = Counter()
        """Bytes by kind, each frame once, when it is sent; what loss made it carry again is not
        counted, and shows in `busy_until`."""

        self.messages: dict[str, int] = Counter()
        self.busy_until = 0.0
        """When the last frame booked so far has left."""

        self._ideal = spec.is_ideal and math.isinf(uplink.rate_bps)
        self._paced = spec.bandwidth_bps < uplink.rate_bps
        self._delays = Delays(
            latency_s=spec.latency_s, jitter_s=spec.jitter_s, loss_rate=spec.loss_rate, seed=seed
        )
        self._bulk = _Flight(self._deliver_now)
        self._control = _Flight(self._deliver_now)
        self._own = Uplink(spec.bandwidth_bps)
        self._waiting: deque[_Queued] = deque()  # bulk that the link's own rate holds back
        self._release_at = 0.0
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._closed = False

    def send(self, frame: Frame, *, kind: str) -> None:
        """Take a frame; `deliver(frame)` is called when it has arrived. Control goes first."""
        if self._closed:
            raise RuntimeError(f"link {self.name} is closed, a {kind} frame came too late")
        loop = asyncio.get_running_loop()
        now = loop.time()
        nbytes = frame_nbytes(frame)
        self.sent[kind] += nbytes
        self.messages[kind] += 1
        if self._ideal:
            self._spans.append(Span(nbytes, now, now, now, now, kind))
            loop.call_soon(self._deliver_now, frame)
            return
        queued = _Queued(frame, nbytes, now, kind)
        if kind == CONTROL or not self._paced:
            self._book(loop, queued, now)
        else:
            self._waiting.append(queued)
            if len(self._waiting) == 1:
                self._release(loop)

    def queued_nbytes(self) -> int:
        """Bytes taken that have not left the node yet."""
        now = asyncio.get_running_loop().time()
        waiting = sum(queued.nbytes for queued in self._waiting)
        return waiting + self._bulk.queued_nbytes(now) + self._control.queued_nbytes(now)

    def drain_spans(self) -> list[Span]:
        """The spans since the last call; no more than the last `MAX_SPANS` are kept."""
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def close(self) -> None:
        """Drop what is in flight; deliver nothing any more, take nothing any more."""
        self._closed = True
        self._waiting.clear()
        self._bulk.clear()
        self._control.clear()

    def _deliver_now(self, frame: Frame) -> None:
        if not self._closed:
            self.deliver(frame)

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand bulk to the uplink no faster than the link's own rate can carry it.

        Booked all at once it would hold the uplink for bytes that the link cannot take yet, and
        the node's other links would wait for nothing.
        """
        while self._waiting:
            head = self._waiting[0]
            start = max(self._release_at, head.queued_at)  # as planned: a late timer costs no rate
            if start > loop.time():
                loop.call_at(start, self._release, loop)
                return
            self._waiting.popleft()
            self._book(loop, head, start)

    def _book(self, loop: asyncio.AbstractEventLoop, queued: _Queued, now: float) -> None:
        control = queued.kind == CONTROL
        resent, late_s = (0, 0.0) if self._delays.are_none else self._delays.draw(queued.nbytes)
        nbytes = queued.nbytes + resent
        depart = self.uplink.book(now, nbytes, control=control)
        start = depart - 8 * nbytes / self.uplink.rate_bps
        if self._paced:
            # The link takes bytes as the uplink lets them out, and is done later.
            depart = self._own.book(start, nbytes, control=control)
            start = depart - 8 * nbytes / self._own.rate_bps
            self._release_at = max(self._release_at, now) + 8 * nbytes / self._own.rate_bps
        self.busy_until = max(self.busy_until, depart)
        flight = self._control if control else self._bulk
        arrive = flight.add(loop, queued, depart, depart + self.spec.latency_s + late_s)
        self._spans.append(
            Span(queued.nbytes, queued.queued_at, start, depart, arrive, queued.kind)
        )


class _Queued(NamedTuple):
    """A frame that was taken and has not been booked yet."""

    frame: Frame
    nbytes: int
    queued_at: float
    kind: str


class _Flight:
    """The delay line: frames that are booked and have not arrived, in order of arrival.

    One timer, for the head: frames that arrive at one instant keep their order on any loop.
    """

    def __init__(self, deliver: Callable[[Frame], object]) -> None:
        self._deliver = deliver
        self._pending: deque[tuple[float, float, int, Frame]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last_arrival = 0.0

    def add(
        self, loop: asyncio.AbstractEventLoop, queued: _Queued, depart: float, arrive: float
    ) -> float:
        """Take a frame and return its arrival, which is never before that of an earlier one."""
        self._last_arrival = arrive = max(self._last_arrival, arrive)
        self._pending.append((arrive, depart, queued.nbytes, queued.frame))
        self._arm(loop)
        return arrive

    def queued_nbytes(self, now: float) -> int:
        """Bytes that have not left the node."""
        return sum(nbytes for _, depart, nbytes, _ in self._pending if depart > now)

    def clear(self) -> None:
        self._pending.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._pending:
            due = self._pending[0][0]
            self._timer = loop.call_at(due, self._fire, loop, due)

    def _fire(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        pending = self._pending
        try:
            # A timer may fire a clock tick early; its own frame is due all the same.
            while pending and pending[0][0] <= max(due, loop.time()):
                self._deliver(pending.popleft()[3])
        finally:
            self._timer = None
            self._arm(loop)
