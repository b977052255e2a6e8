"""Where to cut a sequence of blocks so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence

from ray_pipe.errors import ConfigError


def partition(costs: Sequence[float], num_stages: int) -> list[range]:
    """Contiguous ranges of blocks, none empty, with the smallest possible largest cost.

    Dynamic programming over (stage, block): exact, and quick for any model that has blocks.
    """
    num_blocks = len(costs)
    if not 1 <= num_stages <= num_blocks:
        raise ConfigError(
            f"{num_stages} stages were asked for, but the model has {num_blocks} blocks that can "
            f"be cut; use --stages {num_blocks} or fewer, or a model with more layers"
        )
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    best = [[float("inf")] * (num_blocks + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_blocks + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        for end in range(stage, num_blocks + 1):
            for start in range(stage - 1, end):
                worst = max(best[stage - 1][start], prefix[end] - prefix[start])
                if worst < best[stage][end]:
                    best[stage][end], cut[stage][end] = worst, start

    ranges: list[range] = []
    end = num_blocks
    for stage in range(num_stages, 0, -1):
        start = cut[stage][end]
        ranges.insert(0, range(start, end))
        end = start
    return ranges
