"""How the suite is cut: into parts for `make test`, and into what is quick.

Parts are found by looking at the tests, so a new file is in exactly one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

PARTS = (
    *("rest", "cluster", "commands", "cluster-2", "commands-2"),
    *("rest-2", "training"),
)
"""In the order in which they are begun: what computes and what waits side by side, and last what
uses both cores and minds no delay.

cluster   files that use the Ray cluster of the tests: one process, one cluster
commands  other tests with Ray: programs and clusters of their own, all in other processes
training  the quality gates: two processes that train
rest      everything else, without Ray
"""

SECOND = {
    "cluster": {"test_ctr_ray", "test_rec_pipeline", "test_killed_shards", "test_replicas"},
    "commands": {"test_monitoring"},
    "rest": {
        *("test_row_stress", "test_sync_means", "test_sync_order", "test_sync_contract"),
        *("test_compare_sync", "test_fleet", "test_hop", "test_ripples", "test_seat", "test_trial"),
        *("test_ad_psgd", "test_all_reduce"),
    },
}
"""Files that make up the second half of a part, which runs by itself: about half of its time."""

TRAINING = Path("e2e") / "test_quality.py"
RAY_MARK = "mark.ray"


def parts_of(items: Iterable[pytest.Item]) -> dict[pytest.Item, str]:
    """The part of each test. A file that uses the cluster is not divided."""
    items = list(items)
    with_cluster = {item.path for item in items if "cluster" in getattr(item, "fixturenames", ())}

    def kind(item: pytest.Item) -> str:
        if is_training(item.path):
            return "training"
        if item.get_closest_marker("ray") is None:
            return "rest"
        return "cluster" if item.path in with_cluster else "commands"

    def part(item: pytest.Item) -> str:
        return f"{kind(item)}-2" if is_second(item.path, kind(item)) else kind(item)

    return {item: part(item) for item in items}


def is_second(path: Path, kind: str) -> bool:
    return path.stem in SECOND.get(kind, ())


def is_training(path: Path) -> bool:
    return path.parts[-2:] == TRAINING.parts


def may_hold(path: Path, part: str) -> bool:
    """Whether a file is to be read for a part at all; reading all of them takes seconds."""
    if part == "training":
        return is_training(path)
    kind = part.removesuffix("-2")
    if is_second(path, kind) != (part != kind):
        return False
    return kind == "rest" or RAY_MARK in path.read_text(encoding="utf-8")


def check_marks(items: Iterable[pytest.Item]) -> None:
    """Of all tests: none would be in no part because `may_hold` does not see what it is."""
    for item in items:
        if item.get_closest_marker("ray") is not None and RAY_MARK not in item.path.read_text():
            raise pytest.UsageError(f"{item.nodeid} is for Ray, but its file has no {RAY_MARK}")


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
