"""Nested state as flat arrays and a tree of plain values: what safetensors and JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

ARRAY = "$array"
"""In a tree of notes, stands for the array of that name."""


def to_tree(value: Any, path: str, arrays: dict[str, Tensor]) -> Any:
    """The value with each tensor moved to `arrays` and its name in the tensor's place."""
    if isinstance(value, Tensor):
        while path in arrays:  # a key with a slash in it may meet another's path
            path += "'"
        arrays[path] = copy_of(value)
        return {ARRAY: path}
    if isinstance(value, Mapping):
        return {str(key): to_tree(item, f"{path}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_tree(item, f"{path}/{i}", arrays) for i, item in enumerate(value)]
    return value


def from_tree(tree: Any, arrays: Mapping[str, Tensor]) -> Any:
    """What `to_tree` was given, tuples as lists."""
    if isinstance(tree, dict):
        if set(tree) == {ARRAY}:
            return arrays[tree[ARRAY]]
        return {key: from_tree(item, arrays) for key, item in tree.items()}
    if isinstance(tree, list):
        return [from_tree(item, arrays) for item in tree]
    return tree


def under(arrays: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose name begins with `prefix`, without it."""
    return {n.removeprefix(prefix): t for n, t in arrays.items() if n.startswith(prefix)}


def copy_of(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own."""
    return tensor.detach().to("cpu", copy=True).contiguous()
