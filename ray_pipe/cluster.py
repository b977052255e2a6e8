"""Ray: connecting, starting stage actors, ending them.

Whoever starts a Ray ends it; a Ray that was running before is left as it was.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from ray_pipe.errors import ClusterError
from ray_pipe.preflight import check_address
from stages.actor import remote_stage

NAMESPACE = "ray_pipe"
INLINE_NBYTES = 4 << 20
START_TIMEOUT_S = 120.0


@contextmanager
def connect(address: str | None) -> Iterator[None]:
    """A Ray to work with: the caller's, the one at `address`, or a new one on this machine."""
    if ray.is_initialized():
        yield
        return
    existing = address or os.environ.get("RAY_ADDRESS")
    label = f"--address {address}" if address else f"RAY_ADDRESS={existing}"
    if existing:
        check_address(existing, label=label)
    # The driver reads every error it needs; Ray would print those of aborted steps once more.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if not existing:
        # A dashboard is eleven more processes; on a small machine they are felt in every step.
        # Frames up to four megabytes go with the call: through the object store each one would cost
        # the node's raylet two milliseconds (decision 5).
        options |= {
            "address": "local",
            "include_dashboard": False,
            "_system_config": {"max_direct_call_object_size": INLINE_NBYTES},
        }
    else:
        options["address"] = existing
    try:
        ray.init(**options)
    except Exception as error:
        raise ClusterError(_explain(label if existing else None, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _explain(label: str | None, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if label is None:
        return (
            f"Ray could not be started on this machine: {first}; `python -m ray_pipe.doctor` "
            "looks for the cause"
        )
    return f"{label}: Ray could not connect: {first}"


class StageActors:
    """The actors of one pipeline. Leaving the block ends them."""

    def __init__(self, num_stages: int, *, label: str | None = None) -> None:
        """`label` names the actors on the dashboard: `ray_pipe/<label>/stage-0`."""
        resources: Any = ray.available_resources  # untyped in ray
        num_gpus = 1.0 if resources().get("GPU", 0) >= num_stages else 0.0
        label = f"{label or 'pipeline'}-{uuid.uuid4().hex[:4]}"
        self.handles = [
            remote_stage(index, name=f"ray_pipe/{label}/stage-{index}", num_gpus=num_gpus)
            for index in range(num_stages)
        ]
        peers = dict(enumerate(self.handles))
        calls = [handle.connect.remote(peers) for handle in self.handles]
        try:
            ray.get(calls, timeout=START_TIMEOUT_S)
        except RayError as error:
            self.__exit__()
            raise ClusterError(
                f"{num_stages} stage actors did not start within {START_TIMEOUT_S:.0f} s "
                f"({type(error).__name__}); does the cluster have room for them (`ray status`), "
                "and is ray_pipe installed on its nodes?"
            ) from error

    def __enter__(self) -> StageActors:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self.handles:
            ray.kill(handle)
