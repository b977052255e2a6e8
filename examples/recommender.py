"""Your own recommender: rows on shards, your modules as dense stages, any loader.

`python examples/recommender.py`; on a cluster with `--address auto`. Two shards and two dense
stages, 100 Mbit/s and 20 ms apart. Ends with the AUC on batches that were not trained on, and with
a checkpoint and an export for serving in `--out`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import ray_pipe
from ray_pipe import rec

DENSE = 4


def tables() -> list[rec.Table]:
    """What the rows are, and how they learn."""
    return [
        rec.Table(
            "user",
            dim=16,
            optimizer=rec.Adagrad(lr=0.1),
            admit=rec.MinCount(2),
            capacity="64MiB",
            evict="lru",
        ),
        rec.Table(
            "item",
            dim=16,
            features=("item", "history"),
            pooling={"history": "mean"},
            optimizer=rec.Adagrad(lr=0.1),
        ),
        rec.Table("country", dim=4, placement="replicated"),
    ]


class Bottom(nn.Module):
    """The first block gets a dict: a vector for each feature, and "dense"."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 16 + 4 + DENSE, 32)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        names = ("user", "item", "history", "country", "dense")
        hidden: Tensor = self.fc(torch.cat([x[name] for name in names], dim=1))
        return hidden.relu()


class Top(nn.Module):
    """Every other block gets what the one before it gave; the last gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x)
        return logits.squeeze(1)


def loader(num: int, *, seed: int, size: int = 256) -> Iterator[dict[str, object]]:
    """Made-up clicks: some users click more, some items are clicked more."""
    draw = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=draw).pow(3) * 2000).long()

    for _ in range(num):
        user, item = ids(size), ids(size)
        lengths = torch.randint(0, 5, (size,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        taste = torch.sin(user * 1.7) + torch.sin(item * 2.3)
        yield {
            "user": user,
            "item": item,
            "history": rec.Jagged(ids(int(lengths.sum())), offsets),
            "country": user % 7,
            "dense": torch.randn(size, DENSE, generator=draw),
            "label": (torch.rand(size, generator=draw) < torch.sigmoid(2 * taste)).float(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="of a Ray cluster; without it, a Ray of our own")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("recommender"))
    args = parser.parse_args()

    emb = rec.EmbeddingStage(tables(), shards=2, max_staleness="auto")
    loss_fn = nn.functional.binary_cross_entropy_with_logits
    link = ray_pipe.Link("100Mbit", rtt="20ms")
    with ray_pipe.Pipeline([emb, Bottom(), Top()], link=link, address=args.address) as pipe:
        for step, batch in enumerate(loader(args.steps, seed=0)):
            loss = pipe.step(batch, loss_fn)  # does not wait: the loss is there when looked at
            if step % 50 == 49:
                print(f"step {step + 1}: loss {loss:.4f}")
        found = rec.evaluate(pipe, loader(10, seed=1))
        stats = emb.stats()
        per_sample = sum(stats["bytes"].values()) / (256 * args.steps)
        print(f"AUC {found.auc:.4f}, log-loss {found.log_loss:.4f}")
        print(
            f"{stats['rows']} rows on {stats['shards']} shards, staleness up to "
            f"{stats['staleness_max']}, {per_sample:.0f} bytes a sample"
        )
        pipe.save(args.out / "checkpoint")
        increments = emb.export(args.out / "serving")
        print(f"{sum(one.rows for one in increments)} rows exported to {args.out / 'serving'}")
    reader = rec.ExportReader(args.out / "serving")
    print(f"user 0 is served as {reader.lookup('user', torch.tensor([0]).numpy())[0, :4]}")


if __name__ == "__main__":
    main()
