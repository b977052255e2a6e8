"""Two ways to run the same protocol code: in virtual time, or on a real loop in its own thread.

Protocol code is `async` over asyncio and asks the loop for the time. `run_virtual` runs it on a
loop whose clock jumps to the next timer when everybody waits: an hour takes milliseconds, runs are
deterministic, and a deadlock is an exception. `LoopThread` (netsim.loop_thread) is the real one.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import inspect
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from netsim.loop_thread import LoopThread

__all__ = ["Deadlock", "LoopThread", "VirtualLoop", "VirtualTimeout", "run_virtual"]

_T = TypeVar("_T")
_Callback = Callable[..., object]
_log = logging.getLogger(__name__)


class Deadlock(RuntimeError):
    """Everybody waits and nothing is scheduled that could wake anybody."""


class VirtualTimeout(TimeoutError):
    """The virtual clock passed the limit that the caller gave."""


def run_virtual(coro: Coroutine[Any, Any, _T], *, limit_s: float | None = None) -> _T:
    """Run `coro` in virtual time and return its result; tasks it leaves behind are cancelled.

    Raises `Deadlock` naming the waiting tasks when nothing can happen any more, `VirtualTimeout`
    when the clock passes `limit_s`, and whatever a callback of the loop raises.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        coro.close()
        raise RuntimeError(
            "run_virtual was called from a running event loop; await the coroutine there, "
            "or call run_virtual from another thread"
        )
    return VirtualLoop(limit_s=limit_s).run(coro)  # type: ignore[abstract]


class VirtualLoop(asyncio.AbstractEventLoop):
    """An asyncio loop without sockets, threads and waiting; timers of one instant run in order."""

    def __init__(self, *, limit_s: float | None = None) -> None:
        self._now = 0.0
        self._limit_s = limit_s
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._num_cancelled = 0
        self._thread_id = threading.get_ident()
        self._closed = False
        self._running = False
        self._error: BaseException | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}  # alive, in order of birth
        self._deaths: list[str] = []
        self._generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()

    # The clock and what it drives.

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: _Callback, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: _Callback,
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]  # makes cancel() tell us
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: _Callback,
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: _Callback, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread_id:
            raise RuntimeError(
                f"{callback!r} came from another thread; in virtual time there is one thread "
                "only, because a real thread cannot be told when to run"
            )
        return self.call_soon(callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if not handle._scheduled:  # type: ignore[attr-defined]
            return  # it has left the heap already
        # Timeouts are armed often and fire rarely: without this the heap keeps all of them.
        self._num_cancelled += 1
        if self._num_cancelled > 100 and self._num_cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._num_cancelled = 0

    def run(self, coro: Coroutine[Any, Any, _T]) -> _T:
        """Run to the end, cancel what is left, close."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._generators.add, self._close_generator)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            main = self.create_task(coro, name="main")
            self._run_until(main)
            return main.result()
        finally:
            try:
                self._cancel_the_rest()
            finally:
                self._running = False
                self._closed = True
                asyncio._set_running_loop(None)
                sys.set_asyncgen_hooks(*hooks)

    def _run_until(self, main: asyncio.Future[Any]) -> None:
        ready = self._ready
        limit_s = float("inf") if self._limit_s is None else self._limit_s
        while not main.done():
            if not ready:
                self._jump(limit_s)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def _jump(self, limit_s: float) -> None:
        """Move the clock to the next timer and make ready all that are due then."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._num_cancelled -= 1
        if not timers:
            raise Deadlock(
                f"at {self._now:g} s of virtual time nothing can happen any more; "
                + self._who_waits()
            )
        when = timers[0][0]
        if when > limit_s:
            raise VirtualTimeout(
                f"virtual time would pass the limit of {limit_s:g} s; " + self._who_waits()
            )
        self._now = max(self._now, when)
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False  # type: ignore[attr-defined]
            if handle.cancelled():
                self._num_cancelled -= 1
            else:
                self._ready.append(handle)

    def _cancel_the_rest(self) -> None:
        self._limit_s = None
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            self._run_until(asyncio.gather(*left, return_exceptions=True))
        for generator in list(self._generators):
            self._run_until(self.create_task(generator.aclose()))

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators.discard(generator)
        if not self._closed:
            self.create_task(generator.aclose())

    # What asyncio asks of a loop.

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, _T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **options: Any,
    ) -> asyncio.Task[_T]:
        task = asyncio.Task(coro, loop=self, name=name, context=context, **options)
        self._tasks[task] = None
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = task._exception
        if error is not None:  # read so, the error still counts as never retrieved
            self._deaths.append(f"{task.get_name()} died of {error!r}")

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Nothing to slow down or to log here."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback's error ends the run; one that nobody can be told of any more is logged."""
        error = context.get("exception")
        if "handle" in context and isinstance(error, BaseException):
            self._error = self._error or error
        else:
            _log.error("%s", context.get("message"), exc_info=error)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        raise RuntimeError(
            f"{func!r} was given to a thread pool; virtual time cannot wait for real threads: "
            "use `await Cores.work(cost_s)` for compute, or call the function directly"
        )

    def run_until_complete(self, future: Any) -> Any:
        raise RuntimeError("a virtual loop is run by run_virtual(coro)")

    run_forever = run_until_complete  # type: ignore[assignment]

    def _who_waits(self) -> str:
        tasks = list(self._tasks)
        shown = [f"{task.get_name()} {_where(task)}" for task in tasks[:20]]
        if len(tasks) > 20:
            shown.append(f"and {len(tasks) - 20} more")
        return "waiting: " + "; ".join(shown + self._deaths[:5])


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line outside asyncio at which a task waits."""
    coro: Any = task.get_coro()
    place = "has not started"
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "ag_frame", None)
        if frame is not None and not frame.f_globals.get("__name__", "").startswith("asyncio"):
            path = os.path.basename(frame.f_code.co_filename)
            place = f"in {frame.f_code.co_qualname} ({path}:{frame.f_lineno})"
        coro = getattr(coro, "cr_await", None) or getattr(coro, "ag_await", None)
        if coro is not None and not (inspect.iscoroutine(coro) or inspect.isasyncgen(coro)):
            break
    return place
