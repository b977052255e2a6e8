"""A real asyncio loop in a thread of its own, for protocol code inside an actor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_FD_LIMIT = 1000  # select() cannot watch descriptors above FD_SETSIZE = 1024


class LoopThread:
    """A real asyncio loop in a daemon thread of its own. Knows nothing of Ray."""

    def __init__(
        self, name: str = "loop", *, on_error: Callable[[BaseException], object] | None = None
    ) -> None:
        """`on_error` hears of errors in callbacks and forgotten tasks; else they are logged."""
        self.name = name
        self._on_error = on_error
        self._loop = asyncio.SelectorEventLoop(_precise_selector())
        self._loop.set_exception_handler(self._handle)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """For `loop.time()`; everything else must happen on the loop's own thread."""
        return self._loop

    def submit(self, coro: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start `coro` on the loop, from any thread; cancelling the future cancels it there."""
        self._refuse_if_stopped(coro)
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def call_soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Call `fn(*args)` on the loop, from any thread; calls of one thread keep their order."""
        self._refuse_if_stopped()
        self._loop.call_soon_threadsafe(fn, *args)

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Cancel all tasks, wait for them, end the thread. Stopping twice does nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.get_ident() == self._thread.ident:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"loop thread {self.name!r} did not stop within {timeout_s:g} s: a callback blocks "
                "it, or a task swallows its cancellation"
            )

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._on_error is not None and isinstance(error, BaseException):
            self._on_error(error)
        else:
            loop.default_exception_handler(context)

    def _refuse_if_stopped(self, coro: Coroutine[Any, Any, Any] | None = None) -> None:
        if self._stopped.is_set():
            if coro is not None:
                coro.close()
            raise RuntimeError(f"loop thread {self.name!r} is stopped and takes no more work")


def _precise_selector() -> selectors.BaseSelector:
    """select() waits in microseconds, epoll in milliseconds; but it takes low numbers only."""
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    return selectors.SelectSelector() if probe < _FD_LIMIT else selectors.DefaultSelector()
