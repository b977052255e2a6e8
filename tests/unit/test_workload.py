"""What can be trained: named models, lists of blocks, functions that make them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from ray_pipe.config import DataConfig, RunConfig
from ray_pipe.data import DatasetSamples, TextSamples
from ray_pipe.errors import ConfigError, DataError
from ray_pipe.workload import blocks_workload, fresh_masks, gpt_workload, tied_names
from stages.dropout import SampleDropout
from stages.loss import IGNORE, cross_entropy, from_mean

SAMPLES = TextSamples(b"a corpus of some bytes" * 40, context=8)


def layers() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]


@pytest.mark.parametrize("wrap", [list, tuple, lambda made: nn.Sequential(*made), nn.ModuleList])
def test_blocks_may_come_as_any_sequence_of_modules(wrap) -> None:
    made = layers()

    work = blocks_workload(wrap(made), loss=cross_entropy, samples=SAMPLES, seed=0)

    assert work.num_blocks == 3
    first, second = (build() for build in work.stage_builders(2))
    assert [type(m) for m in (*first, *second)] == [nn.Linear, nn.ReLU, nn.Linear]
    assert torch.equal(first[0].weight, made[0].weight)


def test_a_stage_carries_only_its_own_blocks() -> None:
    work = blocks_workload(layers(), loss=cross_entropy, samples=SAMPLES, seed=0)

    carried = [len(build.args[0]) for build in work.stage_builders(3)]

    assert carried == [1, 1, 1]


def test_a_function_makes_the_same_weights_in_every_stage() -> None:
    work = blocks_workload(layers, loss=cross_entropy, samples=SAMPLES, seed=7)

    whole = work.build(0, 3)
    parts = [build() for build in work.stage_builders(3)]

    assert torch.equal(whole[2].weight, parts[2][0].weight)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (nn.Linear(2, 2), "one Linear, which cannot be cut"),
        ([], "has no blocks"),
        ([nn.Linear(2, 2), "x"], "block 1 is a str"),
        (
            [nn.Flatten(), nn.LazyLinear(2)],
            r"block 1 \(LazyLinear\) has parameters without a shape",
        ),
    ],
)
def test_what_is_no_sequence_of_modules_is_refused(blocks, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        blocks_workload(blocks, loss=cross_entropy, samples=SAMPLES, seed=0)


def tied_layers() -> list[nn.Module]:
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    return [embedding, nn.Linear(4, 4), nn.Linear(4, 4), head]


@pytest.mark.parametrize("blocks", [tied_layers, tied_layers()], ids=["function", "list"])
def test_a_cut_between_tied_weights_is_refused_by_name_with_the_way_out(blocks) -> None:
    work = blocks_workload(blocks, loss=cross_entropy, samples=SAMPLES, seed=0)

    work.check_ties(1)
    with pytest.raises(ConfigError) as caught:
        work.check_ties(2)
    assert str(caught.value) == (
        "blocks 0 and 3 share one parameter, 0.weight (stage 0) and 3.weight (stage 1), and a cut "
        "lies between them: each stage would train a copy of its own, silently; untie them (for "
        "example blocks[3] with a clone of the weight), or use fewer stages, so that they stay "
        "together."
    )


def test_a_block_used_twice_is_tied_and_untied_blocks_are_not() -> None:
    twice = nn.Linear(4, 4)

    assert tied_names([twice, nn.ReLU(), twice]) == (
        ("0.weight", "2.weight"),
        ("0.bias", "2.bias"),
    )
    assert tied_names(layers()) == ()


def test_weights_tied_within_one_stage_train_as_one() -> None:
    work = blocks_workload(tied_layers(), loss=cross_entropy, samples=SAMPLES, seed=0)

    (build,) = work.stage_builders(1)
    stage = pickle.loads(pickle.dumps(build))()

    assert stage[0].weight is stage[3].weight
    assert len(list(stage.parameters())) == 5


def test_dropout_that_draws_fresh_masks_is_found() -> None:
    blocks = [nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0))]

    assert fresh_masks(blocks) == ["1.0"]


def test_dropout_inside_attention_and_recurrent_layers_is_found_too() -> None:
    blocks = [
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(4, 4, num_layers=2, dropout=0.1),
        nn.GRU(4, 4, num_layers=2),
        nn.Sequential(nn.TransformerEncoderLayer(4, 2, dropout=0.0)),
        nn.FeatureAlphaDropout(0.2),
        SampleDropout(0.3, salt=0),
    ]

    assert fresh_masks(blocks) == ["0", "2", "5"]


def test_a_recurrent_layer_alone_draws_no_mask_whatever_its_dropout() -> None:
    layer = nn.LSTM(4, 4)
    layer.dropout = 0.5  # torch warns of it in the constructor, and drops between layers only

    assert fresh_masks([layer]) == []


def test_a_loss_may_return_a_mean_or_a_sum_with_its_count() -> None:
    output, target = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0])
    mean = from_mean(lambda o, t: (o - t).mean())
    pair = from_mean(lambda o, t: ((o - t).sum(), 2))

    assert mean(output, target) == (torch.tensor(4.0), 2)
    assert pair(output, target) == (torch.tensor(4.0), 2)


def test_padding_is_refused_where_the_loss_would_count_it() -> None:
    ragged = [(torch.ones(n), torch.ones(n)) for n in (2, 3)]

    with pytest.raises(DataError, match="different lengths, but the loss would count padding"):
        DatasetSamples(ragged, may_pad=False).batch([0, 1])
    assert DatasetSamples(ragged).batch([0, 1]).lengths == (2, 3)


def test_padding_of_targets_alone_is_refused_too_where_the_loss_would_count_it() -> None:
    ragged = [(torch.ones(4), torch.ones(n)) for n in (2, 3)]

    with pytest.raises(DataError, match=r"targets of samples \[0, 1\] have different lengths"):
        DatasetSamples(ragged, may_pad=False).batch([0, 1])
    assert DatasetSamples(ragged).batch([0, 1]).targets[0].tolist() == [1, 1, IGNORE]
    assert DatasetSamples(ragged[:1] * 2, may_pad=False).batch([0, 1]).targets.shape == (2, 2)


def test_the_text_that_comes_with_python_is_cut_short_by_default() -> None:
    assert len(gpt_workload(RunConfig()).samples) == 160


def test_files_of_a_folder_that_are_left_out_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 1000)
    config = RunConfig(data=DataConfig(source=str(tmp_path)))
    assert gpt_workload(config).notes == ()
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "c.txt", "deep/d.txt", "e.txt"):
        (tmp_path / name).write_bytes(b"caf\xe9")

    (note,) = gpt_workload(config).notes

    assert note == (
        f"--data {tmp_path}: 4 files are not UTF-8 text and left out (b.txt, c.txt, deep/d.txt, "
        "…); convert what should be read, for example with iconv."
    )


def test_eval_keeps_a_tenth_out_of_training() -> None:
    work = gpt_workload(RunConfig(eval=True))

    assert (work.num_train, work.num_held_out) == (144, 16)
