"""What a click run needs that only its data can tell, refused before any shard is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from netsim.units import show_size
from ray_pipe.config import RunConfig
from ray_pipe.ctr_workload import ClickTask, order_of
from ray_pipe.errors import ConfigError
from stages.embedding.permits import MAX_AUTO_TAU
from stages.embedding.row_table import MARKER_BYTES
from stages.embedding.shard import Shard
from stages.embedding.shard_files import ShardFileError, check_file
from stages.embedding.shard_folders import saved_shards

ROW_OVERHEAD = 64
"""Bytes of a row besides its numbers: header, index, recency."""

TABLE_OVERHEAD = 96 << 10
"""Bytes of a table on a shard besides its rows: recency queue, first index, a slab."""

STATE = {"adagrad": 1.0, "row-adagrad": 0.0, "sgd": 0.0, "adam": 2.0}
"""Numbers of optimizer state for each number of a row."""

SLACK = 1.5
"""A store that is nearly full of rows of steps under way drops them before their gradients come."""


def check_capacity(config: RunConfig, task: ClickTask) -> None:
    """Refuse a capacity that cannot even hold the rows of the steps that are under way."""
    embedding = config.embedding
    num_rows = _num_rows(config, task, range(1))
    row_nbytes = round(4 * embedding.dim * (1 + STATE[embedding.optimizer])) + ROW_OVERHEAD
    tau = MAX_AUTO_TAU if embedding.tau is None else embedding.tau
    if embedding.spill is not None:
        need = 2 * round(SLACK * num_rows * row_nbytes)
        need += len(task.tables) * embedding.shards * TABLE_OVERHEAD
        if embedding.capacity < need:
            raise ConfigError(
                f"--capacity {show_size(embedding.capacity)} is less than the rows of one step, "
                f"which must be in memory together: {config.pipeline.samples_per_step} samples "
                f"touch {num_rows:,} rows of about {row_nbytes} bytes, with new versions and the "
                f"tables' own {show_size(need, digits=3)}; raise --capacity, or lower --batch-size."
            )
        _check_markers(config, task, need, row_nbytes)
        return
    need = round(SLACK * (tau + 1) * num_rows * row_nbytes)
    if embedding.capacity >= need:
        return
    raise ConfigError(
        f"--capacity {show_size(embedding.capacity)} is less than the rows under way: a step of "
        f"{config.pipeline.samples_per_step} samples touches {num_rows:,} rows of about "
        f"{row_nbytes} bytes, and up to {tau + 1} steps are under way, which takes "
        f"{show_size(need, digits=3)}; raise --capacity, lower --staleness or --batch-size, or "
        "give a folder for the rest with --spill."
    )


def _num_rows(config: RunConfig, task: ClickTask, steps: range) -> int:
    """Rows of sharded tables that these steps use."""
    order, samples = order_of(config, task.workload), task.workload.samples
    ids = [sample for step in steps for part in order.at(step) for sample in part]
    bags: dict[str, list[Any]] = {}
    clicks: Any = samples.clicks(ids)  # type: ignore[attr-defined]
    for table, bag in zip(task.features, clicks.bags, strict=True):
        bags.setdefault(table, []).append(bag.ids)
    return sum(len(np.unique(np.concatenate(parts))) for parts in bags.values())


def _check_markers(config: RunConfig, task: ClickTask, need: int, row_nbytes: int) -> None:
    """Refuse a capacity that the markers of all rows on disk would fill."""
    capacity = config.embedding.capacity
    num_steps = order_of(config, task.workload).steps_per_epoch
    if config.steps is not None:
        num_steps = min(num_steps, config.steps)
    num_rows = _num_rows(config, task, range(num_steps))
    least = num_rows * MARKER_BYTES + need
    if num_rows * row_nbytes <= capacity or least <= capacity:
        return
    raise ConfigError(
        f"--capacity {show_size(capacity)} is less than --spill needs in memory: the run uses "
        f"{num_rows:,} rows, and each that is on disk keeps about {MARKER_BYTES} bytes here, which "
        f"with the rows of one step is {show_size(least, digits=3)}; raise --capacity, or leave "
        "out --spill, which drops the rows that were used longest ago."
    )


def check_prune(config: RunConfig, task: ClickTask) -> None:
    """Refuse a ratio that pruning cannot reach, before any shard is started: rows also have bytes
    that are no columns."""
    if not config.embedding.prune:
        return
    try:
        Shard(task.tables, index=0, tau=0, capacity="8MiB", slab="16KiB", pages="4k").close()
    except ValueError as error:
        raise ConfigError(
            f"--prune {config.embedding.prune:g} with rows of {config.embedding.dim} "
            f"(embedding.dim): {error}"
        ) from None


def check_rows(config: RunConfig, task: ClickTask) -> None:
    """Refuse a checkpoint of rows that is damaged or of other tables, before any is started."""
    if config.embedding.rows is None:
        return
    shard = Shard(task.tables, index=0, tau=0, capacity="8MiB", slab="16KiB", pages="4k")
    try:
        for one in saved_shards(Path(config.embedding.rows)):
            check_file(shard, one.read())
    except ShardFileError as error:
        raise ConfigError(f"embedding.rows={config.embedding.rows}: {error}.") from None
    finally:
        shard.close()
