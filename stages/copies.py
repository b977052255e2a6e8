"""Copies of a state that wait to be written, in a thread beside training.

Path: stages.actor_saving -> stages.copies -> stages.storage

Whoever copies and whoever writes are two calls from afar, and either may come first: the one that
writes waits here. It could be given the other's result as an argument instead, but then Ray would
hold back every later call to the actor until the copy is made, and that comes after a step, which
may wait for a neighbour that is lost: signs of life and the abort among them.
"""

from __future__ import annotations

from collections import deque
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT_KEYS = 16
"""Of those that are over: more than are ever under way together."""


class Copies(Generic[T]):
    """Copies by key. Keys are copied in the order in which they are written."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._copies: dict[str, T | Exception] = {}
        self._num_put = 0
        self._over: deque[str] = deque(maxlen=KEPT_KEYS)
        """Taken, or given up: what still comes for them is too late."""

    def __len__(self) -> int:
        return len(self._copies)

    def put(self, key: str, copy: T | Exception) -> bool:
        """The copy, or why there is none; who waits for an earlier one waits in vain. False if it
        comes too late: whoever was to write it has ended."""
        with self._changed:
            if key in self._over:
                return False
            self._copies[key] = copy
            self._num_put += 1
            self._changed.notify_all()
            return True

    def put_if_missing(self, key: str, why: Exception) -> None:
        """There will be no copy, unless it is here already."""
        with self._changed:
            if key not in self._copies:
                self.put(key, why)

    def take(self, key: str) -> T:
        """Waits for the copy; raises what `put` was given in its place."""
        with self._changed:
            before = self._num_put
            self._changed.wait_for(lambda: key in self._copies or self._num_put > before)
            copy = self._copies.pop(key, None)
            self._over.append(key)
        if copy is None:
            raise RuntimeError("it was not copied: the order for it was lost")
        if isinstance(copy, Exception):
            raise copy
        return copy

    def clear(self) -> list[T]:
        """Nobody will write what is here; it is handed out, and who waits is told."""
        with self._changed:
            left = [copy for copy in self._copies.values() if not isinstance(copy, Exception)]
            self._copies.clear()
            self._num_put += 1
            self._changed.notify_all()
        return left
