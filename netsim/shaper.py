"""When a frame has left its node, and how late the network makes it.

An `Uplink` is a token bucket of burst zero: it books the time at which it is free again. Any burst
would let messages below it pass unshaped, and compressed activations are that small.
"""

from __future__ import annotations

import math
import random

SEGMENT_NBYTES = 1460  # payload of one Ethernet-sized TCP segment


class Uplink:
    """What one node can send, shared by all its links. Belongs to one event loop.

    A link with a rate of its own has a second one to itself.
    """

    __slots__ = ("_control_free", "free", "rate_bps")

    def __init__(self, rate_bps: float = math.inf) -> None:
        if not rate_bps > 0:
            raise ValueError(f"rate_bps is {rate_bps}, must be more than 0")
        self.rate_bps = rate_bps
        self.free = 0.0
        """When everything booked so far has left."""

        self._control_free = 0.0

    def book(self, now: float, nbytes: int, *, control: bool = False) -> float:
        """Book `nbytes` and return the time at which the last of them has left.

        Bulk goes first come, first served. Control goes before all bulk, even booked bulk; what it
        takes is added to `free`, so in the long run the rate is exact.
        """
        own_s = 8 * nbytes / self.rate_bps
        self.free = max(self.free, now) + own_s
        if control:
            self._control_free = max(self._control_free, now) + own_s
            return self._control_free
        return self.free


class Delays:
    """Seeded jitter and loss of one link, as a reliable, ordered transport shows them."""

    __slots__ = ("_jitter_s", "_loss_rate", "_random", "_round_trip_s", "are_none")

    def __init__(self, *, latency_s: float, jitter_s: float, loss_rate: float, seed: int) -> None:
        self._jitter_s = jitter_s
        self._loss_rate = loss_rate
        self._round_trip_s = 2 * latency_s
        self.are_none = not (jitter_s or loss_rate)
        """Every frame is as late as the latency says."""

        self._random = random.Random(seed)

    def draw(self, nbytes: int) -> tuple[int, float]:
        """Bytes that must be sent again, and seconds the frame is late beyond the latency.

        Lost segments are sent again, and again if lost again; each round is noticed one round
        trip later.
        """
        late_s = self._random.uniform(0, self._jitter_s) if self._jitter_s else 0.0
        resent = 0
        if self._loss_rate:
            lost = self._num_lost(math.ceil(nbytes / SEGMENT_NBYTES))
            while lost:
                resent += min(lost * SEGMENT_NBYTES, nbytes)
                late_s += self._round_trip_s
                lost = self._num_lost(lost)
        return resent, late_s

    def _num_lost(self, num_segments: int) -> int:
        """A binomial draw, by jumping from loss to loss: the gaps are geometric."""
        log_kept = math.log1p(-self._loss_rate)
        lost = 0
        position = 0
        while True:
            gap = math.log(1.0 - self._random.random()) / log_kept
            if gap >= num_segments - position:
                return lost
            position += 1 + int(gap)
            lost += 1
