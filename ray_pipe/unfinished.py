"""runs/<name>/unfinished.json: what a run needs to be taken up again if its driver is killed.

It is there while a run is not over, and only then: made before the first step, changed when an arm
begins or ends, is evaluated or fails, removed at the end. Steps are not in it, they are lines of
metrics.jsonl. Always written aside and renamed. No torch: the command line reads the settings.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_pipe.errors import ConfigError

FILE = "unfinished.json"
FORMAT = 1


class RunRecord:
    """Writes the file. A disk that is full costs no training: it is told once."""

    def __init__(
        self,
        folder: Path,
        *,
        config: Mapping[str, Any],
        code: Mapping[str, Any],
        epoch_s: float,
        on_warning: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path = folder / FILE
        self._on_warning = on_warning
        self._is_told = False
        self._body: dict[str, Any] = {
            "format": FORMAT,
            "config": dict(config),
            "code": dict(code),
            "driver": this_process(),
            "epoch_s": epoch_s,
            "stopped_by": "",
            "failures": [],
            "arms": {},
        }

    def arm(self, name: str, **values: Any) -> None:
        """Note something of an arm; in the file with the next `save`."""
        self._body["arms"].setdefault(name, {}).update(values)

    def save(self, failures: Sequence[Mapping[str, Any]], *, stopped_by: str = "") -> None:
        """Put what is known in place of the old file."""
        self._body |= {"failures": list(failures), "stopped_by": stopped_by}
        aside = self._path.with_name(f"{FILE}.part")
        try:
            aside.write_text(json.dumps(self._body), encoding="utf-8")
            aside.replace(self._path)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                self._on_warning(
                    f"{self._path} could not be written: {(error.strerror or str(error)).lower()}; "
                    "training goes on. If the driver is killed the run goes on from its last "
                    "checkpoint."
                )

    def remove(self) -> None:
        """The run is over."""
        remove_record(self._path.parent)


def remove_record(folder: Path) -> None:
    """Of a run that is over, or goes on elsewhere."""
    for name in (FILE, f"{FILE}.part"):
        (folder / name).unlink(missing_ok=True)


def has_record(folder: str | Path) -> bool:
    """Whether a run in this folder is not over."""
    return os.path.isfile(os.path.join(folder, FILE))


def read_record(folder: Path) -> dict[str, Any]:
    """What the file says; raises `ConfigError` if it cannot be read."""
    path = folder / FILE
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        version = body["format"]
        if version == FORMAT and body["config"] and isinstance(body["arms"], dict):
            found: dict[str, Any] = body
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    raise ConfigError(f"{path} has format {version!r}, this version of ray_pipe reads {FORMAT}.")


def newest_record(out: str) -> tuple[float, str] | None:
    """When a run below `out` that is not over last did something, and its folder."""
    found = [
        (max(path.stat().st_mtime for path in (one, lines) if path.exists()), str(one.parent))
        for one in Path(out).glob(f"*/{FILE}")
        for lines in [one.with_name("metrics.jsonl")]
    ]
    return max(found, default=None)


def this_process() -> dict[str, Any]:
    """Of this driver, so that a later one can tell whether it lives."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": _since(os.getpid())}


def is_alive(driver: Mapping[str, Any]) -> bool:
    """Whether another process on this machine is that driver; a number may be used again."""
    if driver.get("host") != socket.gethostname() or driver.get("pid") == os.getpid():
        return False
    since = _since(int(driver.get("pid", 0)))
    return since is not None and since == driver.get("since")


def _since(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None if there is none any more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
