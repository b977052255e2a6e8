"""A frame that lies in several buffers: large parts stay where they are.

Joining the pieces would cost a pass over memory, and as much new memory as the frame has bytes. A
transport that gathers pieces itself, as Ray does when it writes an object, needs no such thing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from compressors.base import Buffer
from compressors.checksum import crc32
from compressors.frame_fields import MAX_PARTS, TooLarge, bytes_view

LARGE_NBYTES = 1 << 16
"""Parts from this size on are not worth a copy."""


class Scattered:
    """Pieces that are one frame when read one after the other.

    A piece may be a view of a tensor's memory: the sender must leave that alone until the frame
    has arrived. The checksum is taken before the journey, so a change on the way is found.
    """

    __slots__ = ("nbytes", "pieces")

    def __init__(self, pieces: Iterable[Any]) -> None:
        self.pieces = tuple(bytes_view(piece) for piece in pieces)
        if len(self.pieces) > 2 * MAX_PARTS + 1:
            raise TooLarge(f"frame in {len(self.pieces)} pieces, limit is {2 * MAX_PARTS + 1}")
        self.nbytes = sum(piece.nbytes for piece in self.pieces)

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)

    def cut(self, start: int, end: int) -> memoryview:
        """The bytes from `start` to `end`: a view where they lie in one piece, else a copy."""
        found = []
        for piece, (first, last) in zip(self.pieces, pairwise(self._edges()), strict=True):
            if first < end and start < last:
                found.append(piece[max(start - first, 0) : end - first])
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def checksum(self, end: int) -> int:
        """CRC-32 of the first `end` bytes."""
        total = 0
        for piece, first in zip(self.pieces, self._edges(), strict=False):
            total = crc32(piece[: max(end - first, 0)], total)
        return total

    def _edges(self) -> list[int]:
        edges = [0]
        for piece in self.pieces:
            edges.append(edges[-1] + piece.nbytes)
        return edges


def gather_small(pieces: Iterable[Buffer]) -> bytes | Scattered:
    """Small neighbours in one piece each, large pieces as they are; bytes if all are small."""
    found: list[Buffer] = []
    small: list[Buffer] = []
    for piece in pieces:
        if memoryview(piece).nbytes < LARGE_NBYTES:
            small.append(piece)
        else:
            found += [b"".join(small), piece]
            small = []
    rest = b"".join(small)
    return Scattered([*found, rest]) if found else rest
