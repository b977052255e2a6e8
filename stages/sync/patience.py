"""How long to wait for a peer: as long as such waits have taken, and some more.

    median + k * MAD

The median absolute deviation ignores a few wild waits, so that one hiccup does not make everybody
patient for the rest of the run; a peer that is always slow moves the median and is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from stages.sync.strategy import SyncResult

_SIGMA_PER_MAD = 1.4826  # of a normal distribution


class Patience:
    """The limit of one kind of wait. Grows after each limit that was reached, until waits end."""

    __slots__ = ("_grown", "_limit", "_seen", "first_s", "floor_s", "k")

    def __init__(
        self,
        *,
        first_s: float = 60.0,
        floor_s: float = 0.0,
        k: float = 6.0,
        window: int = 32,
        seen: Iterable[float] = (),
    ) -> None:
        """`first_s` counts until a few waits were seen; no limit is below `floor_s`."""
        if not (first_s > 0 and floor_s >= 0 and k > 0 and window >= 4):
            raise ValueError(
                f"patience needs first_s > 0, floor_s >= 0, k > 0 and a window of 4 or more, got "
                f"{first_s}, {floor_s}, {k}, {window}"
            )
        self.first_s = first_s
        self.floor_s = floor_s
        self.k = k
        self._seen: deque[float] = deque(seen, maxlen=window)
        self._grown = 1.0
        self._limit: float | None = None

    def saw(self, waited_s: float) -> None:
        """A wait has ended well."""
        self._seen.append(waited_s)
        self._grown = 1.0
        self._limit = None

    def gave_up(self) -> None:
        """A wait reached its limit: the next may take twice as long."""
        self._grown = min(2 * self._grown, 1024.0)

    @property
    def limit_s(self) -> float:
        """How long the next wait may take."""
        if self._limit is None:
            self._limit = self._measure()
        return self._limit * self._grown

    def _measure(self) -> float:
        if len(self._seen) < 4:
            return self.first_s
        middle = median(self._seen)
        spread = median(abs(waited - middle) for waited in self._seen)
        # Where all waits were alike the spread is nothing, and any delay would be too late.
        return max(self.floor_s, middle + self.k * max(_SIGMA_PER_MAD * spread, 0.25 * middle))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self._seen), "grown": self._grown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen.clear()
        self._seen.extend(map(float, state["seen"]))
        self._grown = float(state["grown"])
        self._limit = None


def saw_exchange(patience: Patience, results: Sequence[SyncResult]) -> None:
    """An exchange has ended well at every stage.

    One in which letters were lost took the limit itself, and more: counted, it would raise the
    limit, and the next loss would take longer still.
    """
    if not any(result.has_loss for result in results):
        patience.saw(max(result.waited_s for result in results))
