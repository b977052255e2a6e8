"""Click data: samples with stable ids, dense features, bags of row ids, and labels.

Path: ray_pipe.driver -> ray_pipe.ctr_data

A sample's id is its place in the file and never changes, whatever the split or shuffle. A batch
is `dense` (float32, one row for each sample), one `Bags` for each feature, and `labels` (float32,
0 or 1). Several features may name one table: they share rows, not bags.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ray_pipe.ctr_ids import salt_of, uniform
from ray_pipe.errors import DataError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A column of ids, and the table that holds their rows."""

    name: str
    table: str


class Bags(NamedTuple):
    """The ids of one feature for each sample: sample i has `ids[offsets[i]:offsets[i + 1]]`.

    `offsets` has one number more than there are samples, which is `nn.EmbeddingBag`'s
    `include_last_offset=True`; a bag may be empty.
    """

    ids: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CtrBatch:
    """Some samples: what a model sees of them, and what it should say."""

    sample_ids: Tensor
    dense: Tensor
    bags: tuple[Bags, ...]
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])


class CtrRow(NamedTuple):
    """One line of a file, read and checked."""

    dense: tuple[float, ...]
    ids: tuple[tuple[int, ...], ...]
    label: int
    time: float | None = None


class CtrSamples:
    """Samples in memory: 4 bytes a dense value, 8 an id, 8 an offset, and nothing of Python's."""

    def __init__(
        self,
        *,
        dense: NDArray[np.float32],
        ids: Sequence[Ints],
        offsets: Sequence[Ints],
        labels: NDArray[np.float32],
        features: Sequence[Feature],
        dense_names: Sequence[str],
        times: NDArray[np.float64] | None = None,
    ) -> None:
        assert len(ids) == len(offsets) == len(features)
        assert dense.shape == (len(labels), len(dense_names))
        assert all(len(ends) == len(labels) + 1 and ends[0] == 0 for ends in offsets)
        self.features = tuple(features)
        self.dense_names = tuple(dense_names)
        self.dense, self.labels, self.times = dense, labels, times
        self._ids, self._offsets = tuple(ids), tuple(offsets)
        self.digest = self._named()

    @classmethod
    def collect(
        cls, rows: Iterable[CtrRow], *, features: Sequence[Feature], dense_names: Sequence[str]
    ) -> CtrSamples:
        """Keep all rows of a reader."""
        dense, labels, times = array("f"), array("b"), array("d")
        ids = [array("q") for _ in features]
        ends = [array("q", [0]) for _ in features]
        for row in rows:
            dense.extend(row.dense)
            labels.append(row.label)
            if row.time is not None:
                times.append(row.time)
            for own, end, bag in zip(ids, ends, row.ids, strict=True):
                own.extend(bag)
                end.append(len(own))
        assert len(times) in (0, len(labels)), "a reader gives all rows a time, or none"
        return cls(
            dense=np.array(dense, dtype=np.float32).reshape(len(labels), len(dense_names)),
            ids=[np.array(own, dtype=np.int64) for own in ids],
            offsets=[np.array(end, dtype=np.int64) for end in ends],
            labels=np.array(labels, dtype=np.float32),
            features=features,
            dense_names=dense_names,
            times=np.array(times, dtype=np.float64) if times else None,
        )

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, sample_ids: Sequence[int] | Ints) -> CtrBatch:
        """The samples asked for, in that order."""
        places = np.asarray(sample_ids, dtype=np.int64)
        if len(places) and not (places.min() >= 0 and places.max() < len(self)):
            raise IndexError(
                f"samples have ids 0 to {len(self) - 1}, "
                f"got {int(places.min())} to {int(places.max())}"
            )
        bags = tuple(
            _gathered(own, ends, places) for own, ends in zip(self._ids, self._offsets, strict=True)
        )
        return CtrBatch(
            sample_ids=torch.from_numpy(places.copy()),
            dense=torch.from_numpy(self.dense[places]),
            bags=bags,
            labels=torch.from_numpy(self.labels[places]),
        )

    def offsets_of(self, feature: int) -> Ints:
        """Where the bags of a feature begin, and one past the last."""
        return self._offsets[feature]

    def first(self, count: int) -> CtrSamples:
        """The first `count` samples as a set of their own."""
        ends = [int(own[count]) for own in self._offsets]
        return CtrSamples(
            dense=self.dense[:count],
            ids=[own[:end] for own, end in zip(self._ids, ends, strict=True)],
            offsets=[own[: count + 1] for own in self._offsets],
            labels=self.labels[:count],
            features=self.features,
            dense_names=self.dense_names,
            times=None if self.times is None else self.times[:count],
        )

    def with_dense(self, dense: NDArray[Any]) -> CtrSamples:
        """The same ids, labels and times with other dense values."""
        return CtrSamples(
            dense=dense.astype(np.float32),
            ids=self._ids,
            offsets=self._offsets,
            labels=self.labels,
            features=self.features,
            dense_names=self.dense_names,
            times=self.times,
        )

    def _named(self) -> str:
        names = [(feature.name, feature.table) for feature in self.features]
        total = hashlib.sha256(repr((names, self.dense_names)).encode())
        parts: list[NDArray[Any]] = [self.dense, self.labels, *self._ids, *self._offsets]
        for part in parts:
            total.update(f"{part.dtype} {part.shape}".encode())
            total.update(np.ascontiguousarray(part).data)
        return total.hexdigest()[:16]


