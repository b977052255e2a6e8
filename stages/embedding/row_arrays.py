"""Checks of the arrays that go into the row store: right as they are, or refused. Never copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def check(name: str, array: Any, dtype: Any, shape: tuple[int | None, ...]) -> Array:
    """`array` itself, if it has this dtype and shape (None: any length) and is C-contiguous."""
    wanted = np.dtype(dtype)
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} must be a numpy array of {wanted}, got {type(array).__name__}; "
            "a CPU tensor gives one without a copy: `tensor.numpy()`"
        )
    if array.dtype != wanted:
        raise TypeError(
            f"{name} must be {wanted}, got {array.dtype}; convert it with `.astype({wanted})`"
        )
    fits = array.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, array.shape)
    )
    if not fits:
        shown = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have the shape [{shown}], got {list(array.shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is not C-contiguous (strides {array.strides}); the store uses arrays where "
            "they lie, so copy it with `numpy.ascontiguousarray` if that is meant"
        )
    return array


def room_for(name: str, array: Any, dtype: Any, shape: tuple[int, ...]) -> Array:
    """A new array, or the caller's after the same checks; it must be writable."""
    if array is None:
        return np.empty(shape, dtype)
    checked = check(name, array, dtype, shape)
    if not checked.flags.writeable:
        raise ValueError(f"{name} is read-only, and results are written to it")
    return checked


def nbytes_of(text: int | str) -> int:
    """1024, "512MiB", "6GiB", "1.5GB"."""
    if isinstance(text, int):
        return text
    units = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ").strip()
    unit = text.strip()[len(number) :].strip().lower() or "b"
    try:
        return int(float(number) * units[unit])
    except (KeyError, ValueError):
        raise ValueError(
            f"a size is a number with a unit, as in 512MiB or 6GiB, got {text!r}"
        ) from None
