"""Error feedback: what rounding lost is added to the next tensor.

    z = x + e;  send Q(z);  e = z - deq(Q(z))       so that  sum sent + e = sum x

For traffic without a row per sample: gradients, momentum between replicas. The residual `e` is
the sender's alone, so the packet is the inner codec's own and the receiver needs none of this.
AC-SGD needs no error feedback: its rows are one.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from compressors.base import Compressor, Packet, SampleKeys, State

_Key = tuple[str, tuple[int, ...]]


class ErrorFeedback:
    """Keeps one fp32 residual per slot and shape, staged until `commit`.

    A slot names a tensor that comes again (a parameter shard); without names, tensors of one shape
    share a residual. Padded positions neither receive nor leave one. The inner codec must not
    remember samples, because the sender decodes its own packets.
    """

    def __init__(self, inner: Compressor) -> None:
        self.inner = inner
        self.name = f"{inner.name}+ef"
        self._residuals: dict[_Key, Tensor] = {}
        self._staged: dict[_Key, Tensor] = {}
        self._num_dropped = 0

    def encode(self, tensor: Tensor, *, keys: SampleKeys, slot: str = "") -> Packet:
        """The packet of `tensor` plus the slot's residual; evaluation adds and keeps none."""
        if not keys.remember:
            return self.inner.encode(tensor, keys=keys)
        key = (slot, tuple(tensor.shape))
        residual = self._staged.get(key, self._residuals.get(key))
        wanted = tensor.detach().to(torch.float32)
        if residual is not None:
            wanted = wanted + residual.to(wanted.device)
        packet = self.inner.encode(wanted.to(tensor.dtype), keys=keys)
        self._staged[key] = self._lost(wanted, self.inner.decode(packet), keys)
        return packet

    def decode(self, packet: Packet) -> Tensor:
        return self.inner.decode(packet)

    def residual(self, shape: tuple[int, ...], *, slot: str = "") -> Tensor | None:
        """What is owed to the receiver so far, staged tensors included."""
        key = (slot, tuple(shape))
        return self._staged.get(key, self._residuals.get(key))

    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        return self.inner.estimate_nbytes(shape)

    def prefetch(self, ids: Collection[int]) -> None:
        self.inner.prefetch(ids)

    def close(self) -> None:
        self.inner.close()

    def commit(self) -> None:
        """The staged residuals are what the next step starts from."""
        self._residuals.update(self._staged)
        self._staged = {}
        self.inner.commit()

    def abort(self) -> None:
        """The step's packets count as never sent."""
        self._staged = {}
        self.inner.abort()

    def stats(self) -> dict[str, float]:
        held = {**self._residuals, **self._staged}.values()
        return {
            **self.inner.stats(),
            "residual_nbytes": float(sum(tensor.nbytes for tensor in held)),
            "residual_nonfinite": float(self._num_dropped),
        }

    def state_dict(self) -> State:
        """The committed residuals, and the inner codec's state."""
        residuals = {
            f"{'x'.join(map(str, shape))}|{slot}": tensor.clone()
            for (slot, shape), tensor in self._residuals.items()
        }
        return {"residuals": residuals, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: State) -> None:
        if set(state) != {"residuals", "inner"}:
            raise ValueError(
                f"{self.name}: state has keys {sorted(state)}, expected inner and residuals; "
                "was it saved by another codec?"
            )
        self._staged = {}
        self._residuals = {
            (name.partition("|")[2], tuple(tensor.shape)): tensor.to(torch.float32).clone()
            for name, tensor in state["residuals"].items()
        }
        self.inner.load_state_dict(state["inner"])

    def _lost(self, wanted: Tensor, sent: Tensor, keys: SampleKeys) -> Tensor:
        lost = wanted - sent.to(device=wanted.device, dtype=torch.float32)
        if keys.lengths is not None:
            for row, length in zip(lost, keys.lengths):
                row[length:] = 0
        # An infinite gradient is the loss scaler's affair; its residual would never leave again.
        if not bool(lost.sum().isfinite()):
            finite = lost.isfinite()
            self._num_dropped += int(lost.numel() - finite.sum())
            lost = torch.where(finite, lost, 0.0)
        return lost.cpu()
