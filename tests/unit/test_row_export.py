"""Exports for serving: what changed, what is gone, and readers that come at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_pipe import rec
from stages.embedding import row_export
from stages.embedding.shard_files import ShardFileError

STORE: dict[str, Any] = {"capacity": "8MiB", "slab": "64KiB", "pages": "4k"}


def tables(shards: int = 2, **options: Any) -> rec.EmbeddingBag:
    settings = {"dim": 4, "optimizer": rec.Sgd(lr=0.1), "init": rec.Uniform(0.5)} | options
    return rec.EmbeddingBag(rec.Table("user", **settings), shards=shards, **STORE)


def train(ours: rec.EmbeddingBag, ids: Any) -> None:
    ours.train()
    (ours(torch.as_tensor(ids)) ** 2).sum().backward()
    ours.step()


def served(reader: rec.ExportReader, num: int = 40) -> torch.Tensor:
    return torch.from_numpy(reader.lookup("user", np.arange(num, dtype=np.int64)))


def now(ours: rec.EmbeddingBag, num: int = 40) -> torch.Tensor:
    ours.eval()
    return ours(torch.arange(num))


def test_increments_carry_touched_rows_only_and_a_reader_follows(tmp_path: Path) -> None:
    ours = tables()
    train(ours, range(30))
    first = ours.export(tmp_path)
    reader = rec.ExportReader(tmp_path, **STORE)
    assert torch.equal(served(reader), now(ours))

    train(ours, [3, 4, 35])
    second = ours.export(tmp_path)
    assert (sum(part.rows for part in first), sum(part.rows for part in second)) == (30, 3)
    assert not torch.equal(served(reader), now(ours))
    assert reader.refresh() == 2  # a file from each shard
    assert torch.equal(served(reader), now(ours))


def test_an_increment_without_rows_is_one_that_readers_follow(tmp_path: Path) -> None:
    ours = tables()
    train(ours, range(30))
    ours.export(tmp_path)
    reader = rec.ExportReader(tmp_path, **STORE)

    assert sum(part.rows for part in ours.export(tmp_path)) == 0
    assert reader.refresh() == 2
    assert torch.equal(served(reader), now(ours))
    assert torch.equal(served(rec.ExportReader(tmp_path, **STORE)), now(ours))
    train(ours, [3])
    ours.export(tmp_path)
    reader.refresh()
    assert torch.equal(served(reader), now(ours))


def test_a_model_without_rows_can_be_exported_and_served(tmp_path: Path) -> None:
    tables().export(tmp_path)

    assert served(rec.ExportReader(tmp_path, **STORE)).abs().sum() == 0


def test_an_export_after_load_is_of_the_rows_that_were_loaded(tmp_path: Path) -> None:
    ours, other = tables(), tables()
    train(other, range(10, 40))
    other.save(tmp_path / "saved")
    train(ours, range(30))
    ours.export(tmp_path / "out")
    reader = rec.ExportReader(tmp_path / "out", **STORE)

    ours.load(tmp_path / "saved")
    ours.export(tmp_path / "out")
    reader.refresh()
    assert torch.equal(now(ours), now(other))
    assert torch.equal(served(reader), now(ours))
    state = tables().state_dict()
    ours.load_state_dict(state)
    ours.export(tmp_path / "out")
    reader.refresh()
    assert served(reader).abs().sum() == 0


@pytest.mark.parametrize("counts", [(4, 1), (1, 4), (2, 3, 2)])
def test_with_another_number_of_shards_every_row_is_still_served(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    ours = tables(shards=counts[0])
    train(ours, range(20))
    ours.export(tmp_path)
    reader = rec.ExportReader(tmp_path, **STORE)
    for num in counts[1:]:
        ours.save(tmp_path / "saved")
        ours.load(tmp_path / "saved", shards=num)
        train(ours, range(num, 20 + num))
        ours.export(tmp_path)

    reader.refresh()
    assert torch.equal(served(reader), now(ours))
    assert torch.equal(served(rec.ExportReader(tmp_path, **STORE)), now(ours))
    assert len(list(tmp_path.glob("shard-*"))) == counts[-1]


def test_until_the_last_shard_is_written_the_old_number_of_them_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tables(shards=2)
    train(ours, range(20))
    ours.export(tmp_path)
    before = now(ours)
    ours.save(tmp_path / "saved")
    ours.load(tmp_path / "saved", shards=3)
    train(ours, range(20))
    seen: list[torch.Tensor] = []
    write = row_export.write_aside

    def watched(path: Path, data: bytes) -> None:
        seen.append(served(rec.ExportReader(tmp_path, **STORE)))
        write(path, data)

    monkeypatch.setattr(row_export, "write_aside", watched)
    ours.export(tmp_path)
    assert len(seen) == 7  # a file and a manifest each, and the one that says three
    assert all(torch.equal(one, before) for one in seen)
    assert torch.equal(served(rec.ExportReader(tmp_path, **STORE)), now(ours))


def test_what_others_put_beside_an_export_is_not_removed(tmp_path: Path) -> None:
    ours = tables(shards=1)
    train(ours, range(5))
    for name in ("shard-notes", "shard-00000-of-00002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("kept")

    ours.export(tmp_path)
    assert [path.parent.name for path in sorted(tmp_path.glob("*/mine.txt"))] == [
        "shard-00000-of-00002",
        "shard-notes",
    ]


def test_rows_that_are_gone_leave_tombstones(tmp_path: Path) -> None:
    ours = tables(max_rows=10, evict="lru")
    train(ours, range(8))
    ours.export(tmp_path)
    reader = rec.ExportReader(tmp_path, **STORE)
    for start in (8, 16, 24):
        train(ours, range(start, start + 8))

    done = ours.export(tmp_path)
    assert sum(part.tombstones for part in done) > 0
    reader.refresh()
    assert torch.equal(served(reader), now(ours))


def test_mutant_without_tombstones_evicted_rows_are_served_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_export.np, "setdiff1d", lambda a, b, **_: a[:0])
    ours = tables(max_rows=10, evict="lru")
    train(ours, range(8))
    ours.export(tmp_path)
    reader = rec.ExportReader(tmp_path, **STORE)
    for start in (8, 16, 24):
        train(ours, range(start, start + 8))
    ours.export(tmp_path)
    reader.refresh()
    assert not torch.equal(served(reader), now(ours))


def test_a_reader_that_starts_in_the_middle_of_a_write_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment of an export, a new reader sees the last whole one, then catches up."""
    ours = tables()
    train(ours, range(20))
    ours.export(tmp_path)
    last = now(ours)
    train(ours, range(10, 30))
    seen: list[torch.Tensor] = []
    write = row_export.write_aside

    def watched(path: Path, data: bytes) -> None:
        path.with_name(path.name + ".part").write_bytes(data[: len(data) // 2])  # cut short
        seen.append(served(rec.ExportReader(tmp_path, **STORE)))
        write(path, data)
        seen.append(served(rec.ExportReader(tmp_path, **STORE)))

    monkeypatch.setattr(row_export, "write_aside", watched)
    early = rec.ExportReader(tmp_path, **STORE)
    ours.export(tmp_path)
    assert len(seen) == 8
    whole = now(ours)
    of_shard = row_export.shard_of(np.arange(40, dtype=np.int64), 2)
    for one in seen:  # each shard as it was or as it is, never between
        for shard in (0, 1):
            mine = torch.from_numpy(of_shard == shard)
            assert torch.equal(one[mine], last[mine]) or torch.equal(one[mine], whole[mine])
    early.refresh()
    assert torch.equal(served(early), whole)


def test_a_new_chain_replaces_the_old_one_and_readers_follow(tmp_path: Path) -> None:
    ours = tables()
    train(ours, range(20))
    ours.export(tmp_path)
    reader = rec.ExportReader(tmp_path, **STORE)
    train(ours, range(5))

    again = ours.export(tmp_path, full=True)
    assert sum(part.rows for part in again) == 20
    assert sorted(path.name for path in (tmp_path / "shard-00000-of-00002").iterdir()) == [
        "1-000000.safetensors",
        "manifest.json",
    ]
    reader.refresh()
    assert torch.equal(served(reader), now(ours))


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardFileError, match="has no exports"):
        rec.ExportReader(tmp_path, **STORE)
    ours = tables()
    train(ours, range(20))
    ours.export(tmp_path)
    file = tmp_path / "shard-00001-of-00002" / "0-000000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ShardFileError, match="export anew with full=True"):
        rec.ExportReader(tmp_path, **STORE)
    manifest = tmp_path / "shard-00000-of-00002" / "manifest.json"
    manifest.write_text(json.dumps({"format": 9}))
    with pytest.raises(ShardFileError, match="exports of format 9"):
        rec.ExportReader(tmp_path, **STORE)
