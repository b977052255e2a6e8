"""Where black boxes lie on a node, and the removal of those that dead runs have left there.

A box outlives its run only if the driver was killed: at a run's end its stages remove their own.
Whoever starts that run again goes on from it (`ray_pipe.left_run`), by hand perhaps and hours
later, so it is kept for a day, unless room is short; see `sweep`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from stages.black_box import BlackBox, BoxHeld
from stages.room import IN_MEMORY, above, file_system, free_memory_nbytes

AUTO, OFF = "auto", "off"
SHARED_MEMORY = Path("/dev/shm")
MIN_FREE_NBYTES = 256 << 20
"""Room that must be left in shared memory: a container often has very little of it."""

KEEP_S = 24 * 3600.0
"""How long a box that nobody holds waits for its run to be resumed."""

STALE_S = 600.0
"""How long it waits at least, where another run needs its room."""

BRIEF = "brief-"
"""How the name of a run begins whose boxes are of no use once its driver is gone."""

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
    gone: Collection[str] = (),
) -> BlackBox:
    """The box of a stage: the one it had on this node, else a new one.

    `setting` is a folder or `auto`; `need_nbytes` what all boxes of the node are expected to take
    without their rows, `rows_nbytes` the rows themselves. With `auto` and a folder that rows are
    `spill`ed to, since memory does not hold them, their log lies there too, if the disk has room
    for both. Before a new one is made, boxes of dead runs are swept, those of `gone` runs among
    them. Raises `OSError` if the folder cannot be used.
    """
    places = candidates(setting)
    folder = existing(setting, run, stage)
    beside = beside_spill(setting, run, stage, spill)
    if folder is not None:
        return _open(folder, beside if beside is not None and beside.is_dir() else None)
    if beside is not None:
        disk, need = above(Path(str(spill))), (1 + ROWS_IN_LOG) * rows_nbytes
        sweep(beside.parent.parent, gone=gone, spare=run, has_room=lambda: _has_room(disk, need))
        if not _has_room(disk, need):
            beside = None
    if beside is None:
        need_nbytes += ROWS_IN_LOG * rows_nbytes
    for place in places:
        has_room = partial(_is_roomy, place.parent, need_nbytes)
        sweep(place, gone=gone, spare=run, has_room=has_room)
        if place == places[-1] or _has_room(place.parent, 2 * need_nbytes):
            break
    return _open(place / run / f"stage-{stage}", beside)


def _open(folder: Path, beside: Path | None) -> BlackBox:
    return when_free(lambda: BlackBox(folder, rows=beside), LOCK_PATIENCE_S)


def when_free(make: Callable[[], BlackBox], patience_s: float) -> BlackBox:
    """The box that `make` opens, once the process that holds it has ended; `BoxHeld` if that takes
    too long."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return make()
        except BoxHeld:
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


def existing(setting: str, run: str, stage: int) -> Path | None:
    """Where the box of a stage lies on this node, if it has one."""
    folders = [place / run / f"stage-{stage}" for place in candidates(setting)]
    return next((folder for folder in folders if folder.is_dir()), None)


def beside_spill(setting: str, run: str, stage: int, spill: str | None) -> Path | None:
    """Where the log of spilled rows lies, if it does not lie in the box."""
    if setting != AUTO or spill is None:
        return None
    return candidates(spill)[0] / run / f"stage-{stage}"


def sweep(
    parent: Path,
    *,
    now: float | None = None,
    gone: Collection[str] = (),
    spare: str = "",
    has_room: Callable[[], bool] = lambda: True,
) -> list[Path]:
    """Remove boxes under `parent` that dead runs have left there; returns which.

    Nobody holds them, and: their run is `gone` (it began anew, or goes on from a checkpoint); or
    they were not touched for a day; or for ten minutes, and nobody will want them (`BRIEF`), or
    without the oldest of them there is no room. Never those of `spare`.
    """
    now = time.time() if now is None else now
    removed = []
    dead = []
    for run in _folders(parent):
        if run.name != spare and (age_s := _age_s(run, now)) is not None:
            dead.append((age_s, run))
    for age_s, run in sorted(dead, reverse=True):
        keep_s = STALE_S if run.name.startswith(BRIEF) else KEEP_S
        is_old = age_s > keep_s or run.name in gone
        if is_old or (age_s > STALE_S and not has_room()):
            shutil.rmtree(run, ignore_errors=True)
            removed.append(run)
    return removed


def _is_roomy(folder: Path, need_nbytes: int) -> bool:
    """Whether new boxes fit here; where files are memory, they must fit in that, too."""
    if file_system(folder) in IN_MEMORY and free_memory_nbytes() < MIN_FREE_NBYTES + need_nbytes:
        return False
    return _has_room(above(folder), 2 * need_nbytes)


def _has_room(folder: Path, need_nbytes: int) -> bool:
    return shutil.disk_usage(folder).free > MIN_FREE_NBYTES + need_nbytes


def _age_s(run: Path, now: float) -> float | None:
    """Since the boxes of a run were touched; None while somebody holds one."""
    boxes = _folders(run)
    try:
        paths = [run, *boxes, *(path for box in boxes for path in box.iterdir())]
        newest = max(path.stat().st_mtime for path in paths)
    except OSError:
        return None  # somebody is at work there
    return None if any(_is_held(box) for box in boxes) else now - newest


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
