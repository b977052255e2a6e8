"""A shard of the embedding tables: serves rows, applies gradients in the order of its pulls.

    announce(ticket, ids)            ids ahead of time; nothing is read yet
    pull(ticket)                     rows, and the version at which they were read
    push(ticket, v_read, gradients)  one optimizer step, when its turn has come
    void(ticket)                     the step failed: later ones need not wait for it

The contract (embeddings.md 7.2): one push is one version; pushes are applied in the order in which
their pulls were served, and early ones are held; none is applied more than `tau` versions after
its pull. Every message may come twice; it counts once. A plain class: no Ray, no clock, no wire.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.embedding import chunk_prune
from stages.embedding.chunk_prune import Cut
from stages.embedding.row_errors import NonFiniteGradientError
from stages.embedding.row_store import RowStore
from stages.embedding.shard_table import Rows, ShardTable, store_capacity
from stages.embedding.shard_terms import (
    F32,
    CapacityError,
    Ids,
    IdSet,
    Pulled,
    Settled,
    ShardCounts,
    ShardStep,
    StalenessError,
    UnknownTicketError,
    nonfinite,
    notes_of,
)
from stages.embedding.tables import Table, check_tables

MAX_ANNOUNCED = 1000
MAX_FINISHED = 4096


@dataclass(slots=True)
class _Open:
    """A step whose pull was served."""

    ids: Mapping[str, IdSet]
    pulled: Pulled
    gradients: Mapping[str, F32] | None = None
    v_read: int = 0
    number: int | None = None
    is_void: bool = False


class Shard:
    """One part of all sharded tables."""

    def __init__(
        self,
        tables: tuple[Table, ...],
        *,
        index: int = 0,
        num_shards: int = 1,
        tau: int,
        seed: int = 0,
        capacity: int | str | None = None,
        spill: str | Path | None = None,
        life: int = 0,
        core: str | None = None,
        **store: Any,
    ) -> None:
        """`capacity` is of all tables here; None: what their own limits want (`store_capacity`).
        `spill` is a folder for what does not fit, for tables
        that name none of their own; each shard and table has a part of it for itself, and one of
        the next `life` in the same process another, so that both can live for a while."""
        check_tables(tables)
        if tau < 0:
            raise ValueError(f"the staleness bound tau is 0 or more, got {tau}")
        self.index = index
        self.tau = tau
        self.version = 0
        """Optimizer steps that were applied here."""

        self.last_step = -1
        """The training step that was applied last, of those that say which they are."""

        self._is_after_client = False
        """A new client is to say which step it goes on with."""

        self.touch_base = self.touched = 0
        """What rows remember of their last use: `touch_base` and the step's touch; the largest yet.
        All shards of a run have the same base, or their rows could not be put in one order."""

        self.counts = ShardCounts()
        self.cuts: list[Cut] = []
        self.tables = {table.name: table for table in tables if table.placement == "sharded"}
        room = store_capacity(tuple(self.tables.values()), num_shards=num_shards, given=capacity)
        self.store = RowStore(capacity=room, core=core, **store)
        self.rows: dict[str, ShardTable] = {}
        for table in self.tables.values():
            folder = table.spill_folder(index, life, default=spill)
            self.rows[table.name] = ShardTable(
                self.store, table, seed=seed, num_shards=num_shards, spill=folder
            )
            if table.prune is not None:
                chunk_prune.check_ratio(self.store[table.name], table)
        self._announced: OrderedDict[int, Mapping[str, IdSet]] = OrderedDict()
        self._open: OrderedDict[int, _Open] = OrderedDict()  # in the order of their pulls
        self._finished: OrderedDict[int, Settled | None] = OrderedDict()  # those that were refused

    # --- reading ----------------------------------------------------------------------------------

    def announce(self, ticket: int, ids: Mapping[str, IdSet]) -> None:
        """Ids that a pull will ask for. The oldest are forgotten beyond a thousand."""
        if ticket in self._open or ticket in self._finished or ticket in self._announced:
            self.counts.repeated += 1
            return
        self._check_names(ids)
        self._announced[ticket] = ids
        for name, part in ids.items():
            self.rows[name].announce(part.ids)
        if len(self._announced) > MAX_ANNOUNCED:
            self._announced.popitem(last=False)

    def pull(
        self, ticket: int, ids: Mapping[str, IdSet] | None = None, *, touch: int | None = None
    ) -> Pulled:
        """The rows of a step; new ids are created. Asked again, the answer is the same.

        `touch` is what the rows remember of this use (`touch_of`); None: the ticket.
        """
        if ticket in self._open:
            self.counts.repeated += 1
            return self._open[ticket].pulled
        if ids is not None:
            self._check_names(ids)
        wanted = self._announced.pop(ticket, ids) if ids is None else ids
        self._announced.pop(ticket, None)
        if wanted is None or ticket in self._finished:
            raise UnknownTicketError(f"shard {self.index} has no ids for step {ticket}")
        for name, part in wanted.items():
            self.check_capacity(name, len(part.ids))
        step = self.touch_base + (ticket if touch is None else touch)
        self.touched = max(self.touched, step)
        tables = {name: self.rows[name].pull(part.ids, step) for name, part in wanted.items()}
        pulled = Pulled(version=self.version, tables=tables)
        self._open[ticket] = _Open(ids=wanted, pulled=pulled)
        return pulled

    def read(self, ids: Mapping[str, Ids]) -> Mapping[str, Rows]:
        """Rows for evaluation: unknown ids are zeros; nothing is created, touched or counted."""
        self._check_names(ids)
        return {name: self.rows[name].read(part) for name, part in ids.items()}

    # --- writing ----------------------------------------------------------------------------------

    def push(
        self,
        ticket: int,
        v_read: int,
        gradients: Mapping[str, F32],
        number: int | None = None,
    ) -> list[Settled]:
        """Gradients of a step. Returns the steps that this settled: it may be none, or several.

        `number` is the training step's. After a failure the dense net goes back and runs steps
        again, under new tickets; what this shard has applied of them is not applied again.
        Columns of chunks that the pull did not have hold `chunk_prune.fold_pruned` norms.
        """
        entry = self._open.get(ticket)
        if entry is None:
            return [self._stray(ticket)]
        if entry.gradients is not None or entry.is_void:
            self.counts.repeated += 1
            return []
        if set(gradients) != set(entry.ids):
            raise ValueError(
                f"shard {self.index}, step {ticket}: gradients for tables {sorted(gradients)}, "
                f"rows were pulled from {sorted(entry.ids)}"
            )
        entry.gradients, entry.v_read, entry.number = gradients, v_read, number
        return self._settle()

    def void(self, ticket: int) -> list[Settled]:
        """The step failed and will push nothing."""
        entry = self._open.get(ticket)
        if entry is None:
            self._announced.pop(ticket, None)
            known = ticket in self._finished
            self._finish(ticket)
            return [
                Settled(
                    ticket=ticket, outcome="repeated" if known else "void", version=self.version
                )
            ]
        if entry.gradients is not None or entry.is_void:
            self.counts.repeated += 1
            return []
        entry.is_void = True
        return self._settle()

    def pulled_rows(self, ticket: int) -> Mapping[str, Rows] | None:
        """What the pull of a step that is under way was answered with; None for any other."""
        entry = self._open.get(ticket)
        return None if entry is None else entry.pulled.tables

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_announced(self) -> int:
        """Steps whose ids came ahead and whose pull has not."""
        return len(self._announced)

    def _stray(self, ticket: int) -> Settled:
        if ticket in self._finished:
            self.counts.repeated += 1
            refused = self._finished[ticket]
            return refused or Settled(ticket=ticket, outcome="repeated", version=self.version)
        self.counts.lost_pushes += 1
        self._finish(ticket)
        return Settled(
            ticket=ticket,
            outcome="lost",
            version=self.version,
            why=f"shard {self.index} did not serve the pull of step {ticket} in this life",
        )

    def _settle(self) -> list[Settled]:
        """Take from the head of the line all that is decided."""
        settled = []
        while self._open:
            ticket, entry = next(iter(self._open.items()))
            if entry.gradients is None and not entry.is_void:
                break
            del self._open[ticket]
            one = self._conclude(ticket, entry)
            self._finish(ticket, one if one.outcome == "refused" else None)
            settled.append(one)
        held = sum(entry.gradients is not None for entry in self._open.values())
        self.counts.max_held = max(self.counts.max_held, held)
        return settled

    def _conclude(self, ticket: int, entry: _Open) -> Settled:
        if entry.gradients is None:
            self.counts.voided += 1
            return Settled(ticket=ticket, outcome="void", version=self.version)
        self._count_unsent(entry.number)
        if entry.number is not None and entry.number <= self.last_step:
            self.counts.replayed += 1
            return Settled(ticket=ticket, outcome="repeated", version=self.version)
        step = ShardStep(
            ids=entry.ids,
            gradients=entry.gradients,
            pulled=entry.pulled.tables,
            v_read=entry.v_read,
        )
        staleness = self.version - entry.v_read
        why = self._why_not(step)
        if not why:
            try:
                self.apply(step)
            except Exception as error:  # whatever it is, the step is told and counted as refused
                why = "; ".join([f"{type(error).__name__}: {error}", *notes_of(error)])
        if why:
            self.counts.refused_pushes += 1
            return Settled(
                ticket=ticket,
                outcome="refused",
                version=self.version,
                staleness=staleness,
                why=f"shard {self.index}, step {ticket}: {why}",
            )
        self.last_step = self.last_step if entry.number is None else entry.number
        return Settled(ticket=ticket, outcome="applied", version=self.version, staleness=staleness)

    def on_new_client(self) -> None:
        """The dense net lost its first stage: what that one did not send is missing here."""
        self._is_after_client = True

    def _count_unsent(self, number: int | None) -> None:
        if not self._is_after_client or number is None:
            return
        self._is_after_client = False
        if self.last_step >= 0:
            self.counts.unsent += max(0, number - self.last_step - 1)

    def check(self, step: ShardStep) -> None:
        """Raise what is wrong with a step, before any of it is applied anywhere."""
        why = self._why_not(step)
        if why:
            self.counts.refused_pushes += 1
            kind = StalenessError if "StalenessError" in why else NonFiniteGradientError
            raise kind(f"shard {self.index}: {why}")

    def apply(self, step: ShardStep) -> None:
        """One version: the optimizer on every table, then the prunes that are due.

        Rows on disk come up for all tables first: a disk that refuses is found before any of them
        has learned.
        """
        done: list[str] = []
        for name in step.gradients:
            self.rows[name].call_up(step.ids[name].ids, step.pulled[name])
        for name, gradients in step.gradients.items():
            wanted = step.ids[name]
            try:
                self.counts.dropped_rows += self.rows[name].apply(
                    wanted.ids, gradients, wanted.counts, step.pulled[name]
                )
            except Exception as error:
                if done:
                    error.add_note(f"tables {done} have taken this step, {name!r} has not")
                raise
            done.append(name)
        self.counts.staleness[self.version - step.v_read] += 1
        self.version += 1
        for table in self.tables.values():
            if table.prune is not None and table.prune.is_due(self.version):
                self.cuts.append(chunk_prune.prune(self.store, self.store[table.name], table))

    def _why_not(self, step: ShardStep) -> str:
        """Why a push cannot be applied; all of it is looked at before any of it is."""
        staleness = self.version - step.v_read
        if not 0 <= staleness <= self.tau:
            return (
                f"StalenessError: its rows were read at version {step.v_read}, this is version "
                f"{self.version} and the bound is {self.tau}; a pool of permits is too large or "
                "not shared"
            )
        for name, gradients in step.gradients.items():
            ids = step.ids[name].ids
            if gradients.shape != (len(ids), self.tables[name].dim):
                return f"table {name!r}: gradients {gradients.shape} for {len(ids)} rows"
            finite = np.isfinite(gradients).all(axis=1)
            if not finite.all():
                return nonfinite(name, ids[~finite], len(ids))
        return ""

    def _finish(self, ticket: int, refused: Settled | None = None) -> None:
        self._finished[ticket] = refused
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    # --- checks, numbers --------------------------------------------------------------------------

    def _check_names(self, tables: Mapping[str, Any]) -> None:
        unknown = sorted(set(tables) - set(self.tables))
        if unknown:
            raise ValueError(f"shard {self.index} has tables {sorted(self.tables)}, not {unknown}")

    def check_capacity(self, name: str, num_ids: int) -> None:
        """Raise `CapacityError` if the rows of `tau + 1` such steps cannot be here together."""
        limit = self.rows[name].max_rows
        # With a disk, rows of other steps may go down and come back.
        if limit and self.rows[name].spilling is None and (self.tau + 1) * num_ids > limit:
            raise CapacityError(
                f"table {name!r}, shard {self.index}: a step of {num_ids} distinct ids, with up to "
                f"{self.tau + 1} steps under way, needs {(self.tau + 1) * num_ids} rows, max_rows "
                f"is {limit}; raise it, lower tau, or use smaller batches or more shards"
            )

    def stats(self) -> dict[str, Any]:
        """Numbers for records and reports."""
        counts = self.counts
        tables = {name: rows.stats() for name, rows in self.rows.items()}
        return {
            "version": self.version,
            "touch_base": self.touch_base,
            "open": self.num_open,
            "rows": sum(part["rows"] for part in tables.values()),
            "real_bytes": sum(chunk_prune.real_bytes(self.store[name]) for name in tables),
            "alive_chunks": {name: part["alive_chunks"] for name, part in tables.items()},
            "staleness_max": max(counts.staleness, default=0),
            "staleness_histogram": dict(sorted(counts.staleness.items())),
            "lost_pushes": counts.lost_pushes,
            "refused_pushes": counts.refused_pushes,
            "unsent_pushes": counts.unsent,
            "voided": counts.voided,
            "repeated": counts.repeated,
            "replayed": counts.replayed,
            "dropped_rows": counts.dropped_rows,
            "prunes": sum(part["epoch"] for part in tables.values()),  # go on after a load
            "hit_rate": {name: part["hit_rate"] for name, part in tables.items()},
            "evictions": counts.evictions + sum(part["evictions"] for part in tables.values()),
            "spilled_rows": sum(part["spilled_rows"] for part in tables.values()),
            "recalled": counts.recalled + sum(part.get("recalled", 0) for part in tables.values()),
            "unadmitted_share": {
                name: part["unadmitted_share"]
                for name, part in tables.items()
                if "unadmitted_share" in part
            },
        }

    def close(self) -> None:
        """Let go of spill files."""
        for rows in self.rows.values():
            rows.close()
