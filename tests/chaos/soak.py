"""A long run with random faults: are its losses right, does anything grow, is anything left behind?

    python tests/chaos/soak.py --minutes 20 --seed 0        (make soak)

The whole command, `driver.run`: AC-SGD with its rows in a spill file, checkpoints, metrics, the
monitor, in three stages over links that lose, repeat, delay and damage frames, while every few
seconds stage 1 or 2 is killed or stopped. Stage 0 and the driver live from beginning to end, so
that their memory has a slope worth the name. Every loss is compared, to the bit, with a rehearsal
in virtual time in which nothing happens. What was found goes to benchmarks/results/soak.json.
Exit status 1 if a loss differs or something leaks; `soak_judge` says what a leak is.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

# Before ray is imported.
os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_IGNORE_UNHANDLED_ERRORS="1",
    OMP_NUM_THREADS="1",
    # Ray tells its metrics every ten seconds, in threads whose heaps fill up within the first fifty
    # times, by 10 MB and more, and then no further (docs/lab-notes.md). Every second instead: that
    # is over when memory is looked at, and if a report kept something it would show tenfold.
    RAY_metrics_report_interval_ms="1000",
)

import ray
import torch
from killing import STAGES, summary_of, tiny_config, way_of
from soak_judge import Growth, Limits, counts_that_grew, judge

from netsim.clock import run_virtual
from ray_pipe import driver
from ray_pipe.config import RunConfig
from ray_pipe.metrics import ArmMeter
from ray_pipe.pipeline import Pipeline
from ray_pipe.plans import Arm, arms_of
from ray_pipe.progress import PlainProgress, plain_console
from ray_pipe.recovery import Failure
from ray_pipe.workload import gpt_workload
from stages.compute import Compute
from stages.crowding import crowding
from stages.mishap import INJECTED, LinkFault
from stages.record import StepRecord
from stages.rehearsal import LocalPipeline

SPARED = 0
"""The stage that is never killed."""

LOOK_S = 2.0
SETTLE_S = 60.0
"""Measured from then on: imports, caches, the first spare, Ray's first fifty reports are done."""

LIMITS = {"driver": Limits(mb=24.0, mb_per_hour=40.0), "stage": Limits(mb=16.0, mb_per_hour=30.0)}
MAX_MORE = {
    "actors": 0, "refs": 8, "driver files": 3, "driver threads": 2, "stage files": 3,
    "stage threads": 2, "boxes": 0, "spill files": 0, "checkpoints": 3,
}  # fmt: skip
MAX_MORE_OBJECTS = {"driver objects": 60_000, "stage objects": 20_000}
"""Blocks of Python's allocator. What is kept of a step or a failure adds up to more than this; the
windows of latest rows and records, which fill within minutes, do not."""

LONG_MINUTES = 5.0
"""From then on the process itself is judged, not only what it has open."""

LINK_FAULTS = tuple(
    (source, LinkFault(target=target, action=action, share=0.002, by_s=by_s))
    for source, target in ((0, 1), (1, 2), (2, 1), (1, 0))
    for action, by_s in (("drop", 0.0), ("duplicate", 0.0), ("delay", 0.02), ("corrupt", 0.0))
)
SLOWEST = 5
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "soak.json"


class Enough(Exception):
    """The time is over."""


def config_of(folder: Path) -> RunConfig:
    return tiny_config(
        "acsgd",
        "1f1b",
        **{
            "name": "soak",
            "out": str(folder / "runs"),
            "steps": 10**6,
            "checkpoint.every": 100,
            "codec.spill_dir": str(folder / "spill"),
            "codec.spill_ram": 1024,  # a row of 1 kB: nearly all are on the disk
            "faults.max_failures": -1,
            "faults.black_box": str(folder / "boxes"),
            "faults.spare_after_s": 0.0,
            "deadline_s": "6s",
            "faults.min_deadline_s": "6s",
        },
    )


def rehearse(config: RunConfig, num_steps: int, note: Callable[[list[StepRecord]], object]) -> None:
    """The same run without actors, faults, spill files or time; `note` gets each step's records."""
    config = replace(config, codec=replace(config.codec, spill_dir=None))
    arm = arms_of(config, gpt_workload(config))[0]
    specs = arm.specs()

    def compute_of(index: int) -> Compute:
        spec = specs[index]
        return Compute(
            spec.build(), optim=spec.optim, loss=spec.loss, recompute=spec.recompute,
            precision=spec.precision, seed=spec.seed * 1009 + spec.node,
        )  # fmt: skip

    async def main() -> None:
        pipeline = LocalPipeline(specs=specs, compute_of=compute_of, samples=arm.workload.samples)
        for first in range(0, num_steps, 50):
            plans = [arm.plan(step) for step in range(first, min(first + 50, num_steps))]
            for records in await pipeline.run(plans):
                note(records)

    run_virtual(main())


