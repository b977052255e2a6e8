"""From rows to one vector for each sample and feature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def as_bags(ids: Any) -> tuple[Tensor, Tensor | None]:
    """Flat ids and where each sample's begin (with the end); None: a whole tensor of ids.

    Takes int64 tensors of one id a sample [B] or several [B, L], and anything with `ids` and
    `offsets`, such as `rec.Jagged`.
    """
    if hasattr(ids, "offsets"):
        flat, offsets = ids.ids, ids.offsets
        if flat.dtype != torch.int64 or offsets.dtype != torch.int64:
            raise TypeError(f"ids and offsets are int64, got {flat.dtype} and {offsets.dtype}")
        ends = (0, int(flat.numel()))
        if not len(offsets) or (int(offsets[0]), int(offsets[-1])) != ends:
            raise ValueError(f"offsets go from 0 to {flat.numel()}, one more than samples")
        return flat, offsets
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids are an int64 tensor or rec.Jagged, got {type(ids).__name__}")
    if ids.dtype != torch.int64 or ids.dim() not in (1, 2):
        raise TypeError(f"ids are int64 of shape [B] or [B, L], got {ids.dtype} {list(ids.shape)}")
    return ids, None


def pooled(rows: Tensor, index: Tensor, offsets: Tensor | None, how: str) -> Tensor:
    """One vector a sample from `rows[index]`; an empty bag is zeros, and `none` pools nothing."""
    if how == "none":
        if offsets is not None:
            raise ValueError("pooling none wants the same number of ids in each sample")
        return rows[index]
    if offsets is None:
        wide = index.reshape(len(index), -1)
        offsets = torch.arange(0, wide.numel() + 1, max(1, wide.shape[1]))
        if not wide.numel():
            offsets = torch.zeros(len(index) + 1, dtype=torch.int64)
    if not index.numel():
        return rows.new_zeros(len(offsets) - 1, rows.shape[1])
    mode = "mean" if how == "mean" else "sum"
    vectors = functional.embedding_bag(
        index.reshape(-1), rows, offsets, mode=mode, include_last_offset=True
    )
    if how == "sqrtn":
        counts = (offsets[1:] - offsets[:-1]).clamp(min=1)
        vectors = vectors / counts.to(vectors.dtype).sqrt()[:, None]
    return vectors
