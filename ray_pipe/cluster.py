"""Ray: connecting, starting stage actors, ending them.

Whoever starts a Ray ends it; a Ray that was running before is left as it was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.job_config import JobConfig
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ray_pipe.errors import ClusterError, Terminated
from ray_pipe.planner.placement import Node, Placement, move, place, spare_homes
from ray_pipe.preflight import check_address
from ray_pipe.preflight_tls import refuse_without_files
from ray_pipe.pulse import PULSE_S
from ray_pipe.spares import Spares

NAMESPACE = "ray_pipe"
INLINE_NBYTES = 4 << 20
FREE_PERIOD_MS = 20
"""How soon the object store has a frame's memory again. Ray's own second means that an exchange
writes to pages that were never mapped, which takes longer than the writing (decision 22)."""

SYSTEM_CONFIG = {
    "max_direct_call_object_size": INLINE_NBYTES,
    "free_objects_period_milliseconds": FREE_PERIOD_MS,
}
"""What a Ray for ray_pipe is started with; `cluster.yaml` has the same."""

START_TIMEOUT_S = 120.0
START_TRIES = 3
"""Ray gives its own start on this machine 30 s, which a machine that is busy may not keep."""

CLOSE_TIMEOUT_S = 3.0
GUEST = -1
"""Stands for who is no stage of the pipeline."""


@contextmanager
def connect(
    address: str | None, *, dashboard: bool = False, job_name: str | None = None
) -> Iterator[str | None]:
    """A Ray to work with: the caller's, the one at `address`, or a new one on this machine.

    Gives the dashboard's URL, if there is one and the Ray is not the caller's; a new Ray has one
    only if `dashboard` asks for it. `job_name` is the run's name in the dashboard's list of jobs.
    """
    if ray.is_initialized():
        yield None
        return
    existing = address or os.environ.get("RAY_ADDRESS")
    label = f"--address {address}" if address else f"RAY_ADDRESS={existing}"
    if existing:
        check_address(existing, label=label)
    else:
        refuse_without_files("Ray on this machine")
    # The driver reads every error it needs; Ray would print those of aborted steps once more.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if job_name:
        options["job_config"] = JobConfig(metadata={"job_name": str(job_name)})
    if not existing:
        # A dashboard is eleven more processes; on a small machine they are felt in every step.
        # Frames up to four megabytes go with the call: through the object store each one would cost
        # the node's raylet two milliseconds (decision 5).
        options |= {
            "address": "local",
            "include_dashboard": dashboard,
            "_system_config": SYSTEM_CONFIG,
        }
    else:
        options["address"] = existing
    try:
        context = start_ray(options, tries=1 if existing else START_TRIES)
    except Exception as error:
        raise ClusterError(_explain(label if existing else None, error)) from error
    try:
        yield f"http://{context.dashboard_url}" if context.dashboard_url else None
    finally:
        ray.shutdown()


def start_ray(options: dict[str, Any], *, tries: int) -> Any:
    """`ray.init`, once more where it only took too long.

    Ray takes SIGTERM for itself and ends the process with a trace; whoever has a handler keeps it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    while True:
        try:
            context = ray.init(**options)
            if is_main and callable(handler):
                signal.signal(signal.SIGTERM, handler)
            return context
        except Exception as error:
            tries -= 1
            if tries == 0 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def show_dashboard(url: str | None) -> str:
    """Where to look while the run lasts."""
    if url is None:
        return (
            "no dashboard: this Ray was started without one (`ray start --include-dashboard=true`)"
        )
    return f"dashboard: {url} (see Jobs and Actors; for its metrics docs/monitoring.md)"


