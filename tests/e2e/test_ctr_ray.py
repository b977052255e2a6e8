"""Click models on real Ray: rows on shards, a dense pipeline, and a single process to compare."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import Tensor

from ray_pipe import rec
from ray_pipe.checkpoint_files import MANIFEST, CheckpointError, CheckpointStore
from ray_pipe.cluster import nodes
from ray_pipe.config import RunConfig
from ray_pipe.ctr_pipeline import CtrPipeline
from ray_pipe.ctr_run import run
from ray_pipe.ctr_workload import ClickTask, CtrArm, click_task, ctr_arms
from ray_pipe.errors import ConfigError, lost_checkpoints
from ray_pipe.plans import optim_spec
from ray_pipe.shards import Shards
from ray_pipe.stage_actors import StageActors
from ray_pipe.trainer import Silent
from stages.embedding.row_store import RowStore
from stages.embedding.shard_stream import read_shard
from stages.embedding.step_clicks import pool
from stages.loss import binary_cross_entropy
from stages.optim import make_optimizer, set_lr
from stages.storage import StorageError

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def config(**changes: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "task": "ctr",
            "data.num_samples": 2000,
            "pipeline.micro_batch_size": 64,
            "embedding.baseline": False,
            "embedding.capacity": "64MiB",
            "network.bandwidth": "unlimited",
            "codec.name": "fp32",
            "faults.black_box": "off",
            "steps": 12,
            **changes,
        }
    )


@contextmanager
def pipeline_of(own: RunConfig) -> Iterator[tuple[CtrPipeline, ClickTask, CtrArm]]:
    task = click_task(own)
    (arm,) = ctr_arms(own, task)
    stages, shards = own.pipeline.stages, own.embedding.shards
    with (
        StageActors(stages, label="ctr-test") as actors,
        Shards(shards, label="ctr-test", nodes=nodes(), num_stages=stages) as actors_of_rows,
    ):
        yield CtrPipeline(actors, arm, shards=actors_of_rows, epoch_s=time.time()), task, arm


def single_process(
    own: RunConfig, task: ClickTask, arm: CtrArm
) -> tuple[list[float], dict[str, Tensor], RowStore]:
    """The same training in one process: no stages, no shards, no letters."""
    store = RowStore(capacity="64MiB")
    tables = {
        table.name: store.table(
            table.name, dim=table.dim, optimizer=table.optimizer, init=table.init, seed=own.seed
        )
        for table in task.tables
    }
    model = task.workload.build(0, task.workload.num_blocks)
    optimizer = make_optimizer(optim_spec(own), model.parameters())
    samples: Any = task.workload.samples
    losses = []
    for step in range(arm.num_steps):
        plan = arm.plan(step)
        parts = [samples.clicks(ids) for ids in plan.micro_batches]
        found = {
            name: np.unique(np.concatenate([part.bags[f].ids.numpy() for part in parts]))
            for f, name in enumerate(task.features)
        }
        rows = {
            name: torch.from_numpy(tables[name].lookup(ids)[0]).requires_grad_()
            for name, ids in found.items()
        }
        total, count = 0.0, sum(len(part) for part in parts)
        for part in parts:
            pooled = []
            for f, name in enumerate(task.features):
                index = torch.from_numpy(np.searchsorted(found[name], part.bags[f].ids.numpy()))
                pooled.append(pool(rows[name], index, part.bags[f].offsets))
            output = model(torch.cat([part.dense, *pooled], dim=1))
            loss = binary_cross_entropy(output, part.labels)[0] / count
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        set_lr(optimizer, plan.lr)
        optimizer.step()
        optimizer.zero_grad()
        for name, ids in found.items():
            gradient = rows[name].grad
            assert gradient is not None
            tables[name].apply(ids, gradient.numpy())
    return losses, dict(model.state_dict()), store


@pytest.mark.parametrize(
    ("replicate", "sharded"),
    [(0, ("id0", "id1", "id2", "id3", "id4")), (200, ("id0", "id1", "id2"))],
    ids=["all tables on shards", "small tables with the dense net"],
)
def test_tau_zero_on_two_shards_and_two_stages_is_a_single_process_to_the_bit(
    cluster: None, replicate: int, sharded: tuple[str, ...]
) -> None:
    synchronous = {"embedding.staleness": "0", "embedding.wire": "fp32"}
    own = config(**synchronous, **{"embedding.replicate": replicate})
    with pipeline_of(own) as (pipeline, task, arm):
        losses = [records[-1].loss for records in pipeline.train()]
        numbers = pipeline.settle_embeddings()
        states = pipeline.state_dicts()
        parts = [
            {name: ray.get(handle.rows.remote(name)) for name in task.features}
            for handle in pipeline.shards.handles
        ]
        pipeline.shards.settle()
        histogram = dict(pipeline.shards.totals().staleness)

    assert task.features == sharded
    expected, weights, store = single_process(own, task, arm)
    assert losses == expected
    ours = [tensor for state in states for tensor in state["module"].values()]
    assert all(torch.equal(a, b) for a, b in zip(ours, weights.values(), strict=True))
    for name in task.features:
        ids = np.concatenate([part[name][0] for part in parts])
        rows = np.concatenate([part[name][1] for part in parts])
        assert len(ids) == store[name].stats()["rows"]
        assert np.array_equal(rows, store[name].lookup(ids, train=False)[0])
    assert all(len(part[name][0]) for part in parts for name in ("id0", "id1"))
    assert histogram == {0: 2 * arm.num_steps}
    assert numbers["lost_pushes"] == 0


def test_a_run_resumed_on_another_number_of_shards_is_the_unbroken_one_to_the_bit(
    cluster: None, tmp_path: Path
) -> None:
    plain = {
        "embedding.staleness": "0",
        "embedding.wire": "fp32",
        "checkpoint.every": 5,
        "out": str(tmp_path),
    }
    whole = run(config(**plain, name="whole"), Silent())
    part = tmp_path / "whole" / "checkpoints" / "sync" / "checkpoint_000005"
    assert sorted(p.name for p in part.glob("shard_*")) == [
        "shard_0_of_2.safetensors",
        "shard_1_of_2.safetensors",
    ]

    again = run(
        config(
            **plain,
            **{"embedding.shards": 3, "checkpoint.resume": str(part), "name": "again"},
        ),
        Silent(),
    )

    (ours,), (theirs,) = again.results["arms"], whole.results["arms"]
    assert again.results["resumed"] == {"sync": 5}
    assert [loss for _, _, loss in ours["losses"]] == [loss for _, _, loss in theirs["losses"]]
    assert (ours["auc"], ours["log_loss"]) == (theirs["auc"], theirs["log_loss"])
    assert ours["rows"] == theirs["rows"]
    assert theirs["staleness_histogram"] == {"0": 24}
    assert ours["staleness_histogram"] == {"0": 2 * 5 + 3 * 7}
    for key in ("samples_per_s", "bytes_per_sample", "resident_bytes", "staleness_max"):
        assert ours[key] is not None

    data = (part / "shard_1_of_2.safetensors").read_bytes()
    (part / "shard_1_of_2.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"shard_1_of_2.safetensors has .* bytes.*cut off"):
        run(config(**plain, **{"checkpoint.resume": str(part), "name": "cut"}), Silent())


def test_checkpoints_during_stale_training_are_one_version_each_and_the_manifest_is_last(
    cluster: None, tmp_path: Path
) -> None:
    """tau = 8 over slow links: steps are under way at every moment; a checkpoint waits for them."""
    stale = {"embedding.staleness": "8", "network.latency": "20ms", "embedding.wire": "fp32"}
    own = config(**stale, **{"checkpoint.every": 4, "checkpoint.keep": 9, "out": str(tmp_path)})
    (arm,) = run(own, Silent()).results["arms"]

    folders = sorted(tmp_path.glob("*/checkpoints/hybrid/checkpoint_*"))
    assert [folder.name for folder in folders] == [
        f"checkpoint_{step:06d}" for step in (4, 8, own.steps)
    ]
    for step, folder in zip((4, 8, own.steps), folders, strict=True):
        files = sorted(folder.glob("shard_*"))
        saved = [read_shard(file.read_bytes()) for file in files]
        assert [one.about["version"] for one in saved] == [step] * 2
        last = max(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        assert last.name == MANIFEST
    assert arm["staleness_max"] > 0


def test_rows_that_do_not_fit_are_spilled_and_the_run_is_the_same_to_the_bit(
    cluster: None, tmp_path: Path
) -> None:
    plain = {
        "embedding.staleness": "0",
        "embedding.wire": "fp32",
        "embedding.dim": 256,
        "data.num_samples": 6000,
        "steps": 40,
        "out": str(tmp_path),
    }
    whole = run(config(**plain, name="whole"), Silent())
    small = {"embedding.capacity": "4MiB", "embedding.spill": str(tmp_path / "rows")}
    spilled = run(config(**plain, **small, name="spilled"), Silent())

    (ours,), (theirs,) = spilled.results["arms"], whole.results["arms"]
    assert [loss for _, _, loss in ours["losses"]] == [loss for _, _, loss in theirs["losses"]]
    assert (ours["auc"], ours["log_loss"]) == (theirs["auc"], theirs["log_loss"])
    assert ours["rows"] == theirs["rows"]
    assert theirs["spilled_rows"] == theirs["recalled_rows"] == theirs["evicted_rows"] == 0
    assert ours["row_bytes"] < 4 << 20 < theirs["row_bytes"]
    assert ours["spilled_rows"] > 0
    assert ours["recalled_rows"] > 0
    assert spilled.path is not None
    assert "rows are in the spill folder" in (spilled.path / "report.html").read_text()
    tiny = {"embedding.capacity": "1MiB", "embedding.spill": str(tmp_path / "rows")}
    with pytest.raises(ConfigError, match=r"--capacity 1MiB is less than the rows of one step"):
        run(config(**plain, **tiny, name="tiny"), Silent())


def test_a_pruned_run_on_ray_has_the_bytes_that_were_asked_for(
    cluster: None, tmp_path: Path
) -> None:
    pruned = {"embedding.prune": 0.6, "embedding.dim": 32, "steps": 16, "out": str(tmp_path)}
    (arm,) = run(config(**pruned, **{"embedding.staleness": "2"}), Silent()).results["arms"]

    whole = arm["rows"] * (32 + 2 * 4 * 32 + 12)  # header, Adagrad's rows, index
    assert arm["prunes"] >= 8
    assert arm["row_bytes"] / whole == pytest.approx(0.4, abs=0.05)
    assert arm["staleness_max"] <= 2
    with pytest.raises(ConfigError, match=r"--prune 0\.9 .*the ratio must be below 0\.77"):
        run(config(**{"embedding.prune": 0.9, "embedding.dim": 32}), Silent())


def test_rows_go_from_a_run_to_one_process_and_back(cluster: None, tmp_path: Path) -> None:
    """One format: `rec.Embeddings` loads a run's checkpoint, a run begins with what it saved."""
    plain = {
        "embedding.staleness": "0",
        "embedding.wire": "fp32",
        "checkpoint.every": 6,
        "steps": 6,
        "out": str(tmp_path),
    }
    own = config(**plain, name="run")
    first = run(own, Silent())
    saved = str(first.checkpoint.path if first.checkpoint else "")
    (arm,) = first.results["arms"]
    tables = click_task(own).tables

    ours = rec.Embeddings(tables, seed=own.seed, capacity="64MiB")
    assert ours.load(saved) == arm["rows"] > 0
    ours.save(tmp_path / "mine")
    again = run(
        config(**plain, name="again", **{"embedding.rows": str(tmp_path / "mine")}), Silent()
    )
    same = run(config(**plain, name="same", **{"embedding.rows": saved}), Silent())

    (ours_then,), (theirs_then,) = again.results["arms"], same.results["arms"]
    assert ours_then["rows"] == theirs_then["rows"] == arm["rows"]
    assert ours_then["losses"][0][2] == theirs_then["losses"][0][2]
    assert ours_then["losses"][0][2] != arm["losses"][0][2]
    assert ours_then["staleness_histogram"] == arm["staleness_histogram"]  # its own steps only


