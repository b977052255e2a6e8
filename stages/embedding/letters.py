"""What embedding clients and shards write to each other, as packets.

Path: stages.embedding.routing -> stages.embedding.letters -> compressors.base

    ids        each table's distinct ids, and how often they occurred where that is a score
    rows       the answer to a pull: weights of alive chunks, and which chunks those are
    gradients  in the order of the pull's ids, which therefore travel once

The operation, the ticket and the versions are in the frame's header. Reading refuses with
`CodecError` what writing never writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from compressors.base import CodecError, Packet
from compressors.id_lists import decode_ids, decode_varints, encode_ids, encode_varints
from compressors.row_values import FORMATS, NonFiniteRows, decode_rows, encode_rows
from stages.embedding.chunk_prune import (
    fold_pruned,
    gradient_mask,
    mask_of,
    pack_bitmaps,
    read_bitmaps,
)
from stages.embedding.row_errors import NonFiniteGradientError
from stages.embedding.shard_table import Rows
from stages.embedding.shard_terms import IdSet, nonfinite
from stages.embedding.tables import Table

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Tables = Mapping[str, Table]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How values travel: `fp32`, `fp16-rowscale` or `int8`; `values` says it of both ways."""

    rows: str = "fp16-rowscale"
    gradients: str = "fp16-rowscale"
    values: InitVar[str | None] = None

    def __post_init__(self, values: str | None) -> None:
        if values is not None:
            object.__setattr__(self, "rows", values)
            object.__setattr__(self, "gradients", values)
        for name, value in (("rows", self.rows), ("gradients", self.gradients)):
            if value not in FORMATS:
                raise ValueError(f"wire.{name} is one of {list(FORMATS)}, got {value!r}")


def ids_packet(ids: Mapping[str, IdSet]) -> Packet:
    """The ids of a step for one shard."""
    counts = [
        b"" if part.counts is None else encode_varints(part.counts.astype(np.uint64))
        for part in ids.values()
    ]
    counted = [part.counts is not None for part in ids.values()]
    inner = [encode_ids(part.ids) for part in ids.values()]
    return _batch("embedding-ids", list(ids), inner, counts, counted=counted)


def read_ids(packet: Packet, tables: Tables) -> dict[str, IdSet]:
    """The ids of a step."""
    names = _names(packet, "embedding-ids", tables)
    counted = packet.meta.get("counted")
    if not isinstance(counted, tuple | list) or len(counted) != len(names):
        raise CodecError("a packet of ids that does not say which are counted")
    read = {}
    for name, inner, part, has_counts in zip(names, packet.inner, packet.parts, counted):
        ids = decode_ids(inner)
        counts = decode_varints(part, len(ids)).astype(np.float32) if has_counts else None
        read[name] = IdSet(ids=ids, counts=counts)
    return read


def rows_packet(rows: Mapping[str, Rows], tables: Tables, values: str) -> Packet:
    """The answer to a pull: alive chunks only, with their bitmaps and the bitmaps' versions."""
    inner, bitmaps = [], []
    for name, part in rows.items():
        table = tables[name]
        mask, packed = None, b""
        if part.alive is not None and (part.alive != (1 << table.chunks) - 1).any():
            mask = mask_of(part.alive, chunks=table.chunks, dim=table.dim)
            packed = pack_bitmaps(part.alive, chunks=table.chunks)
        inner.append(encode_rows(part.weights, values=values, mask=mask))
        bitmaps.append(packed)
    epochs = [part.epoch for part in rows.values()]
    return _batch("embedding-rows", list(rows), inner, bitmaps, epochs=epochs)


def read_rows(packet: Packet, tables: Tables) -> dict[str, Rows]:
    """Rows as the shard had them, but for what the wire's format loses."""
    names = _names(packet, "embedding-rows", tables)
    epochs = packet.meta.get("epochs")
    if not isinstance(epochs, tuple | list) or len(epochs) != len(names):
        raise CodecError("a packet of rows without the versions of its bitmaps")
    read = {}
    for name, inner, part, epoch in zip(names, packet.inner, packet.parts, epochs):
        table = tables[name]
        if len(inner.shape) != 2 or inner.shape[1] != table.dim or type(epoch) is not int:
            raise CodecError(f"table {name!r} has rows of {table.dim}, got {inner.shape}")
        alive = None
        if table.chunks > 1:
            alive = np.full(inner.shape[0], (1 << table.chunks) - 1, np.uint8)
        mask = None
        if memoryview(part).nbytes:
            if alive is not None:
                packed = np.frombuffer(part, np.uint8)
                alive = read_bitmaps(packed, num=len(alive), chunks=table.chunks)
            if alive is None:
                raise CodecError(f"table {name!r}: bitmaps do not fit {inner.shape[0]} rows")
            mask = mask_of(alive, chunks=table.chunks, dim=table.dim)
        read[name] = Rows(weights=decode_rows(inner, mask=mask), alive=alive, epoch=epoch)
    return read


def gradients_packet(
    gradients: Mapping[str, F32],
    pulled: Mapping[str, Rows],
    ids: Mapping[str, Ids],
    tables: Tables,
    values: str,
) -> Packet:
    """Gradients of a pull's rows: alive chunks whole, of the others the norm.

    Refuses with `NonFiniteGradientError` what is not finite, by table and id.
    """
    inner = []
    for name, part in gradients.items():
        table, alive, mask = tables[name], pulled[name].alive, None
        if alive is not None:
            part = fold_pruned(part, alive, chunks=table.chunks)
            mask = gradient_mask(alive, chunks=table.chunks, dim=table.dim)
        try:
            inner.append(encode_rows(part, values=values, mask=mask))
        except NonFiniteRows as error:
            bad = ids[name][list(error.rows)]
            raise NonFiniteGradientError(nonfinite(name, bad, len(ids[name]))) from None
    return _batch("embedding-gradients", list(gradients), inner, [])


def read_gradients(packet: Packet, pulled: Mapping[str, Rows], tables: Tables) -> dict[str, F32]:
    """Gradients, for the rows as they were pulled."""
    names = _names(packet, "embedding-gradients", tables)
    read = {}
    for name, inner in zip(names, packet.inner):
        if name not in pulled:
            raise CodecError(f"gradients of table {name!r}, from which nothing was pulled")
        table, alive, mask = tables[name], pulled[name].alive, None
        if inner.shape != (len(pulled[name].weights), table.dim):
            raise CodecError(f"table {name!r}: gradients {inner.shape} do not fit the pull")
        if alive is not None:
            mask = gradient_mask(alive, chunks=table.chunks, dim=table.dim)
        read[name] = decode_rows(inner, mask=mask)
    return read


def _batch(
    codec: str, names: list[str], inner: list[Packet], parts: list[bytes], **meta: Any
) -> Packet:
    return Packet(
        codec=codec,
        shape=(len(names),),
        meta={"tables": names, **meta},
        parts=tuple(parts),
        inner=tuple(inner),
    )


def _names(packet: Packet, codec: str, tables: Tables) -> list[str]:
    names = packet.meta.get("tables")
    if packet.codec != codec or not isinstance(names, tuple | list):
        raise CodecError(f"expected a packet of {codec}, got {packet.codec!r}")
    num_parts = 0 if codec == "embedding-gradients" else len(names)
    if len(packet.inner) != len(names) or len(packet.parts) != num_parts:
        raise CodecError(f"{codec}: {len(names)} tables do not fit its parts")
    unknown = [name for name in names if name not in tables]
    if unknown:
        raise CodecError(f"{codec}: unknown tables {unknown}; there are {sorted(tables)}")
    return list(names)
