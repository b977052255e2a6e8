"""What a pipeline from Python asks its shards: numbers, rows, exports.

Path: ray_pipe.rec_pipeline -> ray_pipe.rec_rows -> stages.embedding.shard_actor
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from ray_pipe.errors import TrainingError
from ray_pipe.failures import cause_of
from ray_pipe.ledger import Ledger
from ray_pipe.rec_arm import LoadedPipeline
from stages.embedding.in_process import merged_stats

CALL_S = 600.0
COUNTS = ("lost_pushes", "lost_versions", "refused", "resent")
"""Of stage 0: what is counted from its beginning."""

NOT_ADDED = ("sent", "spans", "troubles")
"""Of a shard's books: not numbers of rows."""


class ClientBook:
    """What stage 0 counted, in all its lives: one that takes its place begins with nothing."""

    def __init__(self) -> None:
        self._now: Mapping[str, Any] = {}
        self._past: Counter[str] = Counter()

    def note(self, told: Mapping[str, Any]) -> None:
        """Its counts so far, in its present life."""
        if self._now and self._now["session"] != told["session"]:
            self._past.update({key: self._now[key] for key in COUNTS})
        self._now = told

    def numbers(self) -> dict[str, Any]:
        """The latest, with what earlier lives counted."""
        return {**self._now, **{key: self._past[key] + self._now[key] for key in COUNTS}}


def ask(pipeline: LoadedPipeline, method: str, *args: Any) -> list[Any]:
    """The answers of all shards; what one of them raises, as it raised it."""
    calls = [getattr(handle, method).remote(*args) for handle in pipeline.shards.handles]
    try:
        found: list[Any] = ray.get(calls, timeout=CALL_S)
    except RayTaskError as error:
        raise cause_of(error) from None
    except RayError as error:
        raise TrainingError(
            f"a shard was lost during {method!r} ({type(error).__name__}); another takes its "
            "place, so try again"
        ) from error
    return found


def rows_of(pipeline: LoadedPipeline, table: str) -> tuple[Any, Any]:
    """Ids of all shards, rising, and their weights."""
    parts = ask(pipeline, "rows", table)
    ids = np.concatenate([part[0] for part in parts])
    order = np.argsort(ids)
    return ids[order], np.concatenate([part[1] for part in parts])[order]


def stats_of(pipeline: LoadedPipeline, ledger: Ledger, client: Mapping[str, Any]) -> dict[str, Any]:
    """All shards as one, with what stage 0 counted (`client`) and what was sent."""
    books = ask(pipeline, "books")
    ledger.add_late(pipeline.shards.settle())
    whole = merged_stats(
        {key: value for key, value in book.items() if key not in NOT_ADDED} for book in books
    )
    return whole | {
        "shards": len(books),
        "tau": client["tau"],
        "lost_pushes": client["lost_pushes"],
        "lost_versions": client["lost_versions"],
        "refused_steps": client["refused"],
        "resent_letters": client["resent"],
        "bytes": ledger.total(),
        "bytes_by_link": ledger.by_link(),
        "shard_failures": len(pipeline.shards.failures),
    }
