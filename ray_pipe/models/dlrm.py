"""A DLRM as a sequence of blocks that can be cut into pipeline stages.

Embeddings come from outside, already pooled. What crosses a cut is one tensor, so dense features
and pooled vectors travel side by side in it: `pack` makes the input of the first block, and the
gradient of that input, taken apart by `unpack`, is what the embedding tables are due.

Blocks: one for each layer of the bottom MLP, which works on the dense columns and hands the pooled
vectors on; one for each layer of the top MLP, the first with the interaction in front of it, the
last giving one logit for each sample. Each block draws its weights from a seed of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

INTERACTIONS = ("dot", "concat")


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMShape:
    """The size of a DLRM."""

    num_dense: int
    dims: tuple[int, ...]
    """Length of the pooled vector of each feature."""

    bottom: tuple[int, ...] = (64,)
    """Hidden layers of the bottom MLP. With `dot` one more follows, as wide as a vector."""

    top: tuple[int, ...] = (64, 32)
    interaction: str = "dot"
    """`dot`: products of all pairs of vectors, which must be equally long. `concat`: none."""

    def __post_init__(self) -> None:
        if self.interaction not in INTERACTIONS:
            raise ValueError(f"interaction {self.interaction!r}, expected dot or concat")
        if self.num_dense < 0 or not self.dims or min(self.dims) < 1:
            raise ValueError(
                f"num_dense={self.num_dense} and dims={self.dims}: a DLRM needs at least one "
                "feature with a vector of length 1 or more"
            )
        if any(width < 1 for width in (*self.bottom, *self.top)):
            raise ValueError(
                f"layers of width bottom={self.bottom}, top={self.top}, need 1 or more"
            )
        if self.interaction == "dot" and len(set(self.dims)) > 1:
            raise ValueError(
                f"vectors of lengths {self.dims} have no dot products; make them equally long, "
                "or use interaction='concat'"
            )

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        """Of the dense part, before and after each layer of the bottom MLP."""
        if not self.num_dense:
            return (0,)
        last = (self.dims[0],) if self.interaction == "dot" else ()
        return (self.num_dense, *self.bottom, *last)

    @property
    def num_vectors(self) -> int:
        """That the dot interaction multiplies."""
        return len(self.dims) + (1 if self.num_dense else 0)

    @property
    def top_widths(self) -> tuple[int, ...]:
        """Before and after each layer of the top MLP."""
        if self.interaction == "dot":
            pairs = self.num_vectors * (self.num_vectors - 1) // 2
            # Without dense features the vectors themselves would be lost in their products.
            first = (self.dims[0] if self.num_dense else sum(self.dims)) + pairs
        else:
            first = self.bottom_widths[-1] + sum(self.dims)
        return (first, *self.top, 1)

    @property
    def num_blocks(self) -> int:
        return len(self.bottom_widths) - 1 + len(self.top_widths) - 1


def pack(dense: Tensor, pooled: Sequence[Tensor]) -> Tensor:
    """Dense features and pooled vectors as the one tensor that enters the first block."""
    return torch.cat([dense, *pooled], dim=1)


def unpack(shape: DLRMShape, packed: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The inverse of `pack`, for an input or for its gradient."""
    dense, *pooled = torch.split(packed, [shape.num_dense, *shape.dims], dim=1)
    return dense, tuple(pooled)


class BottomLayer(nn.Module):
    """A layer of the bottom MLP; what stands right of its columns passes by."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.width_in = width_in
        self.linear = nn.Linear(width_in, width_out)

    def forward(self, x: Tensor) -> Tensor:
        dense, rest = x[:, : self.width_in], x[:, self.width_in :]
        return torch.cat([torch.relu(self.linear(dense)), rest], dim=1)


class DotInteraction(nn.Module):
    """Products of all pairs of vectors, beside what the bottom MLP said."""

    pairs: Tensor

    def __init__(self, shape: DLRMShape) -> None:
        super().__init__()
        self.vectors, self.dim = shape.num_vectors, shape.dims[0]
        self.kept = self.dim if shape.num_dense else self.dim * self.vectors
        pairs = torch.triu_indices(self.vectors, self.vectors, offset=1)
        self.register_buffer("pairs", pairs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        vectors = x.view(x.shape[0], self.vectors, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([x[:, : self.kept], products[:, self.pairs[0], self.pairs[1]]], dim=1)


class Logit(nn.Module):
    """The last layer: one number for each sample."""

    def __init__(self, width_in: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x)).squeeze(1)


def dlrm_block(shape: DLRMShape, index: int, *, seed: int) -> nn.Module:
    """Block `index`, with its weights drawn from the run's seed and its own place."""
    if not 0 <= index < shape.num_blocks:
        raise IndexError(
            f"a DLRM of this shape has blocks 0 to {shape.num_blocks - 1}, got {index}"
        )
    num_bottom = len(shape.bottom_widths) - 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + index)
        if index < num_bottom:
            module: nn.Module = BottomLayer(*shape.bottom_widths[index : index + 2])
        else:
            module = nn.Sequential(*_top(shape, index - num_bottom))
        for name, parameter in module.named_parameters():
            if name.endswith("weight"):
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)
    return module


def _top(shape: DLRMShape, layer: int) -> list[nn.Module]:
    width_in, width_out = shape.top_widths[layer : layer + 2]
    parts: list[nn.Module] = []
    if layer == 0 and shape.interaction == "dot":
        parts.append(DotInteraction(shape))
    if layer == len(shape.top):
        return [*parts, Logit(width_in)]
    return [*parts, nn.Linear(width_in, width_out), nn.ReLU()]


def dlrm_blocks(shape: DLRMShape, *, seed: int) -> list[nn.Module]:
    """The whole dense network; `nn.Sequential(*blocks)` takes what `pack` makes."""
    return [dlrm_block(shape, index, seed=seed) for index in range(shape.num_blocks)]


def dlrm_flops(shape: DLRMShape, index: int) -> float:
    """Forward floating-point operations of a block per sample: what the planner balances."""
    num_bottom = len(shape.bottom_widths) - 1
    if index < num_bottom:
        width_in, width_out = shape.bottom_widths[index : index + 2]
        return 2.0 * width_in * width_out
    layer = index - num_bottom
    width_in, width_out = shape.top_widths[layer : layer + 2]
    flops = 2.0 * width_in * width_out
    if layer == 0 and shape.interaction == "dot":
        flops += 2.0 * shape.num_vectors**2 * shape.dims[0]
    return flops
