"""What a user gives to a recommender's pipeline: read as meant, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rec_bench import batches, blocks, tables

import ray_pipe
from ray_pipe import rec
from ray_pipe.errors import ConfigError, DataError
from ray_pipe.rec_batches import Batches, num_samples
from stages.embedding.loaded import features_packet, labels_packet, read_features, read_labels
from stages.embedding.shard_terms import CapacityError


def reader(own: list[rec.Table] | None = None, **options: Any) -> Batches:
    stage = rec.EmbeddingStage(tables() if own is None else own, **options)
    return Batches(stage, shards=stage.shards)


def test_micro_batches_arrive_as_they_were_sent() -> None:
    (batch,) = batches(1)
    loaded = reader().read(batch, micro_batches=4)

    assert [one.part.num_samples for one in loaded] == [6, 6, 5, 6]
    assert num_samples(loaded) == 23
    start = 0
    for one in loaded:
        part, label = (
            read_features(features_packet(one.part)),
            read_labels(labels_packet(one.label)),
        )
        stop = start + part.num_samples
        assert torch.equal(label, batch["label"][start:stop])
        assert part.dense is not None
        assert torch.equal(part.dense, batch["dense"][start:stop])
        user, recent, _, history, shown, *_ = part.bags
        assert torch.equal(user.ids, batch["user"][start:stop])
        assert torch.equal(shown.ids, batch["shown"][start:stop])
        for bag, name in ((recent, "recent"), (history, "history")):
            ids, offsets = batch[name]
            assert bag.offsets is not None
            assert torch.equal(bag.ids, ids[offsets[start] : offsets[stop]])
            assert torch.equal(bag.offsets, offsets[start : stop + 1] - offsets[start])
        start = stop


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"usr": torch.zeros(23, dtype=torch.int64)}, "'usr'.*did you mean 'user'"),
        ({"user": None}, "feature 'user': ids are an int64 tensor"),
        ({"user": torch.zeros(23)}, "feature 'user': ids are int64"),
        ({"user": torch.zeros(22, dtype=torch.int64)}, "one number of samples.*'user': 22"),
        ({"gender": torch.full((23,), 3)}, "'gender'.*ids 0 to 2, got 3 to 3"),
        ({"shown": rec.Jagged(torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]))}, "none"),
        (
            {"history": rec.Jagged(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 3, 2]))},
            "'history': offsets fall",
        ),
        ({"dense": torch.zeros(23, 2, dtype=torch.float64)}, "'dense' is a float32 tensor"),
        ({"label": None}, "no 'label'"),
        ({"label": 1.0}, "'label' is a tensor"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused_by_name(
    change: dict[str, Any], words: str
) -> None:
    (batch,) = batches(1)
    with pytest.raises(DataError, match=words):
        reader().read(batch | change)


def test_a_feature_that_is_missing_is_named() -> None:
    (batch,) = batches(1)
    del batch["item"], batch["user"]
    with pytest.raises(DataError, match=r"no ids for features \['user', 'item'\]"):
        reader().read(batch)
    with pytest.raises(DataError, match="a batch is a mapping"):
        reader().read([batch])


def test_a_capacity_below_the_steps_under_way_is_explained() -> None:
    (batch,) = batches(1)
    distinct = len(torch.cat([batch["user"], batch["recent"].ids]).unique())
    roomy = reader(tables(max_rows=9 * distinct, evict="lru"), max_staleness=8)
    roomy.read(batch)
    tight = reader(tables(max_rows=distinct, evict="lru"), max_staleness=8)
    with pytest.raises(CapacityError, match=f"table 'user'.*{distinct} distinct ids.*9 steps"):
        tight.read(batch)
    assert num_samples(tight.read(batch, train=False)) == 23
    reader(tables(max_rows=distinct, spill="somewhere"), max_staleness=8).read(batch)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shards": 0}, "shards is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_staleness": "often"}, "max_staleness is 'often'"),
        ({"capacity": "1KiB"}, "capacity is 1024 bytes"),
    ],
)
def test_a_stage_refuses_what_it_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rec.EmbeddingStage(tables(), **options)


def test_features_and_tables_that_clash_are_refused() -> None:
    one = rec.Table("a", dim=4)
    with pytest.raises(ConfigError, match="feature 'a' is of tables 'a' and 'b'"):
        rec.EmbeddingStage([one, rec.Table("b", dim=4, features=("a",))])
    with pytest.raises(ConfigError, match="a feature 'dense'"):
        rec.EmbeddingStage([rec.Table("dense", dim=4)])
    with pytest.raises(ConfigError, match="every table is replicated"):
        rec.EmbeddingStage([rec.Table("c", dim=4, placement="replicated")])


def test_staleness_and_wire_say_what_they_are() -> None:
    auto = rec.EmbeddingStage(tables(), max_staleness=rec.AutoStaleness(cap=5, window=6))
    assert (auto.tau, auto.bound) == (None, 5)
    assert (auto.spec(2).bound, auto.spec(2).auto_window) == (5, 6)
    assert rec.EmbeddingStage(tables(), max_staleness="auto").bound == 16
    assert rec.EmbeddingStage(tables(), max_staleness=3).spec(2).bound == 3
    assert rec.Wire(values="int8") == rec.Wire(rows="int8", gradients="int8")
    with pytest.raises(ValueError, match=r"wire.rows is one of"):
        rec.Wire(values="fp8")


def test_links_are_written_as_people_write_them() -> None:
    link = ray_pipe.Link("100Mbit", rtt="80ms")
    assert (link.bandwidth_bps, link.latency_s) == (100e6, 0.04)
    assert ray_pipe.Link().topology(3).is_unlimited
    with pytest.raises(ConfigError, match=r"Link: .*'100M'"):
        ray_pipe.Link("100M")


def test_a_pipeline_refuses_what_it_cannot_train() -> None:
    emb = rec.EmbeddingStage(tables())
    with pytest.raises(ConfigError, match=r"expected a rec.EmbeddingStage"):
        ray_pipe.Pipeline(blocks())
    with pytest.raises(ConfigError, match="no dense block"):
        ray_pipe.Pipeline([emb])
    with pytest.raises(ConfigError, match="stage 2 is a str"):
        ray_pipe.Pipeline([emb, blocks()[0], "top"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="num_stages is 3"):
        ray_pipe.Pipeline([emb, *blocks()], num_stages=3)
    with pytest.raises(ConfigError, match="codec='acsgd' remembers"):
        ray_pipe.Pipeline([emb, *blocks()], codec="acsgd")
    with pytest.raises(ConfigError, match="decay='constant'"):
        ray_pipe.Pipeline([emb, *blocks()], optim=ray_pipe.OptimConfig(decay="cosine"))
    ray_pipe.Pipeline([emb, *blocks()])
    with pytest.raises(ConfigError, match="part of a Pipeline already"):
        ray_pipe.Pipeline([emb, *blocks()])
    with pytest.raises(ConfigError, match="has no rows yet"):
        rec.EmbeddingStage(tables()).stats()


def sketch(ratio: float) -> list[rec.Table]:
    """The tables of the specification's sketch."""
    return [
        rec.Table(
            "user", dim=32, features=["user_id"], optimizer=rec.RowAdagrad(lr=0.05),  # type: ignore[arg-type]
            init=rec.Uniform(0.05), admit=rec.MinCount(2), capacity="6GiB", evict="lru",
            spill="spill_dir", prune=rec.ChunkPrune(chunk=8, ratio=ratio, warmup=2000, every=500),
        ),
        rec.Table(
            "item", dim=32, features=["item_id", "history"], pooling={"history": "mean"},  # type: ignore[arg-type]
        ),
        rec.Table("gender", dim=4, features=["gender"], placement="replicated"),  # type: ignore[arg-type]
    ]  # fmt: skip


def test_the_sketch_of_the_specification_is_a_pipeline() -> None:
    emb = rec.EmbeddingStage(
        sketch(0.6), shards=2, max_staleness=8, wire=rec.Wire(values="fp16-rowscale")
    )
    pipe = ray_pipe.Pipeline([emb, *blocks()], link=ray_pipe.Link("100Mbit", rtt="80ms"))

    assert [feature.name for feature in pipe.emb.features] == [
        "user_id", "item_id", "history", "gender",
    ]  # fmt: skip
    assert emb.spec(2).capacity > 6 << 30
    with pytest.raises(ConfigError, match=r"table 'user': .*ratio must be below"):
        rec.EmbeddingStage(sketch(0.9))
