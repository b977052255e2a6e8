"""AUC to the last bit against all pairs, log-loss without log(0), calibration; parts that merge."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_pipe.ctr_metrics import (
    ScoreCounts,
    UndefinedMetric,
    auc,
    expected_best_auc,
    log_loss,
)

# Few distinct scores, so that ties are the rule.
SAMPLES = st.lists(st.tuples(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 3.0, 40.0]), st.booleans()))
BOTH = SAMPLES.filter(lambda rows: len({label for _, label in rows}) == 2)


def twin_auc(rows: list[tuple[float, bool]]) -> float:
    """Every positive against every negative."""
    wins, pairs = Fraction(0), 0
    for (one, label), (other, other_label) in product(rows, rows):
        if label and not other_label:
            pairs += 1
            wins += 1 if one > other else Fraction(1, 2) if one == other else 0
    return float(wins / pairs)


def counts(rows: list[tuple[float, bool]]) -> ScoreCounts:
    return ScoreCounts.of([score for score, _ in rows], [label for _, label in rows])


@given(BOTH)
def test_auc_is_that_of_all_pairs_to_the_last_bit(rows: list[tuple[float, bool]]) -> None:
    assert counts(rows).auc() == twin_auc(rows)


def ordinal_auc(rows: list[tuple[float, bool]]) -> float:
    """Mutant: ranks in order of sorting, ties not shared."""
    ranked = sorted(range(len(rows)), key=lambda place: rows[place][0])
    positives = sum(label for _, label in rows)
    total = sum(rank for rank, place in enumerate(ranked, 1) if rows[place][1])
    u = total - positives * (positives + 1) // 2
    return u / (positives * (len(rows) - positives))


def test_mutant_auc_without_mid_ranks_is_seen() -> None:
    """A model that says the same of everyone knows nothing, in whatever order the data come."""
    rows = [(0.5, False), (0.5, False), (0.5, True)]

    assert twin_auc(rows) == 0.5 == counts(rows).auc()
    assert ordinal_auc(rows) == 1.0


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 3, 2, 4], [0, 0, 1, 1], 0.75),
        ([1, 2, 2, 4], [0, 0, 1, 1], 0.875),
    ],
)
def test_auc_of_four_samples(scores: list[int], labels: list[int], expected: float) -> None:
    assert auc(scores, labels) == expected


def test_auc_of_more_pairs_than_64_bits_count() -> None:
    many = np.array([3_000_000_000, 3_000_000_000], dtype=np.int64)
    half = ScoreCounts(scores=np.array([0.0, 1.0]), positives=many, negatives=many[::-1])

    assert half.auc() == 0.5
    # Mutant: the same in 64 bits wraps around.
    below = np.cumsum(half.negatives) - half.negatives
    wrapped = int(np.dot(half.positives, 2 * below + half.negatives))
    assert wrapped / (2 * half.num_positives * half.num_negatives) != 0.5


@pytest.mark.parametrize("label", [0, 1])
def test_auc_of_one_class_is_undefined_and_not_a_half(label: int) -> None:
    with pytest.raises(UndefinedMetric, match="AUC needs both classes, got"):
        auc([0.1, 0.2], [label, label])


@given(BOTH, st.integers(1, 5), st.randoms())
def test_parts_merge_into_the_whole_in_any_order(rows, num_parts: int, random) -> None:
    shuffled = rows.copy()
    random.shuffle(shuffled)
    parts = [counts(shuffled[place::num_parts]) for place in range(num_parts)]

    merged, whole = parts[0].merge(*parts[1:]), counts(rows)

    assert merged.auc() == whole.auc()
    assert merged.log_loss() == whole.log_loss()
    assert merged.calibration() == whole.calibration()
    assert merged.scores.tobytes() == whole.scores.tobytes()


def test_mutant_the_mean_of_the_parts_auc_is_not_the_auc() -> None:
    one, two = ScoreCounts.of([1, 2], [0, 1]), ScoreCounts.of([8, 9], [0, 1])

    assert one.merge(two).auc() == 0.75
    assert (one.auc() + two.auc()) / 2 == 1.0


def test_log_loss_of_certain_mistakes_is_large_and_finite() -> None:
    """Through a probability, in fp32 or fp64, it would be log(0)."""
    assert log_loss([0.0, 0.0], [0, 1]) == pytest.approx(math.log(2), abs=1e-15)
    assert log_loss([1000.0, -1000.0], [0, 1]) == 1000.0
    assert log_loss([40.0], [1]) == pytest.approx(math.exp(-40.0), rel=1e-12)
    assert log_loss([-40.0], [0]) > 0.0  # 1 - sigmoid(-40) is 1 in fp64: a mutant reads 0 here
    assert -math.log(1.0 - 1.0 / (1.0 + math.exp(40.0))) == 0.0


@given(SAMPLES.filter(len))
def test_log_loss_is_torchs(rows: list[tuple[float, bool]]) -> None:
    scores = torch.tensor([score for score, _ in rows], dtype=torch.float64)
    labels = torch.tensor([float(label) for _, label in rows], dtype=torch.float64)

    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)

    assert log_loss(scores, labels) == pytest.approx(float(expected), rel=1e-12, abs=1e-300)


def test_the_best_constant_has_a_normalized_entropy_of_one() -> None:
    logit = math.log(0.25 / 0.75)

    assert ScoreCounts.of([logit] * 4, [0, 1, 0, 0]).normalized_entropy() == pytest.approx(1.0)
    with pytest.raises(UndefinedMetric, match="needs both classes, got 2 positives"):
        ScoreCounts.of([0.0, 1.0], [1, 1]).normalized_entropy()


def test_calibration_compares_clicks_expected_and_seen() -> None:
    logit = math.log(3.0)  # the model says 3 in 4, one in two came
    found = ScoreCounts.of([logit] * 4 + [-logit] * 4, [1, 0, 1, 0, 0, 0, 1, 0]).calibration(
        num_bins=2
    )

    assert [(b.count, b.observed) for b in found.bins] == [(4, 0.25), (4, 0.5)]
    assert [b.predicted for b in found.bins] == [pytest.approx(0.25), pytest.approx(0.75)]
    assert found.ratio == pytest.approx(4 / 3)
    assert found.error == pytest.approx(0.125)


def test_equal_logits_are_never_torn_apart() -> None:
    found = ScoreCounts.of([0.0] * 9, [1, 0, 0] * 3).calibration(num_bins=10)

    assert [(b.count, b.predicted) for b in found.bins] == [(9, 0.5)]


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_of_a_model_that_diverged_are_refused(score: float) -> None:
    with pytest.raises(ValueError, match="1 of 2 scores are not finite: the model diverged"):
        auc([0.0, score], [0, 1])


def test_labels_other_than_0_and_1_are_refused() -> None:
    with pytest.raises(ValueError, match="labels are 0 or 1, got -1"):
        auc([0.0, 1.0], [-1, 1])
    with pytest.raises(ValueError, match="2 scores for 3 labels"):
        auc([0.0, 1.0], [0, 1, 1])


def test_metrics_of_no_samples_are_undefined() -> None:
    nothing = ScoreCounts.of([], [])

    assert len(nothing) == 0
    for metric in (nothing.auc, nothing.log_loss, nothing.calibration, nothing.normalized_entropy):
        with pytest.raises(UndefinedMetric):
            metric()
    assert nothing.merge(ScoreCounts.of([1, 2], [0, 1])).auc() == 1.0


PROBABILITIES = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), min_size=2, max_size=6)


@given(PROBABILITIES)
def test_the_expected_best_auc_is_that_of_all_outcomes(chances: list[float]) -> None:
    """All labels that may be drawn, each with its chance: right pairs over pairs."""
    right, pairs = 0.0, 0.0
    for labels in product([0, 1], repeat=len(chances)):
        chance = math.prod(p if y else 1 - p for p, y in zip(chances, labels, strict=True))
        both = sum(labels) * (len(labels) - sum(labels))
        if both and chance:
            right += chance * both * auc(chances, labels)
            pairs += chance * both
    if pairs:
        assert expected_best_auc(chances) == pytest.approx(right / pairs, abs=1e-12)
    else:
        with pytest.raises(UndefinedMetric):
            expected_best_auc(chances)


def test_what_is_no_probability_is_refused() -> None:
    for wrong in ([0.5], [0.5, 1.5], [-0.1, 0.5], [0.5, math.nan]):
        with pytest.raises(ValueError, match="two or more probabilities between 0 and 1"):
            expected_best_auc(wrong)
