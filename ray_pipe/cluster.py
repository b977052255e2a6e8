"""Ray: connecting, starting stage actors, ending them.

Whoever starts a Ray ends it; a Ray that was running before is left as it was.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from ray_pipe.errors import ClusterError
from stages.actor import remote_stage

NAMESPACE = "ray_pipe"
CONNECT_TIMEOUT_S = 5.0
INLINE_NBYTES = 4 << 20
START_TIMEOUT_S = 120.0


@contextmanager
def connect(address: str | None) -> Iterator[None]:
    """A Ray to work with: the caller's, the one at `address`, or a new one on this machine."""
    if ray.is_initialized():
        yield
        return
    _refuse_unreachable(address)
    # The driver reads every error it needs; Ray would print those of aborted steps once more.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if address is None and not os.environ.get("RAY_ADDRESS"):
        # A dashboard is eleven more processes; on a small machine they are felt in every step.
        # Frames up to four megabytes go with the call: through the object store each one would cost
        # the node's raylet two milliseconds (decision 5).
        options |= {
            "address": "local",
            "include_dashboard": False,
            "_system_config": {"max_direct_call_object_size": INLINE_NBYTES},
        }
    elif address is not None:
        options["address"] = address
    try:
        ray.init(**options)
    except Exception as error:
        raise ClusterError(_explain(address, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_unreachable(address: str | None) -> None:
    """Ray itself waits much longer before it says that nobody is there."""
    if address is None or address in ("auto", "local"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise ClusterError(
            f"--address {address}: expected HOST:PORT, ray://HOST:PORT or auto, as 10.0.0.10:6379"
        )
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"--address {address}: nobody answers there ({error.strerror or error}); is the "
            "cluster up (`ray status` on its head), and may this machine reach that port?"
        ) from None


def _explain(address: str | None, error: Exception) -> str:
    if address == "auto":
        return (
            "--address auto: no running Ray was found on this machine; start one with "
            "`ray start --head`, or leave --address out"
        )
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"Ray could not be started or reached (--address {address}): {first}"


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
