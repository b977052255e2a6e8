"""Rows of the Python twin: what they begin as, how they learn, how they are cut.

The dull version of native/rows/table.cpp and optimize.cpp: one row at a time, numpy, the same
operations in the same order, hence the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.embedding import row_rules as rules

F32 = npt.NDArray[np.float32]
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """The finaliser of SplitMix64: a bijection on 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def name_hash(name: str) -> int:
    """FNV-1a."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


@dataclass(slots=True)
class Row:
    """A row, or with `disk_stamp` the marker of one that is on disk. Never changed once stored."""

    alive: int
    accumulator: np.float32
    epoch: int
    utilities: npt.NDArray[np.uint16]
    chunks: list[F32]  # weights and state of each alive chunk, one array each
    stamp: int = 0
    disk_stamp: int | None = None


@dataclass(slots=True, kw_only=True)
class Shape:
    """What a table's rows are made of. The arguments of `native.RowStore.table`, by name."""

    name: str
    dim: int
    chunks: int
    optimizer: int
    rule: tuple[float, float, float, float]
    init: int
    mean: float
    scale: float
    seed: int
    decay: float
    utility_scale: float
    decays: list[np.float32] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decays = [np.float32(1)]
        while len(self.decays) < 4096 and self.decays[-1] > np.float32(1e-12):
            self.decays.append(self.decays[-1] * np.float32(self.decay))
        if self.decays[-1] <= np.float32(1e-12):
            self.decays.pop()

    @property
    def chunk(self) -> int:
        return self.dim // self.chunks

    @property
    def state(self) -> int:
        return {rules.ADAM_RULE: 2, rules.ADAGRAD_RULE: 1}.get(self.optimizer, 0)

    @property
    def all_chunks(self) -> int:
        return (1 << self.chunks) - 1

    @property
    def utility_bytes(self) -> int:
        return (2 * (self.chunks + 1) + 3) // 4 * 4 if self.chunks > 1 else 0

    def payload_bytes(self, alive: int) -> int:
        return self.utility_bytes + 4 * self.chunk * (1 + self.state) * alive

    def cell_bytes(self, alive: int) -> int:
        return -(-(32 + self.payload_bytes(alive)) // 16) * 16

    @property
    def record_bytes(self) -> int:
        return 8 + self.payload_bytes(self.chunks)

    @property
    def salt(self) -> int:
        return mix((self.seed * GOLDEN + name_hash(self.name)) & MASK)

    def initial(self, key: int) -> F32:
        base = mix((key * GOLDEN + mix((self.salt + GOLDEN) & MASK)) & MASK)
        mean, scale = np.float32(self.mean), np.float32(self.scale)
        out = np.empty(self.dim, np.float32)
        for d in range(self.dim):
            if self.init == rules.ZEROS_INIT:
                out[d] = mean
            elif self.init == rules.UNIFORM_INIT:
                r = (mix((base + d * GOLDEN) & MASK) >> 40) - (1 << 23)
                out[d] = mean + scale * (np.float32(r) * np.float32(2.0**-23))
            else:
                total = -6 * 65535
                for part in range(3):
                    r = mix((base + (3 * d + part) * GOLDEN) & MASK)
                    total += sum(r >> shift & 0xFFFF for shift in (0, 16, 32, 48))
                out[d] = mean + scale * (np.float32(total) * np.float32(2.0**-16))
        return out

    def fresh_chunk(self, weights: F32) -> F32:
        first = self.rule[3] if self.optimizer == rules.ADAGRAD_RULE else 0.0
        return np.concatenate([weights, np.full(self.chunk * self.state, first, np.float32)])

    def new_row(self, weights: F32, alive: int, epoch: int) -> Row:
        parts = weights.reshape(self.chunks, self.chunk)
        return Row(
            alive=alive,
            accumulator=np.float32(self.rule[3]),
            epoch=epoch & 0xFFFF,
            utilities=np.zeros(self.chunks, np.uint16),
            chunks=[self.fresh_chunk(parts[c]) for c in self.ranks(alive)],
        )

    def ranks(self, alive: int) -> list[int]:
        """The chunks of a row, in the order in which they are stored."""
        return [c for c in range(self.chunks) if alive >> c & 1]

    def read(self, row: Row) -> F32:
        out = np.zeros((self.chunks, self.chunk), np.float32)
        for rank, c in enumerate(self.ranks(row.alive)):
            out[c] = row.chunks[rank][: self.chunk]
        return out.reshape(-1)

    def rewrite(self, row: Row, weights: F32) -> Row:
        parts = weights.reshape(self.chunks, self.chunk)
        chunks = [
            np.concatenate([parts[c], row.chunks[rank][self.chunk :]])
            for rank, c in enumerate(self.ranks(row.alive))
        ]
        return Row(row.alive, row.accumulator, row.epoch, row.utilities, chunks)

    def add(self, row: Row, delta: F32) -> Row:
        return self.rewrite(row, self.read(row) + delta)

    def reshape(self, row: Row, alive: int) -> Row:
        have = dict(zip(self.ranks(row.alive), row.chunks, strict=True))
        zero = self.fresh_chunk(np.zeros(self.chunk, np.float32))
        chunks = [have[c] if c in have else zero.copy() for c in self.ranks(alive)]
        # Utilities with the epoch that they are of: a cut is no use of the row.
        return Row(alive, row.accumulator, row.epoch, row.utilities, chunks)

    # --- utilities --------------------------------------------------------------------------------

    def decay_since(self, row: Row, epoch: int) -> np.float32:
        passed = (epoch - row.epoch) & 0xFFFF
        return self.decays[passed] if passed < len(self.decays) else np.float32(0)

    def idle_periods(self, row: Row, epoch: int) -> int:
        """Whole periods between prunes without a step on the row."""
        return max(0, ((epoch - row.epoch) & 0xFFFF) - 1)

    def current(self, row: Row, epoch: int, weights: F32 | None = None) -> npt.NDArray[np.uint16]:
        """Utilities as of this epoch, as the bits of half floats; then times `weights`, if any."""
        values = row.utilities.view(np.float16).astype(np.float32)
        now = _half(values * self.decay_since(row, epoch))
        if weights is None:
            return now
        return _half(now.view(np.float16).astype(np.float32) * weights)

    # --- learning ---------------------------------------------------------------------------------

    def numbers(self, lr: float, step: int) -> tuple[np.float32, ...]:
        """(-lr, eps, 1 - beta1, 1 - beta2), rounded as torch rounds its scalars."""
        eps, beta1, beta2, _ = self.rule
        if self.optimizer == rules.ADAM_RULE:
            lr = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return np.float32(-lr), np.float32(eps), np.float32(1 - beta1), np.float32(1 - beta2)

    def optimize(self, row: Row, gradient: F32, count: np.float32, step: Any, epoch: int) -> Row:
        minus_lr, eps, rest1, rest2 = step
        parts = gradient.reshape(self.chunks, self.chunk)
        wide = parts.astype(np.float64)
        squares = np.cumsum(wide * wide, axis=1)[:, -1]  # first to last, never pairwise
        accumulator, utilities = row.accumulator, row.utilities
        if self.optimizer == rules.ROW_ADAGRAD_RULE:
            total = np.float64(0)
            for c in self.ranks(row.alive):
                total += squares[c]
            accumulator = accumulator + np.float32(total / self.dim)
        if self.chunks > 1:
            gained = count * np.sqrt(squares).astype(np.float32) * np.float32(self.utility_scale)
            values = row.utilities.view(np.float16).astype(np.float32)
            utilities = _half(values * self.decay_since(row, epoch) + gained)
        chunks = []
        for rank, c in enumerate(self.ranks(row.alive)):
            g, old = parts[c], row.chunks[rank]
            w = old[: self.chunk]
            if self.optimizer == rules.NONE:
                new = [old]
            elif self.optimizer == rules.SGD_RULE:
                new = [w + minus_lr * g]
            elif self.optimizer == rules.ROW_ADAGRAD_RULE:
                new = [w + minus_lr * g / (np.sqrt(accumulator) + eps)]
            elif self.optimizer == rules.ADAGRAD_RULE:
                total_squares = old[self.chunk :] + g * g
                new = [w + minus_lr * g / (np.sqrt(total_squares) + eps), total_squares]
            else:
                m, v = old[self.chunk : 2 * self.chunk], old[2 * self.chunk :]
                m = (g - m) * rest1 + m
                v = (g * g - v) * rest2 + v
                new = [w + minus_lr * (m / (np.sqrt(v) + eps)), m, v]
            chunks.append(np.concatenate(new).astype(np.float32, copy=False))
        return Row(row.alive, accumulator, epoch & 0xFFFF, utilities, chunks)

    # --- records ----------------------------------------------------------------------------------

    def to_record(self, row: Row) -> bytes:
        if row.disk_stamp is not None:
            return np.uint16(0x400).tobytes().ljust(self.record_bytes, b"\0")
        parts = [np.uint32(row.alive).tobytes(), np.float32(row.accumulator).tobytes()]
        if self.chunks > 1:
            head = np.uint16(row.epoch).tobytes() + row.utilities.tobytes()
            parts.append(head.ljust(self.utility_bytes, b"\0"))
        parts += [chunk.tobytes() for chunk in row.chunks]
        return b"".join(parts).ljust(self.record_bytes, b"\0")

    def from_record(self, record: bytes) -> Row:
        alive = record[0]
        at = 8 + self.utility_bytes
        size = 4 * self.chunk * (1 + self.state)
        head = np.frombuffer(record, np.uint16, self.chunks + 1, 8) if self.chunks > 1 else None
        return Row(
            alive=alive,
            accumulator=np.frombuffer(record, np.float32, 1, 4)[0],
            epoch=0 if head is None else int(head[0]),
            utilities=np.zeros(self.chunks, np.uint16) if head is None else head[1:].copy(),
            chunks=[
                np.frombuffer(record, np.float32, size // 4, at + i * size).copy()
                for i in range(alive.bit_count())
            ],
        )


def _half(values: F32) -> npt.NDArray[np.uint16]:
    """To nearest even, saturating at the largest half float."""
    return np.minimum(values, np.float32(65504)).astype(np.float16).view(np.uint16)
