"""What every test shares: one torch thread, no clock in property tests, one Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator

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

torch.set_num_threads(1)
settings.register_profile("ray_pipe", deadline=None)
settings.load_profile("ray_pipe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--half",
        choices=["ray", "plain"],
        help="only what needs Ray (it runs in order), or only the rest: `make test` runs both "
        "halves at the same time",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    half = config.getoption("--half")
    if half is None:
        return
    with_ray = [item for item in items if item.get_closest_marker("ray") is not None]
    rest = [item for item in items if item.get_closest_marker("ray") is None]
    items[:], others = (with_ray, rest) if half == "ray" else (rest, with_ray)
    config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
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
    start_ray(options, tries=START_TRIES)
    yield
    ray.shutdown()
