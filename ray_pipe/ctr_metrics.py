"""What a click model is judged by: exact AUC, log-loss, calibration.

All three are functions of how many positives and negatives each logit has. `ScoreCounts` keeps
just that, sorted: parts of a test set that were scored anywhere, in any order, merge into the very
counts of the whole, and the metrics agree to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ray_pipe.errors import RayPipeError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class UndefinedMetric(RayPipeError, ValueError):
    """The metric has no value on this data; 0.5 or NaN would be taken for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """Samples of similar logits: how often the model expects a click, how often one came."""

    count: int
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`ratio` is clicks expected over clicks seen; `error` the mean gap over the bins."""

    ratio: float
    error: float
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreCounts:
    """Distinct logits, ascending, and the positives and negatives of each."""

    scores: Floats
    positives: Ints
    negatives: Ints

    @classmethod
    def of(cls, scores: ArrayLike | torch.Tensor, labels: ArrayLike | torch.Tensor) -> ScoreCounts:
        """Count logits with labels of 0 and 1; refuses anything else, and what is not finite."""
        logits, truth = _flat(scores), _flat(labels)
        if logits.shape != truth.shape:
            raise ValueError(f"{len(logits)} scores for {len(truth)} labels")
        if wrong := int((~np.isfinite(logits)).sum()):
            raise ValueError(
                f"{wrong} of {len(logits)} scores are not finite: the model diverged; "
                "lower the learning rate or look at its first step"
            )
        strange = truth[(truth != 0) & (truth != 1)]
        if len(strange):
            raise ValueError(f"labels are 0 or 1, got {strange[0]:g}")
        clicks = truth.astype(np.int64)
        return _counted(logits, clicks, 1 - clicks)

    def merge(self, *others: ScoreCounts) -> ScoreCounts:
        """The counts of all parts together; order and grouping do not matter."""
        parts = (self, *others)
        return _counted(
            np.concatenate([part.scores for part in parts]),
            np.concatenate([part.positives for part in parts]),
            np.concatenate([part.negatives for part in parts]),
        )

    @property
    def num_positives(self) -> int:
        return int(self.positives.sum())

    @property
    def num_negatives(self) -> int:
        return int(self.negatives.sum())

    def __len__(self) -> int:
        return self.num_positives + self.num_negatives

    def auc(self) -> float:
        """How often a positive scores above a negative, ties counting half; correctly rounded."""
        pairs = self.num_positives * self.num_negatives
        if not pairs:
            raise UndefinedMetric(
                f"AUC needs both classes, got {self.num_positives} positives and "
                f"{self.num_negatives} negatives; test on more samples"
            )
        below = np.cumsum(self.negatives) - self.negatives
        weights = 2 * below + self.negatives
        if 2 * pairs < 1 << 63:
            twice = int(np.dot(self.positives, weights))
        else:  # whole numbers of any size, where 64 bits would wrap around
            twice = sum(map(int.__mul__, self.positives.tolist(), weights.tolist()))
        return twice / (2 * pairs)

    def log_loss(self) -> float:
        """Mean negative log-likelihood in nats; taken from logits, so it never takes log(0)."""
        self._need_samples("log-loss")
        losses = self.positives * np.logaddexp(0.0, -self.scores)
        losses_of_negatives = self.negatives * np.logaddexp(0.0, self.scores)
        return math.fsum((*losses, *losses_of_negatives)) / len(self)

    def normalized_entropy(self) -> float:
        """Log-loss over that of the best constant: below 1 the model knows something."""
        share = self.num_positives / max(1, len(self))
        if not 0.0 < share < 1.0:
            raise UndefinedMetric(
                f"normalized entropy needs both classes, got {self.num_positives} positives and "
                f"{self.num_negatives} negatives; test on more samples"
            )
        return self.log_loss() / -(share * math.log(share) + (1 - share) * math.log1p(-share))

    def calibration(self, *, num_bins: int = 10) -> Calibration:
        """Expected against observed clicks, overall and in bins of about equally many samples.

        Samples of one logit are never torn apart, so there may be fewer bins.
        """
        self._need_samples("calibration")
        if not self.num_positives:
            raise UndefinedMetric("calibration needs at least one positive; test on more samples")
        counts = self.positives + self.negatives
        expected = counts * np.exp(-np.logaddexp(0.0, -self.scores))
        middle = np.cumsum(counts) - 0.5 * counts
        place = np.minimum((middle * num_bins / len(self)).astype(np.int64), num_bins - 1)
        bins = []
        for one in np.unique(place):
            inside = place == one
            count = int(counts[inside].sum())
            bins.append(
                CalibrationBin(
                    count=count,
                    predicted=math.fsum(expected[inside]) / count,
                    observed=int(self.positives[inside].sum()) / count,
                )
            )
        gaps = [abs(one.predicted - one.observed) * one.count for one in bins]
        return Calibration(
            ratio=math.fsum(expected) / self.num_positives,
            error=math.fsum(gaps) / len(self),
            bins=tuple(bins),
        )

    def _need_samples(self, metric: str) -> None:
        if not len(self):
            raise UndefinedMetric(f"{metric} of no samples")


def auc(scores: ArrayLike | torch.Tensor, labels: ArrayLike | torch.Tensor) -> float:
    """`ScoreCounts.auc` of one array."""
    return ScoreCounts.of(scores, labels).auc()


def log_loss(logits: ArrayLike | torch.Tensor, labels: ArrayLike | torch.Tensor) -> float:
    """`ScoreCounts.log_loss` of one array."""
    return ScoreCounts.of(logits, labels).log_loss()


def expected_best_auc(probabilities: ArrayLike) -> float:
    """What a model that knows each sample's true probability would score.

    Labels are drawn from the probabilities: expected pairs in the right order over expected
    pairs, a sample never paired with itself. No ranking has a higher expectation.
    """
    p = np.sort(_flat(probabilities))
    if len(p) < 2 or p[0] < 0.0 or p[-1] > 1.0 or not math.isfinite(p.sum()):
        raise ValueError(f"expected two or more probabilities between 0 and 1, got {len(p)}")
    values, starts = np.unique(p, return_index=True)
    counts = np.diff(np.append(starts, len(p)))
    clicks, misses = values * counts, (1.0 - values) * counts
    itself = values * (1.0 - values) * counts
    right = clicks * (np.cumsum(misses) - misses) + 0.5 * (clicks * misses - itself)
    pairs = math.fsum(clicks) * math.fsum(misses) - math.fsum(itself)
    if pairs <= 0.0:
        raise UndefinedMetric("AUC needs both classes, these probabilities allow for one only")
    return math.fsum(right) / pairs


def _flat(values: ArrayLike | torch.Tensor) -> Floats:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _counted(scores: Floats, positives: Ints, negatives: Ints) -> ScoreCounts:
    if not len(scores):
        return ScoreCounts(scores=scores, positives=positives, negatives=negatives)
    order = np.argsort(scores, kind="stable")
    ordered = scores[order] + 0.0  # -0.0 and 0.0 are one score, and now also one bit pattern
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return ScoreCounts(
        scores=ordered[starts],
        positives=np.add.reduceat(positives[order], starts),
        negatives=np.add.reduceat(negatives[order], starts),
    )
