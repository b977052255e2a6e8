"""FIITED's pruning: chunks of rows, scored by use and gradient, cut to a target of real bytes.

The row store keeps the scores (`u = decay u + accesses * ||gradient of the chunk||`), the alive
chunks of a row side by side, and gives slabs back. Here is the policy: when, how many bytes, and
what a gradient means that was computed before the cut and arrives after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stages.embedding.row_store import RowStore
from stages.embedding.row_table import RowTable
from stages.embedding.tables import Table

F32 = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
INDEX_BYTES = 12
"""Of the row store's index for each row, at its usual load. It does not shrink with chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One prune of one table of one shard."""

    table: str
    epoch: int
    full_bytes: int
    """What the resident rows would take with all their chunks."""

    target_bytes: int
    bytes_after: int
    pruned: int
    regrown: int
    dropped_rows: int


def row_bytes(rows: RowTable) -> int:
    """Real bytes of a row with all its chunks: header, utilities, chunks, its part of the index."""
    return int(rows.stats()["row_bytes"]) + INDEX_BYTES


def chunk_bytes(rows: RowTable) -> int:
    """Weights and optimizer state of one chunk."""
    return 4 * rows.dim // rows.chunks * (1 + rows.state)


def bare_bytes(rows: RowTable) -> int:
    """Real bytes of a row that has lost all its chunks."""
    return row_bytes(rows) - rows.chunks * chunk_bytes(rows)


def real_bytes(rows: RowTable) -> int:
    """Real bytes of a table's resident rows as they are."""
    stats = rows.stats()
    resident = stats["rows"] - stats["spilled_rows"]
    return resident * bare_bytes(rows) + int(stats["alive_chunks"]) * chunk_bytes(rows)


def check_ratio(rows: RowTable, table: Table) -> None:
    """Refuse a ratio that even rows without a single chunk would not reach."""
    assert table.prune is not None
    most = 1 - bare_bytes(rows) / row_bytes(rows)
    if table.prune.ratio >= most:
        raise ValueError(
            f"table {table.name!r}: prune.ratio is {table.prune.ratio}, but of the "
            f"{row_bytes(rows)} bytes of a row, {bare_bytes(rows)} are header, utilities and index "
            f"and stay; the ratio must be below {most:.2f}. Lower it, or use a larger dim"
        )


def prune(store: RowStore, rows: RowTable, table: Table) -> Cut:
    """Cut a table to its share of real bytes; hot chunks regrow, freed slabs go back."""
    assert table.prune is not None
    stats = rows.stats()
    resident = stats["rows"] - stats["spilled_rows"]
    full = resident * row_bytes(rows)
    target = int((1 - table.prune.ratio) * full)
    kept = (target - resident * bare_bytes(rows)) // chunk_bytes(rows)
    done = rows.prune(keep=kept / max(1, resident * rows.chunks))
    store.compact()
    return Cut(
        table=table.name,
        epoch=rows.stats()["epoch"],
        full_bytes=full,
        target_bytes=target,
        bytes_after=real_bytes(rows),
        pruned=done.pruned,
        regrown=done.regrown,
        dropped_rows=done.dropped_rows,
    )


# --- bitmaps and gradients ------------------------------------------------------------------------


def mask_of(alive: Bits, *, chunks: int, dim: int) -> Mask:
    """[rows, dim]: the columns of alive chunks."""
    bits = (alive[:, None] >> np.arange(chunks, dtype=np.uint8)) & 1
    return np.repeat(bits.astype(np.bool_), dim // chunks, axis=1)


def gradient_mask(alive: Bits, *, chunks: int, dim: int) -> Mask:
    """What a push carries: alive chunks whole, and one number for each that is gone."""
    mask = mask_of(alive, chunks=chunks, dim=dim)
    mask[:, :: dim // chunks] = True
    return mask


def fold_pruned(gradients: F32, alive: Bits, *, chunks: int) -> F32:
    """Gradients with, for each chunk that is gone, its norm in the first column and zeros after.

    A chunk that is gone has no weights to move; its gradient's norm is its score, and that is all
    that the shard needs of it.
    """
    num, dim = gradients.shape
    parts = gradients.reshape(num, chunks, dim // chunks)
    gone = ((alive[:, None] >> np.arange(chunks, dtype=np.uint8)) & 1) == 0
    wide = parts.astype(np.float64)
    folded = np.zeros_like(parts)
    folded[:, :, 0] = np.sqrt((wide * wide).sum(axis=2)).astype(np.float32)
    return np.where(gone[:, :, None], folded, parts).reshape(num, dim)


def without_regrown(gradients: F32, then: Bits, now: Bits, *, chunks: int) -> F32:
    """Gradients of a pull, made right for the chunks that are alive at the push.

    A chunk that regrew in between was not in the forward pass, and of its gradient only the norm
    came: it takes no step. A chunk that was cut in between takes none either, in the store.
    """
    regrown = now & ~then
    if not regrown.any():
        return gradients
    dim = gradients.shape[1]
    mask = mask_of(regrown, chunks=chunks, dim=dim)
    return np.where(mask, np.float32(0), gradients)
