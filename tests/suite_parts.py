"""How the suite is cut: into parts for `make test`, and into what is quick.

Parts are found by looking at the tests, so a new file is in exactly one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

PARTS = ("cluster", "rest", "commands", "training")
"""In the order in which they are begun: the longest first, those that use both cores last.

cluster   files that use the Ray cluster of the tests: one process, one cluster
commands  other tests with Ray: programs and clusters of their own, all in other processes
training  the quality gates: two processes that train
rest      everything else, without Ray
"""

TRAINING = Path("e2e") / "test_quality.py"


def parts_of(items: Iterable[pytest.Item]) -> dict[pytest.Item, str]:
    """The part of each test. A file that uses the cluster is not divided."""
    items = list(items)
    with_cluster = {item.path for item in items if "cluster" in getattr(item, "fixturenames", ())}

    def part(item: pytest.Item) -> str:
        if item.path.parts[-2:] == TRAINING.parts:
            return "training"
        if item.get_closest_marker("ray") is None:
            return "rest"
        return "cluster" if item.path in with_cluster else "commands"

    return {item: part(item) for item in items}


def keep_few_cases_quick(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what `@pytest.mark.quick(n)` leaves over: all cases but n of a test."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick") is not None:
            cases[item.path, getattr(item, "originalname", item.name)].append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("quick")
        assert mark is not None
        kept = spread(len(found), mark.args[0])
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def spread(num_cases: int, num_quick: int) -> Sequence[int]:
    """Which cases are quick: the first, the last and others evenly between, so that a product of
    parameters is not seen along one of them only."""
    if num_quick >= num_cases:
        return range(num_cases)
    if num_quick == 1:
        return [0]
    return [number * (num_cases - 1) // (num_quick - 1) for number in range(num_quick)]
