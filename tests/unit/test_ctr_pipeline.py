"""A pipeline with shards: whom a lost shard excuses, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ray_pipe import ctr_pipeline
from ray_pipe.ctr_pipeline import CtrPipeline
from ray_pipe.pipeline import Pipeline
from ray_pipe.rec_arm import LoadedPipeline
from ray_pipe.shard_totals import ShardTotals


@dataclass(frozen=True)
class Record:
    step: int
    sent: dict[str, Any] = field(default_factory=dict)
    embedding: dict[str, Any] = field(default_factory=dict)


def pipeline_of(kind: type[CtrPipeline]) -> Any:
    pipeline: Any = kind.__new__(kind)
    pipeline._num_excused = 0
    pipeline.shards = SimpleNamespace(failures=[], step=0, look=dict, totals=ShardTotals)
    pipeline.loader = SimpleNamespace(look=dict)
    pipeline.own = SimpleNamespace(known={})
    pipeline._next = lambda: [Record(step=5)]
    return pipeline


def test_a_lost_shard_excuses_stages_that_waited_for_it_only_until_the_next_step_is_done() -> None:
    """Of a pipeline from Python too: or no stage that hangs later would ever be counted."""
    pipeline = pipeline_of(LoadedPipeline)
    late: Any = SimpleNamespace(kind="timeout")
    died: Any = SimpleNamespace(kind="died")
    assert not pipeline.excuses(late)

    pipeline.shards.failures.append("shard 0 was stopped")
    assert pipeline.excuses(late)
    assert not pipeline.excuses(died)
    pipeline.advance()
    assert not pipeline.excuses(late)
    assert pipeline.shards.step == 5


def test_the_driver_tells_the_shards_what_a_stage_0_that_died_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, str, str]] = []

    def actor(index: int) -> Any:
        def keep_not(key: str, why: str) -> None:
            told.append((index, key, why))

        def call(*args: Any) -> None: ...

        return SimpleNamespace(
            **{name: SimpleNamespace(remote=call) for name in ("keep_state", "write_kept")},
            keep_not=SimpleNamespace(remote=keep_not),
        )

    pipeline = pipeline_of(LoadedPipeline)
    pipeline.handles = [actor(0), actor(1)]
    pipeline.shards.handles = [actor(2), actor(3)]
    pipeline.patience_s = lambda: 0.0
    kept: dict[str, Any] = {}
    monkeypatch.setattr(
        ctr_pipeline, "Save", lambda handles, write, **options: kept.update(options)
    )
    pipeline.start_save("key", 7, None)

    kept["on_failed"](1, RuntimeError("stage 1 died"))
    assert told == []
    kept["on_failed"](0, RuntimeError("stage 0 died"))
    assert told == [(2, "key", "stage 0 died"), (3, "key", "stage 0 died")]


def test_whoever_checks_in_asks_the_shards_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage may wait for one that is lost; and who saves again wants its successor."""
    asked: list[str] = []
    pipeline = pipeline_of(LoadedPipeline)
    pipeline.shards.check = lambda: asked.append("shards")
    monkeypatch.setattr(Pipeline, "check_in", lambda self: asked.append("stages"))
    pipeline.check_in()

    assert asked == ["shards", "stages"]
