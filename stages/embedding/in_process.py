"""Embedding tables in this process: an ordinary `nn.Module`, the same rows as on shards.

    bag = EmbeddingBag(Table("user", dim=32))
    loss(bag(ids)).backward()
    bag.step()                       one optimizer step on the rows that were looked up

Several forward passes before a step add up, as gradients do. In evaluation (`eval()`, or without
gradients) unknown ids read as zeros and nothing is created, touched or counted. `delay` holds every
update back by so many steps: what a hybrid run of that staleness would make of the model, without
a cluster. Checkpoints are those of a cluster's shards, for any number of them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressors.id_lists import dedupe
from stages.embedding import shard_files, shard_folders
from stages.embedding.pooling import as_bags, pooled
from stages.embedding.replicated import Replicated
from stages.embedding.row_export import Exporter, Increment, publish
from stages.embedding.shard import Shard
from stages.embedding.shard_table import Rows
from stages.embedding.shard_terms import IdSet, ShardStep
from stages.embedding.tables import Table, check_tables, shard_of


@dataclass(slots=True, kw_only=True)
class _Read:
    """The rows of one table in one forward pass."""

    table: str
    ids: Any
    counts: Any
    rows: Tensor
    pulled: list[Rows]
    """Of each shard."""

    places: Any


class Embeddings(nn.Module):
    """All tables of a model. Replicated ones are parameters, for the dense optimizer."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        shards: int = 1,
        delay: int = 0,
        seed: int = 0,
        capacity: int | str | None = None,
        spill: str | Path | None = None,
        core: str | None = None,
        **store: Any,
    ) -> None:
        """`capacity` is of each shard's memory for all tables; None: what their own `capacity` and
        `max_rows` want, and 1 GiB for those that have none."""
        super().__init__()
        self.tables = {table.name: table for table in tables}
        check_tables(tuple(tables))
        if shards < 1 or delay < 0:
            raise ValueError(f"shards is {shards} and delay {delay}; at least 1 and 0")
        self.feature_tables: dict[str, Table] = {}
        for table in tables:
            for feature in table.features:
                if feature in self.feature_tables:
                    raise ValueError(
                        f"feature {feature!r} is of tables {self.feature_tables[feature].name!r} "
                        f"and {table.name!r}; it can read one"
                    )
                self.feature_tables[feature] = table
        self.delay = delay
        self._options: dict[str, Any] = {
            "tau": delay,
            "seed": seed,
            "capacity": capacity,
            "spill": spill,
            "core": core,
            **store,
        }
        self.replicated = Replicated(tuple(tables), seed=seed, core=core)
        self._reads: list[_Read] = []
        self._held: deque[list[ShardStep]] = deque()
        self._exporters: dict[Path, list[Exporter]] = {}
        self._life = 0
        self.shards = self._new_shards(shards)

    def _new_shards(self, num: int) -> list[Shard]:
        tables = tuple(self.tables.values())
        return [
            Shard(tables, index=index, num_shards=num, life=self._life, **self._options)
            for index in range(num)
        ]

    def _become(self, files: Callable[[], Iterable[Any]], num: int) -> int:
        """Other rows, all of them or none: the ones here live until the others are whole.

        So there are two of everything for a while, in memory and in the spill folder.
        """
        self._life += 1
        fresh: list[Shard] = []
        try:
            fresh = self._new_shards(num)
            taken = sum(shard_files.fill_shard(one, files(), num_shards=num) for one in fresh)
        except BaseException:
            self._life -= 1
            for shard in fresh:
                shard.close()
            raise
        for shard in self.shards:
            shard.close()
        self.shards = fresh
        self._held.clear()
        self.drop()
        self._exporters.clear()  # they know the old rows
        return taken

    # --- forward, backward, step ------------------------------------------------------------------

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """A vector for each sample and feature of the batch; keys that are no features are left."""
        bags = {name: as_bags(batch[name]) for name in self.feature_tables if name in batch}
        missing = sorted(set(self.feature_tables) - set(bags))
        if missing:
            raise ValueError(f"the batch has no ids for features {missing}")
        by_table: dict[str, list[str]] = {}
        for feature in bags:
            by_table.setdefault(self.feature_tables[feature].name, []).append(feature)
        vectors: dict[str, Tensor] = {}
        for name, features in by_table.items():
            flat = torch.cat([bags[feature][0].reshape(-1) for feature in features])
            rows, index = self._rows(name, flat)
            parts = torch.split(index, [bags[feature][0].numel() for feature in features])
            for feature, part in zip(features, parts, strict=True):
                ids, offsets = bags[feature]
                how = self.tables[name].pooling.get(feature, "sum")
                vectors[feature] = pooled(rows, part.reshape(ids.shape), offsets, how)
        return {feature: vectors[feature] for feature in bags}

    def _rows(self, name: str, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of distinct ids, and where each occurrence is among them."""
        if self.tables[name].placement == "replicated":
            return self.replicated({name: flat})[name], torch.arange(len(flat))
        unique, inverse, counts = dedupe(np.ascontiguousarray(flat.numpy()))
        index = torch.from_numpy(inverse.astype(np.int64))
        places = shard_of(unique, len(self.shards))
        training = self.training and torch.is_grad_enabled()
        if not training:
            self.drain()
        pulled = []
        rows = np.empty((len(unique), self.tables[name].dim), np.float32)
        for number, shard in enumerate(self.shards):
            mine = places == number
            ids = np.ascontiguousarray(unique[mine])
            part = self._pull(number, name, ids) if training else shard.rows[name].read(ids)
            rows[mine] = part.weights
            pulled.append(part)
        leaf = torch.from_numpy(rows)
        if training:
            leaf.requires_grad_()
            self._reads.append(
                _Read(
                    table=name,
                    ids=unique,
                    counts=counts.astype(np.float32),
                    rows=leaf,
                    pulled=pulled,
                    places=places,
                )
            )
        return leaf, index

    def _pull(self, number: int, name: str, ids: Any) -> Rows:
        """One shard's rows for a pass of a step that may have had passes before."""
        shard = self.shards[number]
        before = [read for read in self._reads if read.table == name]
        asked = [read.ids[read.places == number] for read in before]
        if shard.rows[name].max_rows:
            shard.check_capacity(name, len(np.unique(np.concatenate([ids, *asked]))))
        told = [
            (those, admitted)
            for those, read in zip(asked, before, strict=True)
            if (admitted := read.pulled[number].admitted) is not None
        ]
        step = shard.touch_base + shard.version + 1
        shard.touched = max(shard.touched, step)
        return shard.rows[name].pull(ids, step, told)

    def step(self) -> None:
        """One optimizer step with the gradients since the last; none at all is no step.

        A gradient that is not finite is refused by table and id, and nothing is applied.
        """
        reads, self._reads = self._reads, []
        if all(read.rows.grad is None for read in reads):
            return
        self._held.append([self._part(shard, reads) for shard in range(len(self.shards))])
        if len(self._held) > self.delay:
            self._settle(self._held.popleft())

    def drop(self) -> None:
        """Forget the forward passes since the last step: the loss was no good."""
        self._reads = []

    def drain(self) -> None:
        """Apply every update that `delay` still holds back."""
        while self._held:
            self._settle(self._held.popleft())

    def _settle(self, parts: list[ShardStep]) -> None:
        for shard, part in zip(self.shards, parts, strict=True):
            shard.check(part)
        for shard, part in zip(self.shards, parts, strict=True):
            shard.apply(part)

    def _part(self, shard: int, reads: list[_Read]) -> ShardStep:
        """What one shard is due: every table, so that each step is a step of each."""
        ids, gradients, pulled = {}, {}, {}
        for name, table in self.shards[shard].tables.items():
            mine = [read for read in reads if read.table == name and read.rows.grad is not None]
            pieces = []
            for read in mine:
                here = read.places == shard
                assert read.rows.grad is not None
                pieces.append((read.ids[here], read.rows.grad.numpy()[here], read.counts[here]))
            answers = [read.pulled[shard] for read in mine]
            keys, grads, counts, rows = _merged(pieces, answers, table)
            ids[name] = IdSet(ids=keys, counts=counts if table.prune is not None else None)
            gradients[name], pulled[name] = grads, rows
        return ShardStep(
            ids=ids, gradients=gradients, pulled=pulled, v_read=self.shards[shard].version
        )

    # --- whole tables -----------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """A checkpoint of the sharded tables. Replicated ones are parameters.

        One that is written over is whole until the new one is.
        """
        self.drain()
        shard_folders.save_shards(self.shards, Path(folder))

    def load(self, folder: str | Path, *, shards: int | None = None) -> int:
        """The rows of a checkpoint, into this or another number of shards; how many there were.

        `folder` is one of `save`, or a checkpoint of a click run. A checkpoint that is refused
        leaves everything as it was.
        """
        num = len(self.shards) if shards is None else shards
        if num < 1:
            raise ValueError(f"shards is {num}; rows need at least 1 to live on")
        saved = shard_folders.saved_shards(Path(folder))
        return self._become(lambda: (one.read() for one in saved), num)

    def export(self, folder: str | Path, *, full: bool = False) -> list[Increment]:
        """Weights for serving: what changed since the last export here, and what is gone."""
        self.drain()
        path = Path(folder)
        if path not in self._exporters or full:
            num = len(self.shards)
            self._exporters[path] = [Exporter(one, path, num_shards=num) for one in self.shards]
        increments = [exporter.export() for exporter in self._exporters[path]]
        publish(path, num_shards=len(self.shards))
        return increments

    def stats(self) -> dict[str, Any]:
        """Rows, real bytes, hit rates, evictions, staleness, dropped gradients, alive chunks."""
        return merged_stats([shard.stats() for shard in self.shards])

    def __deepcopy__(self, memo: dict[int, Any]) -> Embeddings:
        """A model of its own: all rows, updates that `delay` holds back, parameters, hooks."""
        if any(rows.spilling is not None for one in self.shards for rows in one.rows.values()):
            raise TypeError(
                f"{type(self).__name__} with a spill folder cannot be copied: the folder is the "
                "cache of one model. `save` this one and `load` it into another with its own folder"
            )
        own: dict[str, Any] = {
            "shards": [],
            "_exporters": {},
            "_reads": [],
        }  # passes under way are not copied
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        rest = {name: value for name, value in self.__dict__.items() if name not in own}
        copied.__dict__.update(own | copy.deepcopy(rest, memo))
        files = [shard_files.pack_shard(shard) for shard in self.shards]
        held = copied._held
        copied._held = deque()
        copied._become(lambda: files, len(self.shards))
        copied._held = held
        return copied

    def get_extra_state(self) -> Any:
        """All rows, so that `torch.save(model.state_dict())` is a whole model."""
        self.drain()
        packed = (bytearray(shard_files.pack_shard(shard)) for shard in self.shards)
        return [torch.frombuffer(data, dtype=torch.uint8) for data in packed]

    def set_extra_state(self, state: Any) -> None:
        self._become(lambda: (part.numpy() for part in state), len(self.shards))


class EmbeddingBag(Embeddings):
    """One table as `nn.EmbeddingBag` is one: ids in, a vector for each bag out."""

    def __init__(self, table: Table, **options: Any) -> None:
        if len(table.features) != 1:
            raise ValueError(
                f"table {table.name!r} has features {list(table.features)}; EmbeddingBag has one, "
                "use Embeddings for several"
            )
        super().__init__([table], **options)
        (self.feature,) = table.features

    def forward(  # type: ignore[override]
        self, ids: Any, offsets: Tensor | None = None
    ) -> Tensor:
        """[B] or [B, L] ids, a `Jagged`, or flat ids with the offsets at which bags begin."""
        if offsets is not None:
            end = torch.tensor([ids.numel()])
            ids = _Flat(ids=ids, offsets=torch.cat([offsets, end]))
        return super().forward({self.feature: ids})[self.feature]


@dataclass(frozen=True, slots=True)
class _Flat:
    ids: Tensor
    offsets: Tensor


def _merged(pieces: list[Any], answers: list[Rows], table: Table) -> tuple[Any, Any, Any, Rows]:
    """Gradients of several forward passes, each distinct id once, added in their order."""
    if len(pieces) == 1:
        ((keys, grads, counts),), (rows,) = pieces, answers
        return np.ascontiguousarray(keys), np.ascontiguousarray(grads), counts, rows
    empty = (np.empty(0, np.int64), np.empty((0, table.dim), np.float32), np.empty(0, np.float32))
    every, grads, counts = (np.concatenate(part) for part in zip(empty, *[*pieces], strict=True))
    if not pieces:
        return every, grads, counts, Rows(weights=grads, alive=_no_bits(table))
    keys, first, inverse = np.unique(every, return_index=True, return_inverse=True)
    total, often = np.zeros((len(keys), table.dim), np.float32), np.zeros(len(keys), np.float32)
    np.add.at(total, inverse, grads)  # in order: as autograd would have added them
    np.add.at(often, inverse, counts)
    alive = admitted = None
    if answers[0].alive is not None:
        alive = np.concatenate([rows.alive for rows in answers if rows.alive is not None])[first]
    if answers[0].admitted is not None:
        told = [rows.admitted for rows in answers if rows.admitted is not None]
        admitted = np.concatenate(told)[first]
    weights = np.concatenate([rows.weights for rows in answers])[first]
    return keys, total, often, Rows(weights=weights, alive=alive, admitted=admitted)


def _no_bits(table: Table) -> Any:
    return np.empty(0, np.uint8) if table.chunks > 1 else None


def merged_stats(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of several shards as those of one: sums, the largest version and staleness."""
    whole: dict[str, Any] = {}
    num = 0
    for part in parts:
        num += 1
        for name, value in part.items():
            if name in ("version", "staleness_max"):
                whole[name] = max(whole.get(name, 0), value)
            elif isinstance(value, dict):
                into = whole.setdefault(name, {})
                for key, number in value.items():
                    into[key] = into.get(key, 0) + number
            else:
                whole[name] = whole.get(name, 0) + value
    for name in ("hit_rate", "unadmitted_share"):  # means; shards hold equal parts
        whole[name] = {key: value / num for key, value in whole.get(name, {}).items()}
    return whole
