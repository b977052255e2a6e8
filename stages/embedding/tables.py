"""What a user says about an embedding table, and where its rows live.

A table is sharded by a hash of the id, or, when it has few ids, replicated with the dense network:
rows that nearly every batch touches gain nothing from asynchrony and lose accuracy by it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stages.embedding.row_arrays import nbytes_of
from stages.embedding.row_rules import Init, Optimizer, RowAdagrad, Uniform

POOLINGS = ("sum", "mean", "sqrtn", "none")
PLACEMENTS = ("sharded", "replicated")
FEW_IDS = 4096
"""A replicated table that does not say how many ids it has may meet so many."""

_U64 = np.uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrune:
    """FIITED: rows are cut into chunks of columns, and the least useful chunks are given up."""

    chunk: int = 8
    """Columns of a chunk; a row has 2 to 8 chunks."""

    ratio: float
    """Share of the table's real bytes (rows, state, headers, index) that pruning takes away."""

    warmup: int = 2000
    """Versions of a shard before its first prune: early gradients are noise."""

    every: int = 500
    """Versions between prunes; at each, chunks that became hot grow again from zero."""

    decay: float = 0.98
    """Of utilities, at each prune."""

    taper: float = 2.0
    """The n-th chunk of a row competes with its utility over n ** taper, so that a row's length
    grows like the square root of its use, and all rows keep the same columns first. At 0 the rows
    used most keep everything and most of the others nothing; above 2.5 rows that become hot get
    their last chunks back late."""

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ValueError(f"prune.ratio is a share of bytes in [0, 1), got {self.ratio}")
        if self.every < 1 or self.warmup < 0:
            raise ValueError(f"prune.every is {self.every} and warmup {self.warmup}; at least 1, 0")
        if not 0 < self.decay <= 1:
            raise ValueError(f"prune.decay is in (0, 1], got {self.decay}")
        if not 0 <= self.taper <= 8:
            raise ValueError(f"prune.taper is an exponent from 0 to 8, got {self.taper}")

    def is_due(self, version: int) -> bool:
        """Whether a shard prunes when it has reached this version."""
        return version >= max(self.warmup, 1) and (version - self.warmup) % self.every == 0


@dataclass(frozen=True, slots=True)
class MinCount:
    """Ids get a row in the step in which they are seen for the n-th time; zeros until then.

    A sighting is a step in which the id occurs. Counters are kept for the `remember` ids that were
    seen last, on each shard; an id that was forgotten begins again.
    """

    count: int
    remember: int = 1_000_000

    def __post_init__(self) -> None:
        if self.count < 1 or self.remember < 1:
            raise ValueError(f"MinCount({self.count}, remember={self.remember}): at least 1 each")

    def needed(self, ids: npt.NDArray[np.int64], table: str) -> npt.NDArray[np.int64]:
        """Sightings after which each id has a row."""
        return np.full(len(ids), self.count, np.int64)


