"""A user's batch, checked by name before anything of it is sent, and cut into micro-batches.

Path: ray_pipe.rec_pipeline -> ray_pipe.rec_batches -> ray_pipe.rec_loader
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_pipe.errors import DataError, nearest
from ray_pipe.rec_stage import DENSE, LABEL, EmbeddingStage
from stages.embedding.loaded import DTYPES, MAX_SAMPLES, Bag, Part
from stages.embedding.pooling import as_bags
from stages.embedding.shard_table import whole_bytes
from stages.embedding.shard_terms import CapacityError
from stages.embedding.tables import shard_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One micro-batch, ready to be sent."""

    part: Part
    label: Tensor


class Batches:
    """Reads batches for one embedding stage."""

    def __init__(self, stage: EmbeddingStage, *, shards: int) -> None:
        self._stage = stage
        self._shards = shards
        self._tables = {table.name: table for table in stage.tables}
        self._limits = {
            table.name: limit
            for table in stage.tables
            if table.placement == "sharded"
            and (limit := table.rows_within(whole_bytes(table), shards))
        }

    def read(self, batch: Any, *, micro_batches: int = 1, train: bool = True) -> list[Loaded]:
        """The micro-batches of a batch; refuses by name what cannot be trained on, or only read."""
        if not isinstance(batch, Mapping):
            raise DataError(
                f"a batch is a mapping from features to ids, with {DENSE!r} and {LABEL!r}, got "
                f"{type(batch).__name__}"
            )
        self._check_names(batch)
        bags = {f.name: self._bag(f.name, batch[f.name]) for f in self._stage.features}
        sizes = {name: bag.num_samples for name, bag in bags.items()}
        dense = _dense(batch.get(DENSE))
        if dense is not None:
            sizes[DENSE] = len(dense)
        label = _label(batch[LABEL])
        sizes[LABEL] = len(label)
        if len(set(sizes.values())) > 1:
            raise DataError(f"a batch has one number of samples, got {sizes}")
        num = len(label)
        if not micro_batches <= num <= MAX_SAMPLES * micro_batches:
            raise DataError(
                f"a batch of {num} samples in {micro_batches} micro-batches; each has 1 to "
                f"{MAX_SAMPLES}"
            )
        for name in self._limits if train else ():
            self._check_room(name, bags)
        ends = [round(num * i / micro_batches) for i in range(micro_batches + 1)]
        return [
            Loaded(
                part=Part(
                    bags=tuple(_cut(bags[f.name], start, stop) for f in self._stage.features),
                    dense=None if dense is None else dense[start:stop],
                    num_samples=stop - start,
                ),
                label=label[start:stop],
            )
            for start, stop in itertools.pairwise(ends)
        ]

    def _check_names(self, batch: Mapping[str, Any]) -> None:
        known = [feature.name for feature in self._stage.features]
        for name in batch:
            if name not in (*known, DENSE, LABEL):
                near = nearest(name, known)
                raise DataError(
                    f"the batch has {name!r}, which is no feature of any table{near} Features are "
                    f"{known}; leave out of the batch what is none."
                )
        missing = [name for name in known if name not in batch]
        if missing:
            raise DataError(f"the batch has no ids for features {missing}")
        if batch.get(LABEL) is None:
            raise DataError(f"the batch has no {LABEL!r}: what the loss compares the output with")

    def _bag(self, name: str, ids: Any) -> Bag:
        (feature,) = [one for one in self._stage.features if one.name == name]
        try:
            flat, offsets = as_bags(ids)
        except (TypeError, ValueError) as error:
            raise DataError(f"feature {name!r}: {error}") from None
        if offsets is not None and bool((offsets[1:] < offsets[:-1]).any()):
            raise DataError(f"feature {name!r}: offsets fall; they say where each bag begins")
        if offsets is not None and feature.pooling == "none":
            raise DataError(
                f"feature {name!r}: pooling none wants as many ids in each sample, a tensor [B, L]"
            )
        table = self._tables[feature.table]
        if table.num_ids and flat.numel() and not feature.sharded:
            low, high = int(flat.min()), int(flat.max())
            if not 0 <= low <= high < table.num_ids:
                raise DataError(
                    f"feature {name!r}: table {table.name!r} is replicated for ids 0 to "
                    f"{table.num_ids - 1}, got {low} to {high}; raise its `num_ids`, leave it out, "
                    "or shard the table"
                )
        return Bag(ids=flat.cpu(), offsets=None if offsets is None else offsets.cpu())

    def _check_room(self, name: str, bags: Mapping[str, Bag]) -> None:
        """Rows of the steps under way must fit, or gradients would meet rows that are gone."""
        table, limit, steps = self._tables[name], self._limits[name], self._stage.bound + 1
        if table.spill is not None or self._stage.spill is not None:
            return
        own = [
            bags[f.name].ids.reshape(-1).numpy() for f in self._stage.features if f.table == name
        ]
        unique = np.unique(np.concatenate(own))
        num = int(np.bincount(shard_of(unique, self._shards), minlength=1).max(initial=0))
        if steps * num > limit:
            raise CapacityError(
                f"table {name!r}: the batch has {len(unique)} distinct ids, up to {num} on one of "
                f"{self._shards} shards; with up to {steps} steps under way that is {steps * num} "
                f"rows, and a shard holds {limit} (capacity {table.capacity}, max_rows "
                f"{table.max_rows}); raise them, lower max_staleness, use smaller batches or more "
                "shards, or give the table a `spill` folder"
            )


def num_samples(loaded: Sequence[Loaded]) -> int:
    return sum(one.part.num_samples for one in loaded)


def _dense(dense: Any) -> Tensor | None:
    if dense is None:
        return None
    if not isinstance(dense, Tensor) or dense.dtype != torch.float32 or dense.dim() != 2:
        what = f"{dense.dtype} {list(dense.shape)}" if isinstance(dense, Tensor) else type(dense)
        raise DataError(f"{DENSE!r} is a float32 tensor [B, columns], got {what}")
    return dense.detach().cpu()


def _label(label: Any) -> Tensor:
    if not isinstance(label, Tensor) or label.dim() < 1 or label.dtype not in DTYPES.values():
        what = f"{label.dtype} {list(label.shape)}" if isinstance(label, Tensor) else type(label)
        raise DataError(f"{LABEL!r} is a tensor [B, …] of {', '.join(DTYPES)}, got {what}")
    return label.detach().cpu()


def _cut(bag: Bag, start: int, stop: int) -> Bag:
    if bag.offsets is None:
        return Bag(ids=bag.ids[start:stop])
    offsets = bag.offsets[start : stop + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    return Bag(ids=bag.ids[low:high], offsets=offsets - low)
