"""Which core the row store runs on: the C++ module, or the Python twin.

Falling back is never silent: it is logged once as a warning with the cause, `RowStore.native` and
`stats()` tell, and RAY_PIPE_CORE=native makes it an error.
"""

from __future__ import annotations

import logging
from typing import Any

from compressors import native as cores
from stages.embedding import row_store_twin

ROWS_ABI = 5
"""Of the row store in `ray_pipe_native`; raised when one of its entry points changes."""

_log = logging.getLogger("ray_pipe")
_warned = False


def core(wanted: str | None = None) -> tuple[Any, bool]:
    """The module to use, and whether it is the native one. `wanted` is "native", "twin" or None."""
    if wanted not in (None, "native", "twin"):
        raise ValueError(f'core is "native", "twin" or None, got {wanted!r}')
    if wanted == "twin" or (wanted is None and cores.core() == "torch"):
        if wanted is None:
            _warn("RAY_PIPE_CORE or a missing native core says so")
        return row_store_twin, False
    module = cores.native()
    found = getattr(module, "ROWS_ABI", None)
    if found == ROWS_ABI:
        return module, True
    cause = (
        f"ray_pipe_native has row store ABI {found}, this source needs {ROWS_ABI}; rebuild it with "
        "`pip install -e . --no-deps`"
    )
    if wanted == "native" or cores._chosen == "native":
        raise ImportError(cause)
    _warn(cause)
    return row_store_twin, False


def _warn(cause: str) -> None:
    global _warned
    if not _warned:
        _log.warning(
            "the row store runs as its Python twin, about a hundred times slower: %s", cause
        )
    _warned = True
