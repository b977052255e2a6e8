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
from stages.embedding.tables import FEW_IDS, Table


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
            rows = store.table(table.name, dim=table.dim, init=table.init, seed=seed)
            if table.num_ids is None:
                self.tables[table.name] = Numbered(table, seed=seed, core=core)
                continue
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
        if isinstance(embedding, nn.Embedding):
            least, most = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
            if not 0 <= least <= most < embedding.num_embeddings:
                raise ValueError(
                    f"table {name!r} is replicated for ids 0 to {embedding.num_embeddings - 1}, "
                    f"got {least} to {most}; raise its `num_ids`, leave it out, or shard it"
                )
        rows: Tensor = embedding(ids)
        return rows


class Numbered(nn.Module):
    """A table of few ids that nobody has counted: numbered as training first sees them.

    There is room for `FEW_IDS` from the start, so that the optimizer knows the parameter; a row
    begins as (seed, table, id) say, when its id comes. In evaluation unknown ids read as zeros.
    """

    known: Tensor
    count: Tensor

    def __init__(self, table: Table, *, seed: int, core: str | None = None) -> None:
        super().__init__()
        self.table, self.seed, self.core = table, seed, core
        self.weight = nn.Parameter(torch.zeros(FEW_IDS, table.dim))
        # Buffers, so that checkpoints have them and a step that is undone takes them back.
        self.register_buffer("known", torch.zeros(FEW_IDS, dtype=torch.int64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        place, found = self._find(flat)
        if self.training and torch.is_grad_enabled() and not bool(found.all()):
            self._take(flat[~found])
            place, found = self._find(flat)
        rows = nn.functional.embedding(place, self.weight)
        if not bool(found.all()):
            rows = rows * found[:, None].to(rows.dtype)
        return rows.reshape(*ids.shape, self.table.dim)

    def _find(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The number of each id, and whether it has one."""
        num = int(self.count)
        if not num:
            return torch.zeros_like(flat), torch.zeros_like(flat, dtype=torch.bool)
        ordered, numbers = self.known[:num].sort()
        near = torch.searchsorted(ordered, flat).clamp(max=num - 1)
        found = ordered[near] == flat
        return numbers[near] * found, found

    def _take(self, strangers: Tensor) -> None:
        """Number ids in the order in which they come, and begin their rows."""
        new = list(dict.fromkeys(strangers.tolist()))
        first, stop = int(self.count), int(self.count) + len(new)
        if stop > FEW_IDS:
            raise ValueError(
                f"table {self.table.name!r} is replicated and has met {stop} ids, room is for "
                f"{FEW_IDS}; shard it (placement='sharded'), or number its ids yourself and say "
                "how many there are: `num_ids`"
            )
        store = RowStore(capacity="1MiB", slab="64KiB", pages="4k", core=self.core)
        table = store.table(
            self.table.name, dim=self.table.dim, init=self.table.init, seed=self.seed
        )
        rows = torch.from_numpy(table.initial(np.asarray(new, np.int64)))
        with torch.no_grad():
            self.weight[first:stop] = rows.to(self.weight.device)
            self.known[first:stop] = torch.tensor(new, device=self.known.device)
            self.count.fill_(stop)
