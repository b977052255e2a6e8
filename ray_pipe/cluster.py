"""Ray itself: connecting, starting one, and what its nodes are.

Whoever starts a Ray ends it; a Ray that was running before is left as it was. The actors that
run on it: `ray_pipe.stage_actors`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
)

from ray_pipe.errors import ClusterError
from ray_pipe.planner.placement import Node
from ray_pipe.preflight import check_address
from ray_pipe.preflight_tls import refuse_without_files

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


@contextmanager
def connect(
    address: str | None, *, dashboard: bool = False, job_name: str | None = None
) -> Iterator[str | None]:
    """A Ray to work with: the caller's, the one at `address`, or a new one on this machine.

    Gives the dashboard's URL, if there is one and the Ray is not the caller's; a new Ray has one
    only if `dashboard` asks for it. `job_name` is the run's name in the dashboard's list of jobs.
    """
    if ray.is_initialized():
        if address not in (None, "auto"):
            _refuse_another(address, ray.get_runtime_context().gcs_address)
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


def _refuse_another(asked: str, here: str) -> None:
    """A process has one Ray: whoever asks for another one would train on this, unnoticed."""

    def place(address: str) -> tuple[str, str]:
        host, _, port = address.rpartition(":")
        with suppress(OSError):
            host = socket.gethostbyname(host)
        return host, port

    if place(asked) != place(here):
        raise ClusterError(
            f"--address {asked}: this process is connected to the Ray at {here} already; leave the "
            "address out to train there, or call ray.shutdown() first"
        )


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
