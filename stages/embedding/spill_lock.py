"""A spill folder belongs to one process.

Records are called by key and stamp. A second run that spills to the same folder would empty it, and
then write other rows under the names of the first one's: those have a right checksum, and would
come back as somebody else's. So whoever opens a folder locks it; the lock ends with the process.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

from stages.embedding.row_errors import SpillBusyError

FILE = "owner.lock"
WAIT_S = 10.0
"""A shard takes the folder over from one that is just being ended."""

LOOK_S = 0.1


class FolderLock:
    """Holds a folder until it is released, or the process ends."""

    def __init__(self, folder: Path, *, wait_s: float | None = None) -> None:
        self._path = folder / FILE
        file = self._take(time.monotonic() + (WAIT_S if wait_s is None else wait_s))
        self._close = weakref.finalize(self, os.close, file)  # whoever is forgotten lets go, too

    def _take(self, until_s: float) -> int:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(file, 32).decode(errors="replace") or "unknown"
                os.close(file)
                if time.monotonic() >= until_s:
                    raise SpillBusyError(
                        f"the spill folder {self._path.parent} is in use by process {owner}; give "
                        "each run and each model a folder of its own, or end that process"
                    ) from None
                time.sleep(LOOK_S)
                continue
            if self._is_there(file):
                os.ftruncate(file, 0)
                os.write(file, str(os.getpid()).encode())
                return file
            os.close(file)  # its owner has removed it meanwhile

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Somebody else may have the folder; a second time is nothing."""
        if self._close.alive:
            self._path.unlink(missing_ok=True)
            self._close()
