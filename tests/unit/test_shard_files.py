"""Shards on disk: another number of them goes on to the bit; what is cut short is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.embedding.row_rules import Adam, RowAdagrad, Sgd, Uniform
from stages.embedding.shard import Shard
from stages.embedding.shard_files import (
    MARKER,
    ShardFileError,
    load_shard,
    write_marker,
    write_shard,
)
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import ChunkPrune, Table, shard_of

CORE = "twin"
IDS = np.arange(40, dtype=np.int64)


def shards(num: int, **options: Any) -> list[Shard]:
    fields = {"name": "user", "dim": 16, "optimizer": Adam(lr=0.1), "init": Uniform(0.5)} | options
    store = {"capacity": "8MiB", "slab": "64KiB", "pages": "4k", "core": CORE}
    return [Shard((Table(**fields),), index=i, tau=0, seed=7, **store) for i in range(num)]


def train(group: list[Shard], first: int, num: int) -> None:
    for ticket in range(first, first + num):
        generator = np.random.default_rng(ticket)
        ids = np.unique(generator.integers(0, 40, 12))
        gradients = generator.standard_normal((len(ids), 16)).astype(np.float32)
        places = shard_of(ids, len(group))
        for index, shard in enumerate(group):
            mine = places == index
            counts = np.ones(int(mine.sum()), np.float32)
            v_read = shard.pull(ticket, {"user": IdSet(ids=ids[mine], counts=counts)}).version
            (settled,) = shard.push(ticket, v_read, {"user": gradients[mine]})
            assert settled.outcome == "applied"


def rows_of(group: list[Shard]) -> dict[int, bytes]:
    """Every row, whole: weights, state, utilities, chunks."""
    return {
        key: raw.tobytes()
        for shard in group
        for part in shard.store["user"].scan()
        for key, raw in zip(part.keys.tolist(), part.raw, strict=True)
    }


def written(group: list[Shard], folder: Path) -> Path:
    parts = [write_shard(shard, folder, num_shards=len(group)) for shard in group]
    write_marker(folder, parts)
    return folder


@pytest.mark.parametrize("optimizer", [Sgd(lr=0.1), RowAdagrad(lr=0.1), Adam(lr=0.1)])
@pytest.mark.parametrize("prune", [None, ChunkPrune(chunk=4, ratio=0.2, warmup=8, every=500)])
def test_with_another_number_of_shards_the_next_hundred_steps_are_the_same_to_the_bit(
    optimizer: Any, prune: Any, tmp_path: Path
) -> None:
    before = shards(2, optimizer=optimizer, prune=prune)
    train(before, 0, 10)
    after = shards(3, optimizer=optimizer, prune=prune)
    for shard in after:
        load_shard(shard, written(before, tmp_path), num_shards=3)
    assert rows_of(after) == rows_of(before)
    assert [len(shard.cuts) for shard in before] == [0 if prune is None else 1] * 2

    train(before, 10, 100)
    train(after, 10, 100)

    assert [shard.version for shard in after] == [110] * 3
    assert rows_of(after) == rows_of(before)


def test_mutant_a_checkpoint_without_adam_s_step_count_does_not_go_on_alike(
    tmp_path: Path,
) -> None:
    before, after = shards(1), shards(1)
    train(before, 0, 10)
    folder = written(before, tmp_path)
    marker = json.loads((folder / MARKER).read_bytes())
    marker["shards"][0]["tables"]["user"]["steps"] = 0
    (folder / MARKER).write_text(json.dumps(marker))
    load_shard(after[0], folder, num_shards=1)

    train(before, 10, 5)
    train(after, 10, 5)

    assert rows_of(after) != rows_of(before)


def test_the_order_of_use_survives(tmp_path: Path) -> None:
    before, after = (shards(1, evict="lru", max_rows=40) for _ in range(2))
    train(before, 0, 10)
    load_shard(after[0], written(before, tmp_path), num_shards=1)

    for shard in (*before, *after):
        shard.store["user"].evict(15)
    assert rows_of(after) == rows_of(before)


def test_a_checkpoint_that_was_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    group = shards(2)
    train(group, 0, 3)
    (empty,) = shards(1)
    parts = [write_shard(shard, tmp_path, num_shards=2) for shard in group]

    with pytest.raises(ShardFileError, match=r"has no embedding\.json: it is no checkpoint"):
        load_shard(empty, tmp_path, num_shards=1)

    write_marker(tmp_path, parts)
    path = tmp_path / "shard-00001-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(
        ShardFileError, match=r"00001-of-00002\.safetensors has \d+ bytes, .* trunc"
    ):
        load_shard(empty, tmp_path, num_shards=1)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ShardFileError, match="is damaged"):
        load_shard(empty, tmp_path, num_shards=1)
    path.unlink()
    with pytest.raises(ShardFileError, match="is missing; the marker names it"):
        load_shard(empty, tmp_path, num_shards=1)
    assert empty.stats()["rows"] == 0
    assert not list(tmp_path.glob("*.part"))


def test_other_settings_are_refused_with_both_numbers(tmp_path: Path) -> None:
    group = shards(1)
    train(group, 0, 1)
    folder = written(group, tmp_path)

    with pytest.raises(ShardFileError, match="was saved with dim 16, this run has 8"):
        load_shard(shards(1, dim=8)[0], folder, num_shards=1)
    with pytest.raises(ShardFileError, match="saved with state 2, this run has 0"):
        load_shard(shards(1, optimizer=Sgd(lr=0.1))[0], folder, num_shards=1)
