"""Shards from the driver's side: what is counted stays counted when a process is replaced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ray_pipe import ctr_pipeline, rec_pipeline, shard_pulse
from ray_pipe import shards as module
from ray_pipe.config import RunConfig
from ray_pipe.ctr_run import _saved_rows
from ray_pipe.shard_pulse import Lost
from ray_pipe.shards import Shards
from stages.embedding.row_rules import Sgd
from stages.embedding.shard import Shard
from stages.embedding.shard_files import fill_shard, pack_shard
from stages.embedding.shard_folders import save_shards
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import Table


class Actor:
    """A shard in this process behind an actor's names; `remote` answers at once."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.shard = Shard(
            (Table("user", dim=2, optimizer=Sgd(lr=0.1)),),
            index=index,
            num_shards=2,
            tau=0,
            core="twin",
        )
        for name in ("setup", "fill_from", "books", "ping", "sizes"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _setup(self, *_: Any) -> dict[str, str]:
        return {"source": "same", "node": str(self.index)}

    def _fill_from(
        self, num_shards: int, with_counts: bool, touch_base: int | None, *files: Any
    ) -> tuple[int, int]:
        num_rows = fill_shard(
            self.shard,
            files,
            num_shards=num_shards,
            with_counts=with_counts,
            touch_base=touch_base,
        )
        return num_rows, self.shard.touch_base

    def _books(self) -> dict[str, Any]:
        return {"sent": {}, "resident_bytes": 0, **self.shard.stats()}

    def _ping(self) -> int:
        return self.index

    def _sizes(self, paths: list[str]) -> list[int]:
        return [Path(path).stat().st_size if self.index else -1 for path in paths]

    def train(self, tickets: range) -> None:
        for ticket in tickets:
            ids = np.arange(ticket, ticket + 5, dtype=np.int64)
            v_read = self.shard.pull(ticket, {"user": IdSet(ids=ids)}).version
            self.shard.push(ticket, v_read, {"user": np.ones((5, 2), np.float32)})


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Shards:
    fake = SimpleNamespace(get=lambda value, timeout=None: value, kill=lambda handle: None)
    monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(shard_pulse, "ray", fake)
    monkeypatch.setattr(module, "WATCH_S", 1e6)
    monkeypatch.setattr(module, "refuse_other_source", lambda infos: None)
    monkeypatch.setattr(module, "remote_shard", lambda index, **_: Actor(index))
    node: Any = SimpleNamespace(id="0" * 56)
    made = Shards(2, label="test", nodes=[node], num_stages=1)
    spec: Any = SimpleNamespace(num_shards=2)
    made.set_up(spec, topology=None, generation=0)
    return made


@pytest.mark.parametrize("dead", [0, 1])
def test_counters_go_on_when_a_shard_is_replaced_from_a_checkpoint(two: Shards, dead: int) -> None:
    for actor in two.handles:
        actor.train(range(1, 8))
    saved = [np.frombuffer(pack_shard(actor.shard), np.uint8) for actor in two.handles]
    two.rows_from = lambda shard: saved
    two.settle()
    before = two.totals()

    two._replace(dead, Lost("died", "killed"))
    two.settle()
    assert two.totals().staleness == before.staleness == {0: 14}
    two.handles[dead].train(range(10, 13))
    two.settle()
    assert two.totals().staleness == {0: 17}


def test_counters_go_on_when_all_shards_begin_from_a_checkpoint(two: Shards) -> None:
    for actor in two.handles:
        actor.train(range(1, 8))
    saved = [np.frombuffer(pack_shard(actor.shard), np.uint8) for actor in two.handles]
    two.handles = [Actor(0), Actor(1)]
    fake: Any = module.ray
    fake.put = lambda file: file

    two.fill(saved)
    two.settle()
    assert two.totals().staleness == {0: 14}


@pytest.mark.parametrize("has_told", [False, True])
def test_counters_of_a_checkpoint_are_taken_over_once_whoever_dies(
    two: Shards, has_told: bool
) -> None:
    for actor in two.handles:
        actor.train(range(1, 8))
    saved = [np.frombuffer(pack_shard(actor.shard), np.uint8) for actor in two.handles]
    two.handles = [Actor(0), Actor(1)]
    fake: Any = module.ray
    fake.put = lambda file: file
    two.fill(saved)
    if has_told:
        two.settle()

    for dead in (0, 1, 0):
        two._replace(dead, Lost("died", "killed"))
        two.settle()
        assert two.totals().staleness == {0: 14}


def test_a_shard_of_a_pipeline_from_python_begins_with_the_rows_that_were_saved_last(
    two: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    saved = [np.frombuffer(pack_shard(actor.shard), np.uint8) for actor in two.handles]

    def saved_rows(checkpoint: Any, shards: Any) -> list[Any]:
        asked.append((checkpoint, len(shards)))
        return saved

    monkeypatch.setattr(rec_pipeline, "saved_rows", saved_rows)
    checkpoint: Any = "the last"
    pipeline: Any = SimpleNamespace(_running=lambda: SimpleNamespace(shards=two))
    rec_pipeline.Pipeline._keep(pipeline, checkpoint)

    two._replace(1, Lost("died", "killed"))
    assert asked == [("the last", 1)]
    assert [failure.source for failure in two.failures] == ["checkpoint"]


def test_a_shard_that_dies_before_the_first_checkpoint_begins_with_the_rows_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(get=lambda value, timeout=None: value)
    monkeypatch.setattr(ctr_pipeline, "ray", fake)
    group = [Actor(0).shard, Actor(1).shard]
    save_shards(group, tmp_path)
    one: Any = SimpleNamespace(saver=None)
    config = RunConfig.from_dict({"task": "ctr", "embedding.rows": str(tmp_path)})

    blind, seeing = Actor(0), Actor(1)
    files = _saved_rows(config, one, None, blind)
    assert [bytes(file) for file in files] == [pack_shard(shard) for shard in group]
    paths = _saved_rows(config, one, None, seeing)
    assert [Path(path).read_bytes() for path in paths] == [bytes(file) for file in files]
    assert _saved_rows(RunConfig.from_dict({"task": "ctr"}), one, None, seeing) == []
