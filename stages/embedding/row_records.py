"""Whole rows, as the store hands them out for checkpoints and spilling: weights, state, utilities.

A record is what a row is, bit for bit: which chunks are alive, the row-wise accumulator, utilities
with the prune they date from, then the alive chunks, each with its weights and optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SPILLED_FLAG = 0x400


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Rows of one table, by position. `raw` goes back into a table unchanged."""

    keys: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.uint64]
    """Of each row's commit; of a spilled row, the name it has on disk."""
    recency: npt.NDArray[np.uint32]
    """Grows with the time of the last touch; only the order means something."""
    raw: npt.NDArray[np.uint8]
    dim: int
    chunks: int
    state: int

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def spilled(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.raw[:, 1] & (SPILLED_FLAG >> 8), np.bool_)

    @property
    def alive(self) -> npt.NDArray[np.uint8]:
        """Bit c of a row: it has chunk c."""
        return self.raw[:, 0]

    @property
    def accumulators(self) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(self.raw[:, 4:8]).view(np.float32)[:, 0]

    def utilities(self) -> npt.NDArray[np.float32]:
        """[rows, chunks], as of the prune they were written after; none without pruning."""
        if self.chunks == 1:
            return np.zeros((len(self), 0), np.float32)
        halves = np.ascontiguousarray(self.raw[:, 10 : 10 + 2 * self.chunks]).view(np.float16)
        return halves.astype(np.float32)

    def parts(self) -> npt.NDArray[np.float32]:
        """[rows, 1 + state, dim]: weights, then each kind of state; zeros where pruned."""
        chunk = self.dim // self.chunks
        head = 8 + ((2 * (self.chunks + 1) + 3) // 4 * 4 if self.chunks > 1 else 0)
        stored = np.ascontiguousarray(self.raw[:, head:]).view(np.float32)
        stored = stored.reshape(len(self), self.chunks, 1 + self.state, chunk)
        alive = (self.alive[:, None] >> np.arange(self.chunks)) & 1
        rank = np.cumsum(alive, axis=1) - 1
        placed = np.take_along_axis(stored, np.maximum(rank, 0)[:, :, None, None], axis=1)
        placed = np.where(alive[:, :, None, None] != 0, placed, np.float32(0))
        return placed.transpose(0, 2, 1, 3).reshape(len(self), 1 + self.state, self.dim)

    def weights(self) -> npt.NDArray[np.float32]:
        """[rows, dim]; zeros where pruned or spilled."""
        return np.ascontiguousarray(self.parts()[:, 0])
