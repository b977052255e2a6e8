"""What can be trained: named models, lists of blocks, functions that make them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ray_pipe.config import RunConfig
from ray_pipe.data import DatasetSamples, TextSamples
from ray_pipe.errors import ConfigError, DataError
from ray_pipe.workload import blocks_workload, fresh_masks, gpt_workload
from stages.loss import cross_entropy, from_mean

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
    ],
)
def test_what_is_no_sequence_of_modules_is_refused(blocks, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        blocks_workload(blocks, loss=cross_entropy, samples=SAMPLES, seed=0)


def test_dropout_that_draws_fresh_masks_is_found() -> None:
    blocks = [nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0))]

    assert fresh_masks(blocks) == ["1.0"]


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


def test_the_text_that_comes_with_python_is_cut_short_by_default() -> None:
    assert len(gpt_workload(RunConfig()).samples) == 160


def test_eval_keeps_a_tenth_out_of_training() -> None:
    work = gpt_workload(RunConfig(eval=True))

    assert (work.num_train, work.num_held_out) == (144, 16)
