"""The embeddings' end in stage 0 where batches come from a loader: as `Feed`, as they come.

Path: stages.embedding.loaded -> stages.embedding.loaded_feed -> stages.embedding.feed

Steps are pulled ahead as far as permits allow and their batches are here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.embedding.feed import LOOKAHEAD, Feed
from stages.embedding.loaded import Inbox, LoadedFeature, Part
from stages.embedding.pooling import pooled
from stages.plan import StepPlan

REFUSAL = "NonFiniteGradientError"
"""In the words of an event: gradients that were not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedClicks:
    """The micro-batches of a step, and where each feature's ids are among those of its table."""

    features: tuple[LoadedFeature, ...]
    parts: Sequence[Part]
    first: Mapping[tuple[int, str], int]
    ids: Mapping[str, Any]
    """All ids of each table."""

    @classmethod
    def read(cls, inbox: Inbox, micro_batches: Sequence[Sequence[int]]) -> LoadedClicks:
        parts = [inbox.part(ids) for ids in micro_batches]
        first: dict[tuple[int, str], int] = {}
        ids: dict[str, list[Any]] = {}
        sizes: dict[str, int] = {}
        for number, part in enumerate(parts):
            for feature, bag in zip(inbox.features, part.bags, strict=True):
                if feature.sharded:
                    first[number, feature.name] = sizes.get(feature.table, 0)
                    ids.setdefault(feature.table, []).append(bag.ids.reshape(-1).numpy())
                    sizes[feature.table] = first[number, feature.name] + bag.ids.numel()
        joined = {name: np.concatenate(pieces) for name, pieces in ids.items()}
        return cls(features=inbox.features, parts=parts, first=first, ids=joined)

    def pooled(
        self,
        micro_batch: int,
        features: Sequence[str],
        rows: Mapping[str, Tensor],
        index: Mapping[str, Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Dense features of a micro-batch, and a vector for each sharded feature, flat."""
        part, vectors = self.parts[micro_batch], []
        for feature, bag in zip(self.features, part.bags, strict=True):
            if not feature.sharded:
                continue
            start = self.first[micro_batch, feature.name]
            places = index[feature.table][start : start + bag.ids.numel()]
            vector = pooled(
                rows[feature.table], places.reshape(bag.ids.shape), bag.offsets, feature.pooling
            )
            vectors.append(vector.reshape(part.num_samples, -1))
        dense = part.dense
        return torch.empty(part.num_samples, 0) if dense is None else dense, vectors


class LoadedFeed(Feed):
    """Rows and gradients for batches of a loader."""

    def __init__(self, spec: Any, *, samples: Inbox, **options: Any) -> None:
        super().__init__(spec, samples=samples, **options)  # type: ignore[arg-type]
        self._inbox = samples
        self._trains = False
        self._is_letting_go = False
        self._begun = -1
        """The newest training step: it is asked for, though `_number` may still be the one before
        while its rows are on their way."""

        samples.on_step = self._on_step

    async def ready(self, plan: StepPlan) -> None:
        self._trains = plan.train
        if plan.train:
            self._begun = plan.step
        await super().ready(plan)

    async def abort(self) -> None:
        """Nothing is pulled ahead until it is known which step comes next."""
        self._trains = False
        await super().abort()

    async def _let_go(self) -> None:
        """Batches that come meanwhile wait: a step is asked for next, and must be the first that
        stands in line for a permit."""
        self._is_letting_go = True
        try:
            await super()._let_go()
        finally:
            self._is_letting_go = False

    def numbers(self) -> dict[str, Any]:
        """With the words about gradients that were not finite, since the last call."""
        refusals = [event for event in self.events if REFUSAL in event]
        self.events = [event for event in self.events if event not in refusals]
        return super().numbers() | {"refusals": refusals}

    def _read(self, micro_batches: Sequence[Sequence[int]]) -> Any:
        return LoadedClicks.read(self._inbox, micro_batches)

    def _on_step(self) -> None:
        """A batch came: if the steps before it are asked for, it is next."""
        if self._trains and self._ask_after is None and not self._is_letting_go:
            self._pull_ahead(self._begun)

    def _pull_ahead(self, step: int) -> None:
        if self._is_closed:
            return
        step = max(step, self._begun)
        for number in range(step + 1, step + self.permits.tau + LOOKAHEAD + 1):
            if number in self._coming:
                continue
            micro_batches = self._inbox.micro_batches(number)
            if micro_batches is None:
                return  # permits are taken in the order of asking, so none may be passed by
            self._ask(number, micro_batches)
