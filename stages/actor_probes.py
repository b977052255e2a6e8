"""Calls of a stage's actor that tell about its process, and about those beside it.

Path: stages.actor -> stages.actor_probes
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray

from stages.courier import VIEW_NBYTES
from stages.lanes import ThreadLane
from stages.measure import Output, measure_stage
from stages.node_load import LoadWatch, NodeLoad
from stages.process_state import is_stopped
from stages.stage_process import StageProcess


class ProbeCalls(StageProcess):
    """What work and messages cost here, and who is alive."""

    def measure(
        self, ids: tuple[int, ...], source: Output | None, repeats: int
    ) -> tuple[dict[str, float], Output | None, NodeLoad | None]:
        """CPU seconds of this stage's pieces of work, its output for the next stage, and how busy
        its node was meanwhile."""
        tensor = None if source is None else source.tensor()
        keeper = self.stage.keeper
        watch = LoadWatch()
        costs, output = measure_stage(
            self._spec,
            self._samples,
            ids,
            tensor,
            device=self._device,
            repeats=repeats,
            box_trial_s=None if keeper is None else keeper.trial_s,
        )
        return costs, None if output is None else Output.of(output), watch.load()

    def cpu_beside_lanes(self) -> float:
        """CPU seconds of this process so far that were no work of a lane: what messages cost."""
        return time.process_time() - self._recorder.cpu_total

    def probe(self, target: int, nbytes: int, count: int) -> tuple[float, float]:
        """CPU seconds that one message of `nbytes` costs this process and the one it goes to."""
        peer = self._peers[target]
        payload: Any = bytes(nbytes) if nbytes <= VIEW_NBYTES else np.zeros(nbytes, np.uint8)
        before = ray.get(peer.cpu_seconds.remote())
        start = time.process_time()
        ray.get([peer.discard.remote(payload) for _ in range(count)])
        own = time.process_time() - start
        return own / count, (ray.get(peer.cpu_seconds.remote()) - before) / count

    def cpu_seconds(self) -> float:
        """CPU time of this process so far, all threads."""
        return time.process_time()

    def cpu_by_phase(self) -> dict[str, float]:
        """CPU seconds so far: of the whole process, and of the lanes' work by phase."""
        return {"process": time.process_time(), **self._recorder.cpu_sums}

    def discard(self, frame: Any) -> None:
        """Where probes end."""

    def costs(self) -> dict[str, list[float]]:
        """CPU seconds of the latest single pieces of work, by phase."""
        return {phase: list(seconds) for phase, seconds in self._recorder.cpu.items()}

    def is_at_work(self) -> bool:
        """Whether an order of the driver is being carried out at this moment."""
        return self.has_order

    def at_work_s(self) -> float:
        """How long the longest of the lanes has been at one piece of work, as the stage's own loop
        says: one that hangs says nothing."""
        lanes = (self._lanes.receive, self._lanes.compute, self._lanes.transmit)
        return float(self._do(max, [lane.busy_s for lane in lanes if isinstance(lane, ThreadLane)]))

    def sees_stopped(self, info: Mapping[str, Any]) -> bool:
        """Whether the stage that `setup` returned `info` of was stopped (SIGSTOP), seen from here,
        the same node."""
        return is_stopped(info["pid"])

    def end_process(self, info: Mapping[str, Any]) -> bool:
        """Kill the stage that `setup` returned `info` of, if it is on this node and still there."""
        return end_actor(info)

    def ping(self) -> int:
        """The process id, as a sign of life."""
        return os.getpid()


def end_actor(info: Mapping[str, Any]) -> bool:
    """Kill the actor's process that `info` tells of, if it is on this node and still there."""
    pid: int = info["pid"]
    if info["node"] != ray.get_runtime_context().get_node_id() or pid == os.getpid():
        return False
    try:
        if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            return False
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True
