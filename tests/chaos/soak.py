"""A long run with random faults: does anything grow, does anything stay behind?

    python tests/chaos/soak.py --minutes 20 --seed 0        (make soak)

Trains a tiny model in three stages over links that lose, repeat, delay and damage frames, and
every few seconds kills or stops a stage. Prints the slope of the memory of the driver and of the
stages, and counts actors, object refs, open files, threads and black boxes at the beginning and at
the end. Exit status 1 if something leaked, or if the losses differ from an unbroken run's.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Before ray is imported.
os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_IGNORE_UNHANDLED_ERRORS="1",
    OMP_NUM_THREADS="1",
)

import ray
import torch
from killing import STAGES, make_arm

from ray_pipe.cluster import StageActors
from ray_pipe.pipeline import Pipeline
from stages.mishap import LinkFault

MB = 1 << 20
SAMPLE_S = 2.0
SETTLE_S = 15.0
"""A process is measured from this age on: imports and caches are done."""

MAX_DRIVER_SLOPE = 40.0
"""MB an hour. A leak of one small record a step would be several hundred."""

MAX_STAGE_SLOPE = 60.0
MAX_MORE = {"actors": 0, "refs": 40, "files": 12, "threads": 6, "boxes": 0}
CHECKED_STEPS = 40
LINK_FAULTS = tuple(
    (source, LinkFault(target=target, action=action, share=0.002, by_s=by_s))
    for source, target in ((0, 1), (1, 2), (2, 1), (1, 0))
    for action, by_s in (("drop", 0.0), ("duplicate", 0.0), ("delay", 0.02), ("corrupt", 0.0))
)


@dataclass
class Watch:
    """Memory over time, by process; counts of what could leak."""

    started: dict[int, float] = field(default_factory=dict)
    samples: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def look(self, pids: list[int]) -> None:
        now = time.monotonic()
        for pid in [os.getpid(), *pids]:
            with suppress(OSError):
                born = self.started.setdefault(pid, now)
                if now - born > SETTLE_S:
                    self.samples.setdefault(pid, []).append((now, rss_mb(pid)))

    def slope(self, pid: int) -> float | None:
        """MB an hour, by least squares; None for a process that did not live long enough."""
        points = self.samples.get(pid, [])
        if len(points) < 10:
            return None
        n = len(points)
        mean_t, mean_m = sum(t for t, _ in points) / n, sum(m for _, m in points) / n
        spread = sum((t - mean_t) ** 2 for t, _ in points)
        return 3600 * sum((t - mean_t) * (m - mean_m) for t, m in points) / spread


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def counts(pids: list[int], folder: Path) -> dict[str, int]:
    gc.collect()  # an exception and its traceback hold each other, and what the frames held
    worker: Any = ray._private.worker.global_worker
    names: Any = ray.util.list_named_actors
    boxes = list(folder.glob("*/*"))
    return {
        "actors": len(names(all_namespaces=True)),
        "refs": len(worker.core_worker.get_all_reference_counts()),
        "files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in [os.getpid(), *pids]),
        "threads": sum(threads(pid) for pid in [os.getpid(), *pids]),
        "boxes": len(boxes),
    }


def trouble(source: random.Random, pipeline: Pipeline) -> str:
    """One fault to one stage, from outside."""
    stage = source.randrange(STAGES)
    number = signal.SIGSTOP if source.random() < 0.2 else signal.SIGKILL
    with suppress(ProcessLookupError):
        os.kill(pipeline.infos[stage]["pid"], number)
    return f"{number.name} stage {stage}"


def run(minutes: float, seed: int, every_s: float, folder: Path, say: Any) -> bool:
    source = random.Random(seed)
    options: dict[str, Any] = {
        "schedule": "1f1b",
        "codec": "fp32",  # a frame sent again is the same frame
        "faults.max_failures": -1,
        "faults.black_box": str(folder),
        "deadline_s": "6s",
        "faults.min_deadline_s": "6s",
    }
    arm = replace(make_arm(**options), num_steps=10**9)
    with StageActors(STAGES, spares=1) as actors:
        plain = Pipeline(actors, replace(arm, num_steps=CHECKED_STEPS), epoch_s=time.time())
        right = [records[-1].loss for records in plain.train()]
        del plain
        pipeline = Pipeline(actors, replace(arm, link_faults=LINK_FAULTS), epoch_s=time.time())
        pipeline.on_failure = lambda failure: say(f"  {failure}")
        losses, watch = [], Watch()
        pids = [info["pid"] for info in pipeline.infos]
        begin: dict[str, int] = {}
        start = next_look = time.monotonic()
        end, next_fault = start + 60 * minutes, start + every_s
        training = pipeline.train()
        for records in training:
            losses.append(records[-1].loss)
            now = time.monotonic()
            pids = [info["pid"] for info in pipeline.infos]
            pipeline.losses.pop(records[0].step - 1000, None)
            if not begin and now - start > 5:
                begin = counts(pids, folder)
            if now > next_look:
                watch.look(pids)
                next_look = now + SAMPLE_S
            if now > end:
                break
            if now > next_fault:
                say(f"{now - start:6.0f} s, step {records[0].step}: {trouble(source, pipeline)}")
                next_fault = time.monotonic() + every_s * source.uniform(0.5, 1.5)
        pipeline.settle()
        pids = [info["pid"] for info in pipeline.infos]
        time.sleep(2.0)
        return report(begin, counts(pids, folder), watch, pids, losses, right, pipeline, say)


def report(
    begin: dict[str, int],
    end: dict[str, int],
    watch: Watch,
    pids: list[int],
    losses: list[Any],
    right: list[Any],
    pipeline: Pipeline,
    say: Any,
) -> bool:
    """Print what was found; whether all is well."""
    good = True
    num = len(pipeline.failures)
    times = sorted(f.recovery_s for f in pipeline.failures if f.recovery_s is not None)
    middle = times[len(times) // 2] if times else float("nan")
    say(f"{len(losses)} steps, {num} failures, recovery median {middle:.1f} s")
    for name, more in MAX_MORE.items():
        grown = end[name] - begin[name]
        good &= grown <= more
        say(f"{name:8} {begin[name]:5} -> {end[name]:5}{'   LEAK' if grown > more else ''}")
    worker: Any = ray._private.worker.global_worker
    held: dict[str, int] = {}
    for ref in worker.core_worker.get_all_reference_counts().values():
        kind = ", ".join(key for key, value in ref.items() if value)
        held[kind] = held.get(kind, 0) + 1
    say(f"refs by kind at the end: {held}")
    for pid in watch.samples:
        slope = watch.slope(pid)
        if slope is None:
            continue
        who, limit = ("stage", MAX_STAGE_SLOPE)
        if pid == os.getpid():
            who, limit = ("driver", MAX_DRIVER_SLOPE)
        points = watch.samples[pid]
        seconds = points[-1][0] - points[0][0]
        # Over a short life the slope is noise: what matters is what was added.
        leaks = slope > limit and slope * seconds / 3600 > 15.0
        good &= not leaks
        say(
            f"{who:6} {pid}: {points[0][1]:.0f} -> {points[-1][1]:.0f} MB in {seconds:.0f} s, "
            f"slope {slope:+.1f} MB/h{'   LEAK' if leaks else ''}"
        )
    if losses[: len(right)] != right[: len(losses)]:
        good = False
        say("the losses differ from those of the unbroken run")
    say("no leak" if good else "FAILED")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 * MB,
    )

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    try:
        with tempfile.TemporaryDirectory(prefix="ray_pipe-soak-") as folder:
            return 0 if run(args.minutes, args.seed, args.every, Path(folder), say) else 1
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
