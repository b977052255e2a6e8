"""Faults in earnest: real Ray actors that kill and stop themselves, and what comes of the run."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ray_pipe.config import RunConfig
from ray_pipe.plans import Arm, arms_of
from ray_pipe.recovery import Failure
from ray_pipe.refs_pipeline import TRANSPORTS
from ray_pipe.saving import Save
from ray_pipe.stage_actors import StageActors
from ray_pipe.workload import gpt_workload
from stages.mishap import INJECTED, LinkFault, Mishap
from stages.schedule import actions_of

STAGES, STEPS, FATAL, MICRO_BATCHES = 3, 5, 2, 3


def tiny_config(codec: str = "acsgd", schedule: str = "gpipe", **changes: Any) -> RunConfig:
    """A tiny training: three stages of one block, five steps over twelve samples."""
    return RunConfig.from_dict(
        {
            "compare": [],
            "codec.name": codec,
            "steps": STEPS,
            "model.name": "gpt-nano",
            "model.layers": STAGES,
            "model.width": 32,
            "model.heads": 2,
            "model.context": 16,
            "data.num_samples": 12,
            "pipeline.stages": STAGES,
            "pipeline.schedule": schedule,
            "pipeline.micro_batches": MICRO_BATCHES,
            "pipeline.micro_batch_size": 2,
            "network.bandwidth_bps": "unlimited",
            "optim.clip": 0.5,
            "codec.rounding": "stochastic",
            **changes,
        }
    )


@cache
def make_arm(codec: str = "acsgd", schedule: str = "gpipe", **changes: Any) -> Arm:
    """The only arm of a tiny training."""
    config = tiny_config(codec, schedule, **changes)
    return arms_of(config, gpt_workload(config))[0]


@dataclass(kw_only=True)
class Ended:
    """How a run ended."""

    losses: list[float | None]
    weights: list[dict[str, Tensor]]
    failures: list[Failure] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    saved: list[Any] | None = None
    """What became of the state after the last step, if it was to be saved."""

    @property
    def injected(self) -> list[str]:
        """The frames that went wrong on purpose."""
        return [event for event in self.events if event.startswith(INJECTED)]

    def told(self, *words: str) -> int:
        """How many events have one of these words in them."""
        return sum(any(word in event for word in words) for event in self.events)


def train(
    actors: StageActors,
    arm: Arm,
    *,
    mishaps: Sequence[tuple[int, Mishap]] = (),
    link_faults: Sequence[tuple[int, LinkFault]] = (),
    transport: str = "push",
    folder: Path | None = None,
) -> Ended:
    """Train the arm with faults on the given actors, which may be others afterwards.

    With a folder, stages are told to save their state after each step that is sent to them.
    """
    arm = replace(arm, mishaps=tuple(mishaps), link_faults=tuple(link_faults))
    start = time.monotonic()
    pipeline = TRANSPORTS[transport](actors, arm, epoch_s=time.time())
    saves: list[Save] = []
    if folder is not None:
        pipeline.on_sent = lambda step: saves.append(
            pipeline.start_save(uuid.uuid4().hex, step, str(folder / str(len(saves))))
        )
    losses: list[float | None] = []
    events: list[str] = []
    for records in pipeline.train():
        losses.append(records[-1].loss)
        events += [event for record in records for event in record.events]
    pipeline.on_sent = None
    weights = [state["module"] for state in pipeline.state_dicts()]
    return Ended(
        losses=losses,
        weights=weights,
        failures=pipeline.failures,
        events=events,
        wall_s=time.monotonic() - start,
        saved=saves[-1].results(wait=True) if saves else None,
    )


def same(ours: Ended, right: Ended) -> bool:
    """Whether every loss and every weight agrees to the bit."""
    return ours.losses == right.losses and all(
        own.keys() == other.keys() and all(torch.equal(own[key], other[key]) for key in own)
        for own, other in zip(ours.weights, right.weights, strict=True)
    )


def points_of(schedule: str, stage: int) -> list[str]:
    """Every place of a step where a stage can die, in its order."""
    points: list[str] = []
    last = STAGES - 1
    for action in actions_of(
        schedule, stage=stage, num_stages=STAGES, num_micro_batches=MICRO_BATCHES
    ):
        forward = action.kind == "F"
        has_source, has_target = (stage > 0, stage < last) if forward else (stage < last, stage > 0)
        points += [f"recv {action}"] * has_source + [str(action)] + [f"send {action}"] * has_target
    points += ["norm"] + ["prepared"] * (stage > 0) + ["update", "commit", "committed"]
    return [*points, "box rows", "box arrays", "box mark"]


def kinds_of(schedule: str, stage: int) -> list[str]:
    """One place of each kind: the second micro-batch's where there are several."""
    chosen: dict[str, str] = {}
    for point in points_of(schedule, stage):
        kind = point.rstrip("0123456789")
        if kind not in chosen or point.endswith("1"):
            chosen[kind] = point
    return list(chosen.values())


WAYS = ("warm", "cold", "nobody_lost")


def _noted(path: Path) -> dict[str, Any]:
    """What was noted before; parts that nobody writes any more are left out."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known = ("summary", *WAYS, "frames", "ended_by_name")
    return {part: value for part, value in found.items() if part in known}


def note(path: Path, name: str, ended: Ended) -> None:
    """Add what a case did to a file of results: recoveries by how, frames that healed.

    Recoveries by a warm spare and by a new process are apart: they differ by seconds.
    """
    found = _noted(path)
    for part in (*WAYS, "frames"):  # of an earlier run
        found.get(part, {}).pop(name, None)
    found.setdefault("summary", {})
    for failure in ended.failures:
        found.setdefault(way_of(failure), {}).setdefault(name, []).append(failure.as_dict())
    if ended.injected:
        found.setdefault("frames", {})[name] = {
            "injected": ended.injected,
            "sent_again": ended.told("sent again", "was told to stage"),
            "arrived_twice": ended.told("arrived twice"),
        }
    for way in WAYS:
        if way in found:
            found["summary"][way] = summary_of(found[way])
    path.write_text(json.dumps(found, indent=1) + "\n")


def note_end(path: Path, name: str, **numbers: float) -> None:
    """Add how long a run took to end that was not to recover."""
    found = _noted(path)
    found.setdefault("ended_by_name", {})[name] = numbers
    path.write_text(json.dumps(found, indent=1) + "\n")


def way_of(failure: Failure) -> str:
    """`warm` if spares took over, `cold` if a new process had to start, else `nobody_lost`."""
    if not failure.replaced:
        return "nobody_lost"
    return "warm" if set(failure.replaced) == set(failure.spares) else "cold"


def summary_of(cases: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Seconds of recovery over all cases of one way."""
    every = (failure["recovery_s"] for failures in cases.values() for failure in failures)
    times = sorted(seconds for seconds in every if seconds is not None)
    if not times:
        return {"recoveries": 0}
    return {
        "recoveries": len(times),
        "best_s": times[0],
        "median_s": times[len(times) // 2],
        "p95_s": times[min(len(times) - 1, int(0.95 * len(times)))],
        "worst_s": times[-1],
    }
