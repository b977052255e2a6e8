"""Tables of few ids, kept in the first dense block instead of on shards.

Path: ray_pipe.ctr_workload -> ray_pipe.ctr_small -> stages.embedding.replicated

A feature like gender or hour is in nearly every sample: asynchrony gains it nothing. Its ids are
numbered, the number travels as one more dense column into the first block, and that block has the
rows as parameters of the dense network, trained in step with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ray_pipe.ctr_data import Bags, CtrBatch, CtrSamples, Ints
from stages.embedding.replicated import Replicated
from stages.embedding.row_rules import Init, Sgd
from stages.embedding.tables import Table

EXACT = 1 << 24
"""Whole numbers up to here are exact in fp32."""


@dataclass(frozen=True, kw_only=True)
class SmallTables:
    """Which features are kept whole, and the number of each of their ids."""

    features: tuple[int, ...]
    """Places of the features among all."""

    names: tuple[str, ...]
    ids: tuple[Ints, ...]
    """The ids of each that training sees, rising; an id's number is its place here."""

    @classmethod
    def find(cls, samples: CtrSamples, train: Ints, *, at_most: int) -> SmallTables:
        """Features with one id a sample, a table to themselves, and few ids."""
        found: list[tuple[int, str, Ints]] = []
        tables = [feature.table for feature in samples.features]
        bags = samples.batch(train).bags
        for place, (table, bag) in enumerate(zip(tables, bags, strict=True)):
            alone = tables.count(table) == 1
            single = bool((np.diff(samples.offsets_of(place)) == 1).all())
            if alone and single:
                known = np.unique(bag.ids.numpy())
                if len(known) <= min(at_most, EXACT):
                    found.append((place, table, known))
        return cls(
            features=tuple(place for place, _, _ in found),
            names=tuple(name for _, name, _ in found),
            ids=tuple(known for _, _, known in found),
        )

    def numbered(self, batch: CtrBatch) -> CtrBatch:
        """The batch with the small features as columns behind the dense ones."""
        columns = [
            self._numbers(known, batch.bags[place])
            for place, known in zip(self.features, self.ids, strict=True)
        ]
        kept = tuple(bag for place, bag in enumerate(batch.bags) if place not in self.features)
        return CtrBatch(
            sample_ids=batch.sample_ids,
            dense=torch.cat([batch.dense, *columns], dim=1),
            bags=kept,
            labels=batch.labels,
        )

    @staticmethod
    def _numbers(known: Ints, bag: Bags) -> Tensor:
        ids = bag.ids.numpy()
        place = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        number = np.where(known[place] == ids, place, len(known))  # the last row: never seen
        return torch.from_numpy(number.astype(np.float32)).unsqueeze(1)


class SmallRows(nn.Module):
    """Block 0: the columns of numbers become rows; everything else passes by.

    In: dense, numbers, pooled vectors of the sharded features. Out: dense, those vectors, then the
    rows of the small tables.
    """

    def __init__(
        self, *, num_dense: int, names: Sequence[str], num_ids: Sequence[int], dim: int,
        init: Init, seed: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_dense = num_dense
        self.names = tuple(names)
        self.replicated = Replicated(
            tuple(
                Table(
                    name=name, dim=dim, optimizer=Sgd(lr=1.0), init=init, placement="replicated",
                    num_ids=count + 1,
                )
                for name, count in zip(names, num_ids, strict=True)
            ),
            seed=seed,
        )  # fmt: skip
        with torch.no_grad():
            for embedding in self.replicated.tables.values():
                assert isinstance(embedding, nn.Embedding)
                embedding.weight[-1] = 0.0  # an id that training never saw reads as zeros

    def forward(self, x: Tensor) -> Tensor:
        stop = self.num_dense + len(self.names)
        dense, numbers, pooled = x[:, : self.num_dense], x[:, self.num_dense : stop], x[:, stop:]
        index = numbers.detach().long()
        rows = self.replicated({name: index[:, i] for i, name in enumerate(self.names)})
        return torch.cat([dense, pooled, *(rows[name] for name in self.names)], dim=1)
