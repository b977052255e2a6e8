"""What is said to a shard and by it: ids, rows, gradients, what became of them, and refusals.

The shard (shard.py) acts on these, letters.py puts them on the wire, the client reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stages.embedding.shard_table import Rows

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

TICKETS_OF_A_SESSION = 1 << 20
"""A session is the milliseconds of the run at which a client began; its tickets begin at as many
times this."""

TOUCHES_OF_A_SESSION = 16
"""What rows remember of their use counts so many steps a millisecond: no run is that fast, so those
of a later session are above those of an earlier one, and 40 bits are two years."""


def touch_of(session: int, ticket: int) -> int:
    """What rows remember of a step that used them: rises with tickets and sessions."""
    before = session * TICKETS_OF_A_SESSION
    if ticket < before:  # a client that numbers its steps by itself
        return ticket
    return session * TOUCHES_OF_A_SESSION + ticket - before


class UnknownTicketError(KeyError):
    """A pull whose ids never came, or came to an earlier life of this shard: send them along."""


class StalenessError(RuntimeError):
    """Gradients are older than the bound allows. Nothing was applied."""


class CapacityError(ValueError):
    """A table cannot even hold the rows of the steps that are under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdSet:
    """Distinct ids of one table in one step, rising."""

    ids: Ids
    counts: F32 | None = None
    """How often each occurred; where the table is pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The answer to a pull."""

    version: int
    tables: Mapping[str, Rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What became of a step on this shard."""

    ticket: int
    outcome: str
    """applied, void, refused, lost (its pull was before a restart) or repeated."""

    version: int
    staleness: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStep:
    """One optimizer step on this shard: gradients of rows as they were pulled."""

    ids: Mapping[str, IdSet]
    gradients: Mapping[str, F32]
    pulled: Mapping[str, Rows]
    v_read: int


SUMS = (
    "lost_pushes", "refused_pushes", "replayed", "unsent", "dropped_rows", "evictions", "recalled",
)  # fmt: skip
"""Counts that a checkpoint keeps, beside those of staleness."""


@dataclass(slots=True, kw_only=True)
class ShardCounts:
    """What happened so far."""

    lost_pushes: int = 0
    refused_pushes: int = 0
    repeated: int = 0
    replayed: int = 0
    """Steps that the dense net ran again after a failure, and that were applied before."""

    unsent: int = 0
    """Steps that the dense net had made when its first stage died, and whose gradients never came:
    it goes on from there, the rows are without them."""

    voided: int = 0
    dropped_rows: int = 0
    """Gradients of rows that were evicted between pull and push."""

    max_held: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    evictions: int = 0
    recalled: int = 0
    """Of shards whose rows and counts are here now; the tables count their own."""

    def add_saved(self, saved: Mapping[str, int]) -> None:
        """What a shard had counted when it was saved (`SUMS`)."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + saved.get(name, 0))


def notes_of(error: BaseException) -> list[str]:
    """What was added to an error on its way."""
    return list(getattr(error, "__notes__", []))


def nonfinite(table: str, bad: Ids, num_ids: int) -> str:
    """The words for gradients that are NaN or infinite."""
    shown = ", ".join(map(str, bad[:8].tolist())) + (", …" if len(bad) > 8 else "")
    return (
        f"NonFiniteGradientError: table {table!r}: the gradients of {len(bad)} of {num_ids} ids "
        f"are not finite ({shown}); nothing was applied. Skip the step, or look at the loss"
    )
