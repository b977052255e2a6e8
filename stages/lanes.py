"""Lanes: where a stage's work runs, one thing at a time, and where its time is measured.

A stage has three lanes (receive, compute, transmit) so that neither decoding nor sending ever
blocks computing. Protocol code only says `await lane.run(...)`: in an actor a lane is a thread, in
the simulator (`stages.rehearsal`) it is a share of the cores and a cost.
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop, Future, get_running_loop
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple, Protocol, TypeVar

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
    cpu: dict[str, deque[float]] = field(default_factory=dict)
    """CPU seconds of the latest single pieces of work, by phase."""

    cpu_sums: dict[str, float] = field(default_factory=dict)
    """CPU seconds of all lanes so far, by phase."""

    _lock: Lock = field(default_factory=Lock, repr=False)

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

    def add_cpu(self, phase: str, seconds: float) -> None:
        """Note what one piece of work cost, whoever else was using the cores."""
        with self._lock:
            self.cpu_sums[phase] = self.cpu_sums.get(phase, 0.0) + seconds
            self.cpu.setdefault(phase, deque(maxlen=1000)).append(seconds)

    @property
    def cpu_total(self) -> float:
        """CPU seconds of all lanes so far."""
        with self._lock:
            return sum(self.cpu_sums.values())

    def drain(self) -> tuple[tuple[Span, ...], dict[str, float]]:
        """What was noted since the last drain."""
        with self._lock:
            spans, self.spans = tuple(self.spans), []
            seconds, self.seconds = self.seconds, {}
        return spans, seconds


class Unrecorded(Recorder):
    """For work that belongs to no step: nothing is noted, so nobody need drain it."""

    def add(self, phase: str, name: str, micro_batch: int, start: float, end: float) -> None:
        """Forget it."""

    def add_cpu(self, phase: str, seconds: float) -> None:
        """Forget it."""


class Lane(Protocol):
    """A place where work of one kind runs in the order it was given."""

    async def run(
        self, phase: str, name: str, micro_batch: int, work: Callable[..., T], *args: object
    ) -> T: ...


class ThreadLane:
    """A lane in earnest: one thread. Leaner than an executor, and a step passes it often."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._recorder = recorder
        self._busy_since: float | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def run(
        self, phase: str, name: str, micro_batch: int, work: Callable[..., T], *args: object
    ) -> T:
        loop = get_running_loop()
        done: Future[T] = loop.create_future()
        self._jobs.put(_Job(loop, done, phase, name, micro_batch, work, args))
        return await done

    @property
    def busy_s(self) -> float:
        """How long the piece of work that runs now has taken; 0 if none does."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Let the thread end after what it was given."""
        self._jobs.put(None)

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.done.cancelled():  # nobody waits for it any more
                continue
            start, cpu = time.monotonic(), time.thread_time()
            self._busy_since = start
            result: Any = None
            error: BaseException | None = None
            try:
                result = job.work(*job.args)
            except StopIteration as raised:  # a future cannot carry it
                error = RuntimeError(f"{job.name} raised StopIteration: {raised}")
            except BaseException as raised:
                error = raised
            self._busy_since = None
            try:
                self._recorder.add_cpu(job.phase, time.thread_time() - cpu)
                self._recorder.add(job.phase, job.name, job.micro_batch, start, time.monotonic())
            except Exception as raised:  # a lane that died of it would leave the stage waiting
                error = error or raised
            with suppress(RuntimeError):  # the loop was stopped meanwhile
                job.loop.call_soon_threadsafe(_settle, job.done, result, error)
            del job, result, error  # an idle lane must not keep tensors alive


class _Job(NamedTuple):
    """One call of `ThreadLane.run`."""

    loop: AbstractEventLoop
    done: Future[Any]
    phase: str
    name: str
    micro_batch: int
    work: Callable[..., Any]
    args: tuple[object, ...]


def _settle(done: Future[Any], result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
