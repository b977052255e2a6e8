"""Work that goes on beside a stage's step and must have ended before its rows may be counted on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """Tasks on the stage's loop. What fails is told to `on_error`, what is cancelled is not."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._name = name
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start it; returns at once."""
        what = getattr(work, "__qualname__", repr(work))
        task = asyncio.create_task(work, name=f"{self._name}: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Until everything that goes on now has ended, however it ended."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def cancel(self) -> None:
        """End everything but the task that asks for it."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