@dataclass(frozen=True, slots=True)
class Probability:
    """Ids get a row with this probability in each step in which they are seen; zeros until then.

    How many sightings an id needs is drawn once, from the id itself, so that it does not depend on
    shards, restarts or the order of batches. Counters as in `MinCount`.
    """

    probability: float
    remember: int = 1_000_000

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1 or self.remember < 1:
            raise ValueError(
                f"Probability({self.probability}, remember={self.remember}): above 0 and up to 1, "
                "and at least 1"
            )

    def needed(self, ids: npt.NDArray[np.int64], table: str) -> npt.NDArray[np.int64]:
        """Sightings after which each id has a row: the first success of a coin with that bias."""
        if self.probability == 1:
            return np.ones(len(ids), np.int64)
        salt = _U64(zlib.crc32(table.encode()) << 1)
        uniform = ((_mixed(ids.view(_U64) ^ salt) >> _U64(11)).astype(np.float64) + 1) / (1 << 53)
        failures: npt.NDArray[np.int64] = np.floor(
            np.log(uniform) / np.log1p(-self.probability)
        ).astype(np.int64)
        return failures + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table. Its name and the run's seed are part of what its rows begin as."""

    name: str = field(kw_only=False)
    dim: int
    optimizer: Optimizer = RowAdagrad(lr=0.05)  # noqa: RUF009 (frozen)
    features: tuple[str, ...] = ()
    """Features of a batch that read this table; empty: one, called as the table."""

    pooling: Mapping[str, str] = field(default_factory=dict, hash=False)
    """How the rows of a feature become one vector: sum (default), mean, sqrtn or none."""

    init: Init = Uniform(0.01)  # noqa: RUF009 (frozen)
    placement: str = "sharded"
    num_ids: int | None = None
    """Of a replicated table: ids are 0 to num_ids - 1. None: any ids, numbered as training first
    sees them, of which there may be `FEW_IDS`."""

    max_rows: int = 0
    """Of each shard; 0 is as many as `capacity` or the shard's memory holds."""

    capacity: int | str | None = None
    """Bytes of all shards' rows together, as in "6GiB"; None: what the shards have."""

    evict: str | None = None
    """"lru" drops what was looked up longest ago when the table is full; None refuses new rows."""

    spill: str | None = None
    """Folder to which those rows go instead of being dropped; they come back bit for bit."""

    admit: MinCount | Probability | None = None
    prune: ChunkPrune | None = None

    def __post_init__(self) -> None:
        if isinstance(self.features, str):
            raise ValueError(
                f"table {self.name!r}: features is a list of names, got {self.features!r}; write "
                f"features=[{self.features!r}]"
            )
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        self._check_pooling()
        if self.dim < 1 or self.max_rows < 0:
            raise ValueError(
                f"table {self.name!r} has dim {self.dim} and max_rows {self.max_rows}; at least 1, "
                "and 0 (no limit) or more"
            )
        if self.evict not in (None, "lru"):
            raise ValueError(f'table {self.name!r}: evict is "lru" or None, got {self.evict!r}')
        if self.capacity is not None and nbytes_of(self.capacity) < 1:
            raise ValueError(f"table {self.name!r}: a capacity of {self.capacity} holds no row")
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"table {self.name!r}: placement is one of {PLACEMENTS}, got {self.placement!r}"
            )
        if self.num_ids is not None and self.num_ids < 1:
            raise ValueError(f"table {self.name!r} has num_ids {self.num_ids}; at least 1, or none")
        if self.placement == "replicated" and self.prune is not None:
            raise ValueError(f"table {self.name!r} is replicated; only sharded tables are pruned")
        if self.prune is not None and (
            self.dim % self.prune.chunk or not 2 <= self.dim // self.prune.chunk <= 8
        ):
            raise ValueError(
                f"table {self.name!r}: a dim of {self.dim} in chunks of {self.prune.chunk} columns "
                f"is {self.dim / self.prune.chunk:g} chunks; 2 to 8 whole ones are possible"
            )

    def _check_pooling(self) -> None:
        for feature, how in self.pooling.items():
            if feature not in self.features:
                raise ValueError(
                    f"table {self.name!r} has features {list(self.features)}, `pooling` speaks of "
                    f"{feature!r}"
                )
            if how not in POOLINGS:
                raise ValueError(
                    f"table {self.name!r}, feature {feature!r}: pooling is one of "
                    f"{list(POOLINGS)}, got {how!r}"
                )

    def rows_within(self, row_bytes: int, num_shards: int) -> int:
        """The most rows of one shard: `max_rows`, or what its share of the capacity holds."""
        if self.capacity is None:
            return self.max_rows
        fit = max(1, nbytes_of(self.capacity) // num_shards // row_bytes)
        return min(fit, self.max_rows) if self.max_rows else fit

    def spill_folder(
        self, shard: int, life: int = 0, *, default: str | Path | None = None
    ) -> Path | None:
        """This table's own part of its spill folder; the disk is a cache of one process."""
        folder = self.spill if self.spill is not None else default
        if folder is None:
            return None
        return Path(folder) / f"{self.name}-{shard:05d}{'-b' if life % 2 else ''}"

    @property
    def chunks(self) -> int:
        return 1 if self.prune is None else self.dim // self.prune.chunk


def check_tables(tables: tuple[Table, ...]) -> None:
    """Names are identities: each once."""
    names = [table.name for table in tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"tables {twice} are given twice; a name is part of a row's identity")


def shard_of(ids: npt.NDArray[np.int64], num_shards: int) -> npt.NDArray[np.int64]:
    """Where rows live: a hash of the id, the same on every machine, spread evenly."""
    x = _mixed(ids.view(_U64) ^ _U64(0xD6E8FEB86659FD93))  # not the hash of the row store's index
    return (((x >> _U64(32)) * _U64(num_shards)) >> _U64(32)).astype(np.int64)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
        return x ^ (x >> _U64(31))
