"""Where black boxes lie on a node, and the removal of those that dead runs have left there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from stages.black_box import BlackBox, BoxError
from stages.room import above

AUTO, OFF = "auto", "off"
SHARED_MEMORY = Path("/dev/shm")
MIN_FREE_NBYTES = 256 << 20
"""Room that must be left in shared memory: a container often has very little of it."""

STALE_S = 600.0
"""A box that nobody holds and nobody has touched for so long is left over from a dead run."""

LOCK_PATIENCE_S = 10.0
"""How long the process that is replaced may take to end."""


ROWS_IN_LOG = 3
"""A log of rows may be so many times its rows."""


def open_box(
    setting: str,
    *,
    run: str,
    stage: int,
    need_nbytes: int,
    rows_nbytes: int = 0,
    spill: str | None = None,
) -> BlackBox:
    """The box of a stage: the one it had on this node, else a new one.

    `setting` is a folder or `auto`; `need_nbytes` what all boxes of the node are expected to take
    without their rows, `rows_nbytes` the rows themselves. With `auto` and a folder that rows are
    `spill`ed to, since memory does not hold them, their log lies there too, if the disk has room
    for both. Raises `OSError` if the folder cannot be used.
    """
    places = candidates(setting)
    folder = _existing(places, run, stage)
    beside = None
    if setting == AUTO and spill is not None:
        beside = candidates(spill)[0] / run / f"stage-{stage}"
        is_good = (
            _has_room(above(Path(spill)), (1 + ROWS_IN_LOG) * rows_nbytes)
            if folder is None
            else beside.is_dir()
        )
        beside = beside if is_good else None
    if folder is None:
        if beside is None:
            need_nbytes += ROWS_IN_LOG * rows_nbytes
        folder = _roomy(places, need_nbytes) / run / f"stage-{stage}"
        for fresh in (folder, beside):
            if fresh is not None:
                sweep(fresh.parent.parent)
    until = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            return BlackBox(folder, rows=beside)
        except BoxError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def candidates(setting: str) -> list[Path]:
    """Folders of this user's boxes, best first."""
    own = f"ray_pipe-boxes-{os.getuid()}"
    if setting != AUTO:
        return [Path(setting) / own]
    found = [SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK) else []
    return [path / own for path in (*found, Path(tempfile.gettempdir()))]


def sweep(parent: Path, *, now: float | None = None) -> list[Path]:
    """Remove boxes under `parent` that dead runs have left there; returns which."""
    now = time.time() if now is None else now
    removed = []
    for run in [path for path in _folders(parent) if _is_stale(path, now)]:
        shutil.rmtree(run, ignore_errors=True)
        removed.append(run)
    return removed


def _existing(places: list[Path], run: str, stage: int) -> Path | None:
    folders = [place / run / f"stage-{stage}" for place in places]
    return next((folder for folder in folders if folder.is_dir()), None)


def _roomy(places: list[Path], need_nbytes: int) -> Path:
    """The first place with room enough; the last one if there is none."""
    for place in places[:-1]:
        if _has_room(place.parent, 2 * need_nbytes):
            return place
    return places[-1]


def _has_room(folder: Path, need_nbytes: int) -> bool:
    return shutil.disk_usage(folder).free > MIN_FREE_NBYTES + need_nbytes


def _is_stale(run: Path, now: float) -> bool:
    boxes = _folders(run)
    try:
        paths = [run, *boxes, *(path for box in boxes for path in box.iterdir())]
        newest = max(path.stat().st_mtime for path in paths)
    except OSError:
        return False  # somebody is at work there
    return now - newest > STALE_S and not any(_is_held(box) for box in boxes)


def _is_held(box: Path) -> bool:
    try:
        fd = os.open(box / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
