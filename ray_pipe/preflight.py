"""Before Ray connects: who answers at an address, and would we be let in?

Left to itself Ray waits 20 to 60 seconds and then says "failed to connect" alike for a wrong port,
a wrong token and another version; with `RAY_AUTH_MODE=token` and no token it ends the process. One
question to the head, in Ray's own protocol and with a deadline, tells them apart within seconds.

The protocol is private to Ray. If a future Ray moves it, the question is skipped and Ray's own
errors are what the user sees.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import socket
from dataclasses import dataclass
from typing import Any

import ray

from ray_pipe import preflight_tls
from ray_pipe.errors import ClusterError

log = logging.getLogger("ray_pipe")

CONNECT_TIMEOUT_S = 4.0
ANSWER_TIMEOUT_S = 4.0
"""Together less than the ten seconds that a person waits without doubting."""

TOKEN_WAYS = (
    "copy the head's token (`ray get-auth-token` there) to ~/.ray/auth_token here, or name its "
    "file in RAY_AUTH_TOKEN_PATH, and set RAY_AUTH_MODE=token"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a cluster's head says about itself."""

    label: str
    """How the user named it."""

    address: str
    ray_version: str
    python_version: str
    node_ids: tuple[str, ...]
    """Of the nodes that are alive."""


def check_address(address: str, *, label: str | None = None) -> Head | None:
    """Ask the head at `address`; raises `ClusterError` with the reason and the way out.

    `label` says where the address was given, for the message. The result is None where there is
    nobody to ask: a new local Ray, or a Ray whose protocol is not the one we know.
    """
    label = label or f"--address {address}"
    if address == "local":
        return None
    if address == "auto":
        given = os.environ.get("RAY_ADDRESS", "")
        if given in ("", "auto"):
            return _ask(label, _find_local(label))
        label, address = f"{label} (RAY_ADDRESS={given})", given
    _refuse_malformed(label, address)
    _refuse_silent(label, address)
    return _ask(label, address)


def _ask(label: str, place: str) -> Head | None:
    try:
        head = ask_head(label, place)
    except (ImportError, AttributeError) as error:
        log.info("ray %s is not asked before it connects: %s", ray.__version__, error)
        return None
    refuse_other_version(head, ray_version=ray.__version__, python=platform.python_version())
    refuse_outsider(head, _local_node_ids())
    return head


# --- the address ----------------------------------------------------------------------------------


def _refuse_malformed(label: str, address: str) -> None:
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            f"{label}: this is the dashboard's address, for `ray job submit`; the "
            "cluster's own has no http:// and mostly port 6379, as 10.0.0.10:6379"
        )
    if address.startswith("ray://"):
        raise ClusterError(
            f"{label}: a pipeline cannot be driven over Ray Client, whose actors lack what "
            "stages need; run the command on a node, where --address auto does: "
            "`ray job submit`, `ray submit` or `ray exec` bring it there"
        )
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(f"{label}: expected HOST:PORT or auto, as 10.0.0.10:6379")


def _refuse_silent(label: str, place: str) -> None:
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except socket.gaierror:
        raise ClusterError(
            f"{label}: there is no host named {host}; check the spelling, or give its "
            "IP address (`hostname -I` on the head)"
        ) from None
    except OSError as error:
        raise ClusterError(
            f"{label}: nobody answers there ({error.strerror or error}); is the "
            "cluster up (`ray status` on its head), and may this machine reach that port?"
        ) from None


def _find_local(label: str) -> str:
    """Where Ray itself looks for `auto`: a Ray of this machine."""
    services = importlib.import_module("ray._private.services")
    setup = importlib.import_module("ray._private.authentication.authentication_token_setup")
    try:
        place = services.canonicalize_bootstrap_address("auto")
    except ConnectionError:
        raise ClusterError(
            f"{label}: no running Ray was found on this machine; start one with "
            "`ray start --head`, give --address HOST:PORT, or leave --address out"
        ) from None
    # As `ray.init(address="auto")` does: a Ray of this machine may use this account's token.
    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    return str(place)


# --- the question ---------------------------------------------------------------------------------