@dataclass
class Watch:
    """Strikes, and looks at what could grow."""

    seed: int
    minutes: float
    every_s: float
    folder: Path
    say: Any
    pipeline: Pipeline | None = None
    meter: ArmMeter | None = None
    losses: list[float | None] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    healed: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    counts: list[dict[str, int]] = field(default_factory=list)
    before: Any = None
    after: Any = None
    rows_before: int = 0
    busy: list[float] = field(default_factory=list)
    """Threads that want each core, at each look."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.start = self.next_look = time.monotonic()
        self.next_fault = self.start + SETTLE_S

    def on_step(self, arm: str, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if row["step"] == 0:
            self.start = now
            self.next_look = self.next_fault = now + min(SETTLE_S, 12 * self.minutes)
        self.losses.append(row["loss"])
        for event in row["events"]:
            if event.startswith(INJECTED):
                self.injected[event.split(": ")[1].split(" of ")[0]] += 1
            self.healed += "was sent again" in event or "was told to stage" in event
        if now > self.next_look:
            self.look(now)
            self.next_look = time.monotonic() + LOOK_S
        if now > self.start + 60 * self.minutes:
            if tracemalloc.is_tracing():  # before the report is made, which loads a library
                self.after = tracemalloc.take_snapshot()
            raise Enough
        if now > self.next_fault:
            self.strike(row["step"])
            self.next_fault = time.monotonic() + self.every_s * self.random.uniform(0.5, 1.5)

    def strike(self, step: int) -> None:
        """One fault to one stage, from outside."""
        assert self.pipeline is not None
        stage = self.random.choice([i for i in range(STAGES) if i != SPARED])
        number = signal.SIGSTOP if self.random.random() < 0.2 else signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(self.pipeline.infos[stage]["pid"], number)
        self.struck[f"{number.name} stage {stage}"] += 1
        self.say(
            f"{time.monotonic() - self.start:6.0f} s, step {step}: {number.name} stage {stage}"
        )

    def look(self, now: float) -> None:
        assert self.pipeline is not None
        assert self.meter is not None
        own, spared = os.getpid(), self.pipeline.infos[SPARED]["pid"]
        for name, pid in (("driver", own), (f"stage {SPARED}", spared)):
            self.memory.setdefault(name, []).append((now - self.start, rss_mb(pid)))
        if self.before is None and tracemalloc.is_tracing():
            self.before, self.rows_before = tracemalloc.take_snapshot(), len(self.meter.rows)
        self.busy.append(crowding())
        gc.collect()  # an exception and its traceback hold each other, and what the frames held
        worker: Any = ray._private.worker.global_worker
        names: Any = ray.util.list_named_actors
        self.counts.append(
            {
                "actors": len(names(all_namespaces=True)),
                "refs": len(worker.core_worker.get_all_reference_counts()),
                "driver files": len(os.listdir(f"/proc/{own}/fd")),
                "driver threads": len(os.listdir(f"/proc/{own}/task")),
                "stage files": len(os.listdir(f"/proc/{spared}/fd")),
                "stage threads": len(os.listdir(f"/proc/{spared}/task")),
                "driver objects": sys.getallocatedblocks(),
                "stage objects": self.objects_there(),
                "boxes": len(list((self.folder / "boxes").glob("*/*"))),
                "spill files": len(list((self.folder / "spill").rglob("*"))),
                "checkpoints": len(
                    list((self.folder / "runs").glob("*/checkpoints/*/checkpoint*"))
                ),
            }
        )

    def objects_there(self) -> int:
        """Blocks of Python's allocator in the stage that lives throughout."""
        assert self.pipeline is not None

        def count(stage: Any) -> int:
            return sys.getallocatedblocks()

        call = self.pipeline.handles[SPARED].__ray_call__.options(concurrency_group="control")
        return int(ray.get(call.remote(count)))

    def python_growth(self) -> dict[str, Any]:
        """What Python objects were added a step since the first look, and where."""
        if self.before is None or self.after is None or self.meter is None:
            return {}
        steps = max(1, len(self.meter.rows) - self.rows_before)
        changes = self.after.compare_to(self.before, "lineno")
        places = []
        for change in changes[:8]:
            frame = change.traceback[0]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            places.append(f"{where}: {change.size_diff / steps:.0f}")
        total = sum(change.size_diff for change in changes)
        return {"bytes_per_step": total / steps, "bytes_per_step_by_line": places}


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def run(config: RunConfig, watch: Watch) -> list[Failure]:
    """Train until the time is over; returns the failures that were survived."""
    failures: list[list[Failure]] = []
    observer = PlainProgress(plain_console(sys.stderr))
    observer.on_step = watch.on_step  # type: ignore[method-assign]
    right_prepare, right_arms = driver.prepare, driver.arms_of

    def prepare(*args: Any, **options: Any) -> Any:
        pipeline, one = right_prepare(*args, **options)
        watch.pipeline, watch.meter = pipeline, one.meter
        failures.append(options["failures"])
        return pipeline, one

    def faulty(*args: Any) -> list[Arm]:
        return [replace(arm, link_faults=LINK_FAULTS) for arm in right_arms(*args)]

    driver.prepare, driver.arms_of = prepare, faulty  # type: ignore[assignment]
    try:
        driver.run(config, observer)
    except Enough:
        pass
    finally:
        driver.prepare, driver.arms_of = right_prepare, right_arms
    return failures[0]


