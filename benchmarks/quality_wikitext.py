"""WikiText-2: what compression costs in training loss, AC-SGD against DirectQ and fp32.

gpt-tiny (4 layers, width 128, byte-level) pretrained on WikiText-2's training text, then fine-tuned
in 4 stages on 256 sequences of 128 bytes it has not seen, batch 16, 8 epochs, AdamW at a constant
6e-4. Training loss of the last epoch and the error of activations, mean and spread of three seeds.
Claim: AC-SGD at 4 and at 2 forward bits stays near fp32; DirectQ loses many times more.

    python benchmarks/quality_wikitext.py [--seeds 3] [--workers 1] [--out FILE]

Prints the README's table and writes `benchmarks/results/quality_wikitext.json`. About 15 minutes
on one core. Needs the data folder beside the project.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import quality_tables
from quality import ArmSpec, acsgd, directq, fp32, run_arms
from quality_tasks import DATA, wikitext_task

PRETRAIN_STEPS = 400


def arms() -> list[ArmSpec]:
    """All arms of one seed."""
    return [
        fp32(),
        directq(4, 4, name="DirectQ fw4/bw4"),
        acsgd(4, 4, name="AC-SGD fw4/bw4"),
        directq(2, 4, name="DirectQ fw2/bw4"),
        acsgd(2, 4, name="AC-SGD fw2/bw4"),
    ]


def main() -> int:
    parser = bench.arguments("quality_wikitext", (__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    if not (DATA / "wikitext-2").is_dir():
        print(f"no data in {DATA / 'wikitext-2'}: nothing to measure", file=sys.stderr)
        return 2

    start = time.perf_counter()
    specs = [dataclasses.replace(arm, seed=s) for s in range(args.seeds) for arm in arms()]
    with tempfile.TemporaryDirectory() as folder:
        print(f"pretraining for {PRETRAIN_STEPS} steps", flush=True)
        task = wikitext_task(Path(folder) / "weights.pt", pretrain_steps=PRETRAIN_STEPS)
        runs = list(quality_tables.shown(run_arms(task, specs, workers=args.workers), len(specs)))
    rows = quality_tables.summary(runs)
    print("\n" + quality_tables.table(rows))
    bench.write(
        args.out,
        {
            "task": {
                "model": "gpt-tiny",
                "data": "WikiText-2, bytes",
                "pretrain_steps": PRETRAIN_STEPS,
                **task.settings(),
            },
            "seeds": args.seeds,
            "seconds": time.perf_counter() - start,
            "arms": rows,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
