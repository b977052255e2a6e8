"""What the shards of a run have and did, all together.

Path: ray_pipe.shards -> ray_pipe.shard_totals -> ray_pipe.ctr_run
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Books = Mapping[str, Any]
"""What a shard tells (`ShardActor.books`); empty before it has told anything."""


@dataclass(kw_only=True)
class ShardTotals:
    """What all shards have and did, the dead ones' last known numbers included."""

    rows: int = 0
    real_bytes: int = 0
    """Of rows, state, headers and index, as the stores count them."""

    resident_bytes: int = 0
    """Of the shards' processes, as the system counts them."""

    staleness: Counter[int] = field(default_factory=Counter)
    dropped_rows: int = 0
    lost_pushes: int = 0
    unsent_pushes: int = 0
    """Parts of steps that the dense net had made when its first stage died with their gradients."""

    refused_pushes: int = 0
    replayed: int = 0
    """Parts of steps that were run again after a dense failure, and were not applied again."""

    prunes: int = 0
    alive_chunks: int = 0
    evictions: int = 0
    """Rows that were dropped for want of capacity, longest unused first."""

    spilled_rows: int = 0
    """Of `rows`, those that are in the spill folder now."""

    recalled: int = 0
    """Rows that came back from there."""

    @classmethod
    def of(cls, living: Sequence[Books], gone: Sequence[Books]) -> ShardTotals:
        """What is there, of those that live; what was done, of all."""
        total = cls()
        for books in filter(None, living):
            total.rows += books["rows"]
            total.real_bytes += books["real_bytes"]
            total.resident_bytes += books["resident_bytes"]
            total.prunes = max(total.prunes, books["prunes"])
            total.alive_chunks += sum(books["alive_chunks"].values())
            total.spilled_rows += books["spilled_rows"]
        for books in filter(None, (*living, *gone)):
            total.staleness.update(books["staleness_histogram"])
            total.dropped_rows += books["dropped_rows"]
            total.lost_pushes += books["lost_pushes"]
            total.unsent_pushes += books["unsent_pushes"]
            total.refused_pushes += books["refused_pushes"]
            total.replayed += books["replayed"]
            total.evictions += books["evictions"]
            total.recalled += books["recalled"]
        return total
