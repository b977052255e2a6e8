"""CRC-32 of large buffers: the native core's where it is faster, else zlib's; the same number.

Frames of replicas hold tens of megabytes, and are checked at both ends: zlib reads some 4 GB/s, the
native core as much as memory gives. The choice changes no bit of any frame, so
machines that choose differently understand each other.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any

import numpy as np

from compressors.base import Buffer
from compressors.native import core, native

SMALL_NBYTES = 1 << 14
"""Below it a call of the native core costs more than it saves."""

_log = logging.getLogger("ray_pipe")
_has_warned = False


def crc32(data: Buffer, start: int = 0) -> int:
    """As `zlib.crc32`: of `data`, going on from `start`."""
    view = memoryview(data)
    if view.nbytes < SMALL_NBYTES or (fast := _fast()) is None:
        return zlib.crc32(view, start)
    raw = np.frombuffer(view, dtype=np.uint8)
    return int(fast(raw.ctypes.data, raw.nbytes, start))


def _fast() -> Any:
    """The native core's entry, where there is one that beats zlib's."""
    global _has_warned
    if core() != "native":
        return None
    module = native()
    if not hasattr(module, "crc32"):
        if not _has_warned:
            _has_warned = True
            _log.warning(
                "the native core is older than this source and has no CRC-32, zlib's is used; "
                "rebuild it with `pip install -e . --no-deps`"
            )
        return None
    return module.crc32 if module.CRC32_FOLDS else None
