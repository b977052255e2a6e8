"""Room for values in a file that is written again and again.

Path: compressors.row_log -> compressors.row_room

A value that replaces another is written beside it, and only then is the other's place given back:
so the commit before can be read until the next one begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

PAGE_NBYTES = 4096
LINE_NBYTES = 64


def room_for(nbytes: int) -> int:
    """Bytes that a value of `nbytes` takes in the file: whole pages, or lines if it is small."""
    unit = PAGE_NBYTES if nbytes >= PAGE_NBYTES else LINE_NBYTES
    return -(-nbytes // unit) * unit


class Room:
    """Which parts of a file are free. Rows of one shape, as most are, fit each other's places."""

    def __init__(self, taken: Iterable[tuple[int, int]] = (), *, end: int = 0) -> None:
        """`taken` are (offset, nbytes) of values that live; all else up to `end` is free."""
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size
        self.end = 0
        """Where the file ends, or will."""

        places = [(offset, room_for(nbytes)) for offset, nbytes in sorted(taken)]
        sizes = sorted({size for _, size in places}, reverse=True)
        for offset, size in places:
            self._free_all(self.end, offset, sizes)
            self.end = offset + size
        self._free_all(self.end, end, sizes)
        self.end = max(self.end, end)

    def take(self, nbytes: int) -> int:
        """The offset of a free part, at the end of the file if none fits."""
        size = room_for(nbytes)
        if fitting := self._free[size]:
            return fitting.pop()
        self.end += size
        return self.end - size

    def give_back(self, offset: int, nbytes: int) -> None:
        """Nobody needs that value when the next one is written."""
        self._free[room_for(nbytes)].append(offset)

    def _free_all(self, start: int, stop: int, sizes: list[int]) -> None:
        """Cut a gap into parts of the sizes in use, the large ones first."""
        for size in sizes:
            while start + size <= stop:
                self._free[size].append(start)
                start += size
