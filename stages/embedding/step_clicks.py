"""The samples of a step as stage 0 sees them: whose ids, which micro-batch, which feature.

Path: ray_pipe.ctr_data -> stages.embedding.step_clicks -> stages.embedding.feed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class Bag(Protocol):
    """Ids of one feature: sample i has `ids[offsets[i]:offsets[i + 1]]`."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...


class Clicks(Protocol):
    """Samples with dense features and a bag of ids for each feature."""

    @property
    def dense(self) -> Tensor: ...
    @property
    def bags(self) -> Sequence[Bag]: ...


class ClickSamples(Protocol):
    """What stage 0 needs of the data."""

    def clicks(self, ids: Sequence[int]) -> Clicks: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClicks:
    """The samples of a step, and where each micro-batch and each feature is in them."""

    clicks: Clicks
    starts: Sequence[int]
    """Sample with which each micro-batch begins, and one past the last."""

    first: Sequence[int]
    """Place of each feature's first id among the ids of its table."""

    ids: Mapping[str, Any]
    """All ids of each table, feature after feature."""

    @classmethod
    def read(
        cls,
        samples: ClickSamples,
        micro_batches: Sequence[Sequence[int]],
        features: Sequence[str],
    ) -> StepClicks:
        """`features` names the table of each bag."""
        clicks = samples.clicks([sample for part in micro_batches for sample in part])
        starts = [0]
        for part in micro_batches:
            starts.append(starts[-1] + len(part))
        first: list[int] = []
        ids: dict[str, list[Any]] = {}
        sizes: Counter[str] = Counter()
        for table, bag in zip(features, clicks.bags, strict=True):
            first.append(sizes[table])
            ids.setdefault(table, []).append(bag.ids.numpy())
            sizes[table] += len(bag.ids)
        joined = {name: np.concatenate(parts) for name, parts in ids.items()}
        return cls(clicks=clicks, starts=starts, first=first, ids=joined)

    def pooled(
        self,
        micro_batch: int,
        features: Sequence[str],
        rows: Mapping[str, Tensor],
        index: Mapping[str, Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Dense features of a micro-batch, and one pooled vector a feature."""
        start, stop = self.starts[micro_batch], self.starts[micro_batch + 1]
        pooled = []
        for table, bag, first in zip(features, self.clicks.bags, self.first, strict=True):
            offsets = bag.offsets[start : stop + 1]
            low, high = int(offsets[0]), int(offsets[-1])
            pooled.append(
                pool(rows[table], index[table][first + low : first + high], offsets - low)
            )
        return self.clicks.dense[start:stop], pooled


def pool(rows: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each sample's rows; an empty bag is zeros."""
    num = len(offsets) - 1
    if len(index) == num and torch.equal(offsets, torch.arange(num + 1)):
        return rows.index_select(0, index)  # one id each, as most features are
    if not len(rows):
        return rows.new_zeros(num, rows.shape[1])
    return functional.embedding_bag(index, rows, offsets, mode="sum", include_last_offset=True)
