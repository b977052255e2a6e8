"""AC-SGD's sample buffers: their dict of tensors against the row store behind the same face.

    python benchmarks/sample_buffers.py [--samples 2000] [--out FILE.json]

A `Shelf` gives and takes one row by sample id: the dict hands out the tensor that it was given,
the row store copies it in and out. `native, batched` takes a whole micro-batch in a call, which the
buffers' protocol does not. Time per row of a visit (get, then put of a new value that is there
already: what the codec computes between the two is the same work for all), in CPU time, medians
over rounds; resident memory of each in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import bench
import numpy as np
import torch
from torch import Tensor

from compressors.buffers import MemoryShelf
from stages.embedding.row_store import RowStore

SIZES = {"64 x 128": 64 * 128, "128 x 256": 128 * 256, "128 x 768": 128 * 768}
BATCH = 16
KINDS = ("dict", "native", "native, batched")


class NativeShelf:
    """Rows as rows of floats: half precision values, two in each."""

    def __init__(self, floats: int, num: int) -> None:
        capacity = int(num * (4 * floats + 64) * 1.3) + (64 << 20)
        self.store = RowStore(capacity=capacity)
        assert self.store.native
        self.table = self.store.table("rows", dim=floats, expected_rows=num)

    def get_many(self, keys: Any) -> Tensor:
        return torch.from_numpy(self.table.multi_get(keys)[0])

    def put_many(self, keys: Any, values: Tensor) -> None:
        offsets = np.arange(len(keys) + 1, dtype=np.int64)
        self.table.run("put", offsets, keys, values.numpy(), want_rows=False)


def visits(kind: str, floats: int, num: int, rounds: int) -> tuple[float, int]:
    """Microseconds a row, and what the rows made resident."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    before = _resident()
    plain, native = MemoryShelf(), None if kind == "dict" else NativeShelf(floats, num)
    fresh = torch.randn(BATCH, floats)
    for first in range(0, num, BATCH):
        keys = np.arange(first, first + BATCH, dtype=np.int64)
        if native is not None:
            native.put_many(keys, fresh)
        else:
            for key in keys.tolist():
                plain.put(key, fresh[0].clone())
    grown = _resident() - before
    times = []
    for _ in range(rounds):
        keys = np.ascontiguousarray(random.permutation(num)[:BATCH]).astype(np.int64)
        new = fresh.clone()  # not counted: every kind is given new values
        rows = list(new.split(1))
        start = time.thread_time()
        if native is None:
            for key, row in zip(keys.tolist(), rows, strict=True):
                plain.get(key)
                plain.put(key, row)
        elif kind == "native":
            for place, row in enumerate(rows):
                native.get_many(keys[place : place + 1])
                native.put_many(keys[place : place + 1], row)
        else:
            native.get_many(keys)
            native.put_many(keys, new)
        times.append((time.thread_time() - start) / BATCH * 1e6)
    return median(times), grown


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = bench.arguments("sample_buffers", (__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    num = args.samples // BATCH * BATCH
    context = multiprocessing.get_context("spawn")
    rows = []
    for name, values in SIZES.items():
        floats = values // 2  # fp16
        row: dict[str, Any] = {"row": name, "nbytes": 4 * floats, "samples": num}
        for kind in KINDS:
            with context.Pool(1) as pool:
                spent, grown = pool.apply(visits, (kind, floats, num, args.rounds))
            row[kind] = {"us_per_row": spent, "resident_per_row": grown / num}
        print(row, flush=True)
        rows.append(row)
    bench.write(args.out, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
