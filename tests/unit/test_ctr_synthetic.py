"""Data out of a seed: the same everywhere, long-tailed, with a truth that sets the best AUC."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_pipe.ctr_data import split_by_seed
from ray_pipe.ctr_ids import uniform
from ray_pipe.ctr_metrics import auc
from ray_pipe.ctr_synthetic import SyntheticCtr, SyntheticSpec, power_law_ranks
from ray_pipe.errors import DataError

SMALL = SyntheticCtr(SyntheticSpec(num_samples=20_000))
ALL = np.arange(20_000)


@given(st.lists(st.integers(0, 19_999), min_size=1, max_size=20))
def test_a_sample_is_the_same_in_whatever_batch_it_comes(places: list[int]) -> None:
    together = SMALL.batch(places)
    alone = [SMALL.batch([place]) for place in places]

    assert torch.equal(together.dense, torch.cat([one.dense for one in alone]))
    assert torch.equal(together.labels, torch.cat([one.labels for one in alone]))
    for feature, bags in enumerate(together.bags):
        assert torch.equal(bags.ids, torch.cat([one.bags[feature].ids for one in alone]))
        assert bags.offsets.tolist() == list(range(len(places) + 1))


def test_the_first_samples_are_these_for_ever() -> None:
    batch = SMALL.batch([0, 1, 2, 3])

    assert batch.bags[0].ids.tolist() == [
        -7736580469497104351,
        7840125247740594050,
        2090119520773805949,
        4441291946346492728,
    ]
    assert batch.labels.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert batch.dense[0].tolist() == pytest.approx(
        [-1.4094001, 0.7084627, 0.5931966, -1.5814054], abs=1e-6
    )


def test_another_seed_is_other_data() -> None:
    other = SyntheticCtr(SyntheticSpec(num_samples=20_000, seed=1))

    assert other.digest != SMALL.digest
    assert not torch.equal(other.batch(ALL).labels, SMALL.batch(ALL).labels)
    assert not set(other.batch(ALL).bags[0].ids.tolist()) & set(
        SMALL.batch(ALL).bags[0].ids.tolist()
    )


def test_ids_have_a_long_tail() -> None:
    ids = SMALL.batch(ALL).bags[0].ids.numpy()
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]

    assert counts[0] / len(ids) == pytest.approx(0.09, abs=0.02)  # one id in eleven samples
    assert counts[:20].sum() > 0.3 * len(ids)
    assert (counts == 1).sum() > 0.5 * len(counts)  # and most ids are seen once


def test_ids_of_two_features_are_different() -> None:
    batch = SMALL.batch(ALL)

    assert not set(batch.bags[0].ids.tolist()) & set(batch.bags[1].ids.tolist())


@given(st.integers(1, 10**12), st.sampled_from([0.5, 1.0, 1.05, 2.0]))
def test_ranks_stay_in_range_for_any_number_of_ids(num_ids: int, exponent: float) -> None:
    chances = np.array([0.0, 0.5, 1.0 - 2.0**-53])

    ranks = power_law_ranks(chances, num_ids=num_ids, exponent=exponent)

    assert ranks[0] == 0
    assert ranks[-1] < num_ids
    assert sorted(ranks) == list(ranks)


def test_ranks_follow_the_law() -> None:
    chances = (np.arange(100_000) + 0.5) / 100_000

    ranks = power_law_ranks(chances, num_ids=100, exponent=1.0)

    for rank in (0, 1, 10, 99):  # the share of rank r is log((r + 2) / (r + 1)) / log(101)
        expected = np.log((rank + 2) / (rank + 1)) / np.log(101)
        assert (ranks == rank).mean() == pytest.approx(expected, abs=2e-5)


def test_the_best_auc_is_reached_by_the_truth_and_by_nothing_else() -> None:
    labels = SMALL.batch(ALL).labels
    best = SMALL.best_auc(ALL)

    assert best == auc(SMALL.logits(ALL), labels)
    assert best == pytest.approx(SMALL.expected_best_auc(ALL), abs=0.006)  # 2 standard errors
    assert 0.78 < best < 0.90
    noise = np.random.default_rng(0).normal(size=len(ALL))
    assert auc(SMALL.logits(ALL) + noise, labels) < best - 0.01


def test_labels_are_drawn_from_the_truth() -> None:
    """Mutant: labels that are the truth's sign would have an AUC of 1."""
    chances, labels = SMALL.probabilities(ALL), SMALL.batch(ALL).labels.numpy()

    for low in np.arange(0.1, 0.9, 0.1):
        inside = (chances >= low) & (chances < low + 0.1)
        assert labels[inside].mean() == pytest.approx(chances[inside].mean(), abs=0.05)
    assert auc(SMALL.logits(ALL), SMALL.logits(ALL) > 0) == 1.0


def unevenness(held_out: np.ndarray) -> float:
    """How far the held-out samples are from the others, in standard errors of the worst column."""
    batch = SMALL.batch(ALL)
    columns = np.column_stack([batch.dense.numpy(), batch.labels.numpy(), SMALL.logits(ALL)])
    inside, outside = columns[held_out], np.delete(columns, held_out, axis=0)
    error = columns.std(axis=0) / len(inside) ** 0.5
    return float((np.abs(inside.mean(axis=0) - outside.mean(axis=0)) / error).max())


def test_a_split_by_seed_is_independent_of_the_data() -> None:
    """Mutant: it happened. The split drew with the salt of the first feature, and held out its
    lowest tenth."""
    for seed in range(5):
        assert unevenness(split_by_seed(len(ALL), test=0.1, seed=seed).test) < 4.0
    chances = uniform(ALL.astype(np.uint64), salt=SMALL._salt("dense", 0))
    assert unevenness(np.flatnonzero(chances < 0.1)) > 20.0


def test_without_signal_nothing_can_be_learnt() -> None:
    noise = SyntheticCtr(SyntheticSpec(num_samples=1000, signal=0.0))

    assert noise.expected_best_auc(range(1000)) == pytest.approx(0.5, abs=1e-12)


def test_the_truth_needs_pairs_of_ids_not_single_ids_only() -> None:
    """Or an interaction would have nothing to find: the best additive guess is well below."""
    labels = SMALL.batch(ALL).labels
    additive = SyntheticCtr(SyntheticSpec(num_samples=20_000))
    places = additive._places(ALL)
    total = additive._dense(places) @ np.array([0.5, -0.25, 0.5, -0.25])
    for feature, ranks in enumerate(additive._ranks(places)):
        total = total + 0.6 * additive._drawn(ranks, feature, "effect", 0)

    assert auc(total, labels) < SMALL.best_auc(ALL) - 0.03


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(IndexError, match="samples have ids 0 to 19999, got -1 to -1"):
        SMALL.batch([-1])
    with pytest.raises(DataError, match="at least one sample and one feature"):
        SyntheticSpec(num_ids=())
    with pytest.raises(DataError, match=r"num_ids=\(0,\) must be 1 or more"):
        SyntheticSpec(num_ids=(0,))
