"""What a rig leaves on the machine while it is up, and how it is removed, by whom it may be."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from tests.cluster.host import RigError

RIGS = Path(tempfile.gettempdir()) / "ray_pipe_rig"
START_TIMEOUT_S = 30.0


def sweep() -> None:
    """Remove rigs whose owner ended without doing so."""
    for folder in RIGS.glob("*") if RIGS.is_dir() else ():
        try:
            owner = int((folder / "owner").read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if owner and not Path(f"/proc/{owner}").exists():
            destroy(folder)


def destroy(folder: Path) -> None:
    """End the processes that a rig recorded, and its files. Anything else is left alone."""
    for record in sorted(folder.glob("*/pid")):
        pid = int(record.read_text(encoding="ascii"))
        if is_ours(pid, record.parent):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + START_TIMEOUT_S
    for record in sorted(folder.glob("*/pid")):
        while is_ours(int(record.read_text(encoding="ascii")), record.parent):
            if time.monotonic() > deadline:
                raise RigError(f"{record.parent.name} of {folder.name} does not end")
            time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def is_ours(pid: int, folder: Path) -> bool:
    """Whether the process is still the one that was recorded, not another with its number."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(folder) in words
