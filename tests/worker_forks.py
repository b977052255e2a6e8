"""Workers for the Ray of the tests that have torch loaded: forks of one process.

A worker that Ray starts by itself takes three to four seconds of CPU before it does anything:
Python, ray, torch, and the compiler that torch loads with its first optimizer. The suite starts
hundreds of them. Here one process loads all that, and forks whenever Ray wants a worker:

    raylet -> worker_shim.py, the process that Ray started -> a fork of this one, the worker

A fork is a process like any other: it can be killed and stopped, and others notice. What it does
not show is that a new process can load our modules; the tests of commands do. With
`pytest --cold-workers` Ray starts its own, as `make test-chaos` does, which times recoveries.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from worker_shim import FORKS, HEADER_NBYTES, TAKEN

SHIM = Path(__file__).with_name("worker_shim.py")
MODULES = (
    *("torch", "stages.assembly", "stages.keeper", "stages.measure", "stages.optim"),
    *("requests", "google.protobuf.internal.builder"),  # half of what ray loads
)
"""Not ray itself: it reads the number of its job while it is loaded."""

END_S = 60.0


@contextmanager
def forked_workers() -> Iterator[None]:
    """While this lasts, workers of a Ray that is started here are forks (on Linux)."""
    if sys.platform != "linux":
        yield
        return
    import pytest
    from ray._private import ray_constants

    with forks(MODULES), pytest.MonkeyPatch.context() as patch:
        # Joined to a folder of Ray's; what is absolute stays as it is.
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", str(SHIM))
        yield


@contextmanager
def forks(modules: Sequence[str]) -> Iterator[int]:
    """A process that has these modules loaded and forks for every `worker_shim.py`; its id. Its
    forks end with it."""
    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as folder:
        place = str(Path(folder) / "forks")
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(place)
            door.listen(128)  # who comes before all is loaded waits
            server = subprocess.Popen(
                [sys.executable, __file__, str(door.fileno()), *modules],
                pass_fds=[door.fileno()],
                stdin=subprocess.PIPE,  # its end is the end of all
                start_new_session=True,
            )
        outer = os.environ.get(FORKS)
        os.environ[FORKS] = place
        try:
            yield server.pid
        finally:
            del os.environ[FORKS]
            if outer is not None:
                os.environ[FORKS] = outer
            assert server.stdin is not None
            server.stdin.close()
            server.wait(END_S)


def load(modules: Sequence[str]) -> None:
    """Load everything that a worker needs; no thread may be begun, a fork would not have it."""
    for name in modules:
        importlib.import_module(name)
    if "torch" in sys.modules:
        import torch

        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # loads torch's compiler
    assert "ray" not in sys.modules
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads are running: forks would miss them"
    gc.collect()
    gc.freeze()


def serve(door: socket.socket) -> list[str]:
    """Fork for all who ask. Returns in the forks, with their words."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        ready, _, _ = select.select([door, sys.stdin.fileno()], [], [])
        if door not in ready:
            end_forks()
            os._exit(0)  # at once: what was loaded need not be taken down
        asked, _ = door.accept()
        if os.fork() == 0:
            door.close()
            return become(asked)
        asked.close()


def end_forks() -> None:
    """None is left. Ray ends its own, but not those that were stopped."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def become(asked: socket.socket) -> list[str]:
    """Be the process that the shim was to be; its words. `asked` stays open until the end."""
    os.setpgid(0, 0)  # a raylet kills the group of a worker that ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, streams, _, _ = socket.recv_fds(asked, HEADER_NBYTES, 3)
    left = int.from_bytes(header, "big")
    message = b""
    while len(message) < left:
        some = asked.recv(left - len(message))
        if not some:
            sys.exit("who wanted a worker is gone")
        message += some
    given = json.loads(message)
    asked.sendall(TAKEN)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(given["env"])
    os.chdir(given["cwd"])
    asked.detach()
    words: list[str] = given["words"]
    return words


if __name__ == "__main__":
    own_door = socket.socket(fileno=int(sys.argv[1]))
    load(sys.argv[2:])
    sys.argv = serve(own_door)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
