"""The samples of a step on their way through one stage: what is read, whose rows, how much loss."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from compressors.base import SampleKeys
from stages.compute import Compute
from stages.loss import count_targets
from stages.plan import StepPlan


class Samples(Protocol):
    """What the first and the last stage need of the data."""

    def batch(self, ids: tuple[int, ...]) -> Any: ...


class Source(Protocol):
    """Makes the first stage's input itself, and wants its gradient: `stages.embedding.feed`."""

    async def ready(self, plan: StepPlan) -> None: ...
    def source(self, plan: StepPlan, micro_batch: int) -> Tensor: ...
    def idle(self) -> None: ...
    def take(self, micro_batch: int, gradient: Tensor) -> None: ...


class Passes:
    """Forward passes of a step. `load` and `forward` run in the compute lane."""

    def __init__(
        self, compute: Compute, samples: Samples | None, *, is_first: bool, is_last: bool
    ) -> None:
        self._compute = compute
        self._samples = samples
        self._is_first = is_first
        self._is_last = is_last
        self._lengths: dict[int, tuple[int, ...] | None] = {}
        self._lengths_out: dict[int, tuple[int, ...] | None] = {}
        self._batches: dict[int, Any] = {}
        self._num_items = 0
        self.loss = 0.0
        """Of the passes so far: shares of the batch's mean."""

        self.num_tokens = 0
        self.feed: Source | None = None
        """Where the first stage's input comes from, if not from the samples."""

    def begin(self) -> None:
        """Forget the step before."""
        self.loss = 0.0
        self.num_tokens = self._num_items = 0
        self._batches.clear()
        self._lengths.clear()
        self._lengths_out.clear()

    def load(self, plan: StepPlan) -> None:
        """The last stage reads the whole batch first: the mean needs to know how many items."""
        assert self._samples is not None
        self._batches = {
            micro_batch: self._samples.batch(ids)
            for micro_batch, ids in enumerate(plan.micro_batches)
        }
        loss = self._compute.loss
        if loss is not None:
            counts = [count_targets(loss, batch.targets) for batch in self._batches.values()]
            self.num_tokens = sum(counts)
            self._num_items = max(1, self.num_tokens)  # a batch of nothing but padding

    def forward(self, plan: StepPlan, micro_batch: int, source: Tensor | None) -> Tensor | None:
        """The output of a micro-batch's forward pass; the last stage adds up the loss instead."""
        ids = plan.micro_batches[micro_batch]
        batch = self._batches.pop(micro_batch, None)
        if self._is_first:
            if self.feed is not None:
                source = self.feed.source(plan, micro_batch)
            else:
                if batch is None:
                    assert self._samples is not None
                    batch = self._samples.batch(ids)
                source = batch.inputs
                self.note_lengths(micro_batch, batch.lengths)
        assert source is not None
        if not self._is_last:
            output = self._compute.forward(micro_batch, source, ids=ids, train=plan.train)
            lengths = self._lengths.get(micro_batch)
            if lengths is not None and not _same_positions(source, output):
                lengths = None
            self._lengths_out[micro_batch] = lengths
            return output
        assert batch is not None
        self.loss += self._compute.forward_loss(
            micro_batch,
            source,
            batch.targets,
            ids=ids,
            num_items=self._num_items,
            train=plan.train,
        )
        return None

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a micro-batch's input, for the stage before or for the feed."""
        sent_back = self._compute.backward(micro_batch, gradient)
        if self.feed is not None:
            assert sent_back is not None
            self.feed.take(micro_batch, sent_back)
        return sent_back

    def note_lengths(self, micro_batch: int, lengths: tuple[int, ...] | None) -> None:
        """Padding is known to the first stage only; it travels with the activations."""
        self._lengths[micro_batch] = lengths

    def keys(self, plan: StepPlan, micro_batch: int, *, backward: bool = False) -> SampleKeys:
        """Who the rows of a micro-batch's output are; `backward`: of its input's gradient."""
        lengths = self._lengths if backward else self._lengths_out
        return SampleKeys(
            ids=plan.micro_batches[micro_batch],
            lengths=lengths.get(micro_batch),
            remember=plan.train,
        )


def _same_positions(source: Tensor, output: Tensor) -> bool:
    """Whether padding of the input is padding of the output: not once a block pools or adds."""
    return output.ndim >= 3 and output.shape[1:2] == source.shape[1:2]
