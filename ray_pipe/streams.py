"""Output whose reader may go away, as `head` does, and `tee` at Ctrl-C. No rich."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO


def let_go(stream: TextIO) -> None:
    """Of a stream whose reader is gone; else Python complains of it at its end, and changes the
    exit status. Of one that is read it changes nothing."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
