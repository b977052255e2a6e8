"""How fast the native kernels are: against their torch twins, memcpy, and the memory itself.

    python benchmarks/codec_kernels.py [--out FILE.json] [--seconds 1.5]

One thread, in its CPU time: waiting for a core does not count. What still disturbs, a cache that
another process has just filled, only ever adds time, and more to the faster: a turn is the best of
a few calls, for all alike. They take turns, so that a busy machine slows all; a ratio is the median
over turns of the ratio of their times. Freed memory is kept by the process: otherwise the twin,
which needs several temporary tensors, would pay for page faults in every call (up to 10x of its
time) and look worse. GB/s are bytes of the fp32 tensor; memcpy copies that tensor. Rows are bf16.
"limit" is what a decoder would reach that read its codes, scales and rows, wrote its outputs and
computed nothing: the twin's time over that of `ray_pipe_native.touch`, through the caches or past
them, or of the kernel itself, whichever is fastest in that turn (spacing the stores out can help
them). Where it is below the target, no kernel can meet the target on this machine; "of limit" says
how near ours comes. (`zero_` of the outputs would be no limit: the processor has a way of filling
memory with one byte, and of writing zeros, that no decoder can take.)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray_pipe_native
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


@dataclass(frozen=True)
class OnCore:
    """A call that is to be served by this core."""

    core: str
    call: Callable[[], object]

    def __call__(self) -> object:
        return self.call()


def turn(call: Callable[[], object]) -> float:
    """The best time of a few calls; the first pays for memory that others gave back.

    The core is chosen before the clock starts: training chooses it once.
    """
    times = []
    with kernels.use(call.core) if isinstance(call, OnCore) else nullcontext():
        call()
        for _ in range(CALLS):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
    return min(times)


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


def operations(h: torch.Tensor, row: torch.Tensor, bits: int) -> dict[str, Callable[[], object]]:
    codes, scales, _, _ = kernels.delta_encode(h, row, bits=bits)
    channels = h.shape[1]
    return {
        "delta_encode": lambda: kernels.delta_encode(h, row, bits=bits),
        "delta_decode": lambda: kernels.delta_decode(codes, scales, row, bits=bits),
        "quantize": lambda: kernels.quantize(h, bits=bits),
        "dequantize": lambda: kernels.dequantize(codes, scales, channels=channels, bits=bits),
    }


def touching(
    operation: str, h: torch.Tensor, row: torch.Tensor, bits: int, *, streamed: bool
) -> Callable[[], object] | None:
    """Read what a decoder reads into outputs of its size, with nothing between."""
    if operation not in ("dequantize", "delta_decode"):
        return None
    codes, scales = kernels.quantize(h, bits=bits)
    has_row = operation == "delta_decode"

    def touch() -> object:
        out = torch.empty(h.shape)
        new_row = torch.empty(h.shape, dtype=row.dtype) if has_row else None
        return ray_pipe_native.touch(
            codes.data_ptr(),
            scales.data_ptr(),
            row.data_ptr() if has_row else 0,
            out.data_ptr(),
            0 if new_row is None else new_row.data_ptr(),
            *h.shape,
            bits,
            streamed,
        )

    return touch


def measure_one(
    name: str,
    call: Callable[[], object],
    h: torch.Tensor,
    row: torch.Tensor,
    bits: int,
    budget_s: float,
) -> dict[str, Any]:
    copy = torch.empty_like(h)
    calls: dict[str, Callable[[], object]] = {
        "native": OnCore("native", call),
        "twin": OnCore("torch", call),
        "memcpy": lambda: copy.copy_(h),
    }
    for streamed in (False, True):
        touch = touching(name, h, row, bits, streamed=streamed)
        if touch is not None:
            calls["touch past caches" if streamed else "touch"] = touch
    turns = take_turns(calls, budget_s)
    if "touch" in turns:
        alike = (turns["touch"], turns["touch past caches"], turns["native"])
        turns["floor"] = [min(each) for each in zip(*alike, strict=True)]
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
        "limit": ratio(turns, "twin", "floor") if "floor" in turns else None,
        "share_of_limit": ratio(turns, "floor", "native") if "floor" in turns else None,
        "num_turns": len(turns["native"]),
    }


def show(entry: dict[str, Any]) -> str:
    """One line of the table."""
    limit = share = ""
    if entry["limit"] is not None:
        limit, share = f"{entry['limit']:.1f}", f"{100 * entry['share_of_limit']:.0f}%"
    rows, channels = entry["shape"]
    return (
        f"{rows:>6}x{channels:<5} {entry['bits']:>4} {entry['operation']:>13} "
        f"{entry['native_us']:>10.1f} {entry['native_gb_per_s']:>12.2f} "
        f"{entry['twin_gb_per_s']:>10.2f} {entry['ratio_to_twin']:>7.1f} {limit:>6} {share:>9} "
        f"{entry['ratio_to_memcpy']:>9.2f}"
    )


def measure(budget_s: float) -> list[dict[str, Any]]:
    print(
        f"{'shape':>12} {'bits':>4} {'operation':>13} {'native us':>10} {'native GB/s':>12} "
        f"{'twin GB/s':>10} {'x twin':>7} {'limit':>6} {'of limit':>9} {'x memcpy':>9}"
    )
    rows = []
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        h = torch.randn(shape, generator=generator)
        row = (h + 0.1 * torch.randn(shape, generator=generator)).bfloat16()
        for bits in BITS:
            for name, call in operations(h, row, bits).items():
                entry = {"shape": list(shape), "bits": bits, "operation": name}
                rows.append(entry | measure_one(name, call, h, row, bits, budget_s))
                print(show(rows[-1]), flush=True)
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
        f"{len(beyond)} could not if they did nothing but read their inputs and write their outputs"
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
