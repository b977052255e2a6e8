"""The doctor's hand on a node: an actor that tells what is there and sends bytes to its peers.

Shipped by value, so it runs on nodes that have another ray_pipe, or none: it may use the standard
library only, and Ray and our own packages inside methods, where their absence is a finding.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import tempfile
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = ("ray", "torch", "numpy")
SMALL_NBYTES = 64 * 1024
"""Goes with the call: one stream of bytes, as on a slow link."""

LARGE_NBYTES = 4 << 20
"""Goes through the object stores, which is the way to fill a fast link."""

LARGE_FROM_NBYTES = 8 << 20
"""Transfers from this size on are cut into large pieces."""

IN_FLIGHT_NBYTES, MAX_PIECES = 32 << 20, 64
FIRST_NBYTES = 16 * 1024
GROWTH = 4
REPEATS = 3
MIN_CALLS, MAX_CALLS, CALLS_S = 5, 21, 0.5
CONNECT_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 10.0
FIRST_ORDINARY_UID = 1000
TRANSFER_TIMEOUT_S = 60.0


def software() -> dict[str, Any]:
    """Versions, source and core of the process that asks. Loads neither torch nor numpy."""
    found: dict[str, Any] = {"versions": {"python": platform.python_version(), "ray_pipe": None}}
    for name in PACKAGES:
        try:
            found["versions"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found["versions"][name] = None
    try:
        from compressors import native
        from ray_pipe import __version__
        from stages.digest import source_digest

        found["versions"]["ray_pipe"] = __version__
        found["source"] = source_digest()
        found["core"] = native.core()
        built = native.build_info() if found["core"] == "native" else {}
        found["native"], found["instructions"] = built.get("source"), built.get("isa")
    except Exception as error:  # a broken install can fail in any way, and that is the finding
        found["source_error"] = f"{type(error).__name__}: {error}"
    return found


def disk(folder: str) -> dict[str, Any]:
    """Room in a folder, or in the nearest one above it that exists; and whether one can write."""
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    try:
        usage = shutil.disk_usage(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"ray_pipe.doctor")
    except OSError as error:
        return {"path": folder, "error": f"{error.strerror or error} ({path})"}
    return {"path": folder, "free_nbytes": usage.free, "total_nbytes": usage.total}


def ray_folder() -> str:
    """Where this node's Ray keeps logs and spilled objects."""
    try:
        import ray

        node: Any = ray._private.worker._global_node
        return str(node.get_temp_dir_path())
    except (ImportError, AttributeError):  # private to Ray; it may move
        return "/tmp/ray"


def free_memory_nbytes() -> int:
    """Memory that can still be had, within the limits of the container."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")
        found.append(int(limit) - int(used))
    return min(found, default=0)


def gpus() -> list[str]:
    """Graphics cards by their driver's word, also those that Ray hides from this process."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            model = next((x.partition(":")[2] for x in lines if x.startswith("Model")), "GPU")
            names.append(model.strip())
    return names


