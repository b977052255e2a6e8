"""A shard's process without Ray: becoming a shard of another arm."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netsim.topology import Topology
from stages.embedding import shard_actor
from stages.embedding.embedding_spec import EmbeddingSpec
from stages.embedding.letters import Wire
from stages.embedding.row_rules import Adagrad
from stages.embedding.shard import Shard
from stages.embedding.shard_actor import ShardActor, ShardPlace
from stages.embedding.shard_stream import KeptShard, keep_shard
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import Table


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def spec(spill: Path) -> EmbeddingSpec:
    return EmbeddingSpec(
        tables=(Table("a", dim=4, optimizer=Adagrad(lr=0.1), max_rows=8),),
        features=("a",),
        num_shards=1,
        tau=0,
        wire=Wire(rows="fp32", gradients="fp32"),
        order=None,  # type: ignore[arg-type]
        num_steps=1,
        seed=7,
        capacity=1 << 20,
        spill=str(spill),
    )


def place(generation: int) -> ShardPlace:
    return ShardPlace(index=0, num_stages=1, topology=Topology.uniform(2), generation=generation)


@pytest.mark.usefixtures("no_collector")
def test_the_shard_of_an_arm_is_gone_with_its_memory_and_disk_when_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = type("Context", (), {"get_node_id": lambda self: "here"})()
    monkeypatch.setattr(shard_actor.ray, "get_runtime_context", lambda: context)
    actor = ShardActor(0)
    known = []
    for generation in range(3):
        actor.setup(spec(tmp_path), place(generation))
        assert actor._server is not None
        shard = actor._server.shard
        for ticket in (1, 2):  # the first rows go down
            there = np.arange(8 * ticket, 8 * ticket + 8, dtype=np.int64)
            shard.pull(ticket, {"a": IdSet(ids=there)})
            shard.push(ticket, shard.version, {"a": np.ones((8, 4), np.float32)})
        assert shard.stats()["spilled_rows"] == 8
        known.append(weakref.ref(shard.store))
        del shard

    assert [store() is None for store in known] == [True, True, False]
    assert actor.troubles == []
    actor._on_loop(actor._let_go)
    actor._loop.stop()


def test_all_rows_are_told_those_on_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = type("Context", (), {"get_node_id": lambda self: "here"})()
    monkeypatch.setattr(shard_actor.ray, "get_runtime_context", lambda: context)
    actor = ShardActor(0)
    actor.setup(spec(tmp_path), place(0))
    assert actor._server is not None
    shard = actor._server.shard
    pulled = {}
    for ticket in (1, 2):
        there = np.arange(8 * ticket, 8 * ticket + 8, dtype=np.int64)
        rows = shard.pull(ticket, {"a": IdSet(ids=there)}).tables["a"].weights
        pulled |= dict(zip(there.tolist(), rows.tolist(), strict=True))
        shard.void(ticket)
    assert shard.stats()["spilled_rows"] == 8

    keys, weights = actor.rows("a")

    assert dict(zip(keys.tolist(), weights.tolist(), strict=True)) == pulled
    actor._on_loop(actor._let_go)
    actor._loop.stop()


def test_a_snapshot_that_nobody_will_write_any_more_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 0 died, the driver gave its checkpoint up, and its order came all the same."""
    context: Any = type("Context", (), {"get_node_id": lambda self: "here"})()
    monkeypatch.setattr(shard_actor.ray, "get_runtime_context", lambda: context)
    actor = ShardActor(0)
    actor.setup(spec(tmp_path), place(0))
    made: list[KeptShard] = []
    closed: list[KeptShard] = []

    def keep(shard: Shard) -> KeptShard:
        made.append(keep_shard(shard))
        return made[-1]

    def close(self: KeptShard) -> None:
        closed.append(self)
        let_go(self)

    let_go = KeptShard.close
    monkeypatch.setattr(KeptShard, "close", close)
    monkeypatch.setattr(shard_actor, "keep_shard", keep)
    actor.keep_not("first", "stage 0 is gone")
    with pytest.raises(RuntimeError, match="stage 0 is gone"):
        actor.write_kept("first", None, "shard")
    actor.keep("first")
    actor.keep("second")

    assert len(actor.write_kept("second", None, "shard")) > 0
    assert len(actor._copies) == 0
    assert len(made) == 2
    assert closed == made
    actor._on_loop(actor._let_go)
    actor._loop.stop()
