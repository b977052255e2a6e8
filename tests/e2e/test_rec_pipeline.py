"""Recommenders on Ray from Python, against rec's own modules in a plain torch loop."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.cloudpickle
import rec_bench
import torch
from rec_bench import Plain, batches, blocks, tables
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import ray_pipe
from ray_pipe import CheckpointError, StageDied, TrainingError, rec
from ray_pipe.rec_arm import LoadedPipeline

pytestmark = [pytest.mark.ray, pytest.mark.slow]
for module in (sys.modules[__name__], rec_bench):
    ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import tests


def assert_same(plain: Plain, pipe: ray_pipe.Pipeline) -> None:
    """Every weight and every row, to the bit."""
    dense = pipe.state_dict()
    assert dense.keys() == plain.net.state_dict().keys()
    assert all(torch.equal(dense[name], w) for name, w in plain.net.state_dict().items())
    small = pipe.replicated_state()
    assert small.keys() == plain.small().keys()
    assert all(torch.equal(small[name], value) for name, value in plain.small().items())
    for name in ("user", "item"):
        ids, rows = pipe.emb.rows(name)
        (shard,) = plain.emb.shards
        assert len(ids) == shard.rows[name].stats()["rows"]
        assert np.array_equal(rows, shard.rows[name].read(ids).weights)


def pipeline(own: list[rec.Table], **options: Any) -> ray_pipe.Pipeline:
    stage = {"shards": 2, "max_staleness": 0, "wire": rec.Wire(values="fp32")}
    for name in [*stage, "capacity", "spill"]:
        if name in options:
            stage[name] = options.pop(name)
    emb = rec.EmbeddingStage(own, **({"capacity": "64MiB"} | stage))
    return ray_pipe.Pipeline([emb, *blocks()], **options)


def test_tau_zero_on_two_shards_and_two_stages_is_a_plain_loop_to_the_bit(cluster: None) -> None:
    made, plain = batches(12), Plain(tables())
    with pipeline(tables()) as pipe:
        losses = [float(pipe.step(batch, binary_cross_entropy_with_logits)) for batch in made]
        expected = [plain.step(batch) for batch in made]

        assert losses == expected
        assert_same(plain, pipe)
        stats = pipe.emb.stats()
        assert stats["staleness_histogram"] == {0: 2 * len(made)}
        assert stats["lost_pushes"] == 0
        links = stats["bytes_by_link"]
        assert set(links["loader->0"]) == {"embedding"}
        assert set(links["loader->1"]) == {"activation"}


def test_evaluation_is_the_plain_models_and_leaves_no_trace(cluster: None) -> None:
    made, plain = batches(6), Plain(tables())
    held_out = batches(4, seed=9, size=40)
    with pipeline(tables(), num_stages=1) as pipe:
        pipe.fit(made, binary_cross_entropy_with_logits)
        for batch in made:
            plain.step(batch)
        before = pipe.emb.stats()
        found = rec.evaluate(pipe, held_out)
        again = rec.evaluate(pipe, held_out)

        plain.emb.eval()
        with torch.no_grad():
            assert found == again == rec.evaluate(plain.logits, held_out)
        after = pipe.emb.stats()
        assert [after[key] for key in ("rows", "version", "hit_rate")] == [
            before[key] for key in ("rows", "version", "hit_rate")
        ]
        plain.emb.train()
        more = batches(2, seed=5)
        expected = [plain.step(batch) for batch in more]
        assert pipe.fit(more, binary_cross_entropy_with_logits) == expected


def test_a_checkpoint_goes_on_with_another_number_of_shards_to_the_bit(
    cluster: None, tmp_path: Path
) -> None:
    own = tables(admit=rec.MinCount(2))
    made, plain = batches(10), Plain(own)
    expected = [plain.step(batch) for batch in made]
    with pipeline(own) as pipe:
        losses = pipe.fit(made[:6], binary_cross_entropy_with_logits)
        pipe.save(tmp_path / "ckpt")
        rest = pipe.fit(made[6:], binary_cross_entropy_with_logits)
        assert [*losses, *rest] == expected

        pipe.load(tmp_path / "ckpt", shards=3)
        assert pipe.fit(made[6:], binary_cross_entropy_with_logits) == expected[6:]
        assert_same(plain, pipe)
        assert pipe.emb.stats()["shards"] == 3

    one = rec.Embeddings(own, capacity="64MiB")
    assert one.load(tmp_path / "ckpt") > 0
    with pytest.raises(CheckpointError, match=r"table 'user' was saved with dim 8, .* has 16"):
        other(user_dim=16).load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"tables \['country', 'gender', 'item', 'user'\]"):
        other(name="visitor").load(tmp_path / "ckpt")
    shard = tmp_path / "ckpt" / "shard_1_of_2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"shard_1_of_2.safetensors has .* bytes.*cut off"):
        pipeline(own).load(tmp_path / "ckpt")


def other(*, user_dim: int = 8, name: str = "user") -> ray_pipe.Pipeline:
    """A pipeline of other tables; nothing of it is started."""
    user = rec.Table(name, dim=user_dim, optimizer=rec.RowAdagrad(lr=0.1))
    return ray_pipe.Pipeline([rec.EmbeddingStage([user, *tables()[1:]]), *blocks()])


def test_increments_have_tombstones_and_a_step_without_a_finite_gradient_is_refused(
    cluster: None, tmp_path: Path
) -> None:
    own = tables(max_rows=230, evict="lru")
    with pipeline(
        own,
        max_staleness=2,
        wire=rec.Wire(values="fp16-rowscale"),
        link=ray_pipe.Link("200Mbit", rtt="10ms"),
        micro_batches=2,
        codec="fp16",
    ) as pipe:
        first = batches(4, size=64)
        pipe.fit(first, binary_cross_entropy_with_logits)
        whole = pipe.emb.export(tmp_path)
        reader = rec.ExportReader(tmp_path, capacity="64MiB")
        early = pipe.emb.rows("user")[0]
        wide = batches(12, size=64, seed=1)
        for number, batch in enumerate(wide, start=1):
            batch["user"] = torch.arange(64) + 1000 * number
        pipe.fit(wide, binary_cross_entropy_with_logits)
        more = pipe.emb.export(tmp_path)
        reader.refresh()

        ids, rows = pipe.emb.rows("user")
        gone = np.setdiff1d(early, ids)
        assert len(gone)
        assert [one.number for one in (*whole, *more)] == [0, 0, 1, 1]
        assert sum(one.tombstones for one in more) == len(gone)
        assert np.array_equal(reader.lookup("user", ids), rows)
        assert not reader.lookup("user", gone).any()
        stats = pipe.emb.stats()
        assert stats["evictions"] >= len(gone)
        assert stats["staleness_max"] <= 2
        assert max(stats["staleness_histogram"]) == stats["staleness_max"]

        bad = dict(batches(1, size=64, seed=2)[0])
        bad["dense"] = bad["dense"] * float("nan")
        version = stats["version"]
        with pytest.raises(rec.NonFiniteGradientError, match=r"step 16.*table '(user|item)'"):
            float(pipe.step(bad, binary_cross_entropy_with_logits))
        assert pipe.emb.stats()["version"] == version
        ahead = [pipe.step(b, binary_cross_entropy_with_logits) for b in (first[0], bad, first[1])]
        with pytest.raises(rec.NonFiniteGradientError, match=r"step 18: .*table"):
            float(ahead[2])
        assert [bool(np.isfinite(float(loss))) for loss in ahead] == [True, False, True]
        assert pipe.emb.stats()["version"] == version + 2
        with pytest.raises(ray_pipe.DataError, match="no 'label'"):
            pipe.step({k: v for k, v in bad.items() if k != "label"}, None)
        assert np.isfinite(float(pipe.step(first[1], binary_cross_entropy_with_logits)))


def test_spilled_and_pruned_tables_are_those_of_one_process_to_the_bit(
    cluster: None, tmp_path: Path
) -> None:
    prune = rec.ChunkPrune(chunk=4, ratio=0.2, warmup=4, every=2)
    small = {"max_rows": 60, "spill": str(tmp_path / "rows")}
    made, plain = batches(12), Plain(tables(item={"prune": prune}), shards=2)
    with pipeline(tables(item={"prune": prune}, **small)) as pipe:
        losses = pipe.fit(made, binary_cross_entropy_with_logits)
        stats = pipe.emb.stats()
        known, _ = pipe.emb.rows("item")

    assert losses == [plain.step(batch) for batch in made]
    there = plain.emb.stats()
    assert stats["rows"] == there["rows"]
    assert stats["version"] == there["version"]
    assert stats["prunes"] == there["prunes"]
    assert stats["alive_chunks"]["item"] == there["alive_chunks"]["item"]
    assert stats["prunes"] == 2 * 5  # of two shards
    assert stats["alive_chunks"]["item"] < 3 * len(known)
    assert stats["spilled_rows"] > 0
    assert stats["recalled"] > 0
    assert there["spilled_rows"] == 0


def test_a_shard_that_is_killed_is_replaced_and_its_lost_pushes_are_counted(
    cluster: None, tmp_path: Path
) -> None:
    made = batches(16)
    with pipeline(tables(), max_staleness=2) as pipe:
        pipe.fit(made[:6], binary_cross_entropy_with_logits)
        pipe.save(tmp_path / "ckpt")
        saved = set(pipe.emb.rows("item")[0])
        losses = [pipe.step(batch, binary_cross_entropy_with_logits) for batch in made[6:9]]
        assert np.isfinite(float(losses[-1]))
        victim = pipe._running().shards.handles[1]
        ray.kill(victim)
        losses += [pipe.step(batch, binary_cross_entropy_with_logits) for batch in made[9:]]

        assert all(np.isfinite(float(loss)) for loss in losses)
        stats = pipe.emb.stats()
        (failure,) = pipe.failures
        assert "embedding shard 1 died" in str(failure)
        assert "rows of the last checkpoint" in str(failure)
        assert stats["shard_failures"] == 1
        assert saved <= set(pipe.emb.rows("item")[0])
        # Steps of the old process after the checkpoint: lost on their way, or applied and gone.
        assert 0 <= stats["lost_pushes"] <= 3
        assert stats["lost_pushes"] + stats["lost_versions"] >= 1
        assert stats["version"] == len(made)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dense_stage_that_is_killed_is_replaced_and_no_bit_is_lost(
    cluster: None, victim: int
) -> None:
    """Between steps, in a step with others under way behind it, and before an evaluation."""
    made, plain = batches(14), Plain(tables())
    expected = [plain.step(batch) for batch in made]
    held_out = batches(4, seed=9, size=40)
    with pipeline(tables()) as pipe:
        losses = pipe.fit(made[:4], binary_cross_entropy_with_logits)
        pipe.drain()
        ray.kill(pipe._running().handles[victim])
        losses += pipe.fit(made[4:8], binary_cross_entropy_with_logits)
        pipe.drain()
        ray.kill(pipe._running().handles[victim])
        found = rec.evaluate(pipe, held_out)
        ahead = [pipe.step(batch, binary_cross_entropy_with_logits) for batch in made[8:]]
        if victim:  # gradients that are on their way to the shards would be lost with stage 0
            float(ahead[0])
            ray.kill(pipe._running().handles[victim])
        losses += map(float, ahead)
        stats = pipe.emb.stats()

        assert losses[:9] == expected[:9]
        if stats["replayed"]:  # died behind the shards' update and before its box: see docs
            assert victim == 1
            assert losses == pytest.approx(expected, abs=0.1)
        else:
            assert losses == expected
            assert_same(plain, pipe)
        assert found.num_samples == 160
        assert [(one.kind, one.stage) for one in pipe.failures] == [("died", victim)] * (2 + victim)
        assert "with the state of its black box; the run went on from step 3" in str(
            pipe.failures[0]
        )
        assert stats["version"] == len(made)
        assert stats["lost_pushes"] == 0


def test_a_stage_that_may_not_be_replaced_ends_the_pipeline_and_load_starts_it_anew(
    cluster: None, tmp_path: Path
) -> None:
    made, plain = batches(6), Plain(tables())
    expected = [plain.step(batch) for batch in made]
    with pipeline(tables(), max_stage_failures=0) as pipe:
        pipe.fit(made[:3], binary_cross_entropy_with_logits)
        pipe.save(tmp_path / "ckpt")
        ray.kill(pipe._running().handles[1])
        with pytest.raises(StageDied, match=r"max_stage_failures is 0; `load` of a folder"):
            pipe.fit(made[3:], binary_cross_entropy_with_logits)
        for _ in range(2):
            with pytest.raises(TrainingError, match=r"^this Pipeline ended: stage 1 died"):
                pipe.drain()

        pipe.load(tmp_path / "ckpt")
        assert pipe.fit(made[3:], binary_cross_entropy_with_logits) == expected[3:]
        assert_same(plain, pipe)


def end(actor: Any) -> None:
    """Kill it, and return when it is dead: `ray.kill` alone leaves it time to write its file."""
    ray.kill(actor)
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote(), timeout=30)


@pytest.mark.parametrize("victim", ["stage 0", "stage 1", "shard 1"])
def test_who_is_killed_while_a_checkpoint_is_written_is_replaced_and_it_is_written(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """Behind the last step, before its state is copied. A stage costs no bit; a shard goes on with
    the rows of the last checkpoint, which here is of the same step."""
    kind, _, index = victim.partition(" ")
    made, plain = batches(9), Plain(tables())
    expected = [plain.step(batch) for batch in made]
    start_save, tries = LoadedPipeline.start_save, []

    def dying(self: LoadedPipeline, *args: Any) -> Any:
        tries.append(args)
        if len(tries) == 2:
            end((self.handles if kind == "stage" else self.shards.handles)[int(index)])
        return start_save(self, *args)

    monkeypatch.setattr(LoadedPipeline, "start_save", dying)
    with pipeline(tables()) as pipe:
        losses = pipe.fit(made[:6], binary_cross_entropy_with_logits)
        pipe.save(tmp_path / "ckpt")
        pipe.save(tmp_path / "ckpt")
        assert len(tries) == 3
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
        (failure,) = pipe.failures
        assert failure.kind == "died"
        assert failure.replaced == ((int(index) if kind == "stage" else 3),)

        losses += pipe.fit(made[6:], binary_cross_entropy_with_logits)
        stats = pipe.emb.stats()
        assert losses == expected
        assert_same(plain, pipe)
        assert (stats["lost_pushes"], stats["lost_versions"]) == (0, 0)
        pipe.load(tmp_path / "ckpt", shards=1)
        assert pipe.fit(made[6:], binary_cross_entropy_with_logits) == expected[6:]
        assert_same(plain, pipe)


def test_a_stage_that_may_not_be_replaced_ends_a_save_and_the_old_checkpoint_is_whole(
    cluster: None, tmp_path: Path
) -> None:
    made, plain = batches(6), Plain(tables())
    expected = [plain.step(batch) for batch in made]
    with pipeline(tables(), max_stage_failures=0) as pipe:
        pipe.fit(made[:3], binary_cross_entropy_with_logits)
        pipe.save(tmp_path / "ckpt")
        pipe.fit(made[3:], binary_cross_entropy_with_logits)
        pipe.drain()
        ray.kill(pipe._running().handles[1])
        with pytest.raises(StageDied, match=r"max_stage_failures is 0; .*ckpt was not written; "):
            pipe.save(tmp_path / "ckpt")
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]

        pipe.load(tmp_path / "ckpt")
        assert pipe.fit(made[3:], binary_cross_entropy_with_logits) == expected[3:]


def test_a_last_stage_that_dies_before_it_is_given_another_loss_is_replaced(
    cluster: None,
) -> None:
    """And a step that is run again has the loss that it had."""
    made, plain = batches(6), Plain(tables())
    expected = [plain.step(batch) for batch in made]

    def twice(output: Tensor, label: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(output, label) * 2

    with pipeline(tables()) as pipe:
        losses = pipe.fit(made[:4], binary_cross_entropy_with_logits)
        pipe.drain()
        ray.kill(pipe._running().handles[1])
        double = float(pipe.step(made[4], twice))

        assert losses == expected[:4]
        assert double == pytest.approx(2 * expected[4], rel=1e-6)
        assert [one.stage for one in pipe.failures] == [1]


def test_the_shipped_recommender_runs(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    result = subprocess.run(
        [sys.executable, str(root / "examples" / "recommender.py"), "--steps", "100"],
        cwd=tmp_path,
        env=env | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=400,
    )

    assert result.returncode == 0, result.stderr
    (auc,) = re.findall(r"AUC (0\.\d+)", result.stdout)
    assert float(auc) > 0.6
    assert re.search(r"\d+ rows exported to recommender/serving", result.stdout)
