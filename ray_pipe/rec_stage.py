"""The embedding stage of a pipeline from Python: which tables, on how many shards, how stale.

Path: ray_pipe.rec_pipeline -> ray_pipe.rec_stage -> ray_pipe.rec_arm
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_pipe.ctr_section import MAX_TAU
from ray_pipe.errors import ConfigError
from stages.embedding.auto_staleness import AutoStaleness
from stages.embedding.embedding_spec import EmbeddingSpec
from stages.embedding.letters import Wire
from stages.embedding.loaded import LoadedFeature
from stages.embedding.permits import MAX_AUTO_TAU
from stages.embedding.row_arrays import nbytes_of
from stages.embedding.row_export import Increment
from stages.embedding.shard import Shard
from stages.embedding.shard_table import store_capacity
from stages.embedding.tables import Table, check_tables

if TYPE_CHECKING:
    from ray_pipe.rec_pipeline import Pipeline

DENSE, LABEL = "dense", "label"
MIN_CAPACITY = 1 << 20
AUTO_WINDOW = 4
"""Steps between two looks of `max_staleness="auto"`."""

MAX_SHARDS = 64


class EmbeddingStage:
    """The first item of `ray_pipe.Pipeline([...])`. Its rows live on Ray actors."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        shards: int = 2,
        max_staleness: int | str | AutoStaleness = "auto",
        wire: Wire | None = None,
        capacity: int | str | None = None,
        spill: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        """`max_staleness` is how many versions rows may be behind when their gradients arrive:
        0 is synchronous, "auto" measures what hides the links, `AutoStaleness(cap=…)` bounds that.
        `capacity` is of the rows of all tables and shards; a table may have its own below it.
        """
        self.tables = tuple(tables)
        check_tables(self.tables)
        self.features = features_of(self.tables)
        if not any(feature.sharded for feature in self.features):
            raise ConfigError(
                "every table is replicated, so that no row is left for the shards; train them as "
                "parameters of an ordinary model, or shard one."
            )
        self.shards = check_shards(shards)
        self.tau, self.auto = _staleness(max_staleness)
        self.wire = wire or Wire()
        self.capacity = _capacity(capacity)
        self.spill = None if spill is None else str(spill)
        self.seed = seed
        self.spec(self.shards)
        for table in self.tables:
            _check_prune(table)
        self._pipe: Pipeline | None = None

    @property
    def bound(self) -> int:
        """The largest staleness that may occur."""
        if self.tau is not None:
            return self.tau
        return MAX_AUTO_TAU if self.auto is None else self.auto.cap

    def spec(self, shards: int) -> EmbeddingSpec:
        """What stage 0 and the shards need to know."""
        return EmbeddingSpec(
            tables=self.tables,
            features=tuple(f.table for f in self.features if f.sharded),
            num_shards=shards,
            tau=self.tau,
            auto_cap=self.bound,
            auto_window=AUTO_WINDOW if self.auto is None else self.auto.window,
            wire=self.wire,
            order=None,
            num_steps=1 << 62,  # a loader does not say when it ends
            capacity=self._shard_capacity(shards),
            spill=self.spill,
            seed=self.seed,
        )

    def _shard_capacity(self, shards: int) -> int:
        try:
            return store_capacity(
                tuple(table for table in self.tables if table.placement == "sharded"),
                num_shards=shards,
                given=None if self.capacity is None else self.capacity // shards,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def attach(self, pipe: Pipeline) -> None:
        """Become the stage of a pipeline; of one only."""
        if self._pipe is not None:
            raise ConfigError("this EmbeddingStage is part of a Pipeline already; make another.")
        self._pipe = pipe

    # --- of a pipeline ----------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Rows, bytes, hit rates, evictions, staleness, lost and dropped gradients, alive chunks,
        and the bytes that were sent, by link and kind. Waits for the steps under way."""
        return self._of_pipe().embedding_stats()

    def export(self, folder: str | Path, *, full: bool = False) -> list[Increment]:
        """Weights for serving: what changed since the last export here, and what is gone."""
        return self._of_pipe().export(folder, full=full)

    def rows(self, table: str) -> tuple[Any, Any]:
        """Ids and weights of all rows of a sharded table, by rising id: for looking into it."""
        return self._of_pipe().rows(table)

    def _of_pipe(self) -> Pipeline:
        if self._pipe is None:
            raise ConfigError("this EmbeddingStage has no rows yet: put it first in a Pipeline.")
        return self._pipe


def features_of(tables: Sequence[Table]) -> tuple[LoadedFeature, ...]:
    """All features, in the order of their tables; each reads one table."""
    found: dict[str, LoadedFeature] = {}
    for table in tables:
        for name in table.features:
            if name in found:
                raise ConfigError(
                    f"feature {name!r} is of tables {found[name].table!r} and {table.name!r}; it "
                    "can read one."
                )
            if name in (DENSE, LABEL):
                raise ConfigError(
                    f"table {table.name!r} has a feature {name!r}, which is what a batch calls its "
                    f"{'dense features' if name == DENSE else 'labels'}; rename it."
                )
            found[name] = LoadedFeature(
                name=name,
                table=table.name,
                pooling=table.pooling.get(name, "sum"),
                dim=table.dim,
                sharded=table.placement == "sharded",
            )
    return tuple(found.values())


def check_shards(shards: int) -> int:
    """A number of shards that can be started."""
    if not 1 <= shards <= MAX_SHARDS:
        raise ConfigError(f"shards is {shards}, must be from 1 to {MAX_SHARDS}.")
    return shards


def _staleness(wish: int | str | AutoStaleness) -> tuple[int | None, AutoStaleness | None]:
    if isinstance(wish, AutoStaleness):
        return None, wish
    if wish == "auto":
        return None, None
    if isinstance(wish, bool) or not isinstance(wish, int) or not 0 <= wish <= MAX_TAU:
        raise ConfigError(
            f"max_staleness is {wish!r}; it must be 0 (synchronous), a whole number up to "
            f'{MAX_TAU}, "auto", or rec.AutoStaleness(cap=…).'
        )
    return wish, None


def _check_prune(table: Table) -> None:
    """Refuse a ratio that pruning cannot reach here, not in an actor."""
    if table.prune is None:
        return
    alone = replace(table, capacity=None, max_rows=0, spill=None, admit=None)
    try:
        Shard((alone,), tau=0, capacity="8MiB", slab="16KiB", pages="4k").close()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _capacity(wish: int | str | None) -> int | None:
    """Bytes that were asked for; None: what the tables' own limits want."""
    if wish is None:
        return None
    capacity = nbytes_of(wish)
    if capacity < MIN_CAPACITY:
        raise ConfigError(
            f"capacity is {capacity} bytes, less than the tables need before their first row; use "
            f"{MIN_CAPACITY} or more."
        )
    return capacity
