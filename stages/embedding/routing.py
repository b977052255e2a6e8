"""A step of the embeddings' client, and which part of it is whose: ids out, rows in, gradients out.

Path: stages.embedding.hybrid -> stages.embedding.routing -> stages.embedding.letters

Duplicates are taken out before anything is sent, every distinct id goes to the shard that its hash
names, and what comes back is put in the order of the distinct ids. Every step has a part for every
shard and every table, if only an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compressors.base import CodecError, Packet
from compressors.id_lists import dedupe
from stages.embedding import letters
from stages.embedding.letters import Wire
from stages.embedding.shard_table import Rows
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import Table, shard_of

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A step whose ids are on their way."""

    ticket: int
    ids: Mapping[str, Ids]
    """Distinct ids of each table, rising."""

    index: Mapping[str, Tensor]
    """Where each occurrence is among them."""

    places: Mapping[str, npt.NDArray[np.int64]]
    """The shard of each distinct id."""

    parts: Sequence[Mapping[str, IdSet]]
    """What each shard is asked for."""


@dataclass(slots=True, kw_only=True)
class Step:
    """A step whose rows are here. Gradients collect in `rows[table].grad`."""

    ahead: Ahead
    rows: dict[str, Tensor]
    pulled: Sequence[Mapping[str, Rows]]
    v_read: list[int]
    pull_s: float = 0.0
    """From the permit to the rows."""

    step_s: float = 0.0
    """Forward and backward; `run` measures it, others may say it before they push."""

    ended_s: float | None = None
    """When they ended, if the push began later than that."""

    number: int | None = None
    """Of the training step, if it may be run again; a shard applies it once."""

    @property
    def ticket(self) -> int:
        return self.ahead.ticket

    @property
    def index(self) -> Mapping[str, Tensor]:
        return self.ahead.index

    @property
    def ids(self) -> Mapping[str, Ids]:
        return self.ahead.ids


class Router:
    """Takes steps apart for the shards, and puts their answers together."""

    def __init__(self, tables: Mapping[str, Table], *, num_shards: int, wire: Wire) -> None:
        self._tables = tables
        self._num_shards = num_shards
        self._wire = wire

    def split(self, ticket: int, ids: Mapping[str, Any]) -> Ahead:
        """Distinct ids by shard; int64 of any shape, tables that are left out have none."""
        unknown = sorted(set(ids) - set(self._tables))
        if unknown:
            raise ValueError(f"sharded tables are {sorted(self._tables)}, got ids for {unknown}")
        unique, index, places = {}, {}, {}
        parts: list[dict[str, IdSet]] = [{} for _ in range(self._num_shards)]
        for name in self._tables:  # every table, in one order, so that each step is a step of each
            array = np.asarray(ids.get(name, np.empty(0, np.int64)))
            if array.dtype != np.int64:
                raise TypeError(f"ids of table {name!r} are int64, got {array.dtype}")
            unique[name], inverse, counts = dedupe(np.ascontiguousarray(array).reshape(-1))
            index[name] = torch.from_numpy(inverse).reshape(array.shape)
            places[name] = shard_of(unique[name], self._num_shards)
            counted = counts.astype(np.float32) if self._tables[name].prune is not None else None
            for shard, part in enumerate(parts):
                mine = places[name] == shard
                part[name] = IdSet(
                    ids=unique[name][mine], counts=None if counted is None else counted[mine]
                )
        return Ahead(ticket=ticket, ids=unique, index=index, places=places, parts=parts)

    def join(self, name: str, ahead: Ahead, pulled: Sequence[Mapping[str, Rows]]) -> Tensor:
        """A table's rows of all shards, as a leaf that collects their gradient."""
        rows = np.empty((len(ahead.ids[name]), self._tables[name].dim), np.float32)
        for shard, part in enumerate(pulled):
            mine = ahead.places[name] == shard
            if len(part[name].weights) != int(mine.sum()):
                raise CodecError(f"shard {shard}, table {name!r}: not as many rows as ids")
            rows[mine] = part[name].weights
        return torch.from_numpy(rows).requires_grad_()

    def gradients(self, step: Step, shard: int) -> Packet:
        """One shard's part; raises `NonFiniteGradientError` by table and ids."""
        gradients, ids = {}, {}
        for name, rows in step.rows.items():
            mine = step.ahead.places[name] == shard
            whole = torch.zeros_like(rows) if rows.grad is None else rows.grad
            gradients[name] = np.ascontiguousarray(whole.numpy()[mine], np.float32)
            ids[name] = step.ahead.ids[name][mine]
        return letters.gradients_packet(
            gradients, step.pulled[shard], ids, self._tables, self._wire.gradients
        )
