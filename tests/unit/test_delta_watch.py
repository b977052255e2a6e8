"""Changes that stay as large as the values are warned of once, with the codec that would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from local_pipeline import SHAPE, Bench, acsgd, build_gpt
from torch import nn

from ray_pipe.delta_watch import MIN_STEPS, DeltaWatch
from ray_pipe.metrics import ArmMeter
from ray_pipe.trained import Trained
from stages.record import StepRecord


def record(ratios: dict[str, float | None]) -> StepRecord:
    """A record with the ratio of each edge; None where no sample was met again."""
    codec = {e: {} if ratio is None else {"delta_ratio": ratio} for e, ratio in ratios.items()}
    return StepRecord(
        stage=0, step=0, loss=None, num_tokens=1, start_s=0.0, end_s=1.0, seconds={}, sent={},
        codec=codec, grad_norm=None,
    )  # fmt: skip


def texts(codec: str, ratios: list[float | None], *, epoch: int = 1) -> list[str]:
    watch = DeltaWatch(codec, steps_per_epoch=epoch)
    return [text for ratio in ratios for text in watch.look([record({"0->1": ratio})])]


def test_a_ratio_that_stays_near_one_is_told_once_with_the_codec_to_use() -> None:
    (text,) = texts("acsgd", [None, *[0.97] * (3 * MIN_STEPS)])

    assert text.startswith(f"edge 0->1: for {MIN_STEPS} steps the changes that acsgd sends were")
    assert "0.97 times as large" in text
    assert "use --codec directq, which remembers nothing" in text


@pytest.mark.parametrize(
    ("codec", "instead"),
    [("acsgd+zstd", "directq+zstd"), ("acsgd-topk", "topk"), ("acsgd-reference", "reference")],
)
def test_the_codec_without_memory_is_the_arms_own_one(codec: str, instead: str) -> None:
    (text,) = texts(codec, [1.3] * MIN_STEPS)

    assert f"use --codec {instead}," in text


def test_a_single_step_below_is_enough_to_say_nothing() -> None:
    ratios: list[float | None] = [1.0] * (MIN_STEPS - 1) + [0.5]

    assert texts("acsgd", ratios * 5) == []


def test_it_looks_at_a_whole_epoch_and_never_at_codecs_without_memory() -> None:
    assert texts("acsgd", [1.0] * 19, epoch=20) == []
    assert len(texts("acsgd", [1.0] * 20, epoch=20)) == 1
    assert texts("directq", [1.0] * 99) == []


def test_each_edge_is_told_of_for_itself() -> None:
    watch = DeltaWatch("acsgd", steps_per_epoch=1)
    ratios: dict[str, float | None] = {"0->1": 1.0, "1->2": 0.2, "2->3": 1.1}
    found = [t for _ in range(20) for t in watch.look([record(ratios)])]

    assert [text[:10] for text in found] == ["edge 0->1:", "edge 2->3:"]


def pipeline(dropout: float) -> Bench:
    def build(blocks: Sequence[int]) -> nn.Module:
        return nn.Sequential(build_gpt(SHAPE, 1, blocks), nn.Dropout(dropout))

    return Bench(num_stages=2, activation=acsgd(), build=build)


@pytest.mark.parametrize(("dropout", "told"), [(0.0, False), (0.9, True)])
def test_a_pipeline_with_fresh_masks_is_told_and_one_without_is_not(
    dropout: float, told: bool
) -> None:
    run = pipeline(dropout).run(2 + MIN_STEPS + 2)
    watch = DeltaWatch("acsgd", steps_per_epoch=2)

    found = [text for records in run.records for text in watch.look(records)]

    assert bool(found) == told


def test_an_arm_hands_the_warning_to_whoever_watches_it() -> None:
    heard: list[str] = []
    arm: Any = None
    one = Trained(arm=arm, prediction=None, meter=ArmMeter("acsgd"), on_warning=heard.append)
    one.deltas = DeltaWatch("acsgd", steps_per_epoch=2)

    for records in pipeline(0.9).run(2 + MIN_STEPS + 2).records:
        one.add(records)

    assert len(heard) == 1
    assert heard[0].startswith("edge 0->1: for 8 steps")
