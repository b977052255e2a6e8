"""FIITED's pruning: chunks of rows, scored by use and gradient, cut to a target of real bytes.

The row store keeps the scores (`u = decay u + accesses * ||gradient of the chunk||`), the alive
chunks of a row side by side, and gives slabs back. Here is the policy: when, how many bytes, and
what a gradient means that was computed before the cut and arrives after it.

Chunks compete with `u / n ** taper`, n being their place in the row. FIITED's own rule (taper 0)
does not know that a row's eighth chunk is worth less than another row's first, and that two rows
with chunks in different columns have no products: on long tails it cost 0.5 points of AUC. Above
2.5 ids that become hot wait for their last chunks: the first ones of cold rows are worth more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

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

HEADER_BYTES = 32
SEGMENTS, BUCKET_BYTES, FULL_BUCKET = 64, 64, 7 * 0.8
"""Of the index: it grows segment by segment, when slots for 0.8 of all are taken."""

MOST_INDEX_BYTES = 23
"""For each row, right after segments have doubled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One prune of one table of one shard."""

    table: str
    epoch: int
    full_bytes: int
    """What the resident rows would take if the table were never pruned."""

    target_bytes: int
    bytes_after: int
    pruned: int
    regrown: int
    dropped_rows: int


def index_bytes(num_rows: int) -> int:
    """Real bytes of the index of so many rows, from the rule by which its segments grow.

    Not the bytes that this index happens to have: a table must be cut alike after a resume. A table
    of a few hundred rows is charged the usual: its index is as small as it gets.
    """
    each, buckets = num_rows / SEGMENTS, 0
    for place in range(SEGMENTS):  # segments differ as random numbers of that mean do
        spread = NormalDist().inv_cdf((place + 0.5) / SEGMENTS) * math.sqrt(each)
        size = 2
        while size * FULL_BUCKET < each + spread:
            size = size * 2 if size < 8192 else size + size // 4
        buckets += size
    return buckets * BUCKET_BYTES if buckets > 2 * SEGMENTS else INDEX_BYTES * num_rows


def row_bytes(rows: RowTable) -> int:
    """Real bytes of a row of a table that is never pruned: header, weights, state, rounded up; and
    its part of the index. What a ratio is a share of."""
    return _round(HEADER_BYTES + rows.chunks * chunk_bytes(rows)) + INDEX_BYTES


def chunk_bytes(rows: RowTable) -> int:
    """Weights and optimizer state of one chunk."""
    return 4 * rows.dim // rows.chunks * (1 + rows.state)


def bare_bytes(rows: RowTable) -> int:
    """Real bytes of a row that has lost all its chunks: header, utilities, part of the index."""
    return int(rows.stats()["row_bytes"]) - rows.chunks * chunk_bytes(rows) + INDEX_BYTES


def _round(nbytes: int) -> int:
    return (nbytes + 15) // 16 * 16


def _index_gap(resident: int) -> int:
    """What the index of so many rows has above its usual bytes."""
    return index_bytes(resident) - INDEX_BYTES * resident


def real_bytes(rows: RowTable) -> int:
    """Real bytes of a table's resident rows as they are."""
    stats = rows.stats()
    resident = stats["rows"] - stats["spilled_rows"]
    chunks = int(stats["alive_chunks"]) * chunk_bytes(rows)
    return resident * bare_bytes(rows) + chunks + _index_gap(resident)


def check_ratio(rows: RowTable, table: Table) -> None:
    """Refuse a ratio that even rows without a single chunk would not reach."""
    assert table.prune is not None
    more = MOST_INDEX_BYTES - INDEX_BYTES
    whole, bare = row_bytes(rows) + more, bare_bytes(rows) + more
    most = 1 - bare / whole
    if table.prune.ratio >= most:
        raise ValueError(
            f"table {table.name!r}: prune.ratio is {table.prune.ratio}, but against the "
            f"{whole} bytes of a whole row, {bare} of header, utilities and "
            f"index stay; the ratio must be below {most:.2f}. Lower it, or use a larger dim"
        )


def prune(store: RowStore, rows: RowTable, table: Table) -> Cut:
    """Cut a table to its share of real bytes; hot chunks regrow, freed slabs go back."""
    assert table.prune is not None
    stats = rows.stats()
    resident = stats["rows"] - stats["spilled_rows"]
    index = _index_gap(resident)
    full = resident * row_bytes(rows) + index
    target = int((1 - table.prune.ratio) * full)
    kept = max(0, (target - resident * bare_bytes(rows) - index) // chunk_bytes(rows))
    done = rows.prune(keep=kept / max(1, resident * rows.chunks), taper=table.prune.taper)
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


def pack_bitmaps(alive: Bits, *, chunks: int) -> bytes:
    """A bit for each chunk of each row, without gaps."""
    bits = np.unpackbits(alive[:, None], axis=1, count=chunks, bitorder="little")
    return np.packbits(bits, bitorder="little").tobytes()


def read_bitmaps(packed: Bits, *, num: int, chunks: int) -> Bits | None:
    """The bitmaps of `num` rows; None if the bytes are not exactly theirs."""
    if len(packed) != -(-num * chunks // 8):
        return None
    bits = np.unpackbits(packed, bitorder="little")
    if bits[num * chunks :].any():
        return None
    rows = bits[: num * chunks].reshape(num, chunks)
    return np.packbits(rows, axis=1, bitorder="little")[:, 0]


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
