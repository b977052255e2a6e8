"""How fast the native kernels are: against their torch twins, memcpy, and the memory itself.

    python benchmarks/codec_kernels.py [--out FILE.json] [--seconds 1.5]

One thread, in its CPU time: waiting for a core does not count. Native and twin take turns of a few
calls, so that a busy machine slows both; a ratio is the median over turns of the ratio of their
medians. Freed memory is kept by the process: otherwise the twin, which needs several temporary
tensors, would pay for page faults in every call (up to 10x of its time) and look worse. GB/s are
bytes of the fp32 tensor; memcpy copies that tensor. Rows are bf16. "limit" is what a decoder would
reach that only wrote its outputs and read nothing: the twin's time over that of
`torch.empty(…).zero_()` for each of them. Where it is below the target, no kernel can meet the
target on this machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from compressors import kernels

SHAPES = ((1024, 128), (2048, 768), (4096, 1600))
BITS = (2, 4, 8)
TARGET = 8.0
CALLS = 5  # in one turn

Turns = dict[str, list[float]]


def keep_freed_memory() -> None:
    """Tell glibc to give nothing back to the system (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        assert libc.mallopt(-1, 2**31 - 1) == libc.mallopt(-3, 32 << 20) == 1


def turn(call: Callable[[], object]) -> float:
    """The median time of a few calls; the first pays for memory that others gave back."""
    call()
    times = []
    for _ in range(CALLS):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return median(times)


def take_turns(calls: dict[str, Callable[[], object]], budget_s: float) -> Turns:
    """Turns of all calls, one after the other, until the budget is used."""
    turns: Turns = {name: [] for name in calls}
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(turns["native"]) < 3:
        for name, call in calls.items():
            turns[name].append(turn(call))
    return turns


def ratio(turns: Turns, slow: str, fast: str) -> float:
    return median(a / b for a, b in zip(turns[slow], turns[fast], strict=True))


def on_core(core: str, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with kernels.use(core):
            return call()

    return run


def operations(h: torch.Tensor, row: torch.Tensor, bits: int) -> dict[str, Callable[[], object]]:
    codes, scales, _, _ = kernels.delta_encode(h, row, bits=bits)
    channels = h.shape[1]
    return {
        "delta_encode": lambda: kernels.delta_encode(h, row, bits=bits),
        "delta_decode": lambda: kernels.delta_decode(codes, scales, row, bits=bits),
        "quantize": lambda: kernels.quantize(h, bits=bits),
        "dequantize": lambda: kernels.dequantize(codes, scales, channels=channels, bits=bits),
    }


def filling(operation: str, h: torch.Tensor, row: torch.Tensor) -> Callable[[], object] | None:
    """Write the outputs of a decoder, with nothing."""
    if operation == "dequantize":
        return lambda: torch.empty(h.shape).zero_()
    if operation == "delta_decode":
        return lambda: (torch.empty(h.shape).zero_(), torch.empty(h.shape, dtype=row.dtype).zero_())
    return None


def measure_one(
    name: str, call: Callable[[], object], h: torch.Tensor, row: torch.Tensor, budget_s: float
) -> dict[str, Any]:
    copy = torch.empty_like(h)
    calls: dict[str, Callable[[], object]] = {
        "native": on_core("native", call),
        "twin": on_core("torch", call),
        "memcpy": lambda: copy.copy_(h),
    }
    fill = filling(name, h, row)
    if fill is not None:
        calls["fill"] = fill
    turns = take_turns(calls, budget_s)
    nbytes = 4 * h.numel()
    rates = {
        f"{each}_gb_per_s": nbytes / median(turns[each]) / 1e9
        for each in ("native", "twin", "memcpy")
    }
    return {
        "native_us": median(turns["native"]) * 1e6,
        **rates,
        "ratio_to_twin": ratio(turns, "twin", "native"),
        "ratio_to_memcpy": ratio(turns, "memcpy", "native"),
        "limit": ratio(turns, "twin", "fill") if fill is not None else None,
        "num_turns": len(turns["native"]),
    }


def measure(budget_s: float) -> list[dict[str, Any]]:
    print(
        f"{'shape':>12} {'bits':>4} {'operation':>13} {'native us':>10} {'native GB/s':>12} "
        f"{'twin GB/s':>10} {'x twin':>7} {'limit':>6} {'x memcpy':>9}"
    )
    rows = []
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        h = torch.randn(shape, generator=generator)
        row = (h + 0.1 * torch.randn(shape, generator=generator)).bfloat16()
        for bits in BITS:
            for name, call in operations(h, row, bits).items():
                entry = {"shape": list(shape), "bits": bits, "operation": name}
                entry |= measure_one(name, call, h, row, budget_s)
                rows.append(entry)
                limit = f"{entry['limit']:.1f}" if entry["limit"] is not None else ""
                print(
                    f"{shape[0]:>6}x{shape[1]:<5} {bits:>4} {name:>13} {entry['native_us']:>10.1f} "
                    f"{entry['native_gb_per_s']:>12.2f} {entry['twin_gb_per_s']:>10.2f} "
                    f"{entry['ratio_to_twin']:>7.1f} {limit:>6} {entry['ratio_to_memcpy']:>9.2f}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/codec_kernels.json"))
    parser.add_argument("--seconds", type=float, default=1.5, help="for each line of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    assert kernels.core() == "native", "the native core is not in use: pip install -e . --no-deps"

    rows = measure(arguments.seconds)
    missed = [row for row in rows if row["ratio_to_twin"] < TARGET]
    beyond = [row for row in missed if row["limit"] is not None and row["limit"] < TARGET]
    print(
        f"{len(rows) - len(missed)} of {len(rows)} reach {TARGET:.0f}x the twin; of the others "
        f"{len(beyond)} could not if they did nothing but write their outputs"
    )
    result = {
        "benchmark": "codec_kernels",
        "native": kernels.build_info(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "target_ratio": TARGET,
        "num_reached": len(rows) - len(missed),
        "num_beyond_reach": len(beyond),
        "reached": not missed,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
