"""Memory for vectors that come again at every exchange.

A new vector of 40 MB costs ten times what writing it costs: the system maps and clears it page by
page, and takes it back when it is freed. Exchanges make vectors of the same few sizes for ever.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGE_NBYTES = 1 << 20
"""Smaller vectors are the allocator's business: it keeps such memory itself."""

NUM_LARGEST = 3
"""Memory that nobody holds is kept up to so many times the largest vector: one exchange needs its
result, and pieces that are a vector together, beside what is kept of the exchange before."""


class VectorMemory:
    """Gives memory for vectors, and takes it back when nobody can reach it any more.

    Views, packets that are kept in case they are asked for again and frames on their way all count:
    there is nothing to give back by hand, hence nothing to give back too early.
    """

    def __init__(self) -> None:
        self._spares: list[mmap.mmap] = []  # the longest unused first
        self._lock = threading.Lock()
        self._largest_nbytes = 0
        self.num_made = 0
        """Pieces of memory that had to be asked of the system."""

    def vector(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A vector of `size` values that may be anything."""
        nbytes = size * dtype.itemsize
        if nbytes < LARGE_NBYTES:
            return torch.empty(size, dtype=dtype)
        memory = self._spare(nbytes) or self._make(nbytes)
        # The tensor's storage keeps this array, and nothing else does: it ends with the last view.
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, _take_back, weakref.ref(self), memory).atexit = False
        return torch.from_numpy(array).view(dtype)

    def _make(self, nbytes: int) -> mmap.mmap:
        self.num_made += 1
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # a fault for 2 MB in place of one for 4 KB
        return memory

    def _spare(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            self._largest_nbytes = max(self._largest_nbytes, nbytes)
            for index, memory in enumerate(self._spares):
                if len(memory) == nbytes:
                    return self._spares.pop(index)
        return None

    def _keep(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._spares.append(memory)
            while sum(map(len, self._spares)) > NUM_LARGEST * self._largest_nbytes:
                del self._spares[0]


def _take_back(owner: Any, memory: mmap.mmap) -> None:
    pool = owner()
    if pool is not None:
        pool._keep(memory)
