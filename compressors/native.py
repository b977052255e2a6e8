"""Which core works on CPU tensors: the C++ module, or torch operations.

The choice is the fastest that can be imported. Falling back is never silent: a missing or outdated
native module is logged once as a warning, `core()` tells, and RAY_PIPE_CORE=native makes it an
error. RAY_PIPE_CORE=torch, or `with use("torch"):`, chooses the twins on purpose.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType, TracebackType
from typing import Any, Literal

NATIVE_ABI = 3
"""Of `ray_pipe_native`; raised when one of its entry points changes."""

_log = logging.getLogger("ray_pipe")
_UNTRIED = object()
_loaded: Any = _UNTRIED  # the module, or None where it cannot be used
_chosen: str | None = os.environ.get("RAY_PIPE_CORE") or None


def core() -> Literal["native", "torch"]:
    """Which core serves CPU tensors in this process."""
    if _chosen == "torch":
        return "torch"
    return "native" if native() is not None else "torch"


class use:
    """Choose the core in this process; as a context, until the context ends."""

    def __init__(self, core: str) -> None:
        global _chosen, _loaded
        if core not in ("native", "torch"):
            raise ValueError(f'core is "native" or "torch", got {core!r}')
        if core == "native":
            _loaded = _import()
        self._before = _chosen
        _chosen = core

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _chosen
        _chosen = self._before


def native() -> Any:
    """The native module, imported at the first call; None, with one warning, without it."""
    global _loaded
    if _loaded is _UNTRIED:
        if _chosen not in (None, "native", "torch"):
            raise ValueError(f'RAY_PIPE_CORE is "native" or "torch", got {_chosen!r}')
        try:
            _loaded = _import()
        except ImportError as error:
            if _chosen == "native":
                raise
            _loaded = None
            _log.warning("native core not in use, codecs run as torch operations: %s", error)
    return _loaded


def build_info() -> dict[str, str]:
    """How the native core was built and which instruction set it uses; empty without it."""
    module = native()
    return dict(module.build_info()) if module is not None else {}


def _import() -> ModuleType:
    try:
        module = importlib.import_module("ray_pipe_native")
    except ImportError as error:
        raise ImportError(f"{error}; build it with `pip install -e . --no-deps`") from error
    if module.ABI != NATIVE_ABI:
        raise ImportError(
            f"ray_pipe_native has ABI {module.ABI}, this source needs {NATIVE_ABI}; "
            "rebuild it with `pip install -e . --no-deps`"
        )
    return module
