"""The AUC that embeddings on shards have to match: one process, plain torch, nothing of ours.

`nn.EmbeddingBag(sparse=True)` tables with torch's own sparse optimizers, the DLRM in one piece
with Adam, batches in the order that a run of ray_pipe visits. Rows that training never touched
read as zeros, as in the row store's evaluation.

    python benchmarks/ctr_reference.py [--set adult | synthetic] [--rule adagrad | sgd]
        [--data FILE [--columns SPEC] [--split seed | time]]
        [--seeds 3] [--epochs 4] [--dim 16] [--out FILE]

Prints a line for each seed, then mean and deviation, and writes
`benchmarks/results/ctr_reference.json` (a set keeps its row when another is measured). Adult
needs the data folder beside the project and takes about a minute on a quiet core.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
from torch import Tensor, nn

from ray_pipe.ctr_columns import ColumnSpec
from ray_pipe.ctr_data import CtrBatch, CtrSamples, Scale, Split, split_by_seed, split_by_time
from ray_pipe.ctr_formats import guess, load, read
from ray_pipe.ctr_metrics import ScoreCounts
from ray_pipe.ctr_synthetic import SyntheticCtr, SyntheticSpec
from ray_pipe.data import Order
from ray_pipe.models.dlrm import DLRMShape, dlrm_blocks, pack
from stages.loss import binary_cross_entropy

ADULT = Path(__file__).resolve().parents[2] / "shared" / "data" / "adult"
ADULT_SPEC = ColumnSpec.parse(
    "label=output; positive=>50K,>50K.; negative=<=50K,<=50K.;"
    "dense=age,education_num,hours_per_week; log=fnlwgt,capital_gain,capital_loss;"
    "ids=workclass,education,marital_status,occupation,relationship,race,sex,native_country"
)
BATCH = 256
RULES = {
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.05),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1.0),
}
INIT = 0.01
"""Rows begin uniformly between -INIT and INIT, as the row store's do."""


def adult() -> tuple[CtrSamples, Split]:
    """The training file, then the test file: the split that everyone uses."""
    rows = [row for name in ("adult.data", "adult.test") for row in read(ADULT / name, ADULT_SPEC)]
    samples = CtrSamples.collect(rows, features=ADULT_SPEC.features, dense_names=ADULT_SPEC.dense)
    train = np.arange(32_561)
    return Scale.of(samples, train).scaled(samples), Split(
        train=train, test=np.arange(32_561, len(samples))
    )


def from_file(path: str, columns: str | None, split_by: str) -> tuple[CtrSamples, Split]:
    """Any file that ray_pipe reads; a seeded tenth is held out, or the latest one."""
    samples = load(path, ColumnSpec.parse(columns) if columns else guess(path))
    if split_by == "time":
        split = split_by_time(samples.times, test=0.1)
    else:
        split = split_by_seed(len(samples), test=0.1, seed=0)
    return Scale.of(samples, split.train).scaled(samples), split


class Reference(nn.Module):
    """Tables and dense network in one place."""

    def __init__(self, samples: Any, train: Tensor, *, dim: int, seed: int) -> None:
        super().__init__()
        self.features = samples.features
        shape = DLRMShape(num_dense=len(samples.dense_names), dims=(dim,) * len(self.features))
        self.dense = nn.Sequential(*dlrm_blocks(shape, seed=seed))
        seen: dict[str, list[Tensor]] = {}
        for feature, bags in zip(self.features, samples.batch(train.numpy()).bags, strict=True):
            seen.setdefault(feature.table, []).append(bags.ids)
        # Row 0 stands for ids that training never saw: zeros, and no gradient ever gets there.
        self.known = {table: torch.unique(torch.cat(ids)) for table, ids in seen.items()}
        generator = torch.Generator().manual_seed(seed)
        self.tables = nn.ModuleDict()
        for table, known in self.known.items():
            weight = torch.empty(len(known) + 1, dim).uniform_(-INIT, INIT, generator=generator)
            weight[0] = 0.0
            self.tables[table] = nn.EmbeddingBag.from_pretrained(
                weight, freeze=False, mode="sum", sparse=True, include_last_offset=True
            )

    def forward(self, batch: CtrBatch) -> Tensor:
        pooled = [
            self.tables[feature.table](self._rows(feature.table, bags.ids), bags.offsets)
            for feature, bags in zip(self.features, batch.bags, strict=True)
        ]
        return torch.as_tensor(self.dense(pack(batch.dense, pooled)))

    def _rows(self, table: str, ids: Tensor) -> Tensor:
        known = self.known[table]
        place = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        return torch.where(known[place] == ids, place + 1, torch.zeros_like(place))


