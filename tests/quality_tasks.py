"""What the quality runs train: a pretrained model and the samples it is fine-tuned on.

Two kinds: a byte-level GPT that is pretrained here, on other text of the same source, and
stories260K, a pretrained Llama which lies beside the project where it is present.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ray_pipe.data import Order, TextSamples, read_text
from ray_pipe.models.gpt import GPTShape, gpt_block, gpt_flops
from ray_pipe.models.llama import BOS, Checkpoint, Tokenizer
from ray_pipe.models.sizes import SIZES
from stages.loss import cross_entropy

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
"""Real data for tests and benchmarks, beside the project; absent on most machines."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A pretrained model and its samples; plain data, so that worker processes can build it."""

    samples: tuple[tuple[int, ...], ...]
    """Windows of token ids, each one longer than the context."""

    weights: Path
    """Weights of the GPT's blocks, or a llama2.c file where there is no GPT shape."""

    gpt: GPTShape | None = None
    micro_batches: int = 2
    micro_batch_size: int = 8
    epochs: int = 8
    lr: float = 3e-4
    clip: float = 1.0
    weight_decay: float = 0.01

    def blocks(self) -> list[nn.Module]:
        """The pretrained model, as blocks that can be cut."""
        if self.gpt is None:
            return Checkpoint.read(self.weights).blocks()
        blocks = [gpt_block(self.gpt, index, seed=0) for index in range(self.gpt.layers)]
        nn.ModuleList(blocks).load_state_dict(torch.load(self.weights, weights_only=True))
        return blocks

    def costs(self) -> list[float]:
        """Relative cost of each block."""
        if self.gpt is not None:
            return [gpt_flops(self.gpt, index) for index in range(self.gpt.layers)]
        return [float(sum(p.numel() for p in block.parameters())) for block in self.blocks()]

    def settings(self) -> dict[str, Any]:
        """What a benchmark tells of its task."""
        names = ("micro_batches", "micro_batch_size", "epochs", "lr", "clip", "weight_decay")
        return {
            "num_samples": len(self.samples),
            "context": len(self.samples[0]) - 1,
            **{name: getattr(self, name) for name in names},
        }

    def order(self, seed: int, *, num_samples: int | None = None) -> Order:
        return Order(
            num_samples=num_samples or len(self.samples),
            micro_batches=self.micro_batches,
            micro_batch_size=self.micro_batch_size,
            seed=seed,
        )


def windows(tokens: Sequence[int], *, context: int, num: int) -> tuple[tuple[int, ...], ...]:
    """The first `num` samples of a text, cut as `TextSamples` cuts it."""
    assert len(tokens) > num * context, f"{len(tokens)} tokens, {num} x {context} are needed"
    return tuple(
        tuple(tokens[start : start + context + 1]) for start in range(0, num * context, context)
    )


def pydoc_task(weights: Path, *, pretrain_steps: int = 600, **options: Any) -> Task:
    """A small GPT pretrained on one part of pydoc's text and fine-tuned on another."""
    shape = GPTShape(layers=4, width=64, heads=4, context=64)
    text = read_text("pydoc")
    cut = len(text) * 7 // 10
    pretrain(shape, text[:cut], weights, steps=pretrain_steps, lr=2e-3)
    samples = windows(text[cut:], context=shape.context, num=256)
    return Task(**{"samples": samples, "weights": weights, "gpt": shape, "lr": 6e-4, **options})


def wikitext_task(weights: Path, *, pretrain_steps: int = 600, **options: Any) -> Task:
    """gpt-tiny, byte-level, pretrained on WikiText-2's training text and fine-tuned on other text.

    The samples are the opening of `valid.txt`, which the pretraining has not seen.
    """
    size = SIZES["gpt-tiny"]
    shape = GPTShape(layers=size.layers, width=size.width, heads=size.heads, context=size.context)
    text = (DATA / "wikitext-2" / "train.txt").read_bytes()
    pretrain(shape, text, weights, steps=pretrain_steps, lr=2e-3)
    fresh = (DATA / "wikitext-2" / "valid.txt").read_bytes()
    samples = windows(fresh, context=shape.context, num=256)
    return Task(**{"samples": samples, "weights": weights, "gpt": shape, "lr": 6e-4, **options})


def stories_task(**options: Any) -> Task:
    """stories260K on tinyshakespeare, the reference experiment of the shared data folder."""
    weights = DATA / "stories260K" / "stories260K.bin"
    vocab = Checkpoint.read(weights).shape.vocab
    tokenizer = Tokenizer.read(DATA / "stories260K" / "tok512.bin", vocab=vocab)
    text = (DATA / "tinyshakespeare" / "input.txt").read_text()
    tokens = [BOS, *tokenizer.encode(text[:40_000])]
    samples = windows(tokens, context=64, num=256)
    return Task(**{"samples": samples, "weights": weights, "micro_batch_size": 4, **options})


def pretrain(
    shape: GPTShape, text: bytes, path: Path, *, steps: int, batch: int = 16, lr: float = 1e-3
) -> float:
    """Train a byte-level GPT on `text` in a plain loop and save it; returns its last loss."""
    torch.set_num_threads(1)
    blocks = [gpt_block(shape, index, seed=0) for index in range(shape.layers)]
    model = nn.Sequential(*blocks).eval()  # no dropout here
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    samples = TextSamples(text, context=shape.context)
    generator = np.random.Generator(np.random.PCG64(0))
    recent: list[float] = []
    for step in range(steps):
        left = 0.5 * (1.0 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (0.1 + 0.9 * left)
        data = samples.batch(generator.integers(len(samples), size=batch).tolist())
        total, count = cross_entropy(model(data.inputs), data.targets)
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(float(loss.detach()))
    torch.save(nn.ModuleList(blocks).state_dict(), path)
    return float(np.mean(recent[-50:]))