def slowest_of(failures: list[Failure]) -> list[dict[str, Any]]:
    """The longest recoveries, and what they waited for."""
    kept = ("kind", "stage", "step", "at_s", "recovery_s", "replaced", "spares", "phases")
    longest = sorted(failures, key=lambda failure: -(failure.recovery_s or 0.0))[:SLOWEST]
    return [{name: failure.as_dict()[name] for name in kept} for failure in longest]


def report(config: RunConfig, watch: Watch, failures: list[Failure]) -> dict[str, Any]:
    """All that was found, and whether all is well."""
    watch.say(f"{len(watch.losses)} steps; rehearsing them without faults")
    right: list[float | None] = []
    rehearse(config, len(watch.losses), lambda records: right.append(records[-1].loss))
    differ = [
        i for i, pair in enumerate(zip(watch.losses, right, strict=True)) if pair[0] != pair[1]
    ]
    seconds = watch.memory["driver"][-1][0] - watch.memory["driver"][0][0]
    growths: dict[str, Growth | None] = {}
    for name, points in watch.memory.items():
        growths[name] = judge(points, LIMITS[name.split()[0]])
    ways: dict[str, dict[str, list[Any]]] = {}
    for failure in failures:
        ways.setdefault(way_of(failure), {}).setdefault("all", []).append(failure.as_dict())
    is_long = watch.minutes >= LONG_MINUTES
    most = MAX_MORE | (MAX_MORE_OBJECTS if is_long else {})
    grew = counts_that_grew(watch.counts, most)
    trouble = [f"{len(differ)} losses differ, the first of step {differ[0]}"] if differ else []
    trouble += [f"{name}: {g.why}" for name, g in growths.items() if g is not None and g.leaks]
    if is_long:
        trouble += [f"{name} was not seen long enough" for name, g in growths.items() if g is None]
    trouble += [f"{name}: {before} -> {after}" for name, (before, after) in grew.items()]
    trouble += [f"{f} was not survived" for f in failures if f.resumed_from is None]
    if not failures or not watch.injected:
        trouble.append("no fault was injected: nothing was tested")
    return {
        "command": f"python tests/chaos/soak.py --minutes {watch.minutes:g} --seed {watch.seed} "
        f"--every {watch.every_s:g}",
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}, ray {ray.__version__}",
        "seconds_watched": seconds,
        "steps": len(watch.losses),
        "losses_equal": len(watch.losses) - len(differ),
        "struck": dict(watch.struck),
        "failures": len(failures),
        "by_kind": dict(Counter(failure.kind for failure in failures)),
        "recovery": {way: summary_of(cases) for way, cases in ways.items()},
        "slowest_recoveries": slowest_of(failures),
        "threads_per_core": {"median": median(watch.busy), "most": max(watch.busy)},
        "frames_injected": dict(watch.injected),
        "frames_healed": watch.healed,
        "python_growth": watch.python_growth(),
        "memory": {name: None if g is None else g.as_dict() for name, g in growths.items()},
        "memory_points": {
            name: [[round(t), round(mb, 1)] for t, mb in points[:: max(1, len(points) // 60)]]
            for name, points in watch.memory.items()
        },
        "counts": {name: [look[name] for look in watch.counts[::10]] for name in watch.counts[0]},
        "limits": {name: [limits.mb, limits.mb_per_hour] for name, limits in LIMITS.items()} | most,
        "trouble": trouble,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--trace", action="store_true", help="which lines of the driver allocate")
    args = parser.parse_args()
    torch.set_num_threads(1)

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="ray_pipe-soak-") as name:
        folder = Path(name)
        for part in ("spill", "boxes", "runs"):
            (folder / part).mkdir()
        config = config_of(folder)
        if args.trace:
            tracemalloc.start()
        watch = Watch(args.seed, args.minutes, args.every, folder, say)
        failures = run(config, watch)
        left = [path for part in ("spill", "boxes") for path in (folder / part).rglob("slot-*")]
        found = report(config, watch, failures)
        found["trouble"] += [f"left behind: {path.name}" for path in left]
    args.results.write_text(json.dumps(found, indent=1) + "\n")
    say(
        json.dumps(
            {k: v for k, v in found.items() if k not in ("memory_points", "counts")}, indent=1
        )
    )
    say(
        "; ".join(["FAILED", *found["trouble"]])
        if found["trouble"]
        else "no leak, every loss right"
    )
    return 1 if found["trouble"] else 0


if __name__ == "__main__":
    sys.exit(main())
