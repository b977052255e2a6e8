"""Samples with stable ids, bags as nn.EmbeddingBag takes them, splits that do not leak."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_pipe.ctr_data import (
    CtrRow,
    CtrSamples,
    Feature,
    Scale,
    batches,
    split_by_seed,
    split_by_time,
)
from ray_pipe.errors import DataError

FEATURES = (Feature(name="user", table="user"), Feature(name="seen", table="item"))
ROWS = [
    CtrRow((0.5,), ((7,), (1, 2)), 1, 30.0),
    CtrRow((1.5,), ((8,), ()), 0, 10.0),
    CtrRow((2.5,), ((2**63 - 1,), (3,)), 0, 20.0),
]


def samples(rows: list[CtrRow] = ROWS) -> CtrSamples:
    return CtrSamples.collect(rows, features=FEATURES, dense_names=("price",))


def test_a_batch_has_dense_values_bags_and_labels_in_the_order_asked_for() -> None:
    batch = samples().batch([2, 1, 0, 2])

    assert len(batch) == 4
    assert batch.sample_ids.tolist() == [2, 1, 0, 2]
    assert (batch.dense.dtype, batch.dense.tolist()) == (
        torch.float32,
        [[2.5], [1.5], [0.5], [2.5]],
    )
    assert (batch.labels.dtype, batch.labels.tolist()) == (torch.float32, [0.0, 0.0, 1.0, 0.0])
    user, seen = batch.bags
    assert user.ids.tolist() == [2**63 - 1, 8, 7, 2**63 - 1]
    assert (seen.ids.tolist(), seen.offsets.tolist()) == ([3, 1, 2, 3], [0, 1, 1, 3, 4])
    assert (seen.ids.dtype, seen.offsets.dtype) == (torch.int64, torch.int64)


BAGS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=8)


@given(BAGS, st.data())
def test_bags_feed_an_embedding_bag_and_an_empty_one_is_zeros(bags, data) -> None:
    rows = [CtrRow((0.0,), ((0,), tuple(bag)), 0) for bag in bags]
    places = data.draw(st.lists(st.integers(0, len(bags) - 1), min_size=1, max_size=6))
    weight = torch.arange(20.0).reshape(10, 2)
    table = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)

    ids, offsets = samples(rows).batch(places).bags[1]

    expected = [sum((weight[i] for i in bags[p]), torch.zeros(2)).tolist() for p in places]
    assert table(ids, offsets).tolist() == expected


@pytest.mark.parametrize("places", [[3], [-1], [0, 99]])
def test_an_id_that_does_not_exist_is_refused(places: list[int]) -> None:
    """Mutant: numpy alone would give the last sample for -1."""
    with pytest.raises(IndexError, match="samples have ids 0 to 2"):
        samples().batch(places)


def test_the_digest_names_the_content() -> None:
    assert samples().digest == samples().digest
    assert samples().digest != samples(ROWS[:2]).digest
    moved = [ROWS[0]._replace(ids=((7,), (1,))), ROWS[1]._replace(ids=((8,), (2,))), ROWS[2]]
    assert samples().digest != samples(moved).digest


def test_a_stream_gives_the_same_batches_with_ids_that_go_on() -> None:
    found = list(batches(iter(ROWS), 2, num_features=2))

    assert [batch.sample_ids.tolist() for batch in found] == [[0, 1], [2]]
    assert torch.equal(found[1].dense, samples().batch([2]).dense)
    assert torch.equal(found[0].bags[1].ids, samples().batch([0, 1]).bags[1].ids)
    assert next(batches(iter(ROWS), 3, num_features=2, first_id=5)).sample_ids.tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="at least 1 sample, got size=0"):
        next(batches(ROWS, 0, num_features=2))


def test_a_stream_is_read_no_further_than_the_batch() -> None:
    taken = []

    def rows():
        for place in range(100):
            taken.append(place)
            yield ROWS[place % 3]

    next(batches(rows(), 4, num_features=2))

    assert taken == [0, 1, 2, 3]


def test_dense_features_are_scaled_by_what_the_training_samples_say() -> None:
    """Mutant: a scale of all samples would leak the test's; here it would be 1.5, not 2."""
    scale = Scale.of(samples(), np.array([1, 2]))

    scaled = scale.scaled(samples())

    assert scaled.dense.ravel().tolist() == [-3.0, -1.0, 1.0]
    assert torch.equal(scaled.batch([0]).bags[1].ids, samples().batch([0]).bags[1].ids)
    assert scaled.digest != samples().digest
    assert Scale.of(samples(), np.array([1])).width.tolist() == [1.0]
    with pytest.raises(DataError, match="scale of 2 dense features cannot serve samples with 1"):
        Scale(mean=np.zeros(2), width=np.ones(2)).scaled(samples())


# --- splits ---------------------------------------------------------------------------------------


@given(st.integers(50, 400), st.integers(0, 400), st.integers(0, 5))
def test_a_sample_stays_on_its_side_when_the_file_grows(first: int, more: int, seed: int) -> None:
    """Mutant: a shuffle of all samples moves them; a run would train on what it tested with."""
    before = split_by_seed(first, test=0.3, seed=seed)
    after = split_by_seed(first + more, test=0.3, seed=seed)

    assert set(before.test) == {place for place in after.test if place < first}
    assert sorted([*after.train, *after.test]) == list(range(first + more))


def test_a_split_by_seed_has_about_the_share_and_depends_on_the_seed() -> None:
    one, two = (split_by_seed(10_000, test=0.2, seed=seed) for seed in (0, 1))

    assert len(one.test) == pytest.approx(2000, abs=200)
    assert len(set(one.test) & set(two.test)) == pytest.approx(400, abs=100)


def test_a_split_by_time_trains_on_the_past() -> None:
    split = split_by_time(samples().times, test=0.34)

    assert (split.train.tolist(), split.test.tolist()) == ([1, 2], [0])


@given(st.lists(st.integers(0, 6), min_size=2, max_size=40), st.floats(0.05, 0.95))
def test_no_training_sample_is_as_late_as_a_test_sample(times: list[int], share: float) -> None:
    moments = np.array(times, dtype=np.float64)
    try:
        split = split_by_time(moments, test=share)
    except DataError:  # the earliest time alone is more than what may be trained on
        earliest = times.count(min(times))
        assert len(times) - round(share * len(times)) < max(earliest, 1) or earliest == len(times)
        return

    assert max(moments[split.train]) < min(moments[split.test])
    assert len(split.test) >= round(share * len(times))
    assert sorted([*split.train, *split.test]) == list(range(len(times)))


def test_splits_that_cannot_be_are_refused() -> None:
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(DataError, match="expected a number between 0 and 1"):
            split_by_seed(10, test=share, seed=0)
    with pytest.raises(DataError, match="samples have no time; name its column, or split by seed"):
        split_by_time(None, test=0.5)
    with pytest.raises(DataError, match="leaves 0 samples to train on and 3 to test"):
        split_by_time(np.zeros(3), test=0.5)
    with pytest.raises(DataError, match="leaves 1 samples to train on and 0 to test"):
        split_by_seed(1, test=0.0001, seed=0)
