"""Permits: how many steps may be between the pull of their rows and the end of their push.

One pool of tau + 1 for the whole run, with one owner, or the bound means nothing: K workers with
pools of their own would let a row miss K (tau + 1) - 1 updates (embeddings.md 7.2).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

MAX_AUTO_TAU = 16


class Permits:
    """Taken in the order in which they are asked for. Also numbers the steps of all clients."""

    def __init__(self, tau: int, *, num_clients: int = 1, first_ticket: int = 1) -> None:
        """`first_ticket`: who begins anew numbers its steps above those of its earlier life."""
        if tau < 0:
            raise ValueError(f"the staleness bound tau is 0 or more, got {tau}")
        if tau + 1 < num_clients:
            raise ValueError(
                f"{num_clients} workers that push separately need as many permits, tau = {tau} "
                f"gives {tau + 1}: a synchronous step would wait for itself. Raise tau to "
                f"{num_clients - 1}, or sum the gradients and push once"
            )
        self.tau = tau
        self.free = tau + 1
        """Below zero after the bound was lowered: as many must come home before one goes out."""

        self.num_clients = num_clients
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._held: dict[int, int] = {}  # ticket -> the bound when it was given
        self._idle: list[asyncio.Future[None]] = []
        self._last_ticket = first_ticket - 1

    @property
    def in_use(self) -> int:
        return len(self._held)

    @property
    def held(self) -> frozenset[int]:
        """Tickets of the steps that are under way."""
        return frozenset(self._held)

    def bound_of(self, ticket: int) -> int:
        """How stale the step may be: the bound when it got its permit, whatever it is now."""
        return self._held.get(ticket, self.tau)

    def next_ticket(self) -> int:
        """A number that no other step has."""
        self._last_ticket += 1
        return self._last_ticket

    async def acquire(self, ticket: int) -> None:
        """Wait for a permit. Whoever is cancelled while waiting takes none."""
        if self.free > 0 and not self._waiting:
            self.free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.free += 1
                    self._wake()
                elif turn in self._waiting:
                    self._waiting.remove(turn)
                raise
        self._held[ticket] = self.tau

    def release(self, ticket: int) -> None:
        """Give a step's permit back; a second time is nothing."""
        if ticket not in self._held:
            return
        del self._held[ticket]
        self.free += 1
        self._wake()
        if not self._held:
            idle, self._idle = self._idle, []
            for waiter in idle:
                if not waiter.done():
                    waiter.set_result(None)

    def resize(self, tau: int) -> None:
        """Another bound from now on. Steps under way keep their permits, so a lower one holds as
        soon as enough of them are home; shards must allow for the larger of the two."""
        if tau + 1 < self.num_clients:
            raise ValueError(f"{self.num_clients} workers need as many permits, got tau = {tau}")
        self.free += tau - self.tau
        self.tau = tau
        self._wake()

    async def all_home(self) -> None:
        """Wait until no step is under way."""
        while self._held:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    def _wake(self) -> None:
        while self.free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self.free -= 1
                turn.set_result(None)


def tau_for(*, pull_s: float, step_s: float, push_s: float) -> int:
    """The smallest bound that never makes a step wait: enough permits to cover the round trip."""
    if not step_s > 0:
        return MAX_AUTO_TAU
    # A hair less, so that 200 ms of 25 ms steps are 8 permits in floating point too.
    permits = math.ceil((pull_s + step_s + push_s) / step_s - 1e-9)
    return min(MAX_AUTO_TAU, max(0, permits - 1))
