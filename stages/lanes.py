"""Lanes: where a stage's work runs, one thing at a time, and where its time is measured.

A stage has three lanes (receive, compute, transmit) so that neither decoding nor sending ever
blocks computing. Protocol code only says `await lane.run(...)`: in an actor a lane is a thread, in
the simulator (`stages.rehearsal`) it is a share of the cores and a cost.
"""

from __future__ import annotations

import threading
import time
from asyncio import get_running_loop
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from stages.record import Span

T = TypeVar("T")

LANE_OF_PHASE = {
    "load": "compute",
    "forward": "compute",
    "backward": "compute",
    "encode": "encode",
    "decode": "decode",
    "update": "update",
    "wait_forward": "wait",
    "wait_backward": "wait",
    "sync": "wait",
}


@dataclass(slots=True)
class Recorder:
    """Spans and seconds of the running step, on a clock that all stages share."""

    offset_s: float = 0.0
    """What turns this stage's clock into seconds since the start of the run."""

    spans: list[Span] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """CPU seconds of single pieces of work by phase: what the simulator is fed with."""

    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, phase: str, name: str, micro_batch: int, start: float, end: float) -> None:
        """Note one stretch of work or of waiting."""
        span = Span(
            lane=LANE_OF_PHASE[phase],
            name=name,
            start_s=start + self.offset_s,
            end_s=end + self.offset_s,
            micro_batch=micro_batch,
        )
        with self._lock:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + end - start
            self.spans.append(span)

    def drain(self) -> tuple[tuple[Span, ...], dict[str, float]]:
        """What was noted since the last drain."""
        with self._lock:
            spans, self.spans = tuple(self.spans), []
            seconds, self.seconds = self.seconds, {}
        return spans, seconds


class Lane(Protocol):
    """A place where work of one kind runs in the order it was given."""

    async def run(
        self, phase: str, name: str, micro_batch: int, work: Callable[..., T], *args: object
    ) -> T: ...


class ThreadLane:
    """A lane in earnest: one thread."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._recorder = recorder

    async def run(
        self, phase: str, name: str, micro_batch: int, work: Callable[..., T], *args: object
    ) -> T:
        def timed() -> T:
            start, cpu = time.monotonic(), time.thread_time()
            try:
                return work(*args)
            finally:
                self._recorder.cpu.setdefault(phase, []).append(time.thread_time() - cpu)
                self._recorder.add(phase, name, micro_batch, start, time.monotonic())

        return await get_running_loop().run_in_executor(self._pool, timed)

    def close(self) -> None:
        """Let the thread end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