def _explain(label: str | None, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if label is None:
        return (
            f"Ray could not be started on this machine: {first}; `python -m ray_pipe.doctor` "
            "looks for the cause"
        )
    return f"{label}: Ray could not connect: {first}"


def is_cluster(address: str | None) -> bool:
    """Whether a run goes to a Ray that others started, not to one of its own."""
    return bool(address or os.environ.get("RAY_ADDRESS"))


def nodes() -> list[Node]:
    """The nodes that are alive, as placement needs them."""
    listed: Any = ray.nodes  # untyped in ray
    return [
        Node(
            id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            num_cpus=node["Resources"].get("CPU", 0.0),
            num_gpus=node["Resources"].get("GPU", 0.0),
            is_head="node:__internal_head__" in node["Resources"],
        )
        for node in listed()
        if node["Alive"]
    ]


def ask_nodes(
    work: Callable[..., Any],
    *args: Any,
    among: Collection[str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
    **options: Any,
) -> dict[str, Any]:
    """What `work` returns in a process on each node (or `among` those ids), by the node's id; an
    error in its place where it fails, or there is no answer in time."""
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(work)
    calls = {
        remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(*args, **options): node.id
        for node in nodes()
        if among is None or node.id in among
    }
    ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    found: dict[str, Any] = {}
    for call, node_id in calls.items():
        try:
            found[node_id] = ray.get(call, timeout=0)
        except RayError as error:
            found[node_id] = error
    return found


Look = Callable[[Collection[int]], Mapping[int, RayError]]
"""Of the stages that are waited for: who is lost, and why."""


def nobody_is_lost(waiting: Collection[int]) -> Mapping[int, RayError]:
    return {}


class NotIntroduced(ClusterError):
    """Actors that did not hear who the others are: `errors` says why, by stage."""

    def __init__(self, text: str, errors: dict[int, RayError]) -> None:
        super().__init__(text, errors)
        self.text = text
        self.errors = errors

    def __str__(self) -> str:
        return self.text


class StageActors:
    """The actors of one pipeline, each on its node. Leaving the block ends them.

    `placement` says where each stage is; Ray holds the places in a placement group, so that a run
    has all of them or waits.
    """

    def __init__(
        self,
        num_stages: int,
        *,
        label: str | None = None,
        placement: Placement | None = None,
        spares: int = 0,
        spare_after_s: float = 0.0,
    ) -> None:
        """`label` names the actors on the dashboard: `ray_pipe/<label>/stage-0`. Each node gets
        `spares` warm spares, `spare_after_s` after the first call of `tend`."""
        self._label = f"{label or 'pipeline'}-{uuid.uuid4().hex[:4]}"
        self.placement = placement or place(num_stages, nodes())
        self.handles: list[Any] = []
        self.guests: dict[int, Any] = {}
        """Actors beside the stages that talk to stage 0, by their node in the topology."""

        self.may_leave_boxes = False
        """Whether they are of use to a later run, if the machine ends this one."""

        self.leaves_boxes = True
        """Whether black boxes of the stages may outlive them; known once they have ended."""

        self._num_replaced = 0
        self._num_spares = 0
        self.spares = Spares(self._start_spare, per_node=spares, after_s=spare_after_s)
        self._group = self._reserve()
        self._homes = [node.id for node in self.placement.nodes]
        """The node of each bundle of the group; a stage that moved has left its bundle behind."""

        self._bundles: dict[Any, int] = {}
        """The bundle that an actor runs in, if it runs in one."""

        try:
            for index in range(num_stages):
                handle = self._start(index, self._in_bundle(index), part="")
                self._bundles[handle] = index
                self.handles.append(handle)
            self.introduce()
        except BaseException:
            self.__exit__()
            raise

    def _reserve(self) -> Any:
        # A node's own resource costs nothing and is there even when all its CPUs are taken.
        bundles = [
            {f"node:{node.ip}": 0.001} | ({"GPU": 1.0} if self.placement.num_gpus else {})
            for node in self.placement.nodes
        ]
        group = placement_group(
            bundles,
            strategy=self.placement.strategy,
            name=f"ray_pipe/{self._label}",
            bundle_label_selector=[{"ray.io/node-id": node.id} for node in self.placement.nodes],
        )
        if not group.wait(START_TIMEOUT_S):
            remove_placement_group(group)
            where = ", ".join(dict.fromkeys(node.ip for node in self.placement.nodes))
            gpu = ", with a free GPU for each stage" if self.placement.num_gpus else ""
            raise ClusterError(
                f"no room for {len(bundles)} stages on {where}{gpu} within {START_TIMEOUT_S:.0f} s;"
                " `ray status` shows who holds what"
            )
        return group

    def _start(self, index: int, strategy: Any, *, part: str) -> Any:
        from stages.remote import remote_stage  # loads torch, which `connect` does not need

        name = f"ray_pipe/{self._label}/stage-{index}{part}"
        return remote_stage(index, name=name, num_gpus=self.placement.num_gpus, strategy=strategy)

    def _start_spare(self, node: Node) -> Any:
        from stages.remote import remote_stage
        from stages.stage_process import SPARE

        self._num_spares += 1
        name = f"ray_pipe/{self._label}/spare-{self._num_spares}"
        num_gpus = self.placement.num_gpus
        return self._settle(
            node,
            lambda home: remote_stage(SPARE, name=name, num_gpus=num_gpus, strategy=home),
        )

    def _settle(self, node: Node, start: Callable[[Any], Any]) -> Any:
        """Start an actor on a node: in a bundle there that nobody uses any more, else beside them.

        What a bundle holds is lent to no one outside it. On a node whose only GPU is that of a
        dead stage, an actor beside the bundle would wait for ever.
        """
        used = {self._bundles.get(handle) for handle in [*self.handles, *self.spares.handles]}
        for bundle, home in enumerate(self._homes):
            if home == node.id and bundle not in used:
                handle = start(self._in_bundle(bundle))
                self._bundles[handle] = bundle
                return handle
        return start(NodeAffinitySchedulingStrategy(node.id, soft=False))

    def _in_bundle(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, bundle)

    def tend(self, warm_with: Any) -> None:
        """Between two steps: start the spares that are missing, and return at once.

        `warm_with` is the spec of any stage of the run.
        """
        if self.spares.is_due():
            self.spares.tend(spare_homes(self.placement, nodes()), warm_with)

    def introduce(self, *, look: Look = nobody_is_lost) -> None:
        """Tell every actor who the others are; returns when all have heard it.

        Raises `NotIntroduced` at the first that cannot or that `look` finds lost, or with all that
        are late.
        """
        peers = dict(enumerate(self.handles)) | self.guests
        calls = {handle.connect.remote(peers): index for index, handle in enumerate(self.handles)}
        guests = [guest.connect.remote(self.handles[0]) for guest in self.guests.values()]
        self._hear(calls | dict.fromkeys(guests, GUEST), look)

    def _hear(self, calls: dict[Any, int], look: Look) -> None:
        waiting, until_s = dict(calls), time.monotonic() + START_TIMEOUT_S
        errors: dict[int, RayError] = {}
        while waiting and not errors:
            left_s = max(0.0, until_s - time.monotonic())
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left_s, PULSE_S))
            if not ready:
                errors = dict(look(waiting.values()))
                if not errors and time.monotonic() >= until_s:
                    errors = {index: GetTimeoutError("no answer") for index in waiting.values()}
                continue
            index = waiting.pop(ready[0])
            try:
                ray.get(ready[0])
            except RayError as error:
                errors = {index: error}
        if errors:
            first = next(iter(errors.values()))
            raise NotIntroduced(
                f"{len(self.handles)} stage actors did not start within {START_TIMEOUT_S:.0f} s "
                f"({type(first).__name__}); does the cluster have room for them (`ray status`), "
                "and is ray_pipe installed on its nodes?",
                errors,
            ) from first

    def replace(self, stages: Collection[int], *, avoid: Collection[str] = ()) -> set[int]:
        """New actors for these stages, on their own node or where `placement.move` finds room.

        `avoid` holds ids of nodes that Ray may still take for alive. Call `introduce` next.
        Returns the stages that a warm spare has taken over.
        """
        warm, alive = set(), nodes()
        homes = {self.placement.nodes[stage].id for stage in stages} - {*avoid}
        silent = {node_id for node_id in homes if self.spares.are_silent(node_id)}
        if any(node.id not in {*avoid, *silent} for node in alive):
            avoid = {*avoid, *silent}
        for node_id in avoid:
            self.spares.forget(node_id)
        self.placement = move(self.placement, stages, alive, avoid=avoid)
        for stage in stages:
            ray.kill(self.handles[stage])
            self._bundles.pop(self.handles[stage], None)
        for stage in sorted(stages):
            # A spare that has not answered yet may be waiting for a GPU that is not to be had.
            home, any_spare = self.placement.nodes[stage], self.placement.num_gpus == 0
            spare = self.spares.take(home.id, loading=any_spare)
            if spare is not None:
                spare.handle.become.remote(stage)
                self.handles[stage] = spare.handle
                if spare.is_warm:
                    warm.add(stage)
                continue
            self._num_replaced += 1
            part = f"-again-{self._num_replaced}"  # the old name may be held a little longer
            start = partial(self._start, stage, part=part)
            self.handles[stage] = self._settle(home, start)
        return warm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.spares.end()
        for handle in self.handles:
            handle.abort.remote("the run has ended")
        if not (self.may_leave_boxes and any(isinstance(one, Terminated) for one in exc)):
            self._close()
        for handle in self.handles:
            ray.kill(handle)
        remove_placement_group(self._group)

    def _close(self) -> None:
        """Let the stages end: killed at once they would leave their black boxes behind."""
        calls = [handle.close.remote() for handle in self.handles]
        with contextlib.suppress(RayError):
            ready, late = ray.wait(calls, num_returns=len(calls), timeout=CLOSE_TIMEOUT_S)
            self.leaves_boxes = bool(late)
            for call in ready:
                ray.get(call)
            return
        self.leaves_boxes = True
