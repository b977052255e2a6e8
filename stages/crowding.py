"""How many threads want each core of this machine: how long a process may be silent and be well."""

from __future__ import annotations

import os


def crowding() -> float:
    """Threads that want to run for each core of this machine, over the last minute; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
