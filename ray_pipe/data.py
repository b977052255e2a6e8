"""Corpora, samples with stable ids, and the order in which a run visits them.

Path: ray_pipe.driver -> ray_pipe.data -> stages.schedule

A sample's id is its place in the corpus and never changes, whatever the shuffle: AC-SGD remembers
activations by it. Ids travel to the stages, tokens do not; the first and last stage hold the data.
"""

from __future__ import annotations

import functools
import hashlib
import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ray_pipe.errors import DataError
from stages.loss import IGNORE


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The inputs or targets of some samples, and how long each is where they differ."""

    inputs: Tensor
    targets: Tensor
    lengths: tuple[int, ...] | None = None


class Samples(Protocol):
    """A fixed set of samples with stable ids 0 .. len - 1."""

    digest: str
    """Names the content: rows remembered for one set never serve another."""

    def __len__(self) -> int: ...
    def batch(self, ids: Sequence[int]) -> Batch: ...


class TextSamples:
    """Windows of a byte-level text: sample i predicts byte t+1 from bytes up to t."""

    vocab = 256

    def __init__(self, text: bytes, *, context: int) -> None:
        available = (len(text) - 1) // context
        if available < 1:
            raise DataError(
                f"the corpus has {len(text)} bytes, one sample of this model needs {context + 1}; "
                "give more text with --data or a shorter --set model.context"
            )
        self.context = context
        self._count = available
        used = text[: available * context + 1]
        self._bytes = np.frombuffer(used, dtype=np.uint8)
        self.digest = hashlib.sha256(used + context.to_bytes(4, "little")).hexdigest()[:16]

    def first(self, count: int) -> TextSamples:
        """The first `count` samples as a corpus of their own."""
        if count > self._count:
            raise DataError(
                f"data.num_samples={count} but the corpus has only {self._count} samples "
                f"of {self.context} bytes; lower data.num_samples or give more text with --data"
            )
        return TextSamples(self._bytes[: count * self.context + 1].tobytes(), context=self.context)

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: Sequence[int]) -> Batch:
        if not all(0 <= sample < self._count for sample in ids):
            raise IndexError(f"samples have ids 0 to {self._count - 1}, got {list(ids)}")
        starts = np.asarray(ids, dtype=np.int64)[:, None] * self.context
        windows = self._bytes[starts + np.arange(self.context + 1)].astype(np.int64)
        tokens = torch.from_numpy(windows)
        return Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())


DIGEST_ITEMS = 16
"""Of a user's dataset that its default digest looks at."""


