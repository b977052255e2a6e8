"""The embedding stage as the first block sees it: packed rows in, a dict of vectors out.

Path: stages.embedding.loaded_feed -> stages.embedding.front -> stages.compute

Rows of sharded tables come packed in one tensor, whose gradient the feed wants. Replicated tables
are parameters here, so they are trained and saved with the dense network; their ids are looked up
in the inbox, by the samples that the pass is about.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stages.dropout import current_samples
from stages.embedding.loaded import Bag, Inbox, LoadedFeature, Part
from stages.embedding.pooling import pooled
from stages.embedding.replicated import Replicated
from stages.embedding.tables import Table

DENSE = "dense"


class Front(nn.Module):
    """The first block of a model, with the vectors of all features in front of it."""

    def __init__(
        self, block: nn.Module, *, features: Sequence[LoadedFeature], tables: Sequence[Table],
        seed: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.features = tuple(features)
        self.replicated = Replicated(tuple(tables), seed=seed)
        self.block = block
        self.inbox: Inbox | None = None
        """Set where the stage is put together."""

    def forward(self, x: Tensor) -> Tensor:
        ids = current_samples()
        assert ids is not None
        assert self.inbox is not None
        output: Tensor = self.block(self.vectors(x, self.inbox.part(ids)))
        return output

    def vectors(self, x: Tensor, part: Part) -> dict[str, Tensor]:
        """What `rec.Embeddings` gives for the batch, and its dense features."""
        bags = {f.name: bag for f, bag in zip(self.features, part.bags, strict=True)}
        widths = [0 if part.dense is None else part.dense.shape[1]]
        widths += [_width(f, bags[f.name]) for f in self.features if f.sharded]
        dense, *pieces = torch.split(x, widths, dim=1)
        whole = self._replicated_rows(bags, x.device)
        found: dict[str, Tensor] = {}
        for feature in self.features:
            bag = bags[feature.name]
            if feature.sharded:
                vector = pieces.pop(0).contiguous()
                if feature.pooling == "none" and bag.ids.dim() == 2:
                    vector = vector.reshape(*bag.ids.shape, feature.dim)
            else:
                rows, index = whole[feature.name]
                vector = pooled(rows, index.reshape(bag.ids.shape), bag.offsets, feature.pooling)
            found[feature.name] = vector
        if part.dense is not None:
            found[DENSE] = dense.contiguous()
        return found

    def _replicated_rows(
        self, bags: dict[str, Bag], device: torch.device
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Rows of a table's features together, and which of them are whose."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        own = [feature for feature in self.features if not feature.sharded]
        for table in dict.fromkeys(feature.table for feature in own):
            names = [feature.name for feature in own if feature.table == table]
            flat = torch.cat([bags[name].ids.reshape(-1) for name in names]).to(device)
            rows = self.replicated({table: flat})[table]
            index = torch.arange(len(flat), device=device)
            parts = torch.split(index, [bags[name].ids.numel() for name in names])
            found |= {name: (rows, part) for name, part in zip(names, parts, strict=True)}
        return found


def _width(feature: LoadedFeature, bag: Bag) -> int:
    """Columns of a feature in the packed tensor."""
    if feature.pooling == "none" and bag.ids.dim() == 2:
        return bag.ids.shape[1] * feature.dim
    return feature.dim