def shm_nbytes() -> int | None:
    """Size of the shared memory that Ray's object store lives in."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def shm_goes_at_logout(root: Path = Path("/"), uid: int | None = None) -> bool:
    """Whether systemd-logind removes this account's files from /dev/shm once it is logged out
    everywhere and nothing of it runs: of ordinary accounts, unless they linger or RemoveIPC=no."""
    uid = os.getuid() if uid is None else uid
    if uid < FIRST_ORDINARY_UID or not (root / "run/systemd/seats").is_dir():
        return False
    with contextlib.suppress(KeyError, ImportError):
        import pwd

        if (root / "var/lib/systemd/linger" / pwd.getpwuid(uid).pw_name).exists():
            return False
    removes = True
    places = [root / top / "systemd" for top in ("usr/lib", "run", "etc")]
    drop_ins = {p.name: p for place in places for p in place.glob("logind.conf.d/*.conf")}
    main = [path for place in places if (path := place / "logind.conf").exists()]
    for path in [*main, *(drop_ins[name] for name in sorted(drop_ins))]:
        with contextlib.suppress(OSError):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                # What is commented out is what it was built with.
                key, _, value = line.strip().lstrip("#").partition("=")
                if key == "RemoveIPC":
                    removes = value.strip().lower() in ("yes", "true", "1", "on")
    return removes


def handshakes(address: str, port: int) -> list[float]:
    """Seconds that each of several TCP handshakes took: one round trip of the network."""
    took: list[float] = []
    begin = time.monotonic()
    while len(took) < MAX_CALLS and (len(took) < MIN_CALLS or time.monotonic() - begin < CALLS_S):
        start = time.monotonic()
        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
        took.append(time.monotonic() - start)
    return took


class Probe:
    """One per node. No method is async, and none runs while another does."""

    def describe(self, folders: list[str]) -> dict[str, Any]:
        """What this node has and runs; the keys are fields of `NodeReport`.

        `folders` are looked at besides Ray's own.
        """
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return {
            "host": socket.gethostname(),
            "software": software(),
            "num_cores": len(os.sched_getaffinity(0)),
            "load": load,
            "free_memory_nbytes": free_memory_nbytes(),
            "shm_nbytes": shm_nbytes(),
            "shm_goes_at_logout": shm_goes_at_logout(),
            "disks": [disk(folder) for folder in (ray_folder(), *folders)],
            "gpus": gpus(),
        }

    def now(self) -> float:
        """This node's clock."""
        return time.time()

    def take(self, payload: Any) -> None:
        """Where calls and bytes of the others end."""

    def reach(self, peer: Any, address: str, ports: list[int]) -> dict[str, Any]:
        """Handshakes with the peer node's own ports, then calls to the probe on it.

        The keys are fields of `LinkReport`.
        """
        found: dict[str, Any] = {"ports_open": True}
        took: list[float] = []
        for port in ports:
            try:
                took += handshakes(address, port)
            except OSError as error:
                found["ports_open"] = False
                found["error"] = f"port {port} of {address}: {error.strerror or error}"
        if took:
            found["handshake_s"] = median(took)
        if not found["ports_open"]:
            return found
        try:
            found["call_s"] = median(self._calls(peer))
        except Exception as error:  # Ray's errors are many, and each means the same here
            found["error"] = f"no answer to a Ray call ({type(error).__name__})"
        return found

    def send(self, peer: Any, call_s: float, seconds: float, limit: int) -> dict[str, Any]:
        """Fill the link for about `seconds`, never with more than `limit` bytes.

        Grows until a transfer takes long enough to tell the rate, then measures `REPEATS` times and
        believes the fastest: a busy machine can only make it slower. The keys are fields of
        `LinkReport`.
        """
        part_s = seconds / (1 + REPEATS)
        nbytes, sent, total_s = min(FIRST_NBYTES, limit), 0, 0.0
        try:
            while True:
                took_s = self._transfer(peer, nbytes)
                sent += nbytes
                total_s += took_s
                rate = nbytes / max(took_s - call_s, took_s / 10)
                if took_s >= part_s / 2 or sent + GROWTH * nbytes > limit:
                    break
                nbytes = int(min(GROWTH * nbytes, max(2 * nbytes, rate * part_s)))
            for left in range(REPEATS, 0, -1):
                nbytes = int(min(rate * part_s, (limit - sent) / left))
                if nbytes < FIRST_NBYTES:
                    break
                took_s = self._transfer(peer, nbytes)
                rate = max(rate, nbytes / max(took_s - call_s, took_s / 10))
                sent += nbytes
                total_s += took_s
        except Exception as error:  # as above
            return {"error": f"the transfer broke off after {sent} bytes ({type(error).__name__})"}
        return {"bandwidth_bps": 8 * rate, "nbytes": sent, "seconds": total_s}

    def _calls(self, peer: Any) -> list[float]:
        import ray

        ray.get(peer.take.remote(b""), timeout=CALL_TIMEOUT_S)  # the first one also connects
        took: list[float] = []
        begin = time.monotonic()
        while len(took) < MAX_CALLS and (
            len(took) < MIN_CALLS or time.monotonic() - begin < CALLS_S
        ):
            start = time.monotonic()
            ray.get(peer.take.remote(b""), timeout=CALL_TIMEOUT_S)
            took.append(time.monotonic() - start)
        return took

    def _transfer(self, peer: Any, nbytes: int) -> float:
        """Seconds until the peer has everything. Random bytes: a tunnel may compress zeros."""
        import ray

        size = SMALL_NBYTES if nbytes < LARGE_FROM_NBYTES else LARGE_NBYTES
        window = min(MAX_PIECES, IN_FLIGHT_NBYTES // size)
        block = os.urandom(min(size, nbytes))
        flying: list[Any] = []
        start = time.monotonic()
        for begin in range(0, nbytes, size):
            piece = block if begin + size <= nbytes else block[: nbytes - begin]
            flying.append(peer.take.remote(piece))
            if len(flying) == window:
                ray.get(flying.pop(0), timeout=TRANSFER_TIMEOUT_S)
        ray.get(flying, timeout=TRANSFER_TIMEOUT_S)
        return time.monotonic() - start
