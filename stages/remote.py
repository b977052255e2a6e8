"""Starts stage actors: which method runs in which of an actor's threads, and where it is placed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ray

from stages.actor import StageActor
from stages.stage_process import SPARE

CONCURRENCY = {"net": 1, "control": 1, "save": 1, "carry": 32}
GROUPS = {
    "deliver": "net",
    "deliver_letter": "net",
    "connect_fleet": "control",
    "on_member": "control",
    "leave": "control",
    "strategy_state": "control",
    "adopt": "control",
    "discard": "net",
    "abort": "control",
    "nudge": "control",
    "ping": "control",
    "is_at_work": "control",
    "at_work_s": "control",
    "sees_stopped": "control",
    "cpu_seconds": "control",
    "cpu_beside_lanes": "control",
    "cpu_by_phase": "control",
    "write_kept": "save",
    "sees": "save",
    "carry": "carry",
}
ORDERS = ("run_step", "begin_step", "forward", "backward", "squared_norms", "finish_step")
"""Calls of a step, one at a time: whether an actor is in one is seen by `is_at_work`."""

ONE_WAY = ("deliver", "deliver_letter")


def remote_stage(
    index: int,
    *,
    name: str,
    num_gpus: float,
    strategy: Any = "SPREAD",
    replica: int | None = None,
) -> Any:
    """Start a stage actor, or a `SPARE`, where `strategy` says. State would be lost by a restart,
    so Ray must not restart it."""
    remote = _remote_class("SpareStage" if index == SPARE else "PipelineStage")
    placed = remote.options(name=name, num_gpus=num_gpus, scheduling_strategy=strategy)
    return placed.remote(index, replica)


@cache
def _remote_class(name: str) -> Any:
    """A class that Ray knows by this name, one for all actors: every process that is given an
    actor's handle loads its class and keeps it, so a class for each would add up with each
    replaced neighbour (a third of a megabyte)."""
    cls: Any = type(name, (StageActor,), {})
    for method, group in GROUPS.items():
        options: dict[str, Any] = {"concurrency_group": group}
        if method in ONE_WAY:
            # Nobody would look for a frame on the dashboard, and each event has its price.
            options |= {"num_returns": 0, "enable_task_events": False}
        mark = ray.method(**options)
        setattr(cls, method, mark(own_copy(getattr(StageActor, method))))
    for method in ORDERS:
        setattr(cls, method, _noted(getattr(StageActor, method)))
    decorate: Any = ray.remote  # its stubs do not know concurrency groups
    return decorate(num_cpus=0, max_restarts=0, concurrency_groups=CONCURRENCY)(cls)


def own_copy(method: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a method that Ray may mark without touching the plain class."""

    def call(self: Any, *args: Any) -> Any:
        return method(self, *args)

    call.__name__ = method.__name__
    call.__doc__ = method.__doc__
    return call


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a method that tells while it runs."""

    def call(self: Any, *args: Any) -> Any:
        self.has_order = True
        try:
            return method(self, *args)
        finally:
            self.has_order = False

    call.__name__ = method.__name__
    call.__doc__ = method.__doc__
    return call
