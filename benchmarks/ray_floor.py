"""The least that a mean over Ray object refs can take: puts, sums and copies, nothing else.

Part of peer_allreduce.py. Pieces go directly to their owners and the means back, as with
`route="direct"`, but as bare arrays: no frame, no checksum, no link, no event loop, no retries, and
all memory is there beforehand. What our own exchange takes beyond this is ours to explain.
"""

from __future__ import annotations

import queue
import time
from typing import Any


class Bare:
    """One member; a Ray actor holds it."""

    def __init__(self, index: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.index = index
        self._peers: list[Any] = []
        self._boxes: dict[str, queue.SimpleQueue[tuple[int, Any]]] = {
            name: queue.SimpleQueue() for name in ("ready", "up", "down")
        }

    def meet(self, peers: list[Any]) -> None:
        self._peers = peers

    def deliver(self, box: str, sender: int, array: Any) -> None:
        self._boxes[box].put((sender, array))

    def run(self, size: int, rounds: int) -> tuple[list[float], float]:
        """Seconds of each round, and one value of the last mean."""
        import numpy as np
        import ray

        num, me = len(self._peers), self.index
        cuts = [slice(size * i // num, size * (i + 1) // num) for i in range(num)]
        others = [(me + shift) % num for shift in range(1, num)]
        vector = np.full(size, float(me), dtype=np.float32)
        out = np.zeros(size, dtype=np.float32)
        mean = np.zeros(cuts[me].stop - cuts[me].start, dtype=np.float32)
        times = []
        for _ in range(rounds):
            self._send("ready", dict.fromkeys(others, 0))
            self._receive("ready", num - 1)
            start = time.perf_counter()
            self._send("up", {other: vector[cuts[other]] for other in others})
            found = self._receive("up", num - 1)
            found[me] = vector[cuts[me]]
            np.add(found[0], found[1], out=mean)
            for index in range(2, num):
                mean += found[index]
            mean /= num
            self._send("down", dict.fromkeys(others, ray.put(mean)))  # stored once for all
            out[cuts[me]] = mean
            for index, array in self._receive("down", num - 1).items():
                out[cuts[index]] = array
            times.append(time.perf_counter() - start)
        return times, float(out[size // 3])

    def _send(self, box: str, what: dict[int, Any]) -> None:
        for other, array in what.items():
            self._peers[other].deliver.remote(box, self.index, array)

    def _receive(self, box: str, num: int) -> dict[int, Any]:
        return dict(self._boxes[box].get(timeout=60) for _ in range(num))