def _gathered(ids: Ints, offsets: Ints, places: Ints) -> Bags:
    starts = offsets[places]
    lengths = offsets[places + 1] - starts
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    return Bags(torch.from_numpy(ids[np.repeat(starts, lengths) + within]), torch.from_numpy(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Shift and width of dense features, learnt from training samples and used for all."""

    mean: NDArray[np.float64]
    width: NDArray[np.float64]

    @classmethod
    def of(cls, samples: CtrSamples, train: Ints) -> Scale:
        """Mean and standard deviation; a feature that never changes keeps its width."""
        dense = samples.dense[train].astype(np.float64)
        width = dense.std(axis=0)
        return cls(mean=dense.mean(axis=0), width=np.where(width > 0.0, width, 1.0))

    def scaled(self, samples: CtrSamples) -> CtrSamples:
        """The same samples with mean 0 and deviation 1 (over the training samples)."""
        if len(self.mean) != len(samples.dense_names):
            raise DataError(
                f"the scale of {len(self.mean)} dense features cannot serve samples with "
                f"{len(samples.dense_names)}"
            )
        return samples.with_dense((samples.dense - self.mean) / self.width)


def batches(
    rows: Iterable[CtrRow], size: int, *, num_features: int, first_id: int = 0
) -> Iterator[CtrBatch]:
    """Batches of a stream in its own order, holding one batch; the last may be smaller."""
    if size < 1:
        raise ValueError(f"a batch needs at least 1 sample, got size={size}")
    features = [Feature(name=str(place), table=str(place)) for place in range(num_features)]
    stream = iter(rows)
    while taken := list(islice(stream, size)):
        names = [str(place) for place in range(len(taken[0].dense))]
        part = CtrSamples.collect(taken, features=features, dense_names=names)
        batch = part.batch(range(len(part)))
        yield CtrBatch(
            sample_ids=batch.sample_ids + first_id,
            dense=batch.dense,
            bags=batch.bags,
            labels=batch.labels,
        )
        first_id += len(taken)


# --- splits ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Sample ids, ascending in `by_seed` and in order of time in `by_time`."""

    train: Ints
    test: Ints


def split_by_seed(num_samples: int, *, test: float, seed: int) -> Split:
    """About a share of `test` is held out, by a hash of (seed, sample id).

    A sample stays on its side when the file grows, so a model never trains on what an earlier
    run tested with.
    """
    _check_share(test)
    places = np.arange(num_samples, dtype=np.uint64)
    held_out = uniform(places, salt=salt_of("split", seed)) < test
    return _both(np.flatnonzero(~held_out), np.flatnonzero(held_out), test)


def split_by_time(times: NDArray[np.float64] | None, *, test: float) -> Split:
    """The latest share of `test` is held out. Equal times stay together, in `test` if in doubt.

    So no training sample is as late as any test sample; the test share is at least what was asked.
    """
    _check_share(test)
    if times is None:
        raise DataError("these samples have no time; name its column, or split by seed")
    order = np.argsort(times, kind="stable")
    wanted = min(len(times) - round(test * len(times)), len(times) - 1)
    cut = int(np.searchsorted(times[order], times[order[wanted]], side="left")) if len(times) else 0
    return _both(order[:cut], order[cut:], test)


def _check_share(test: float) -> None:
    if not 0.0 < test < 1.0:
        raise DataError(f"the held-out share is {test}, expected a number between 0 and 1")


def _both(train: NDArray[np.intp], test: NDArray[np.intp], share: float) -> Split:
    if not len(train) or not len(test):
        raise DataError(
            f"a held-out share of {share} leaves {len(train)} samples to train on and {len(test)} "
            "to test with; give more data or another share"
        )
    return Split(train=train.astype(np.int64), test=test.astype(np.int64))
