"""A shard as the bytes of one file, for any number of shards to come.

The bytes are what `shard_stream` writes: whole rows as the store keeps them, and in the header what
else there is to know: Adam's step count, the prunes, the version, the counters. Filling shards of
another number routes row by row. Rows know the step that used them last, so the order of use is
exact whatever the numbers of shards; of rows that one step used on different shards, no shard ever
knew which was first. `shard_folders` and the checkpoints of runs keep such files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stages.embedding.shard import Shard
from stages.embedding.shard_stream import (
    ShardFileError,
    keep_shard,
    read_shard,
    rows_for,
    touches_of,
)
from stages.embedding.tables import shard_of

__all__ = ["ShardFileError", "check_file", "fill_shard", "pack_shard", "write_aside"]


def pack_shard(shard: Shard) -> bytearray:
    """One shard at its present version as the bytes of one file, for `fill_shard`.

    For whoever keeps checkpoints of more than embeddings, and checks files by itself.
    """
    with keep_shard(shard) as kept:
        return kept.to_bytes()


def check_file(shard: Shard, file: Any) -> None:
    """Raise `ShardFileError` unless `fill_shard` could take rows of this file."""
    _check_tables(shard, read_shard(file).about)


def fill_shard(
    shard: Shard,
    files: Iterable[Any],
    *,
    num_shards: int,
    with_counts: bool = True,
    touch_base: int | None = None,
) -> int:
    """Fill an empty shard, number `shard.index` of `num_shards`, with its rows of all `files` that
    `pack_shard` made, of any number of shards; returns how many rows it took.

    `with_counts`: shard 0 takes over what all of them had counted, so that sums go on. Not for a
    shard that takes the place of a dead one: the others still have theirs, and their `touch_base`,
    which is then given too.
    """
    saved = [read_shard(file) for file in files]
    for one in saved:
        _check_tables(shard, one.about)
    seen = [one.about for one in saved]
    last_touches = [touches_of(part)[0] for part in seen]
    # Of one run: all files count alike, in the way that the largest number tells.
    _, renumbered = touches_of(max(seen, key=lambda part: int(part["touched"])))

    def mine(keys: Any) -> Any:
        return shard_of(keys, num_shards) == shard.index

    total = 0
    for name, held in shard.rows.items():
        arrays = [one.arrays[f"{name}/rows"] for one in saved]
        for keys, raw, touched in rows_for(arrays, mine, in_order=held.has_order):
            held.restore(keys, raw, None if touched is None else renumbered(touched))
            total += len(keys)
        numbers = [part["tables"][name] for part in seen]
        held.rows.restore_progress(
            steps=max(number["steps"] for number in numbers),
            epoch=max(number["epoch"] for number in numbers),
        )
        # A table that admitted everybody has no sightings.
        arrays = [one.arrays[f"{name}/seen"] for one in saved if f"{name}/seen" in one.arrays]
        if held.admission is not None:
            for keys, raw, touched in rows_for(arrays, mine, in_order=True):
                assert touched is not None
                held.admission.counters.restore(keys, raw, renumbered(touched))
    shard.version = max(part["version"] for part in seen)
    shard.touched = max(last_touches)
    shard.touch_base = shard.touched if touch_base is None else touch_base
    if with_counts and shard.index == 0:  # sums over all shards stay what they were
        for part in seen:
            shard.counts.add_saved(part.get("sums", part))  # one of them stood there before
            for age, num in part["staleness"].items():
                shard.counts.staleness[int(age)] += num
    return total


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


def write_aside(path: Path, data: Any) -> None:
    """Whole or not at all: written beside, made durable, renamed. Bytes, or pieces of them."""
    aside = path.with_name(path.name + ".part")
    with open(aside, "wb") as file:
        for chunk in [data] if isinstance(data, bytes) else data:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
