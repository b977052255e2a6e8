"""What a stage computes: forward, backward, update, with the pipeline's cut in the graph.

Path: stages.actions -> stages.compute -> stages.ends

The input of a stage is a fresh leaf: what the receiver decoded, with gradient. Its gradient is
taken there and sent back; the sender feeds what it decodes into its own output (straight through
the quantiser, never into the codec's memory).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stages.block_output import check_output, run_blocks
from stages.dropout import sample_ids
from stages.loss import LossFn, checked_sum
from stages.optim import (
    OptimSpec,
    make_optimizer,
    scale_gradients,
    set_lr,
    squared_norms,
)
from stages.randomness import Randomness, State


@dataclass(slots=True)
class InFlight:
    """A micro-batch between its forward and its backward pass."""

    source: Tensor
    output: Tensor | None
    """With its graph; None when the backward pass computes it again."""

    replay: Callable[[], Tensor]
    state: State
    """Of the random numbers, before the forward pass."""

    buffers: Buffers
    """What they were before it, if the backward pass computes it again."""


Buffers = dict[str, Tensor]
IN_PLACE = "leaf Variable that requires grad"
"""What torch says of a block that changes the input of its stage in place."""


class Compute:
    """The torch side of one stage. Knows nothing of codecs, links or Ray."""

    def __init__(
        self,
        module: nn.Module,
        *,
        optim: OptimSpec,
        loss: LossFn | None = None,
        recompute: bool = False,
        precision: str = "fp32",
        device: str = "cpu",
        seed: int = 0,
        first_block: int = 0,
    ) -> None:
        """`first_block` is the place of the module's first block in the whole model."""
        self._first_block = first_block
        self.module = module.to(device)
        self.device = torch.device(device)
        self.loss = loss
        self.recompute = recompute
        self.precision = precision
        self.parameters = list(self.module.parameters())
        self.optimizer = make_optimizer(optim, self.parameters)
        self._randomness = Randomness(seed, self.device)
        self._state_before: State | None = None
        self._buffers_before: Buffers = {}
        self._copies_input = recompute
        """Whether blocks get a copy: they may change it in place (`nn.ReLU(inplace=True)`), and
        what a gradient is sent back for, or a second pass starts from, must stay as it is."""

        self._in_flight: dict[int, InFlight] = {}

    def forward(
        self, micro_batch: int, source: Tensor, *, ids: tuple[int, ...], train: bool = True
    ) -> Tensor:
        """Run one micro-batch and keep what its backward pass needs; returns the output."""
        leaf = self._leaf(source)

        def run() -> Tensor:
            return self._run(leaf, ids, num_samples=len(ids))

        return self._forward(micro_batch, leaf, run, train=train)

    def forward_loss(
        self,
        micro_batch: int,
        source: Tensor,
        target: Tensor,
        *,
        ids: tuple[int, ...],
        num_items: int,
        train: bool = True,
    ) -> float:
        """The last stage's forward pass; returns this micro-batch's share of the batch's mean."""
        assert self.loss is not None
        loss = self.loss
        target = target.to(self.device)
        leaf = self._leaf(source)

        def run() -> Tensor:
            output = self._run(leaf, ids, num_samples=None)
            return checked_sum(loss, output, target) / num_items

        return float(self._forward(micro_batch, leaf, run, train=train))

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Backward pass of one micro-batch; returns the gradient of its input, if it has one."""
        flight = self._in_flight.pop(micro_batch)
        output, buffers = flight.output, {}
        if output is None:
            buffers = self._copy_buffers()
            self._put_buffers(flight.buffers)
            with self._randomness.drawing(flight.state):
                output = flight.replay()
        if gradient is not None:
            gradient = gradient.to(output.device, output.dtype)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        self._put_buffers(buffers)  # the second pass moved them once more, as a batch norm does
        if flight.source.requires_grad and flight.source.grad is None:
            return torch.zeros_like(flight.source)  # the output does not depend on the input
        return flight.source.grad

    def squared_norms(self) -> list[float]:
        """Squared gradient norm of each parameter, in the model's order."""
        return squared_norms(self.parameters)

    def update(self, *, lr: float, factor: float) -> None:
        """Scale by the clip factor, step, clear. A factor of 0 (norm not finite) skips the step."""
        if factor != 0.0:
            scale_gradients(self.parameters, factor)
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._state_before = None

    def abort(self) -> None:
        """Forget a step that will not commit."""
        self._in_flight.clear()
        self.optimizer.zero_grad(set_to_none=True)
        if self._state_before is not None:
            self._randomness.state = self._state_before
            self._state_before = None
            self._put_buffers(self._buffers_before)

    @property
    def random_state(self) -> State:
        """Of the stage's own random numbers, between steps."""
        return self._randomness.state

    @random_state.setter
    def random_state(self, state: State) -> None:
        self._randomness.state = state

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and random numbers, between steps."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self._randomness.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._randomness.state = tuple(state["random"])

    def _forward(
        self, micro_batch: int, leaf: Tensor, run: Callable[[], Tensor], *, train: bool
    ) -> Tensor:
        self.module.train(train)
        state = self._randomness.state
        if not train:
            with torch.no_grad(), self._randomness.drawing(state):
                return run().detach()
        if self._state_before is None:
            self._state_before = state
            # Those of a batch norm change in the forward pass.
            self._buffers_before = self._copy_buffers()
        buffers = self._copy_buffers() if self.recompute else {}
        try:
            output = self._first_pass(run)
        except RuntimeError as error:
            if self._copies_input or IN_PLACE not in str(error):
                raise
            # The first pass of all, so what was before it is what was before the step.
            self._copies_input = True
            self._randomness.state = state
            self._put_buffers(self._buffers_before)
            output = self._first_pass(run)
        kept = None if self.recompute else output
        self._in_flight[micro_batch] = InFlight(leaf, kept, run, state, buffers)
        return output.detach()

    def _first_pass(self, run: Callable[[], Tensor]) -> Tensor:
        with torch.set_grad_enabled(not self.recompute), self._randomness.drawing():
            return run()

    def _copy_buffers(self) -> Buffers:
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def _put_buffers(self, values: Buffers) -> None:
        """Give buffers their values of before; one that a block has made since stays."""
        if not values:
            return
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in values and values[name].shape == buffer.shape:
                    buffer.copy_(values[name])

    def _leaf(self, source: Tensor) -> Tensor:
        leaf = source.to(self.device).detach()
        return leaf.requires_grad_() if leaf.is_floating_point() else leaf

    def _run(self, leaf: Tensor, ids: tuple[int, ...], *, num_samples: int | None) -> Tensor:
        first = self._first_block
        source = leaf.clone() if self._copies_input else leaf
        with sample_ids(ids), self._precision():
            made = run_blocks(self.module, source, first_block=first)
        output = check_output(made, self.module, first_block=first, num_samples=num_samples)
        return output.float() if self.precision == "bf16" else output

    def _precision(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()
