"""Cuts that make the slowest stage as fast as can be."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_pipe.errors import ConfigError
from ray_pipe.planner.partition import partition


def show(costs: list[float], num_stages: int) -> str:
    return " ".join(f"{r.start}-{r.stop}" for r in partition(costs, num_stages))


def test_equal_blocks_are_shared_out_evenly() -> None:
    assert show([1.0] * 8, 4) == "0-2 2-4 4-6 6-8"


def test_a_heavy_block_stands_alone() -> None:
    assert show([1, 1, 1, 10, 1], 3) == "0-3 3-4 4-5"
    assert show([9, 1, 1, 1], 2) == "0-1 1-4"


def test_one_stage_takes_everything_and_as_many_stages_as_blocks_one_each() -> None:
    assert show([3, 1, 2], 1) == "0-3"
    assert show([3, 1, 2], 3) == "0-1 1-2 2-3"


def test_more_stages_than_blocks_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"5 stages .* has 3 blocks .* use --stages 3 or fewer"):
        partition([1, 1, 1], 5)


def test_no_stage_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 stages were asked for"):
        partition([1, 1, 1], 0)


@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=8), st.integers(1, 8))
def test_no_cut_is_better(costs: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))

    ranges = partition(costs, num_stages)

    assert [index for blocks in ranges for index in blocks] == list(range(len(costs)))
    assert all(len(blocks) > 0 for blocks in ranges)
    worst = max(sum(costs[i] for i in blocks) for blocks in ranges)
    every = ((0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), num_stages - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cuts)) for cuts in every)
    assert worst == best
