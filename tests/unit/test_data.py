"""Samples with stable ids, orders that resume anywhere, and padding end to end, (d)13."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_pipeline import DIRECTQ, FP32, Bench, acsgd, plain_loop, same_bits
from torch import Tensor, nn

from compressors.registry import CodecSpec
from ray_pipe.codec_names import BACKWARD, backward_codec
from ray_pipe.data import DatasetSamples, Order, TextSamples, read_text
from ray_pipe.errors import DataError
from stages import passes
from stages.loss import IGNORE
from stages.passes import Passes

# --- text ---------------------------------------------------------------------------------------


def test_a_sample_predicts_the_next_byte() -> None:
    samples = TextSamples(b"abcdefghij", context=3)

    batch = samples.batch((2, 0))

    assert len(samples) == 3
    assert [bytes(row.tolist()) for row in batch.inputs] == [b"ghi", b"abc"]
    assert [bytes(row.tolist()) for row in batch.targets] == [b"hij", b"bcd"]
    assert batch.lengths is None


def test_the_digest_names_the_content_and_the_window() -> None:
    one, same = TextSamples(b"abcdefghij", context=3), TextSamples(b"abcdefghij", context=3)

    assert one.digest == same.digest
    assert one.digest != TextSamples(b"abcdefghiX", context=3).digest
    assert one.digest != TextSamples(b"abcdefghij", context=2).digest
    assert one.digest != one.first(2).digest


def test_the_first_samples_are_the_same_samples() -> None:
    samples = TextSamples(b"abcdefghij", context=3)

    assert torch.equal(samples.first(2).batch((1,)).inputs, samples.batch((1,)).inputs)


@pytest.mark.parametrize("ids", [(3,), (-1,), (0, 99)])
def test_an_id_that_does_not_exist_is_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(IndexError, match="samples have ids 0 to 2"):
        TextSamples(b"abcdefghij", context=3).batch(ids)


def test_a_corpus_that_is_too_small_says_what_would_do() -> None:
    with pytest.raises(DataError, match=r"has 3 bytes, one sample .* needs 9; give more text"):
        TextSamples(b"abc", context=8)
    with pytest.raises(DataError, match=r"data.num_samples=9 but the corpus has only 3 samples"):
        TextSamples(b"abcdefghij", context=3).first(9)


def test_the_default_text_is_on_every_machine() -> None:
    text = read_text("pydoc")

    assert len(text) > 300_000
    assert read_text("pydoc") == text


def test_a_folder_is_read_in_order_and_without_binaries(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")

    skipped: list[Path] = []

    assert read_text(str(tmp_path), on_skip=skipped.append) == b"first\nsecond"
    assert skipped == [tmp_path / "c.bin"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"ok\xff")

    with pytest.raises(DataError, match=r"no such data file: .*none.txt"):
        read_text(str(tmp_path / "none.txt"))
    with pytest.raises(DataError, match=r"bad.txt is not UTF-8 text \(byte 0xff at offset 2\)"):
        read_text(str(bad))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no UTF-8 text \(0 files looked at\)"):
        read_text(str(tmp_path / "empty"))


# --- order ----------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_every_epoch_visits_every_sample_once(
    num_samples: int, micro_batches: int, size: int, seed: int
) -> None:
    order = Order(
        num_samples=num_samples, micro_batches=micro_batches, micro_batch_size=size, seed=seed
    )

    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        batches = [order.at(step) for step in steps]
        seen = [sample for batch in batches for micro in batch for sample in micro]
        assert sorted(seen) == list(range(num_samples))
        assert all(len(batch) <= micro_batches for batch in batches)
        assert all(1 <= len(micro) <= size for batch in batches for micro in batch)


def test_an_order_resumes_at_any_step_and_differs_between_epochs_and_seeds() -> None:
    order = Order(num_samples=12, micro_batches=2, micro_batch_size=3, seed=1)

    assert replace(order).at(5) == order.at(5)
    assert order.at(0) != order.at(2)
    assert order.at(0) != replace(order, seed=2).at(0)


def test_the_last_batch_of_an_epoch_may_be_smaller() -> None:
    order = Order(num_samples=7, micro_batches=2, micro_batch_size=2, seed=0)

    assert [len(micro) for micro in order.at(1)] == [2, 1]
    assert order.steps_per_epoch == 2


# --- a user's dataset -----------------------------------------------------------------------


class Sentences:
    """Tokens of different lengths; the target of each is the next."""

    lengths = (8, 3, 5, 8, 2, 6, 7, 4, 5, 1, 8, 3)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = (torch.arange(self.lengths[index] + 1) * 7 + index * 11) % 96 + 32
        return tokens[:-1], tokens[1:]


def test_samples_of_different_length_are_padded_and_their_lengths_told() -> None:
    batch = DatasetSamples(Sentences()).batch((4, 1))

    assert batch.inputs.tolist() == [[76, 83, 0], [43, 50, 57]]
    assert batch.targets.tolist() == [[83, 90, IGNORE], [50, 57, 64]]
    assert batch.lengths == (2, 3)


def test_samples_of_one_length_are_not_padded() -> None:
    batch = DatasetSamples(Sentences()).batch((0, 3))

    assert batch.inputs.shape == (2, 8)
    assert batch.lengths is None


def test_the_digest_of_a_dataset_names_its_content_not_its_class() -> None:
    one = [(torch.tensor([float(i)]), i % 2) for i in range(100)]
    same = [(torch.tensor([float(i)]), i % 2) for i in range(100)]
    digest = DatasetSamples(one).digest

    assert digest == DatasetSamples(same).digest == "a0b0535d25f78149"
    for change in ((0, (torch.tensor([0.5]), 0)), (99, (torch.tensor([99.0]), 0))):
        other = list(one)
        other[change[0]] = change[1]
        assert DatasetSamples(other).digest != digest
    assert DatasetSamples(one[:50]).digest != digest
    assert DatasetSamples(one, digest="mine").digest == "mine"
    assert len(DatasetSamples([]).digest) == len(DatasetSamples(one[:1]).digest) == 16


def test_the_digest_of_a_dataset_looks_at_sixteen_items() -> None:
    class Counting(Sentences):
        lengths = (3,) * 1000
        seen: ClassVar[list[int]] = []

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.seen.append(index)
            return super().__getitem__(index)

    DatasetSamples(Counting())

    assert Counting.seen == [place * 999 // 15 for place in range(16)]
    assert Counting.seen[-1] == 999


def test_a_stream_or_an_item_that_is_no_pair_is_refused() -> None:
    with pytest.raises(DataError, match="list_iterator has no length or index"):
        DatasetSamples(iter([1, 2]))
    with pytest.raises(DataError, match="sample 1 of list is a int, expected a pair"):
        DatasetSamples([(1, 2), 3]).batch((0, 1))


PADDED = Bench(num_stages=4, samples=DatasetSamples(Sentences()), optim=Bench().optim)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (({"ids": torch.ones(3)}, 1), r"the input of sample 0 of list is a dict, which makes no"),
        ((torch.ones(3), None), r"the target of sample 0 of list is a NoneType, which makes no"),
        (((torch.ones(3), torch.ones(2)), 1), r"the input of sample 0 of list is a tuple, which"),
    ],
)
def test_an_item_that_makes_no_tensor_is_named(item: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DatasetSamples([item] * 4)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_padded_batches_train_as_a_plain_loop_to_the_last_bit(num_stages: int) -> None:
    bench = replace(PADDED, num_stages=num_stages)

    run, (losses, weights) = bench.run(3), plain_loop(bench, 3)

    assert run.losses == losses
    assert same_bits(run.weights, weights)


def alone(bench: Bench) -> Bench:
    """The same batches with a micro-batch for each sample: nothing is padded."""
    steps = tuple(
        tuple((sample,) for micro in bench.plan(step).micro_batches for sample in micro)
        for step in range(6)
    )
    return replace(bench, order=steps)


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", [FP32, acsgd(), DIRECTQ], ids=["fp32", "acsgd", "directq"])
def test_padding_changes_neither_loss_nor_rows(codec: CodecSpec) -> None:
    """A padded position enters no scale: what a sample becomes does not depend on its company."""
    bench = replace(PADDED, activation=codec, gradient=codec if codec is DIRECTQ else FP32)

    padded, single = bench.run(6), alone(bench).run(6)

    assert padded.losses == pytest.approx(single.losses, rel=1e-4)


def rows_by_sample(run: Any) -> dict[int, tuple[int, ...]]:
    """Shapes of the rows of the first edge."""
    state = run.stages[0].wiring.activation_out.codec.state_dict()
    dims = iter(state["dims"].tolist())
    return {
        sample: tuple(next(dims) for _ in range(count))
        for sample, count in zip(state["ids"].tolist(), state["num_dims"].tolist())
    }


def test_rows_hold_the_valid_positions_only_and_stay_warm_in_other_company() -> None:
    run = replace(PADDED, activation=acsgd()).run(6)

    assert rows_by_sample(run) == {i: (n, 32) for i, n in enumerate(Sentences.lengths)}
    assert all(sender == receiver for sender, receiver in run.rows())
    assert run.events == []
    hits = [step[0].codec["0->1"]["hit_rate"] for step in run.records]
    assert hits == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.slow
def test_mutant_forgetting_the_lengths_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Passes.keys
    monkeypatch.setattr(
        Passes, "keys", lambda *args, **where: replace(right(*args, **where), lengths=None)
    )

    run = replace(PADDED, activation=acsgd()).run(6)

    assert rows_by_sample(run) != {i: (n, 32) for i, n in enumerate(Sentences.lengths)}
    assert run.records[3][0].codec["0->1"]["hit_rate"] < 1.0


class Prepend(nn.Module):
    """A token of its own before each sample's."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(-1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), 1, 32), x], dim=1)


