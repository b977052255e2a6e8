"""What the machine says about a process. No Ray, no torch: a bare worker loads it at once."""

from __future__ import annotations

from pathlib import Path

STOPPED = "T"
"""SIGSTOP, or a debugger that wants the process to wait."""


def is_stopped(pid: int) -> bool:
    """Whether the process of this machine was stopped; False if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == STOPPED