def visits(train: Tensor, *, epochs: int, seed: int) -> Iterator[Tensor]:
    """The batches of a run, as `ray_pipe.data.Order` gives them."""
    order = Order(num_samples=len(train), micro_batches=1, micro_batch_size=BATCH, seed=seed)
    for step in range(epochs * order.steps_per_epoch):
        yield train[torch.tensor(order.at(step)[0])]


def scored(model: Reference, samples: Any, test: Tensor) -> ScoreCounts:
    """Counts over the test samples."""
    with torch.no_grad():
        parts = []
        for ids in test.split(4096):  # type: ignore[no-untyped-call]
            batch = samples.batch(ids.numpy())
            parts.append(ScoreCounts.of(model(batch), batch.labels))
    return parts[0].merge(*parts[1:])


def train_one(samples: Any, split: Split, *, seed: int, args: Namespace) -> dict[str, float]:
    """Train with one seed; the numbers of one arm."""
    train, test = torch.from_numpy(split.train), torch.from_numpy(split.test)
    model = Reference(samples, train, dim=args.dim, seed=seed)
    before = scored(model, samples, test).auc()
    tables = RULES[args.rule](model.tables.parameters())
    dense = torch.optim.Adam(model.dense.parameters(), lr=1e-3)
    start = time.perf_counter()
    for ids in visits(train, epochs=args.epochs, seed=seed):
        batch = samples.batch(ids.numpy())
        total, count = binary_cross_entropy(model(batch), batch.labels)
        tables.zero_grad()
        dense.zero_grad()
        (total / count).backward()
        tables.step()
        dense.step()
    spent = time.perf_counter() - start
    found = scored(model, samples, test)
    return {
        "auc": found.auc(),
        "auc_before": before,
        "log_loss": found.log_loss(),
        "normalized_entropy": found.normalized_entropy(),
        "calibration": found.calibration().ratio,
        "samples_per_s": args.epochs * len(train) / spent,
    }


def main() -> int:
    parser = bench.arguments("ctr_reference", (__doc__ or "").splitlines()[0])
    parser.add_argument("--set", choices=("adult", "synthetic"), default="adult")
    parser.add_argument("--rule", choices=sorted(RULES), default="adagrad")
    parser.add_argument("--data", help="a file that ray_pipe reads, instead of a set")
    parser.add_argument("--columns", help="what the columns of a plain CSV file are")
    parser.add_argument("--split", choices=("seed", "time"), default="seed", help="of --data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dim", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch asks to be told either way
    best: float | None = None
    samples: Any
    if args.data:
        name, (samples, split) = (
            Path(args.data).name,
            from_file(args.data, args.columns, args.split),
        )
    elif args.set == "synthetic":
        name, samples = "synthetic", SyntheticCtr(SyntheticSpec())
        split = split_by_seed(len(samples), test=0.1, seed=0)
        best = samples.best_auc(split.test)
    elif ADULT.is_dir():
        name, (samples, split) = "adult", adult()
    else:
        print(f"no data in {ADULT}: try --set synthetic", file=sys.stderr)
        return 2

    arms = []
    for seed in range(args.seeds):
        arms.append(train_one(samples, split, seed=seed, args=args))
        print(
            f"{name} {args.rule} seed {seed}: "
            + ", ".join(f"{k} {v:.4g}" for k, v in arms[-1].items()),
            flush=True,
        )
    aucs = [arm["auc"] for arm in arms]
    row = {
        "set": name,
        "rule": args.rule,
        "epochs": args.epochs,
        "dim": args.dim,
        "num_train": len(split.train),
        "num_test": len(split.test),
        "digest": samples.digest,
        "auc": statistics.mean(aucs),
        "auc_sd": statistics.stdev(aucs) if len(aucs) > 1 else None,
        "best_auc": best,
        "seeds": arms,
    }
    known = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    others = [one for one in known["rows"] if (one["set"], one["rule"]) != (name, args.rule)]
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"rows": [*others, row]}, indent=1) + "\n")
    deviation = "" if row["auc_sd"] is None else f" ± {row['auc_sd']:.4f}"
    print(
        f"{name}, {args.rule}: AUC {row['auc']:.4f}{deviation}"
        + (f", best reachable {best:.4f}" if best else "")
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
