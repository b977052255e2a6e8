"""How fast embedding rows and ids are made ready for the wire: C++ against the numpy twins.

    python benchmarks/wire_speed.py [--out FILE.json] [--seconds 1.5]

One thread, in its CPU time, native and twin in turns, as benchmarks/codec_kernels.py does it. Rows
are those of a step (8,192 and 65,536 of 16 floats); ids are long-tailed, as clicks have them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from codec_kernels import OnCore, keep_freed_memory, ratio, take_turns

from compressors import kernels, wire_kernels

SIZES = (8_192, 65_536)
DIM = 16


def operations(num: int) -> dict[str, Callable[[], object]]:
    generator = np.random.default_rng(0)
    rows = (generator.standard_normal((num, DIM)) * 1e-3).astype(np.float32)
    halves, exponents = wire_kernels.half_rows(rows)
    codes, steps = wire_kernels.int8_rows(rows)
    ids = generator.zipf(1.2, num).astype(np.int64) * 0x9E3779B97F4A7C1
    return {
        "half_rows": lambda: wire_kernels.half_rows(rows),
        "rows_of_half": lambda: wire_kernels.rows_of_half(halves, exponents),
        "int8_rows": lambda: wire_kernels.int8_rows(rows),
        "rows_of_int8": lambda: wire_kernels.rows_of_int8(codes, steps),
        "dedupe": lambda: wire_kernels.dedupe(ids),
    }


def measure(num: int, budget_s: float) -> list[dict[str, Any]]:
    found = []
    for name, call in operations(num).items():
        calls = {"native": OnCore("native", call), "twin": OnCore("torch", call)}
        turns = take_turns(calls, budget_s)
        found.append(
            {
                "operation": name,
                "num": num,
                "native_us": 1e6 * median(turns["native"]),
                "twin_us": 1e6 * median(turns["twin"]),
                "ratio_to_twin": ratio(turns, "twin", "native"),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=1.5)
    args = parser.parse_args()
    if kernels.core() != "native":
        raise SystemExit("the native core is not in use; build it with `pip install -e .`")
    keep_freed_memory()
    results = [one for num in SIZES for one in measure(num, args.seconds)]
    print(f"{'operation':<14} {'num':>7} {'native':>10} {'numpy':>10} {'ratio':>7}")
    for one in results:
        print(
            f"{one['operation']:<14} {one['num']:>7} {one['native_us']:>7.0f} us "
            f"{one['twin_us']:>7.0f} us {one['ratio_to_twin']:>6.1f}x"
        )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