def test_a_click_run_keeps_spares_and_says_when_its_last_state_is_lost(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, started = CheckpointStore.commit, []

    class Noted(StageActors):
        def __init__(self, *args: Any, **options: Any) -> None:
            started.append(options)
            super().__init__(*args, **options)

    def refuse(store: Any, place: Any, aside: Any, manifest: Any) -> Any:
        if manifest.step == 4:
            raise StorageError(28, "the disk is full")
        return commit(store, place, aside, manifest)

    monkeypatch.setattr(CheckpointStore, "commit", refuse)
    monkeypatch.setattr("ray_pipe.driver.StageActors", Noted)
    monkeypatch.setattr("ray_pipe.checkpoint.FINAL_PAUSE_S", 0.0)
    own = config(
        **{"out": str(tmp_path), "name": "clicks", "steps": 4, "checkpoint.every": 2,
           "faults.spares": 2, "faults.spare_after_s": "3s"}
    )  # fmt: skip
    results = run(own, Silent()).results

    assert results["lost_checkpoints"] == dict.fromkeys(
        [arm["name"] for arm in results["arms"]], "the disk is full"
    )
    assert lost_checkpoints(results) is not None  # the command ends with status 1
    assert [(one["spares"], one["spare_after_s"]) for one in started] == [(2, 3.0)]
