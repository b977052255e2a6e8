"""Trials of a comparison that are done, kept beside its results as they come.

A thousand replicas take half an hour: whoever stops the comparison goes on with `--resume`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray_pipe.metrics import to_json
from stages.sync.trial import Trial


class KeptTrials:
    """One line for each trial, under everything that it depends on besides the program itself."""

    def __init__(self, folder: Path | str, *, resume: bool) -> None:
        """Without `resume` what an earlier comparison left is of no use, and goes."""
        self._path = Path(folder) / "trials.jsonl"
        self._found: dict[str, Trial] = {}
        if resume and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                body = json.loads(line)
                self._found[body["key"]] = _trial(body["trial"])
        else:
            self._path.unlink(missing_ok=True)

    def get(self, settings: dict[str, Any], run: Callable[[], Trial]) -> Trial:
        """The trial with these settings: the one that is here, or a new one."""
        key = to_json(settings)
        if key not in self._found:
            self._found[key] = run()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(to_json({"key": key, "trial": asdict(self._found[key])}) + "\n")
        return self._found[key]


def _trial(body: dict[str, Any]) -> Trial:
    return Trial(**{**body, "curve": tuple((at_s, loss) for at_s, loss in body["curve"])})
