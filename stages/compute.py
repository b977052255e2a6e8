"""What a stage computes: forward, backward, update, with the pipeline's cut in the graph.

Path: stages.stage -> stages.compute -> compressors.base

The input of a stage is a fresh leaf: what the receiver decoded, with gradient. Its gradient is
taken there and sent back; the sender feeds what it decodes into its own output (straight through
the quantiser, never into the codec's memory).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stages.dropout import sample_ids
from stages.loss import LossFn, checked_sum
from stages.optim import (
    OptimSpec,
    make_optimizer,
    scale_gradients,
    set_lr,
    squared_norms,
)


@dataclass(slots=True)
class InFlight:
    """A micro-batch between its forward and its backward pass."""

    source: Tensor
    ids: tuple[int, ...]
    output: Tensor | None = None
    replay: Callable[[], Tensor] | None = None
    rng: Tensor | None = field(default=None)


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
    ) -> None:
        self.module = module.to(device)
        self.device = torch.device(device)
        self.loss = loss
        self.recompute = recompute
        self.precision = precision
        self.parameters = list(self.module.parameters())
        self.optimizer = make_optimizer(optim, self.parameters)
        self._in_flight: dict[int, InFlight] = {}

    def forward(
        self, micro_batch: int, source: Tensor, *, ids: tuple[int, ...], train: bool = True
    ) -> Tensor:
        """Run one micro-batch and keep what its backward pass needs; returns the output."""
        leaf = self._leaf(source)
        if not train:
            self.module.eval()
            with torch.no_grad():
                return self._run(leaf, ids).detach()
        self.module.train()
        flight = InFlight(leaf, ids)
        if self.recompute:
            flight.rng = torch.get_rng_state()
            with torch.no_grad():
                output = self._run(leaf, ids)
            flight.replay = lambda: self._run(leaf, ids)
        else:
            output = flight.output = self._run(leaf, ids)
        self._in_flight[micro_batch] = flight
        return output.detach()

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
            return checked_sum(loss, self._run(leaf, ids), target) / num_items

        if not train:
            self.module.eval()
            with torch.no_grad():
                return float(run())
        self.module.train()
        flight = InFlight(leaf, ids)
        if self.recompute:
            flight.rng = torch.get_rng_state()
            with torch.no_grad():
                total = run()
            flight.replay = run
        else:
            total = flight.output = run()
        self._in_flight[micro_batch] = flight
        return float(total.detach())

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Backward pass of one micro-batch; returns the gradient of its input, if it has one."""
        flight = self._in_flight.pop(micro_batch)
        output = flight.output
        if output is None:
            assert flight.replay is not None
            assert flight.rng is not None
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(flight.rng)
                output = flight.replay()
        if gradient is not None:
            gradient = gradient.to(output.device, output.dtype)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
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

    def abort(self) -> None:
        """Forget a step that will not commit."""
        self._in_flight.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _leaf(self, source: Tensor) -> Tensor:
        leaf = source.to(self.device).detach()
        return leaf.requires_grad_() if leaf.is_floating_point() else leaf

    def _run(self, leaf: Tensor, ids: tuple[int, ...]) -> Tensor:
        with sample_ids(ids), self._precision():
            output: Tensor = self.module(leaf)
        return output.float() if output.is_floating_point() else output

    def _precision(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()
