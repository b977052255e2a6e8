"""A GPT as a sequence of blocks that can be cut anywhere.

Pre-norm transformer with learned positions; the token embedding rides with the first block and
the final norm and head with the last, so a model of L layers has L blocks. Each block draws its
weights from a seed of its own: any stage builds just its blocks and gets the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.dropout import SampleDropout


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """The size of a GPT."""

    layers: int
    width: int
    heads: int
    context: int
    vocab: int = 256
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return torch.as_tensor(mixed)


class Block(nn.Module):
    """Attention and MLP, each on a residual."""

    def __init__(self, shape: GPTShape, *, index: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.drop1 = SampleDropout(shape.dropout, salt=2 * index)
        self.drop2 = SampleDropout(shape.dropout, salt=2 * index + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return torch.as_tensor(x + self.drop2(self.down(hidden)))


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return torch.as_tensor(self.tokens(tokens) + self.positions(positions))


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.project = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.project(self.norm(x)))


def gpt_block(shape: GPTShape, index: int, *, seed: int) -> nn.Module:
    """Block `index` of a GPT, with its weights drawn from the run's seed and its own place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + index)
        parts: list[nn.Module] = [Block(shape, index=index)]
        if index == 0:
            parts.insert(0, Embedding(shape))
        if index == shape.layers - 1:
            parts.append(Head(shape))
        module = nn.Sequential(*parts)
        for name, parameter in module.named_parameters():
            if parameter.dim() < 2:
                continue
            # Residual projections shrink with depth, as in GPT-2.
            residual = name.endswith(("out.weight", "down.weight"))
            scale = 0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02
            nn.init.normal_(parameter, std=scale)
        for name, parameter in module.named_parameters():
            if name.endswith("bias") and parameter.dim() == 1:
                nn.init.zeros_(parameter)
    return module


def gpt_flops(shape: GPTShape, index: int) -> float:
    """Forward floating-point operations of a block per token: what the planner balances."""
    flops = 24.0 * shape.width**2 + 4.0 * shape.context * shape.width
    if index == shape.layers - 1:
        flops += 2.0 * shape.width * shape.vocab
    return flops
