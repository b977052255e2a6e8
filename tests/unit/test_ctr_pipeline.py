"""A pipeline with shards: whom a lost shard excuses, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray_pipe.ctr_pipeline import CtrPipeline
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
