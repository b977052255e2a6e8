"""A small Llama as a sequence of blocks that can be cut, read from llama2.c's .bin files.

Root-mean-square norms, rotary positions, grouped-query attention and a gated MLP. The token
embedding rides with the first block, the final norm and the head with the last. Where the file
ties embedding and head, the last block gets a copy of its own: two stages cannot share a tensor.

    checkpoint = Checkpoint.read("stories260K.bin")
    blocks = checkpoint.blocks()                       # any cut of these is a pipeline
    ids = Tokenizer.read("tok512.bin", vocab=checkpoint.shape.vocab).encode("Once upon a time")
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_pipe.errors import DataError

BOS = 1
"""Begins a text; every story was trained with it in front."""

_FIRST_BYTE = 3
"""Piece 3 + b stands for the single byte b, for text that no piece spells."""

_HEADER = struct.Struct("<7i")
_NORM_EPS = 1e-5
_ROPE_BASE = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The size of a Llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    """Key and value heads; each serves `heads / kv_heads` query heads."""

    hidden: int
    """Channels inside the MLP."""

    vocab: int
    context: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class RMSNorm(nn.Module):
    """Divides by the root mean square of the channels, then scales each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, _NORM_EPS)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        kv_width = shape.kv_heads * shape.head_width
        self.shape = shape
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, kv_width, bias=False)
        self.value = nn.Linear(shape.width, kv_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        cos, sin = rotary(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self._rotate(self._heads(self.query(x)))
        k = self._rotate(self._heads(self.key(x)))
        v = self._heads(self.value(x))
        shared = self.shape.heads // self.shape.kv_heads
        k = k.repeat_interleave(shared, dim=1)
        v = v.repeat_interleave(shared, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.as_tensor(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head_width).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn each pair of neighbouring channels by an angle that grows with the position."""
        cos = torch.as_tensor(self.cos)[: x.shape[2]]
        sin = torch.as_tensor(self.sin)[: x.shape[2]]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Block(nn.Module):
    """Attention and gated MLP, each on a residual."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.norm1 = RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        inner = self.norm2(x)
        return torch.as_tensor(x + self.down(functional.silu(self.gate(inner)) * self.up(inner)))


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.width)
        self.project = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.project(self.norm(x)))


def rotary(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each position and channel pair."""
    pairs = torch.arange(0, shape.head_width, 2, dtype=torch.float64) / shape.head_width
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float64), _ROPE_BASE**-pairs)
    return angles.cos().float(), angles.sin().float()


# --- the file -----------------------------------------------------------------------------------

# In the file each kind of tensor comes for all layers at once, in this order.
_LAYER_TENSORS = (
    "norm1.weight",
    "attention.query.weight",
    "attention.key.weight",
    "attention.value.weight",
    "attention.out.weight",
    "norm2.weight",
    "gate.weight",
    "down.weight",
    "up.weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A pretrained model: its shape and its weights by name."""

    shape: LlamaShape
    embedding: Tensor
    layers: tuple[dict[str, Tensor], ...]
    final_norm: Tensor
    head: Tensor
    tied: bool
    """Whether the file has one tensor for embedding and head."""

    @classmethod
    def read(cls, path: str | Path) -> Checkpoint:
        """Read a llama2.c version-0 file; refused if its length does not fit its header."""
        raw = Path(path).read_bytes()
        if len(raw) < _HEADER.size:
            raise DataError(f"{path} has {len(raw)} bytes, a llama2.c header needs {_HEADER.size}")
        width, hidden, layers, heads, kv_heads, vocab, context = _HEADER.unpack_from(raw)
        tied = vocab > 0  # a negative size says that the head has a tensor of its own
        shape = LlamaShape(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            hidden=hidden,
            vocab=abs(vocab),
            context=context,
        )
        _check(path, shape)
        with torch.device("meta"):  # shapes only: the header is not to be trusted with memory yet
            body = Block(shape)
        by_name = {name: tuple(parameter.shape) for name, parameter in body.named_parameters()}
        rest = _Reader(path, raw)
        embedding = rest.take(shape.vocab, shape.width)
        stacked = {name: rest.take(layers, *by_name[name]) for name in _LAYER_TENSORS}
        final_norm = rest.take(shape.width)
        rest.take(2, context, shape.head_width // 2)  # rotary angles, which we compute
        head = embedding if tied else rest.take(shape.vocab, shape.width)
        rest.end()
        return cls(
            shape=shape,
            embedding=embedding,
            layers=tuple(
                {name: tensor[index] for name, tensor in stacked.items()} for index in range(layers)
            ),
            final_norm=final_norm,
            head=head,
            tied=tied,
        )

    def block(self, index: int) -> nn.Module:
        """Block `index` with tensors of its own."""
        body = Block(self.shape)
        body.load_state_dict(self.layers[index])
        parts: list[nn.Module] = [body]
        if index == 0:
            tokens = nn.Embedding(self.shape.vocab, self.shape.width)
            tokens.load_state_dict({"weight": self.embedding})
            parts.insert(0, tokens)
        if index == self.shape.layers - 1:
            head = Head(self.shape)
            head.load_state_dict(
                {"norm.weight": self.final_norm, "project.weight": self.head},
            )
            parts.append(head)
        return nn.Sequential(*parts)

    def blocks(self) -> list[nn.Module]:
        """The whole model, a block for each layer."""
        return [self.block(index) for index in range(self.shape.layers)]


class _Reader:
    """Takes fp32 tensors off a file, and knows when it was too short or too long."""

    def __init__(self, path: str | Path, raw: bytes) -> None:
        self._path = path
        self._raw = raw
        self._offset = _HEADER.size

    def take(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        end = self._offset + 4 * count
        if end > len(self._raw):
            raise DataError(
                f"{self._path} has {len(self._raw)} bytes, its header asks for at least {end}; "
                "the file is cut short or no llama2.c version-0 file"
            )
        values = np.frombuffer(self._raw, dtype="<f4", count=count, offset=self._offset)
        self._offset = end
        return torch.from_numpy(values.reshape(shape).copy())

    def end(self) -> None:
        if self._offset != len(self._raw):
            raise DataError(
                f"{self._path} has {len(self._raw)} bytes, its header accounts for {self._offset}; "
                "it is no llama2.c version-0 file"
            )


def _check(path: str | Path, shape: LlamaShape) -> None:
    sizes = (shape.layers, shape.width, shape.heads, shape.kv_heads, shape.hidden, shape.vocab)
    plausible = all(0 < size < 1 << 20 for size in (*sizes, shape.context))
    if (
        not plausible
        or shape.width % shape.heads
        or shape.heads % shape.kv_heads
        or shape.head_width % 2
    ):
        raise DataError(f"{path} is no llama2.c version-0 file: its header reads {shape}")


# --- the tokenizer ------------------------------------------------------------------------------


class Tokenizer:
    """Byte-pair pieces with scores, as llama2.c keeps them: the best-scored pair merges first."""

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        self.pieces = list(pieces)
        self.scores = list(scores)
        self._id_of: dict[bytes, int] = {}
        for index, piece in enumerate(self.pieces):
            if index >= _FIRST_BYTE + 256:  # before it: unknown, begin, end, and single bytes
                self._id_of.setdefault(piece, index)

    @classmethod
    def read(cls, path: str | Path, *, vocab: int) -> Tokenizer:
        """Read a llama2.c tokenizer of `vocab` pieces."""
        raw = Path(path).read_bytes()
        pieces: list[bytes] = []
        scores: list[float] = []
        offset = 4  # the length of the longest piece, which we do not need
        try:
            for _ in range(vocab):
                score, length = struct.unpack_from("<fi", raw, offset)
                offset += 8
                if length < 0 or offset + length > len(raw):
                    raise struct.error
                pieces.append(raw[offset : offset + length])
                scores.append(score)
                offset += length
        except struct.error:
            raise DataError(
                f"{path} ends in piece {len(pieces)}, the model's vocabulary has {vocab}"
            ) from None
        if offset != len(raw):
            raise DataError(
                f"{path} has {len(raw) - offset} bytes after the {vocab} pieces that the model's "
                "vocabulary has; it belongs to another model"
            )
        return cls(pieces, scores)

    @property
    def vocab(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without `BOS`; a space is put in front, as in training."""
        if not text:
            return []
        ids: list[int] = []
        for letter in " " + text:
            raw = letter.encode()
            known = self._id_of.get(raw)
            ids += [_FIRST_BYTE + byte for byte in raw] if known is None else [known]
        return self._merge(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; the space that `encode` put in front is taken off."""
        raw = b"".join(self._spelled(index) for index in ids if index != BOS)
        return raw.removeprefix(b" ").decode(errors="replace")

    def _spelled(self, index: int) -> bytes:
        if _FIRST_BYTE <= index < _FIRST_BYTE + 256:
            return bytes([index - _FIRST_BYTE])
        return self.pieces[index]

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge the neighbours of best score, leftmost first, until none make a piece."""
        after = [*range(1, len(ids)), -1]
        before = list(range(-1, len(ids) - 1))
        heap: list[tuple[float, int, int, int, int]] = []

        def offer(left: int) -> None:
            right = after[left]
            if right < 0:
                return
            merged = self._id_of.get(self.pieces[ids[left]] + self.pieces[ids[right]])
            if merged is not None:
                heapq.heappush(heap, (-self.scores[merged], left, ids[left], ids[right], merged))

        for place in range(len(ids)):
            offer(place)
        while heap:
            _, left, id_left, id_right, merged = heapq.heappop(heap)
            right = after[left]
            if right < 0 or (ids[left], ids[right]) != (id_left, id_right):
                continue  # one of the two was merged with another neighbour meanwhile
            ids[left], ids[right] = merged, -1
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            if before[left] >= 0:
                offer(before[left])
            offer(left)
        return [index for index in ids if index >= 0]
