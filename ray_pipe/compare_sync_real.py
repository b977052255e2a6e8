"""The comparison of sync strategies in earnest: four replicas on Ray, one training job, real time.

Four replicas share the cores of one machine; if steps were all computing, a slow replica would make
the others faster and lock-step would make all of them slow. So a step of a tiny GPT computes for
some milliseconds and sleeps for `--real-step`; `--slow` stretches both. Links are emulated as in
the rest of the table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ray_pipe.cluster import connect
from ray_pipe.config import RunConfig
from ray_pipe.plans import arms_of
from ray_pipe.replica_actors import ReplicaActors
from ray_pipe.replicas import ReplicaPipeline
from ray_pipe.workload import gpt_workload
from stages.record import StepRecord
from stages.sync.strategies import SyncSpec, options_of
from stages.sync.trial import Costs, Trial

NUM_REPLICAS = 4
MOST_TIMES = 6
"""The most steps of a strategy for one of all-reduce."""

WINDOW = 4
"""Rows over which a loss curve is smoothed."""


@contextmanager
def real_replicas() -> Iterator[ReplicaActors]:
    """Ray, and four actors that every trial uses in turn."""
    with connect(None), ReplicaActors(NUM_REPLICAS, 1, label="compare-sync") as actors:
        yield actors


def settings_of(
    sync: SyncSpec, *, slow: str, steps: int, costs: Costs, seed: int
) -> dict[str, Any]:
    """The run's settings, as `ray_pipe.run` would read them: the strategy's own, every one."""
    options = {f"sync.{name}": getattr(sync, name) for name in options_of(sync.name, sync.groups)}
    options |= {"sync.name": sync.name, "sync.codec": sync.codec.name, "sync.bits": sync.codec.bits}
    if options.get("sync.group_size", NUM_REPLICAS) > NUM_REPLICAS:
        options["sync.group_size"] = NUM_REPLICAS
    return {
        "compare": [],
        "codec.name": "fp32",
        "model.name": "gpt-nano",
        "model.layers": 2,
        "data.num_samples": 512,
        "pipeline.stages": 1,
        "pipeline.micro_batches": 1,
        "pipeline.micro_batch_size": 8,
        "network.bandwidth_bps": costs.bandwidth_bps,
        "network.latency_s": costs.latency_s,
        "optim.lr": 1e-3,
        "steps": steps,
        "seed": seed,
        "sync.replicas": NUM_REPLICAS,
        "sync.slow": slow,
        **options,
    }


class Pause(nn.Module):
    """Takes its time and no core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


def build_paused(
    build: Callable[[int, int], nn.Module], seconds: float, start: int, stop: int
) -> nn.Module:
    """Some blocks of a model, with a pause before them; runs inside the stage's actor."""
    return nn.Sequential(Pause(seconds), build(start, stop))


def run_real(
    actors: ReplicaActors,
    sync: SyncSpec,
    *,
    slow: str,
    steps: int,
    costs: Costs,
    seed: int = 0,
    step_s: float = 0.25,
    seconds: float | None = None,
) -> Trial:
    """One strategy on the actors, to its last step; or as long as all-reduce took for its steps,
    so that losses can be compared at equal times."""
    most = steps if seconds is None else MOST_TIMES * steps
    config = RunConfig.from_dict(settings_of(sync, slow=slow, steps=most, costs=costs, seed=seed))
    config.validate()
    work = gpt_workload(config)
    arm = arms_of(config, replace(work, build=partial(build_paused, work.build, step_s)))[0]
    pipeline = ReplicaPipeline(actors, arm, epoch_s=time.time())
    rows: list[list[StepRecord]] = []
    for row in pipeline.train():
        rows.append(list(row))
        if seconds is not None and len(rows) > steps and _span_s(rows[1:]) >= seconds:
            break
    pipeline.settle()
    return trial_of(rows, pipeline.book.as_dict(), slow=slow)


def _span_s(rows: Sequence[Sequence[StepRecord]]) -> float:
    records = [record for row in rows for record in row]
    return max(r.end_s for r in records) - min(r.start_s for r in records)


def trial_of(rows: Sequence[Sequence[StepRecord]], book: Mapping[str, Any], *, slow: str) -> Trial:
    """What the records of a run say; the first row, in which everything is set up, is left out."""
    timed = rows[1:]
    start_s = min(record.start_s for row in timed for record in row)
    ends = [max(record.end_s for record in row) - start_s for row in timed]
    run = [record for row in timed for record in row if record.loss is not None]
    a_step = min(record.num_tokens for record in run)  # a record may be two steps of a fast replica
    pace = []
    for replica in sorted({record.replica for record in run}):
        own = [record for record in run if record.replica == replica]
        span_s = max(record.end_s for record in own) - min(record.start_s for record in own)
        pace.append(span_s * a_step / sum(record.num_tokens for record in own))
    losses = []
    for row in timed:
        found = [record.loss for record in row if record.loss is not None]
        losses.append(statistics.mean(found) if found else None)
    curve = []
    latest: list[float] = []
    for end_s, loss in zip(ends, losses, strict=True):
        if loss is not None:
            latest = [*latest, loss][-WINDOW:]
            curve.append((end_s, statistics.mean(latest)))
    nbytes = sum(kinds.get("replica", 0) for row in timed for r in row for kinds in r.sent.values())
    num_run = sum(record.num_tokens for record in run) // a_step
    return Trial(
        num_replicas=len(book["members"]),
        slow=slow,
        seconds=max(ends),
        iteration_s=statistics.median(pace),
        slowest_iteration_s=max(pace),
        curve=tuple(curve),
        largest_gap=int(book["largest_gap"]),
        num_skipped=int(book["skipped"]),
        waited_s={cause: s / len(book["members"]) for cause, s in book["waited_s"].items()},
        nbytes_per_iteration=nbytes / max(1, num_run),
        groups=book["generator"],
    )
