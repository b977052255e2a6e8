"""What stage 0 and the shards need to know of the embeddings of one arm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.embedding.letters import Wire
from stages.embedding.permits import MAX_AUTO_TAU
from stages.embedding.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMishap:
    """A shard's process ends itself, once, for tests: see `stages.mishap`."""

    shard: int
    point: str
    """`push`: gradients have come and nothing is applied; `applied`: they are applied, and the
    acknowledgement has not left; `keep`: a checkpoint is to be taken; `fill`: one has come; `read`:
    rows are wanted for an evaluation."""

    version: int
    """The shard's, at that moment."""

    life: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """The same record in the shards' actors, in stage 0 and in a test."""

    tables: tuple[Table, ...]
    features: tuple[str, ...]
    """The table of each feature of a sample, in the order of their vectors in the packed input."""

    num_shards: int
    tau: int | None
    """How many versions rows may be behind; None measures what hides the links."""

    auto_cap: int = MAX_AUTO_TAU
    """The largest bound that measuring may choose."""

    auto_window: int = 4
    """Steps between two looks of it; those before the first are synchronous."""

    wire: Wire
    order: Any
    """`at(step)`: the samples of each micro-batch, so that ids travel before the plan does."""

    num_steps: int
    """Nothing is pulled ahead beyond them."""

    capacity: int = 1 << 30
    """Bytes that the rows of one shard may take."""

    spill: str | None = None
    """Folder for the rows that do not fit."""

    seed: int = 0
    core: str | None = None
    deadline_s: float = 5.0
    """First wait for an answer of a shard; each further one is twice as long."""

    num_tries: int = 6
    mishaps: tuple[ShardMishap, ...] = ()

    @property
    def slab(self) -> int:
        """Of a shard's store: large pages where there is room, small ones for small shards."""
        return min(2 << 20, max(16 << 10, 1 << (self.capacity // 64).bit_length() - 1))

    @property
    def bound(self) -> int:
        """What a shard enforces: nothing older is ever applied."""
        return self.auto_cap if self.tau is None else self.tau

    def node(self, shard: int, num_stages: int) -> int:
        """The shard's place in the topology: behind the stages."""
        return num_stages + shard


def link_name(source: str, target: str) -> str:
    """Links of shards in the ledger: `0->e1`, `e1->0`."""
    return f"{source}->{target}"
