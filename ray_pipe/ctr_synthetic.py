"""Click data out of a seed: long-tailed ids and a planted truth, so the best AUC is known.

Path: ray_pipe.ctr_data -> ray_pipe.ctr_synthetic

Everything about sample i is a hash of (seed, i): nothing is stored or downloaded, any sample can
be made anywhere at any time, and a table may have more ids than memory has bytes. Ids follow a
power law; the logit is planted as

    bias + w . dense + sum_f a_f(id_f) + sum_(f, g) <v_f(id_f), v_g(id_g)>

with effects `a` and latent vectors `v` that are hashes of the id. Labels are drawn from it, so even
who knows the truth does not reach an AUC of 1: `best_auc` says what they do reach.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ray_pipe.ctr_data import Bags, CtrBatch, CtrSamples, Feature, Ints
from ray_pipe.ctr_ids import mixed, salt_of, uniform
from ray_pipe.ctr_metrics import auc, expected_best_auc
from ray_pipe.errors import DataError

LATENT = 2
"""Length of the planted vectors; a table needs at least as many dimensions to represent them."""

_ROOT_3 = 3.0**0.5  # a uniform number in [-1, 1) times this has variance 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """The size and shape of the data; equal specs are equal data."""

    num_samples: int = 100_000
    num_ids: tuple[int, ...] = (20_000, 5_000, 1_000, 100, 10)
    """Distinct ids of each feature; the last few stand for low-cardinality columns."""

    num_dense: int = 4
    exponent: float = 1.05
    """Of the power law: the r-th commonest id has a share like 1 / r ** exponent."""

    signal: float = 1.0
    """Scales everything but the bias: 0 is pure noise, AUC 0.5."""

    bias: float = -1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.num_dense < 0 or not self.num_ids:
            raise DataError("synthetic data needs at least one sample and one feature of ids")
        if min(self.num_ids) < 1 or self.exponent <= 0.0:
            raise DataError(
                f"synthetic data: num_ids={self.num_ids} must be 1 or more and "
                f"exponent={self.exponent} above 0"
            )


class SyntheticCtr:
    """Samples 0 .. num_samples - 1, with the truth behind them."""

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec = spec
        self.features = tuple(
            Feature(name=f"id{place}", table=f"id{place}") for place in range(len(spec.num_ids))
        )
        self.dense_names = tuple(f"x{place}" for place in range(spec.num_dense))
        self.digest = hashlib.sha256(repr(spec).encode()).hexdigest()[:16]
        self.times = None

    def __len__(self) -> int:
        return self.spec.num_samples

    def batch(self, sample_ids: Sequence[int] | Ints) -> CtrBatch:
        """The samples asked for, in that order; one id in each bag."""
        places = self._places(sample_ids)
        offsets = torch.arange(len(places) + 1)
        return CtrBatch(
            sample_ids=torch.from_numpy(places.astype(np.int64)),
            dense=torch.from_numpy(self._dense(places).astype(np.float32)),
            bags=tuple(
                Bags(torch.from_numpy(self._row_ids(ranks, feature)), offsets)
                for feature, ranks in enumerate(self._ranks(places))
            ),
            labels=torch.from_numpy(self._labels(places).astype(np.float32)),
        )

    def collected(self) -> CtrSamples:
        """All samples in memory, where they are read many times."""
        whole = self.batch(np.arange(len(self)))
        return CtrSamples(
            dense=whole.dense.numpy(),
            ids=[bags.ids.numpy() for bags in whole.bags],
            offsets=[bags.offsets.numpy() for bags in whole.bags],
            labels=whole.labels.numpy(),
            features=self.features,
            dense_names=self.dense_names,
        )

    def logits(self, sample_ids: Sequence[int] | Ints) -> NDArray[np.float64]:
        """The planted truth."""
        spec, places = self.spec, self._places(sample_ids)
        ranks = self._ranks(places)
        dense = self._dense(places)
        weights = np.array([0.5 if column % 2 == 0 else -0.25 for column in range(spec.num_dense)])
        total = dense @ weights
        for feature, ids in enumerate(ranks):
            total = total + 0.6 * self._drawn(ids, feature, "effect", 0)
        for left in range(0, len(ranks) - 1, 2):  # features 0 and 1, 2 and 3, …
            for axis in range(LATENT):
                one = self._drawn(ranks[left], left, "latent", axis)
                two = self._drawn(ranks[left + 1], left + 1, "latent", axis)
                total = total + 0.5 * one * two
        return np.asarray(spec.bias + spec.signal * total)

    def probabilities(self, sample_ids: Sequence[int] | Ints) -> NDArray[np.float64]:
        return np.asarray(np.exp(-np.logaddexp(0.0, -self.logits(sample_ids))))

    def best_auc(self, sample_ids: Sequence[int] | Ints) -> float:
        """What the truth itself scores on these samples and the labels that were drawn for them."""
        return auc(self.logits(sample_ids), self._labels(self._places(sample_ids)))

    def expected_best_auc(self, sample_ids: Sequence[int] | Ints) -> float:
        """The same for labels yet to be drawn: what no model exceeds on average."""
        return expected_best_auc(self.probabilities(sample_ids))

    def _places(self, sample_ids: Sequence[int] | Ints) -> NDArray[np.uint64]:
        places = np.asarray(sample_ids, dtype=np.int64)
        if len(places) and not (places.min() >= 0 and places.max() < len(self)):
            raise IndexError(
                f"samples have ids 0 to {len(self) - 1}, "
                f"got {int(places.min())} to {int(places.max())}"
            )
        return places.astype(np.uint64)

    def _salt(self, kind: str, column: int, axis: int = 0) -> int:
        return salt_of("synthetic", self.spec.seed, kind, column, axis)

    def _dense(self, places: NDArray[np.uint64]) -> NDArray[np.float64]:
        columns = [
            uniform(places, salt=self._salt("dense", column))
            for column in range(self.spec.num_dense)
        ]
        if not columns:
            return np.zeros((len(places), 0))
        return _ROOT_3 * (2.0 * np.stack(columns, axis=1) - 1.0)

    def _ranks(self, places: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
        return [
            power_law_ranks(
                uniform(places, salt=self._salt("rank", feature)),
                num_ids=count,
                exponent=self.spec.exponent,
            )
            for feature, count in enumerate(self.spec.num_ids)
        ]

    def _drawn(
        self, ids: NDArray[np.uint64], feature: int, kind: str, axis: int
    ) -> NDArray[np.float64]:
        """A number of variance 1 for each id, the same wherever the id comes."""
        salt = self._salt(kind, feature, axis)
        return _ROOT_3 * (2.0 * uniform(ids, salt=salt) - 1.0)

    def _row_ids(self, ranks: NDArray[np.uint64], feature: int) -> Ints:
        """Ranks as they would look in the wild: any 64 bits, and no order left in them."""
        return mixed(ranks, salt=self._salt("id", feature)).view(np.int64)

    def _labels(self, places: NDArray[np.uint64]) -> NDArray[np.int64]:
        drawn = uniform(places, salt=self._salt("label", 0))
        return np.asarray(drawn < self.probabilities(places.astype(np.int64))).astype(np.int64)


def power_law_ranks(
    chances: NDArray[np.float64], *, num_ids: int, exponent: float
) -> NDArray[np.uint64]:
    """Ranks 0 .. num_ids - 1 from uniform chances: the density x ** -exponent cut into whole parts.

    A closed form, so a law over 300 million ids needs no table of 300 million numbers.
    """
    top = float(num_ids + 1)
    if abs(exponent - 1.0) < 1e-9:
        x = np.exp(chances * np.log(top))
    else:
        power = 1.0 - exponent
        x = (1.0 + chances * (top**power - 1.0)) ** (1.0 / power)
    ranks: NDArray[np.uint64] = np.clip(np.floor(x) - 1.0, 0.0, num_ids - 1.0).astype(np.uint64)
    return ranks
