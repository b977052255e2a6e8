"""What a click run trains: samples, arms, capacity, the loss that remembers its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_pipe import rec
from ray_pipe.config import RunConfig
from ray_pipe.ctr_checks import check_capacity, check_rows
from ray_pipe.ctr_workload import ClickLoss, click_task, ctr_arms
from ray_pipe.errors import ConfigError, DataError
from ray_pipe.rec_arm import OwnLoss


def config(**changes: Any) -> RunConfig:
    return RunConfig.from_dict({"task": "ctr", "data.num_samples": 3000, **changes})


def test_the_task_changes_defaults_and_what_is_given_stays() -> None:
    plain = config()

    assert (plain.pipeline.stages, plain.pipeline.samples_per_step) == (2, 1024)
    assert (plain.data.source, plain.optim.clip, plain.compare) == ("synthetic", 0.0, ())
    assert config(**{"pipeline.stages": 3}).pipeline.stages == 3
    assert config(steps=7).epochs is None
    assert config(**{"pipeline.batch_size": 256}).pipeline.micro_batch_size == 128
    assert RunConfig.from_dict(plain.to_dict()) == plain
    assert RunConfig().pipeline.stages == 4


def test_the_synchronous_fp32_arm_comes_first_and_differs_only_in_what_travels_and_when() -> None:
    run = config(**{"codec.name": "directq"})
    plain, hybrid = ctr_arms(run, click_task(run))

    assert (plain.name, hybrid.name) == ("fp32", "hybrid")
    assert (plain.codec.name, hybrid.codec.name) == ("fp32", "directq")
    assert (plain.embedding.tau, hybrid.embedding.tau) == (0, None)
    assert (plain.embedding.wire.rows, hybrid.embedding.wire.rows) == ("fp32", "fp16-rowscale")
    assert plain.plan(3) == hybrid.plan(3)
    assert plain.embedding.tables == hybrid.embedding.tables
    assert plain.topology.num_nodes == 4  # two stages, two shards
    first, last = hybrid.specs()
    assert first.embedding is hybrid.embedding
    assert last.embedding is None


def test_no_baseline_is_trained_twice() -> None:
    same = config(**{"embedding.staleness": "0", "embedding.wire": "fp32", "codec.name": "fp32"})
    alone = config(**{"embedding.baseline": False})

    assert [arm.name for arm in ctr_arms(same, click_task(same))] == ["sync"]
    assert [arm.name for arm in ctr_arms(alone, click_task(alone))] == ["hybrid"]


def test_held_out_samples_come_after_those_of_training_and_are_never_trained_on() -> None:
    run = config()
    task = click_task(run)
    (_, arm) = ctr_arms(run, task)
    trained = {
        i for step in range(arm.order.steps_per_epoch) for mb in arm.order.at(step) for i in mb
    }
    tested = [i for plan in arm.evaluations(5) for mb in plan.micro_batches for i in mb]

    assert trained == set(range(task.workload.num_train))
    assert tested == list(range(task.workload.num_train, 3000))
    assert task.best_auc is not None
    assert 0.8 < task.best_auc < 0.9


def test_a_capacity_below_the_rows_under_way_is_refused_with_the_numbers() -> None:
    run = config(**{"embedding.capacity": "1MiB"})

    with pytest.raises(ConfigError) as caught:
        check_capacity(run, click_task(run))

    text = str(caught.value)
    assert "--capacity 1MiB is less than the rows under way" in text
    assert "1024 samples touches" in text
    assert "up to 17 steps" in text
    for way in ("raise --capacity", "--staleness", "--batch-size", "--spill"):
        assert way in text
    enough = config(**{"embedding.capacity": "64MiB"})
    check_capacity(enough, click_task(enough))


def test_a_capacity_below_the_markers_of_rows_on_disk_is_refused_with_the_numbers() -> None:
    many: dict[str, Any] = {
        "data.num_samples": 30_000, "pipeline.batch_size": 32, "embedding.spill": "below",
    }  # fmt: skip
    run = config(**many, **{"embedding.capacity": "1300KiB"})
    task = click_task(run)
    with pytest.raises(ConfigError) as caught:
        check_capacity(run, task)

    assert "less than --spill needs in memory: the run uses 1" in str(caught.value)
    assert "keeps about 46 bytes" in str(caught.value)
    check_capacity(config(**many, **{"embedding.capacity": "2MiB"}), task)
    check_capacity(config(**many, steps=10, **{"embedding.capacity": "1300KiB"}), task)


def test_rows_to_begin_with_that_do_not_fit_the_run_are_refused_before_it_starts(
    tmp_path: Path,
) -> None:
    plain = config()
    tables = click_task(plain).tables
    store: Any = {"capacity": "8MiB", "slab": "64KiB", "pages": "4k"}
    rec.Embeddings(tables, **store).save(tmp_path / "fits")
    rec.Embeddings(tables[:1], **store).save(tmp_path / "other")

    fits = config(**{"embedding.rows": str(tmp_path / "fits")})
    check_rows(fits, click_task(fits))
    check_rows(plain, click_task(plain))
    for name, why in (("other", "the checkpoint has tables"), ("none", "is no checkpoint")):
        wrong = config(**{"embedding.rows": str(tmp_path / name)})
        with pytest.raises(ConfigError, match=rf"embedding\.rows=.*{name}: .*{why}"):
            check_rows(wrong, click_task(wrong))


def test_a_file_of_clicks_is_read_scaled_and_split_by_time(tmp_path: Path) -> None:
    lines = ["user,item,rating,timestamp"]
    lines += [f"{i % 7},{i % 11},{1 + i % 5},{1000 + i}" for i in range(200)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(lines) + "\n")
    run = config(
        **{"data.source": str(path), "data.num_samples": None, "embedding.split": "time",
           "pipeline.batch_size": 32, "embedding.test": 0.25}
    )  # fmt: skip

    task = click_task(run)

    assert task.features == ("user", "item")
    assert (task.workload.num_train, task.workload.num_held_out) == (150, 50)
    assert task.best_auc is None
    samples: Any = task.workload.samples
    assert samples.batch([0, 1, 2, 3, 4]).targets.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_held_out_samples_of_one_class_are_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    """Ratings that end with a month of good ones, say: their AUC would be told after an epoch."""
    lines = ["user,item,rating,timestamp"]
    lines += [f"{i % 7},{i % 11},{5 if i >= 150 else 1 + i % 5},{1000 + i}" for i in range(200)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(lines) + "\n")
    own = {"data.source": str(path), "data.num_samples": None, "embedding.test": 0.25}

    with pytest.raises(DataError, match=r"all 50 held-out samples have the label 1, .* both"):
        click_task(config(**own, **{"embedding.split": "time"}))
    assert click_task(config(**own)).workload.num_train > 0


def test_more_stages_than_layers_are_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match=r"5 dense layers.*--stages 5 or fewer"):
        click_task(config(**{"pipeline.stages": 6}))


def test_pruning_begins_after_a_quarter_of_the_steps() -> None:
    run = config(**{"embedding.prune": 0.5, "embedding.dim": 32, "steps": 160})
    table = click_task(run).tables[0]

    assert table.prune is not None
    assert (table.prune.chunk, table.prune.warmup, table.prune.every) == (8, 40, 10)


def test_the_loss_keeps_logits_in_an_evaluation_only() -> None:
    loss = ClickLoss()
    logits, labels = torch.tensor([0.5, -1.0], requires_grad=True), torch.tensor([1.0, 0.0])

    loss(logits, labels)
    with torch.no_grad():
        loss(logits, labels)
        loss(logits[:1], labels[:1])

    scores, truth = loss.scores(3)
    assert np.array_equal(scores, np.array([0.5, -1.0, 0.5], np.float32))
    assert truth.tolist() == [1.0, 0.0, 1.0]
    assert len(loss.scores(3)[0]) == 0


@pytest.mark.parametrize("loss", [ClickLoss(), OwnLoss(micro_batches=1)])
def test_an_evaluation_that_was_broken_off_and_run_again_is_told_once(loss: Any) -> None:
    logits, labels = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])
    with torch.no_grad():
        loss(logits[:2], labels[:2])  # a stage died here
        loss(logits[:2], labels[:2])
        loss(logits[2:], labels[2:])

    scores, truth = loss.scores(3)

    assert scores.tolist() == [1.0, 2.0, 3.0]
    assert truth.tolist() == [1.0, 0.0, 1.0]


def test_several_outputs_a_sample_stay_together() -> None:
    loss = OwnLoss(micro_batches=1)
    with torch.no_grad():
        for _ in range(2):
            loss(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 0.0]))

    scores, truth = loss.scores(2)

    assert scores.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert truth.tolist() == [1.0, 0.0]
