"""Shards on disk: written aside, one version each, for any number of shards to come.

    shard-00000-of-00002.safetensors   whole rows as the store keeps them, oldest touched first
    embedding.json                     written last, by rename: without it there is no checkpoint

A row knows its optimizer state, utilities and chunks; Adam's step count, the prunes and the
version go in the marker. Loading with another number of shards routes row by row. Recency is exact
within a shard that is loaded as it was saved; rows of several are merged by rank.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from stages.embedding.row_records import Records
from stages.embedding.row_table import RowTable
from stages.embedding.shard import Shard
from stages.embedding.tables import shard_of

MARKER = "embedding.json"
ABOUT = "ray_pipe_shard"
FORMAT = 1


class ShardFileError(RuntimeError):
    """A checkpoint of embeddings that is missing, damaged or of other tables."""


def write_shard(shard: Shard, folder: Path, *, num_shards: int) -> dict[str, Any]:
    """Write one shard at its present version; returns its entry for `write_marker`.

    Call it between pushes, from whoever owns the shard. Steps that are under way are not part of
    it: whoever resumes takes them again.
    """
    arrays, tables = _contents(shard)
    data = save(arrays)
    file = f"shard-{shard.index:05d}-of-{num_shards:05d}.safetensors"
    write_aside(folder / file, data)
    return {
        "file": file,
        "nbytes": len(data),
        "crc32": zlib.crc32(data),
        "version": shard.version,
        "tables": tables,
    }


def pack_shard(shard: Shard) -> bytes:
    """One shard at its present version as the bytes of one file, for `fill_shard`.

    For whoever keeps checkpoints of more than embeddings, and checks files by itself.
    """
    arrays, tables = _contents(shard)
    counts = shard.counts
    about = {
        "format": FORMAT,
        "version": shard.version,
        "tables": tables,
        "staleness": {str(age): num for age, num in counts.staleness.items()},
        "dropped_rows": counts.dropped_rows,
    }
    return save(arrays, metadata={ABOUT: json.dumps(about)})


def fill_shard(shard: Shard, files: Iterable[Any], *, num_shards: int) -> int:
    """Fill an empty shard, number `shard.index` of `num_shards`, with its rows of all `files` that
    `pack_shard` made, of any number of shards; returns how many rows it took."""
    return _fill(shard, map(_unpack, files), num_shards=num_shards, where="a saved shard")


def _contents(shard: Shard) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    tables: dict[str, Any] = {}
    for name, held in shard.rows.items():
        rows = held.rows
        arrays[f"{name}/keys"], arrays[f"{name}/rows"] = _whole(held.scan(), rows)
        stats = rows.stats()
        tables[name] = {
            "dim": rows.dim,
            "chunks": rows.chunks,
            "state": rows.state,
            "optimizer": type(rows.optimizer).__name__,
            "steps": stats["steps"],
            "epoch": stats["epoch"],
            "rows": len(arrays[f"{name}/keys"]),
        }
        if held.admission is not None:
            counters = held.admission.counters
            arrays[f"{name}/seen_keys"], arrays[f"{name}/seen"] = _whole(counters.scan(), counters)
    return arrays, tables


def _whole(parts: Iterable[Records], rows: RowTable) -> tuple[Any, Any]:
    """All keys and records, oldest touched first."""
    every = list(parts)
    keys = np.concatenate([np.empty(0, np.int64), *(part.keys for part in every)])
    width = rows.core.record_bytes
    raw = np.concatenate([np.empty((0, width), np.uint8), *(part.raw for part in every)])
    recency = np.concatenate([np.empty(0, np.uint32), *(part.recency for part in every)])
    order = np.argsort(recency, kind="stable")
    return keys[order], raw[order]


def write_marker(folder: Path, parts: list[dict[str, Any]]) -> None:
    """All shards are written: this makes it a checkpoint."""
    text = json.dumps({"format": FORMAT, "shards": parts}, indent=1)
    write_aside(folder / MARKER, text.encode())


def load_shard(shard: Shard, folder: Path, *, num_shards: int) -> int:
    """Fill an empty shard, number `shard.index` of `num_shards`; returns how many rows it took."""
    parts = _read_marker(folder)["shards"]
    whole = ((part, partial(_read_part, folder, part)) for part in parts)
    return _fill(shard, whole, num_shards=num_shards, where=str(folder))


def _fill(
    shard: Shard,
    parts: Iterable[tuple[Any, Callable[[], dict[str, Any]]]],
    *,
    num_shards: int,
    where: str,
) -> int:
    """Route row by row what the parts hold; each is (what it is, a way to its arrays)."""
    total, seen = 0, []
    taken: dict[str, list[tuple[Any, Any, Any]]] = {}
    for part, read in parts:
        _check_tables(shard, where, part)
        seen.append(part)
        arrays = read()
        for name in shard.rows:
            for what in (f"{name}/keys {name}/rows", f"{name}/seen_keys {name}/seen"):
                keys, raw = (arrays.get(array) for array in what.split())
                if keys is None or raw is None:
                    continue  # a table that admits everybody has no sightings
                rank = np.arange(len(keys)) / max(1, len(keys))
                mine = shard_of(keys, num_shards) == shard.index
                taken.setdefault(what, []).append((keys[mine], raw[mine], rank[mine]))
    for name, held in shard.rows.items():
        keys, raw = _in_order(taken[f"{name}/keys {name}/rows"])
        held.restore(keys, raw)
        numbers = [part["tables"][name] for part in seen]
        held.rows.restore_progress(
            steps=max(number["steps"] for number in numbers),
            epoch=max(number["epoch"] for number in numbers),
        )
        sightings = taken.get(f"{name}/seen_keys {name}/seen")
        if held.admission is not None and sightings is not None:
            held.admission.counters.restore(*_in_order(sightings))
        total += len(keys)
    shard.version = max(part["version"] for part in seen)
    if shard.index == 0:  # sums over all shards stay what they were
        for part in seen:
            shard.counts.dropped_rows += part.get("dropped_rows", 0)
            for age, num in part.get("staleness", {}).items():
                shard.counts.staleness[int(age)] += num
    return total


def _in_order(pieces: list[tuple[Any, Any, Any]]) -> tuple[Any, Any]:
    """Rows of several shards, merged by their rank in the order of use."""
    keys, raw, rank = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.argsort(rank, kind="stable")
    return np.ascontiguousarray(keys[order]), np.ascontiguousarray(raw[order])


def _unpack(file: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """What `pack_shard` said of a file, and a way to its arrays."""
    data = bytes(memoryview(file))
    try:
        length = int.from_bytes(data[:8], "little")
        about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][ABOUT])
    except (ValueError, KeyError, TypeError):
        raise ShardFileError("this is no saved shard of embeddings, or it was cut off") from None
    if about.get("format") != FORMAT:
        raise ShardFileError(f"a saved shard of format {about.get('format')}, expected {FORMAT}")
    return about, lambda: dict(load(data))


def _read_marker(folder: Path) -> Any:
    try:
        marker = json.loads((folder / MARKER).read_bytes())
    except FileNotFoundError:
        raise ShardFileError(
            f"{folder} has no {MARKER}: it is no checkpoint of embeddings, or one whose writing "
            "was cut short; take the one before"
        ) from None
    if marker.get("format") != FORMAT:
        raise ShardFileError(f"{folder}: format {marker.get('format')}, this source reads {FORMAT}")
    return marker


def _read_part(folder: Path, part: Any) -> dict[str, Any]:
    path = folder / part["file"]
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ShardFileError(f"{path} is missing; the marker names it") from None
    if len(data) != part["nbytes"]:
        raise ShardFileError(
            f"{path} has {len(data)} bytes, {part['nbytes']} were written: it is truncated; take "
            "an earlier checkpoint"
        )
    if zlib.crc32(data) != part["crc32"]:
        raise ShardFileError(f"{path} is damaged: its checksum is not the one that was written")
    return dict(load(data))


def _check_tables(shard: Shard, where: str, part: Any) -> None:
    saved = part["tables"]
    if set(saved) != set(shard.tables):
        raise ShardFileError(
            f"{where} has tables {sorted(saved)}, this run has {sorted(shard.tables)}"
        )
    for name, numbers in saved.items():
        rows = shard.store[name]
        here = {
            "dim": rows.dim,
            "chunks": rows.chunks,
            "state": rows.state,
            "optimizer": type(rows.optimizer).__name__,
        }
        for what, value in here.items():
            if numbers[what] != value:
                raise ShardFileError(
                    f"table {name!r} was saved with {what} {numbers[what]}, this run has {value}; "
                    "load it with the settings it was trained with"
                )


def write_aside(path: Path, data: bytes) -> None:
    """Whole or not at all: written beside, made durable, renamed."""
    aside = path.with_name(path.name + ".part")
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