class Pool(nn.Module):
    """One vector for each sample: its first token's."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class DropFirst(nn.Module):
    """Only the positions that have a target."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:]


class FirstByte(Sentences):
    """One target for each sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = super().__getitem__(index)
        return tokens, targets[0]


def other_positions(change: type[nn.Module], blocks: Sequence[int]) -> nn.Module:
    """Two blocks that keep the positions, one that changes them, one that does not."""
    torch.manual_seed(1)
    last = [nn.Linear(32, 256)] if change is Pool else [DropFirst(), nn.Linear(32, 256)]
    made = [
        nn.Embedding(256, 32),
        nn.Sequential(nn.Linear(32, 32), change()),
        nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
        nn.Sequential(*last),
    ]
    return nn.Sequential(*(made[index] for index in blocks))


EVERY_CODEC = (*BACKWARD, "directq+ef", "topk+ef", "acsgd+zstd", "reference+ef+zstd")


@pytest.mark.quick(4)
@pytest.mark.parametrize("change", [Prepend, Pool])
@pytest.mark.parametrize("name", EVERY_CODEC)
def test_lengths_end_where_a_block_changes_the_positions(
    name: str, change: type[nn.Module]
) -> None:
    """Nobody can tell what is padding there: every value is sent, and none is zeroed."""
    plain = Bench(
        num_stages=4,
        samples=DatasetSamples(FirstByte() if change is Pool else Sentences()),
        build=partial(other_positions, change),
        lr=0.01,
    )
    precise = {"bits": 8, "density": 1.0, "reference_group": 8}

    run = replace(
        plain,
        activation=CodecSpec(name=name, **precise),
        gradient=CodecSpec(name=backward_codec(name), **precise),
    ).run(8)

    assert run.losses == pytest.approx(plain.run(8).losses, rel=5e-3)
    assert run.events == []
    assert [stage.passes._lengths_out.get(0) is None for stage in run.stages] == [
        False, True, True, True,
    ]  # fmt: skip


def test_mutant_lengths_that_outlive_their_positions_lose_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "_same_positions", lambda source, output: True)

    with pytest.raises(AssertionError):
        test_lengths_end_where_a_block_changes_the_positions("directq", Prepend)


def test_a_batch_of_nothing_but_padding_has_loss_zero() -> None:
    class Blank(Sentences):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            tokens, targets = super().__getitem__(index)
            return tokens, torch.full_like(targets, IGNORE)

    bench = Bench(num_stages=2, samples=DatasetSamples(Blank()))

    run = bench.run(1)

    assert run.losses == [0.0]
    assert run.records[0][0].grad_norm == 0.0
