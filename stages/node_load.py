"""How many of a machine's cores are busy, and how many of them with this process.

Whoever predicts how stages share the cores of a node must know what else runs there: Ray's own
daemons, other users. Read while the stages measure their costs, so it takes no time of its own.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)
"""Places of idle and iowait among the times of a line of `STAT`."""

NUM_TIMES = 8
"""Times of a line that count; those of guests are part of the first two."""


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """Cores that were busy on average."""

    all: float
    """With anything on this machine."""

    own: float
    """With this process."""


class LoadWatch:
    """From its making on."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._busy_s = busy_s(stat)
        self._own_s = time.process_time()
        self._start_s = time.monotonic()

    def load(self) -> NodeLoad | None:
        """Since then; None where the machine does not say."""
        now_s = busy_s(self._stat)
        took_s = time.monotonic() - self._start_s
        if now_s is None or self._busy_s is None or took_s <= 0:
            return None
        own = (time.process_time() - self._own_s) / took_s
        return NodeLoad((now_s - self._busy_s) / took_s, own)


def busy_s(stat: Path = STAT) -> float | None:
    """CPU seconds that this machine has worked since it was started, stolen ones included.

    None where that is not to be read, or tells of more cores than this process may use: then
    it is also about other people's containers.
    """
    if len(os.sched_getaffinity(0)) != os.cpu_count() or _has_quota():
        return None
    try:
        with stat.open() as lines:
            name, *times = lines.readline().split()
        ticks = sum(int(t) for i, t in enumerate(times[:NUM_TIMES]) if i not in IDLE)
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if name == "cpu" else None


def _has_quota(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> bool:
    """Whether this process's container may use a part of the cores only."""
    try:
        return not limit.read_text().startswith("max")
    except OSError:
        return False
