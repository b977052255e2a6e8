"""A pretrained Llama fine-tuned over compressed links: DirectQ against AC-SGD on three grids.

stories260K (260,032 parameters) on tinyshakespeare, 256 sequences of 64 tokens, batch 8, 8 epochs,
AdamW at a constant 3e-4, 4 stages. Training loss of the last epoch, mean of three seeds.
Claim: AC-SGD at 2 to 4 forward bits stays near fp32 where DirectQ does not, on every grid.

    python benchmarks/quality_stories.py [--seeds 3] [--workers 2] [--out FILE]

Prints the tables and writes `benchmarks/results/quality_stories.json`. About ten minutes on two
cores. Needs the data folder beside the project.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import quality_tables
from quality import ArmSpec, acsgd, directq, fp32, run_arms
from quality_tasks import DATA, stories_task

BITS = ((2, 4), (3, 6), (4, 8))
GRIDS = {
    "signed, groups of 32": {},
    "signed, one scale per token": {"group": 64, "first_visit_bits": 32},
    "the paper's": {"grid": "reference", "first_visit_bits": 32},
}


def arms() -> list[ArmSpec]:
    """All arms of one seed; the name says which row of which table they are."""
    found = [fp32()]
    for grid, codec in GRIDS.items():
        for fw, bw in BITS:
            found += [
                directq(fw, bw, codec=codec, name=f"DirectQ fw{fw}/bw{bw}, {grid}"),
                acsgd(fw, bw, codec=codec, name=f"AC-SGD fw{fw}/bw{bw}, {grid}"),
            ]
    slot = acsgd(2, 4, mutation="id-is-position", name="AC-SGD fw2/bw4, keyed by batch slot")
    return [*found, slot]


def main() -> int:
    parser = bench.arguments("quality_stories", (__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if not (DATA / "stories260K").is_dir():
        print(f"no data in {DATA / 'stories260K'}: nothing to measure", file=sys.stderr)
        return 2

    start = time.perf_counter()
    task = stories_task()
    specs = [dataclasses.replace(arm, seed=s) for s in range(args.seeds) for arm in arms()]
    runs = list(quality_tables.shown(run_arms(task, specs, workers=args.workers), len(specs)))
    rows = quality_tables.summary(runs)
    print("\n" + quality_tables.table(rows))
    bench.write(
        args.out,
        {
            "task": {"model": "stories260K", "data": "tinyshakespeare", **task.settings()},
            "seeds": args.seeds,
            "seconds": time.perf_counter() - start,
            "arms": rows,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
