"""What every test shares: one torch thread, no clock in property tests, one Ray cluster.

Properties are tried with a quarter of their examples; `--hypothesis-profile thorough` (`make
test-thorough`) tries all. A test of many cases says with `@pytest.mark.quick(n)` how many of them
`make quick` runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

# Before torch and ray are imported. Ray: no token file, no telemetry, every log line once.
os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DEDUP_LOGS="0",
    RAY_IGNORE_UNHANDLED_ERRORS="1",
    RAY_SCHEDULER_EVENTS="0",
    OMP_NUM_THREADS="1",
)

import pytest
import torch
from hypothesis import settings
from properties import ALL_EXAMPLES
from suite_parts import PARTS, check_marks, keep_few_cases_quick, may_hold, parts_of
from worker_forks import forked_workers

torch.set_num_threads(1)
settings.register_profile("ordinary", deadline=None, max_examples=ALL_EXAMPLES // 4)
settings.register_profile("thorough", deadline=None, max_examples=ALL_EXAMPLES)
settings.load_profile("ordinary")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=PARTS,
        help="only one part of the suite: what uses the tests' own Ray cluster, what starts a Ray "
        "of its own, what trains models for a gate, or the rest; `make test` runs three at a time",
    )
    parser.addoption(
        "--cold-workers",
        action="store_true",
        help="let the tests' own Ray start its workers itself, seconds of CPU each; otherwise they "
        "are forks that have torch loaded",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    part = config.getoption("--part")
    is_test = collection_path.match("test_*.py")
    return True if part and is_test and not may_hold(collection_path, part) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_few_cases_quick(items)
    check_marks(items)
    part = config.getoption("--part")
    if part is not None:
        parts = parts_of(items)
        config.hook.pytest_deselected(items=[item for item in items if parts[item] != part])
        items[:] = [item for item in items if parts[item] == part]


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """A Ray cluster of this machine, started once for all tests that need it."""
    import ray

    from ray_pipe.cluster import START_TRIES, start_ray

    options = {
        "address": "local",  # whatever else runs on this machine
        "num_cpus": 8,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "object_store_memory": 200 << 20,
    }
    is_cold = request.config.getoption("--cold-workers")
    with nullcontext() if is_cold else forked_workers():
        start_ray(options, tries=START_TRIES)
        yield
        ray.shutdown()
