"""What a simulated machine has besides links: cores that its stages share, and lanes of work.

The simulator runs the real protocol code on the virtual clock; only compute is replaced, by
`await lane.work(cost_s)`. Four stages on two cores then slow each other down as they do in earnest.
"""

from __future__ import annotations

import asyncio
import heapq
import math


class Cores:
    """Processor sharing: n busy threads on c cores each progress at min(1, c / n)."""

    def __init__(self, num_cores: float) -> None:
        if not num_cores > 0:
            raise ValueError(f"num_cores is {num_cores}, must be more than 0")
        self.num_cores = num_cores
        self.work_s = 0.0
        """Core seconds of all jobs that ended."""

        # Every busy thread progresses at one speed, so one number says how far all of them are:
        # a job ends when `_progress` reaches what it was at its start plus its cost per thread.
        self._progress = 0.0
        self._updated_at = 0.0
        self._num_threads = 0.0
        self._jobs: list[tuple[float, int, _Job]] = []
        self._num_started = 0
        self._timer: asyncio.TimerHandle | None = None

    async def work(self, cost_s: float, parallelism: float = 1) -> None:
        """Occupy `parallelism` threads until `cost_s` core seconds of work are done."""
        if not 0 <= cost_s < math.inf:
            raise ValueError(f"cost_s is {cost_s}, must be 0 or more and finite")
        if not 0 < parallelism < math.inf:
            raise ValueError(f"parallelism is {parallelism}, must be more than 0 and finite")
        if cost_s == 0:
            return
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        job = _Job(loop.create_future(), cost_s, parallelism)
        self._num_started += 1
        end = self._progress + cost_s / parallelism
        heapq.heappush(self._jobs, (end, self._num_started, job))
        self._num_threads += parallelism
        self._arm(loop)
        try:
            await job.done
        except asyncio.CancelledError:
            if not job.ended:
                self._advance(loop.time())
                self._end(job)
                self._arm(loop)
            raise

    @property
    def speed(self) -> float:
        """How fast each busy thread progresses now, at most 1."""
        return min(1.0, self.num_cores / self._num_threads) if self._jobs else 1.0

    def _advance(self, now: float) -> None:
        self._progress += (now - self._updated_at) * self.speed
        self._updated_at = now

    def _end(self, job: _Job) -> None:
        job.ended = True
        self._num_threads -= job.parallelism
        while self._jobs and self._jobs[0][2].ended:
            heapq.heappop(self._jobs)
        if not self._jobs:
            self._num_threads = 0.0  # forget what rounding left

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            end = self._jobs[0][0]
            due = self._updated_at + max(0.0, end - self._progress) / self.speed
            self._timer = loop.call_at(due, self._fire, loop, end)

    def _fire(self, loop: asyncio.AbstractEventLoop, end: float) -> None:
        self._timer = None
        self._progress = end  # exact: the clock's rounding must not leave a sliver of work
        self._updated_at = loop.time()
        while self._jobs and self._jobs[0][0] <= end:
            job = self._jobs[0][2]
            self.work_s += job.cost_s
            self._end(job)
            if not job.done.done():
                job.done.set_result(None)
        self._arm(loop)


class _Job:
    """One call of `Cores.work`."""

    __slots__ = ("cost_s", "done", "ended", "parallelism")

    def __init__(self, done: asyncio.Future[None], cost_s: float, parallelism: float) -> None:
        self.done = done
        self.cost_s = cost_s
        self.parallelism = parallelism
        self.ended = False


class Lane:
    """A serial executor on shared cores: one job at a time, in the order of the calls."""

    def __init__(self, cores: Cores, *, name: str = "lane") -> None:
        self.cores = cores
        self.name = name
        self.busy_s = 0.0
        """Time with a job on the lane; more than its work when the cores are shared."""

        self._turn = asyncio.Lock()

    async def work(self, cost_s: float, parallelism: float = 1) -> tuple[float, float]:
        """Wait for the lane, do the work, and return when it started and ended."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            start = loop.time()
            try:
                await self.cores.work(cost_s, parallelism)
            finally:
                end = loop.time()
                self.busy_s += end - start
        return start, end
