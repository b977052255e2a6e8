"""TLS between this process and a cluster's head: who of the two speaks it, and what is missing.

Part of `ray_pipe.preflight`. Ray's own word for all of these is "failed to connect", a minute on.
"""

from __future__ import annotations

import os
import socket
import ssl

from ray_pipe.errors import ClusterError

FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
TIMEOUT_S = 2.0
WAYS = (
    "set RAY_USE_TLS=1 and name a certificate of that cluster, its key and its authority in "
    f"{', '.join(FILES)} (docs/cluster.md)"
)


def is_on() -> bool:
    """Whether this process would speak TLS; read as Ray reads it."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def refuse_without_files(label: str) -> None:
    """Raise `ClusterError` if TLS is on and its files are not named, or cannot be read."""
    if not is_on():
        return
    unset = [name for name in FILES if not os.environ.get(name)]
    if unset:
        raise ClusterError(f"{label}: RAY_USE_TLS is on, but {', '.join(unset)} is not set; {WAYS}")
    for name in FILES:
        path = os.environ[name]
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ClusterError(
                f"{label}: RAY_USE_TLS is on, but {name}={path} cannot be read: {why}; {WAYS}"
            ) from None


def explain(label: str, place: str, said: str) -> str | None:
    """What TLS has to do with a head at `place` that could not be asked; None: nothing.

    `said` are gRPC's words.
    """
    theirs, ours = speaks_tls(place), is_on()
    if theirs and not ours:
        return (
            f"{label}: what answers there speaks TLS, and this process does not (RAY_USE_TLS is "
            f"off); {WAYS}"
        )
    if ours and not theirs:
        return (
            f"{label}: this process speaks TLS (RAY_USE_TLS is on), and what answers there does "
            "not; is it the head's port (mostly 6379), and was RAY_USE_TLS=1 set where "
            "`ray start` ran?"
        )
    if theirs:
        words = " ".join(said.rpartition("last error: ")[2].split())[:200]
        return (
            f"{label}: both ends speak TLS, but do not accept each other ({words}); the "
            "certificates of both must be signed by the authority in RAY_TLS_CA_CERT, be valid "
            "today, and name the address that is called (tools/make_certificates.sh)"
        )
    return None


def speaks_tls(place: str) -> bool:
    """Whether whoever listens at HOST:PORT answers a TLS greeting; nothing is verified."""
    host, _, port = place.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it wants a certificate, in TLS's own words
    except OSError:
        return False
