"""How much memory and disk the rows of AC-SGD need on each node, and whether it is there.

Each end of a link remembers one row for every sample. A stage also keeps its rows a second time, in
the log of its black box, which lies in shared memory if there is plenty: that is memory as well.
Free of torch, as `ray_pipe.checks` is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_pipe.codec_names import has_memory
from ray_pipe.errors import ConfigError

if TYPE_CHECKING:
    from ray_pipe.config import RunConfig

WORTHWHILE_HITS = 0.5
"""Below this share of visits that find their row, a memory cap is warned of."""

ROW_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4, "int2": 2}

ROWS_IN_LOG = 3
"""A black box's log of rows may be so many times its rows; as `stages.box_places` has it."""


def remembers(config: RunConfig) -> bool:
    """Whether any arm keeps rows."""
    return any(has_memory(arm.name) for arm in config.arms) and config.pipeline.stages > 1


def memory_need(config: RunConfig, num_samples: int, *, row_elements: int | None = None) -> int:
    """Bytes that all ends of all links remember together: 2 (K-1) N S H bytes, capped."""
    ends = 2 * (config.pipeline.stages - 1)
    return ends * end_need(config, num_samples, row_elements=row_elements)


def end_need(config: RunConfig, num_samples: int, *, row_elements: int | None = None) -> int:
    """Bytes that one end of one link remembers. `row_elements` is for a user's own model: values
    per sample at a cut."""
    if not remembers(config):
        return 0
    need = num_samples * row_nbytes(config, row_elements)
    return need if config.codec.memory_cap is None else min(need, config.codec.memory_cap)


def row_nbytes(config: RunConfig, row_elements: int | None) -> int:
    """Of one sample at one end of one link."""
    size = config.model.size
    elements = size.context * size.width if row_elements is None else row_elements
    bits = ROW_BITS[config.codec.rows]
    row = -(-elements * bits // 8)
    if bits < 16:
        row += 2 * size.width  # a bf16 scale for each sample and channel
    return row


def expected_hits(share: float) -> float:
    """Share of visits that find their row where memory holds this share of all rows.

    A visit is found if fewer samples than memory holds came since the sample's last one. With a
    new shuffle in each epoch, u and v the places of the two visits in theirs, these are 1 - u(1-v)
    of all, and P(u(1-v) > a) = 1 - a + a ln a with a = 1 - share.
    """
    lost = 1.0 - share
    if lost <= 0.0:
        return 1.0
    return 0.0 if share <= 0.0 else max(0.0, share + lost * math.log(lost))


def check_memory_cap(
    config: RunConfig, num_samples: int, *, row_elements: int | None = None
) -> list[str]:
    """Rows that are pushed out before their sample comes again gain nothing."""
    from netsim.units import show_size

    cap = config.codec.memory_cap
    if cap is None or not remembers(config):
        return []
    row = row_nbytes(config, row_elements)
    fits = cap // row
    hits = expected_hits(fits / num_samples)
    if hits >= WORTHWHILE_HITS:
        return []
    step = config.pipeline.samples_per_step
    less = "not even those of one step" if fits < min(step, num_samples) else "the last ones"
    return [
        f"codec.memory_cap={show_size(cap)} holds {fits} of {num_samples} samples "
        f"({show_size(row, digits=3)} each, one step has {step}): {less}, so that about "
        f"{100 * hits:.0f} % of the visits find their row and all others are sent as first visits "
        f"of {config.codec.first_visit_bits} bits; "
        f"{show_size(num_samples * row, digits=3)} hold all, or keep them on disk with "
        "codec.spill_dir."
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a node has for the stages that are on it, as they found it."""

    node: str
    """Its address."""

    stages: tuple[int, ...]
    """Places in the pipeline; of several replicas one may be here more than once."""

    memory_nbytes: int
    spill_nbytes: int | None = None
    """Free where rows are spilled to."""

    log_in: str = ""
    """Where the logs of the black boxes go: `memory`, `spill` (the same folder), or elsewhere."""


def rooms_of(
    infos: Sequence[Mapping[str, Any]], *, num_stages: int, addresses: Mapping[str, str]
) -> list[Room]:
    """The nodes of a run, from what each stage (of each replica) said of itself when set up."""
    homes: dict[str, list[int]] = {}
    for index, info in enumerate(infos):
        homes.setdefault(str(info["node"]), []).append(index)
    rooms = []
    for node, here in homes.items():
        found = [infos[index]["room"] for index in here]
        spills = [room["spill_nbytes"] for room in found if room["spill_nbytes"] is not None]
        logs = [room["log_in"] for room in found]
        rooms.append(
            Room(
                node=addresses.get(node, node[:8]),
                stages=tuple(index % num_stages for index in here),
                memory_nbytes=min(room["memory_nbytes"] for room in found),
                spill_nbytes=min(spills, default=None),
                log_in=next((place for place in ("memory", "spill") if place in logs), ""),
            )
        )
    return rooms


def check_memory(
    config: RunConfig,
    num_samples: int,
    rooms: Sequence[Room],
    *,
    row_elements: int | None = None,
) -> None:
    """What AC-SGD remembers fits into the memory of each node, or onto its disk where it is
    spilled; raises `ConfigError` with the first node where it does not."""
    end = end_need(config, num_samples, row_elements=row_elements)
    for room in rooms if end else ():
        last = config.pipeline.stages - 1
        ends = sum((stage > 0) + (stage < last) for stage in room.stages)
        rows = ends * end
        is_spilled = config.codec.spill_dir is not None and room.spill_nbytes is not None
        in_memory = ends * min(end, config.codec.spill_ram) if is_spilled else rows
        on_disk = rows if is_spilled else 0
        log = ROWS_IN_LOG * rows
        if room.log_in == "memory":
            in_memory += log
        elif room.log_in == "spill":
            on_disk += log
        for need, free, place in (
            (in_memory, room.memory_nbytes, "of memory are available"),
            (on_disk, room.spill_nbytes or 0, f"are free in {config.codec.spill_dir}"),
        ):
            if need > free:
                _refuse(config, num_samples, room, ends, need, free, place)


def _refuse(
    config: RunConfig, num_samples: int, room: Room, ends: int, need: int, free: int, place: str
) -> None:
    from netsim.units import show_size

    copies = 1 + (ROWS_IN_LOG if room.log_in in ("memory", "spill") else 0)
    cap = free // 2 // (ends * copies)  # leaves half for everything else
    ways = [f"--set codec.memory_cap={cap // 10**6}MB"] if cap >= 10**6 else []
    if config.codec.rows in ("fp32", "bf16"):
        ways.append("--set codec.rows=int8")
    if config.codec.spill_dir is None:
        ways.append("--set codec.spill_dir=FOLDER")
    if room.log_in == "memory":
        ways.append("--set faults.black_box=FOLDER on a disk")
    who = f"stage{'s' if len(room.stages) > 1 else ''} {', '.join(map(str, room.stages))}"
    logs = ", with the logs of their black boxes" if copies > 1 else ""
    raise ConfigError(
        f"node {room.node} ({who}): acsgd remembers {num_samples} samples at {ends} "
        f"end{'s' if ends > 1 else ''} of links there and needs {show_size(need, digits=3)}{logs}, "
        f"but only {show_size(free, digits=3)} {place}; lower it with "
        f"{', '.join(ways)}{', or' if ways else ''} --codec directq, which remembers nothing."
    )
