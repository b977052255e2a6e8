"""What the Ray of the tests starts in place of a worker: has a fork take over, lasts as long as it.

Ray's words are handed to `worker_forks.py`, with the environment, the folder and the standard
streams. Where nobody answers, or the worker needs an environment of its own, it is started as Ray
would have done it. Imports nothing that takes time.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

FORKS = "RAY_PIPE_TEST_FORKS"
"""Where the forks are to be had: the path of a socket."""

HEADER_NBYTES = 8
TAKEN = b"!"


def main(words: list[str]) -> None:
    """`words` are those for Ray's setup_worker.py, which drops the language before it goes on."""
    wants_own = any(word.startswith("--serialized-runtime-env-context=") for word in words)
    if wants_own:
        setup = Path(words[0]).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(setup), *words])
    words = [word for word in words if not word.startswith("--language=")]
    if not taken_over(words):
        os.execv(sys.executable, [sys.executable, *words])


def taken_over(words: list[str]) -> bool:
    """Whether a fork did the work; returns when it has ended."""
    given = {"words": words, "env": dict(os.environ), "cwd": str(Path.cwd())}
    message = json.dumps(given).encode()
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.connect(os.environ[FORKS])
            socket.send_fds(door, [len(message).to_bytes(HEADER_NBYTES, "big")], [0, 1, 2])
            door.sendall(message)
            if door.recv(1) != TAKEN:
                return False
        except (OSError, KeyError):
            return False
        with suppress(OSError):
            door.recv(1)  # nothing comes any more but the end
        return True


if __name__ == "__main__":
    main(sys.argv[1:])
