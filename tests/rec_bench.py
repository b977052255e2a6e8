"""A recommender with everything: two dims, four ways of pooling, three kinds of optimizer.

`Plain` trains it with rec's own modules in a plain torch loop; whatever else trains it is compared
with that, to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ray_pipe import rec
from ray_pipe.config import RunConfig
from ray_pipe.plans import optim_spec
from stages.optim import make_optimizer, set_lr

FEATURES = ("user", "item", "history", "shown", "recent", "gender", "country")
WIDTH = 8 + 12 + 12 + 3 * 12 + 8 + 4 + 4 + 2


def tables(*, item: dict[str, Any] | None = None, **user: Any) -> list[rec.Table]:
    """`user` and `item` change those tables."""
    options = {"optimizer": rec.RowAdagrad(lr=0.1), "init": rec.Uniform(0.1)} | user
    return [
        rec.Table(
            "user", dim=8, features=("user", "recent"), pooling={"recent": "sqrtn"}, **options
        ),
        rec.Table(
            "item",
            dim=12,
            features=("item", "history", "shown"),
            pooling={"history": "mean", "shown": "none"},
            **{"optimizer": rec.Adam(lr=0.01), "init": rec.Uniform(0.1), **(item or {})},
        ),
        rec.Table("gender", dim=4, placement="replicated", num_ids=3, init=rec.Uniform(0.1)),
        rec.Table("country", dim=4, placement="replicated", init=rec.Uniform(0.1)),
    ]


class Bottom(nn.Module):
    """Takes what the embedding stage gives."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, 16)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        vectors = [x[name].flatten(1) for name in (*FEATURES, "dense")]
        hidden: Tensor = self.fc(torch.cat(vectors, dim=1))
        return hidden.relu()


class Top(nn.Module):
    """One logit a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x)
        return logits.squeeze(1)


def blocks() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Bottom(), Top()]


def batches(num: int, *, size: int = 23, seed: int = 0) -> list[dict[str, Any]]:
    """Long-tailed ids of any sign, bags of 0 to 4, some of them empty; one is all empty."""
    made = []
    for number in range(num):
        draw = np.random.default_rng([seed, number])
        lengths = draw.integers(0, 5, size) * (number != 3)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        num_ids = int(lengths.sum())
        user = draw.zipf(1.3, size) % 500
        made.append(
            {
                "user": torch.from_numpy(user - 250),
                "recent": rec.Jagged(torch.from_numpy(draw.zipf(1.3, num_ids) % 500), offsets),
                "item": torch.from_numpy(draw.zipf(1.2, size) % 300),
                "history": rec.Jagged(torch.from_numpy(draw.zipf(1.2, num_ids) % 300), offsets),
                "shown": torch.from_numpy(draw.zipf(1.2, (size, 3)) % 300),
                "gender": torch.from_numpy(draw.integers(0, 3, size)),
                "country": torch.from_numpy(draw.integers(-9, 9, size) << 40),
                "dense": torch.from_numpy(draw.normal(size=(size, 2)).astype(np.float32)),
                "label": torch.from_numpy((user % 2).astype(np.float32)),
            }
        )
    return made


class Plain:
    """The model in one process: rec's modules, torch's loop."""

    def __init__(self, own: list[rec.Table], *, shards: int = 1) -> None:
        self.emb = rec.Embeddings(own, capacity="64MiB", shards=shards)
        self.net = nn.Sequential(*blocks())
        config = RunConfig.from_dict({"task": "ctr"})
        parameters = [*self.emb.parameters(), *self.net.parameters()]
        self.optimizer = make_optimizer(optim_spec(config), parameters)
        set_lr(self.optimizer, config.optim.lr)

    def logits(self, batch: dict[str, Any]) -> Tensor:
        output: Tensor = self.net({**self.emb(batch), "dense": batch["dense"]})
        return output

    def step(self, batch: dict[str, Any]) -> float:
        loss = binary_cross_entropy_with_logits(self.logits(batch), batch["label"])
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.emb.step()
        return float(loss.detach())

    def small(self) -> dict[str, Tensor]:
        """The replicated tables."""
        return {k: v for k, v in self.emb.state_dict().items() if k.startswith("replicated")}
