"""How large the models we know by name are. Free of torch, so that `--help` can read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The shape of a GPT."""

    layers: int
    """Transformer blocks; the pipeline can be cut between any two of them."""

    width: int
    """Channels of the residual stream: what one token costs on a link."""

    heads: int
    """Attention heads; divides `width`."""

    context: int
    """Tokens of a sample."""


SIZES: dict[str, ModelSize] = {
    "gpt-nano": ModelSize(layers=4, width=64, heads=4, context=64),
    "gpt-tiny": ModelSize(layers=4, width=128, heads=4, context=128),
    "gpt-small": ModelSize(layers=8, width=256, heads=8, context=256),
    "gpt2": ModelSize(layers=12, width=768, heads=12, context=1024),
}