class DatasetSamples:
    """A user's map-style `torch.utils.data.Dataset` of (input, target) pairs.

    The index is the stable id, so the dataset must give the same item for the same index. Items
    of different length are padded; padded targets carry `stages.loss.IGNORE`.

    Rows that AC-SGD remembers for one dataset must never serve another: `digest` names the content.
    By default it is a hash of the length and of `DIGEST_ITEMS` items spread evenly from first to
    last, so that it is cheap and the same in every process; two datasets that differ only between
    those items need a `digest` of their own.
    """

    def __init__(self, dataset: Any, *, digest: str | None = None, may_pad: bool = True) -> None:
        # A stream of torch inherits an index that only raises, and may well have a length.
        is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
        if is_stream or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"{type(dataset).__name__} has no length or index; AC-SGD needs a map-style "
                "dataset with stable ids, not a stream"
            )
        self._dataset = dataset
        self.name = type(dataset).__name__
        self._may_pad = may_pad
        self.digest = digest if digest is not None else self._sampled_digest()

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, ids: Sequence[int]) -> Batch:
        pairs = [self._pair(index) for index in ids]
        inputs, targets = ([pair[side] for pair in pairs] for side in (0, 1))
        same_inputs = len({tuple(item.shape) for item in inputs}) == 1
        same_targets = len({tuple(item.shape) for item in targets}) == 1
        if not self._may_pad and not (same_inputs and same_targets):
            raise DataError(
                f"{'targets of ' if same_inputs else ''}samples {list(ids)} have different "
                "lengths, but the loss would count padding; "
                "give it an attribute `count` (number of items from the targets) and let it skip "
                f"targets of {IGNORE}, or make all samples equally long"
            )
        if same_inputs:
            return Batch(inputs=torch.stack(inputs), targets=_stack(targets, IGNORE))
        lengths = tuple(int(item.shape[0]) for item in inputs)
        return Batch(inputs=_stack(inputs, 0), targets=_stack(targets, IGNORE), lengths=lengths)

    def _sampled_digest(self) -> str:
        length = len(self._dataset)
        total = hashlib.sha256(f"{type(self._dataset).__qualname__} {length}".encode())
        last, places = length - 1, min(length, DIGEST_ITEMS) - 1
        for place in range(places + 1):
            index = place * last // places if places else 0
            for part in self._pair(index):
                tensor = part.detach().cpu().contiguous()
                total.update(f"{index} {tensor.dtype} {tuple(tensor.shape)}".encode())
                total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()[:16]

    def _pair(self, index: int) -> tuple[Tensor, Tensor]:
        item = self._dataset[index]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(
                f"sample {index} of {type(self._dataset).__name__} is a {type(item).__name__}, "
                "expected a pair (input, target)"
            )
        return self._tensor(item[0], "input", index), self._tensor(item[1], "target", index)

    def _tensor(self, part: Any, what: str, index: int) -> Tensor:
        try:
            return torch.as_tensor(part)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"the {what} of sample {index} of {self.name} is a {type(part).__name__}, which "
                f"makes no tensor ({error}); a sample is a pair of tensors, arrays or numbers: put "
                "several of them into one"
            ) from None


def _stack(items: list[Tensor], fill: int) -> Tensor:
    if len({tuple(item.shape) for item in items}) == 1:
        return torch.stack(items)
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=fill)


def read_text(source: str, *, on_skip: Callable[[Path], None] = lambda path: None) -> bytes:
    """The corpus behind `--data`: `pydoc`, a UTF-8 file, or a folder of them, of which those that
    are something else are left out; `on_skip` is told each."""
    if source == "pydoc":
        topics = pydoc_data.topics.topics
        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        texts = []
        for file in files:
            text = _read_utf8(file, skip_binary=True)
            if text is None:
                on_skip(file)
            else:
                texts.append(text)
        if not texts:
            raise DataError(
                f"the folder {source} holds no UTF-8 text ({len(files)} files looked at)"
            )
        return b"\n".join(texts)
    text = _read_utf8(path, skip_binary=False)
    assert text is not None
    return text


def _read_utf8(path: Path, *, skip_binary: bool) -> bytes | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"no such data file: {path}; give a UTF-8 text file, a folder, or `--data pydoc`"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        if skip_binary:
            return None
        raise DataError(
            f"{path} is not UTF-8 text (byte {raw[error.start]:#04x} at offset {error.start}); "
            "convert it, for example with iconv"
        ) from None
    return raw


@functools.lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, num_samples: int) -> np.ndarray[Any, Any]:
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which samples each step visits: a pure function of (seed, step), so it resumes anywhere."""

    num_samples: int
    micro_batches: int
    micro_batch_size: int
    seed: int
    shard: int = 0
    """Which of several replicas this is the order of: it visits samples shard, shard + num_shards,
    …, `num_samples` of them."""

    num_shards: int = 1

    @property
    def batch_size(self) -> int:
        return self.micro_batches * self.micro_batch_size

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def at(self, step: int) -> tuple[tuple[int, ...], ...]:
        """Sample ids of each micro-batch of a step; the last batch of an epoch may be smaller."""
        epoch, place = divmod(step, self.steps_per_epoch)
        shuffled = _shuffled(self.seed, epoch, self.num_samples)
        ids = shuffled[place * self.batch_size : (place + 1) * self.batch_size]
        size = self.micro_batch_size
        return tuple(
            tuple(
                self.shard + self.num_shards * int(sample) for sample in ids[start : start + size]
            )
            for start in range(0, len(ids), size)
        )
