"""A shard as the bytes of one file, for any number of shards to come.

Safetensors: whole rows as the store keeps them, oldest touched first, and in the header what else
there is to know: Adam's step count, the prunes, the version, the counters. Filling shards of
another number routes row by row. Recency is exact within a shard that is loaded as it was saved;
rows of several are merged by rank. `shard_folders` and the checkpoints of runs keep such files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from stages.embedding.row_records import Records
from stages.embedding.row_table import RowTable
from stages.embedding.shard import Shard
from stages.embedding.tables import shard_of

ABOUT = "ray_pipe_shard"
FORMAT = 1


class ShardFileError(RuntimeError):
    """A checkpoint of embeddings that is missing, damaged or of other tables."""


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


def fill_shard(
    shard: Shard, files: Iterable[Any], *, num_shards: int, with_counts: bool = True
) -> int:
    """Fill an empty shard, number `shard.index` of `num_shards`, with its rows of all `files` that
    `pack_shard` made, of any number of shards; returns how many rows it took.

    `with_counts`: shard 0 takes over what all of them had counted, so that sums go on. Not for a
    shard that takes the place of a dead one: the others still have theirs.
    """
    total, seen = 0, []
    taken: dict[tuple[str, str], list[tuple[Any, Any, Any]]] = {}
    for part, read in map(_unpack, files):
        _check_tables(shard, part)
        seen.append(part)
        arrays = read()
        for name in shard.rows:
            for what in (_rows_of(name), _sightings_of(name)):
                keys, raw = (arrays.get(array) for array in what)
                if keys is None or raw is None:
                    continue  # a table that admits everybody has no sightings
                rank = np.arange(len(keys)) / max(1, len(keys))
                mine = shard_of(keys, num_shards) == shard.index
                taken.setdefault(what, []).append((keys[mine], raw[mine], rank[mine]))
    for name, held in shard.rows.items():
        keys, raw = _in_order(taken[_rows_of(name)])
        held.restore(keys, raw)
        numbers = [part["tables"][name] for part in seen]
        held.rows.restore_progress(
            steps=max(number["steps"] for number in numbers),
            epoch=max(number["epoch"] for number in numbers),
        )
        sightings = taken.get(_sightings_of(name))
        if held.admission is not None and sightings is not None:
            held.admission.counters.restore(*_in_order(sightings))
        total += len(keys)
    shard.version = max(part["version"] for part in seen)
    if with_counts and shard.index == 0:  # sums over all shards stay what they were
        for part in seen:
            shard.counts.dropped_rows += part.get("dropped_rows", 0)
            for age, num in part.get("staleness", {}).items():
                shard.counts.staleness[int(age)] += num
    return total


def check_file(shard: Shard, file: Any) -> None:
    """Raise `ShardFileError` unless `fill_shard` could take rows of this file."""
    _check_tables(shard, _unpack(file)[0])


def _contents(shard: Shard) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    tables: dict[str, Any] = {}
    for name, held in shard.rows.items():
        rows = held.rows
        keys, raw = _rows_of(name)
        arrays[keys], arrays[raw] = _whole(held.scan(), rows)
        stats = rows.stats()
        tables[name] = {
            "dim": rows.dim,
            "chunks": rows.chunks,
            "state": rows.state,
            "optimizer": type(rows.optimizer).__name__,
            "steps": stats["steps"],
            "epoch": stats["epoch"],
            "rows": len(arrays[keys]),
        }
        if held.admission is not None:
            counters = held.admission.counters
            keys, raw = _sightings_of(name)
            arrays[keys], arrays[raw] = _whole(counters.scan(), counters)
    return arrays, tables


def _rows_of(table: str) -> tuple[str, str]:
    return f"{table}/keys", f"{table}/rows"


def _sightings_of(table: str) -> tuple[str, str]:
    return f"{table}/seen_keys", f"{table}/seen"


def _whole(parts: Iterable[Records], rows: RowTable) -> tuple[Any, Any]:
    """All keys and records, oldest touched first."""
    every = list(parts)
    keys = np.concatenate([np.empty(0, np.int64), *(part.keys for part in every)])
    width = rows.core.record_bytes
    raw = np.concatenate([np.empty((0, width), np.uint8), *(part.raw for part in every)])
    recency = np.concatenate([np.empty(0, np.uint32), *(part.recency for part in every)])
    order = np.argsort(recency, kind="stable")
    return keys[order], raw[order]


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


def _check_tables(shard: Shard, part: Any) -> None:
    saved = part["tables"]
    if set(saved) != set(shard.tables):
        raise ShardFileError(
            f"the checkpoint has tables {sorted(saved)}, this run has {sorted(shard.tables)}"
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
