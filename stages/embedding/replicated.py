"""Tables of few ids, kept whole beside the dense network and trained synchronously with it.

A feature like gender or hour is in nearly every sample: its rows are dense parameters in all but
name. They begin with the very rows that they would have on a shard.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from stages.embedding.row_store import RowStore
from stages.embedding.tables import Table


class Replicated(nn.Module):
    """The replicated ones among `tables`; add its parameters to the dense optimizer."""

    def __init__(
        self, tables: tuple[Table, ...], *, seed: int = 0, core: str | None = None
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict()
        store = RowStore(capacity="1MiB", slab="64KiB", pages="4k", core=core)
        for table in tables:
            if table.placement != "replicated":
                continue
            assert table.num_ids is not None
            rows = store.table(table.name, dim=table.dim, init=table.init, seed=seed)
            first = rows.initial(np.arange(table.num_ids, dtype=np.int64))
            embedding = nn.Embedding(table.num_ids, table.dim)
            embedding.weight = nn.Parameter(torch.from_numpy(first))
            self.tables[table.name] = embedding

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows of each table, for ids of any shape."""
        return {name: self._rows(name, part) for name, part in ids.items()}

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        if name not in self.tables:
            raise ValueError(f"replicated tables are {sorted(self.tables)}, got {name!r}")
        embedding = self.tables[name]
        assert isinstance(embedding, nn.Embedding)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < embedding.num_embeddings:
            raise ValueError(
                f"table {name!r} is replicated for ids 0 to {embedding.num_embeddings - 1}, got "
                f"{int(ids.min())} to {int(ids.max())}; raise its `num_ids`, or shard it"
            )
        rows: Tensor = embedding(ids)
        return rows