def ask_head(label: str, place: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Head:
    """Versions and nodes of the cluster at `place` (HOST:PORT); `label` is how the user named it.

    Raises `ClusterError` if what answers is not a head, or does not let us in.
    """
    grpc: Any = importlib.import_module("grpc")
    channels: Any = importlib.import_module("ray._private.grpc_utils")
    messages: Any = importlib.import_module("ray.core.generated.gcs_service_pb2")
    services: Any = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
    auth = _auth_mode()
    if auth == "token" and not _has_token():  # Ray's own client would end this process
        raise ClusterError(
            f"{label}: RAY_AUTH_MODE is token, but there is no token here; {TOKEN_WAYS}"
        )
    preflight_tls.refuse_without_files(label)
    channel = channels.init_grpc_channel(place, [("grpc.enable_http_proxy", 0)])
    try:
        metadata = services.InternalKVGcsServiceStub(channel).InternalKVGet(
            messages.InternalKVGetRequest(key=b"CLUSTER_METADATA", namespace=b"cluster"),
            timeout=timeout_s,
        )
        nodes = services.NodeInfoGcsServiceStub(channel).GetAllNodeInfo(
            messages.GetAllNodeInfoRequest(), timeout=timeout_s
        )
    except grpc.RpcError as error:
        code, why = error.code().name, None
        if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            why = preflight_tls.explain(label, place, error.details() or "")
        raise ClusterError(why or explain(label, code, auth=auth)) from None
    finally:
        channel.close()
    said = json.loads(metadata.value or b"{}")
    return Head(
        label=label,
        address=place,
        ray_version=said.get("ray_version", ""),
        python_version=said.get("python_version", ""),
        node_ids=tuple(node.node_id.hex() for node in nodes.node_info_list if node.state == 0),
    )


def explain(label: str, code: str, *, auth: str) -> str:
    """What a gRPC status means to a person who gave an address."""
    if code == "UNAUTHENTICATED":
        if auth == "token":
            return f"{label}: the cluster does not accept this machine's token; {TOKEN_WAYS}"
        return (
            f"{label}: the cluster asks for a token and this process sends none "
            f"(RAY_AUTH_MODE is {auth}); {TOKEN_WAYS}"
        )
    if code == "UNIMPLEMENTED":
        return (
            f"{label}: what answers there is not the head of a Ray cluster (it may be "
            "another port of one: a node's, or Ray Client's, 10001); the head's port is what "
            "`ray start --head` printed, mostly 6379"
        )
    if code == "DEADLINE_EXCEEDED":
        return (
            f"{label}: the port is open, but no Ray answered within "
            f"{ANSWER_TIMEOUT_S:.0f} s; is it Ray's port (mostly 6379), and is the head alive "
            "(`ray status` there)?"
        )
    if code == "UNAVAILABLE":
        return (
            f"{label}: something answers there, but it does not speak Ray's protocol; "
            "Ray's port is mostly 6379 (8265 is its dashboard)"
        )
    return f"{label}: the cluster answered with {code}; `ray status` on its head"


def refuse_other_version(head: Head, *, ray_version: str, python: str) -> None:
    """Ray talks only to its own version, and pickled code only to the same Python."""
    if not head.ray_version:
        return
    if head.ray_version != ray_version:
        raise ClusterError(
            f"{head.label}: the cluster runs Ray {head.ray_version}, this environment "
            f"has Ray {ray_version}; they must be equal: `pip install ray=={head.ray_version}` "
            f"here, or install ray=={ray_version} on every node and start them again"
        )
    loose = os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL") == "minor"
    digits = 2 if loose else 3
    if head.python_version.split(".")[:digits] != python.split(".")[:digits]:
        raise ClusterError(
            f"{head.label}: the cluster runs Python {head.python_version}, this is "
            f"Python {python}; use the same one everywhere (for another patch release only, "
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor accepts it)"
        )


def refuse_outsider(head: Head, local_ids: set[str]) -> None:
    """A driver needs a node of the cluster on its own machine; without one Ray waits a minute."""
    if head.node_ids and not local_ids & set(head.node_ids):
        raise ClusterError(
            f"{head.label}: the cluster answers ({len(head.node_ids)} nodes), but this "
            "machine is none of its nodes; run the command on one of them (`ray submit`, "
            "`ray exec`, `ray job submit`), or join with "
            f"`ray start --address={head.address}`"
        )


# --- what Ray knows of this process ---------------------------------------------------------------


def _auth_mode() -> str:
    raylet: Any = importlib.import_module("ray._raylet")
    is_on = raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN
    return "token" if is_on else os.environ.get("RAY_AUTH_MODE", "not set")


def _has_token() -> bool:
    raylet: Any = importlib.import_module("ray._raylet")
    return bool(raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


def _local_node_ids() -> set[str]:
    services: Any = importlib.import_module("ray._private.services")
    return set(services.find_node_ids())
