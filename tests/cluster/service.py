"""A driver on a host of the rig that trains one arm after another, as it is asked from outside.

`Service(rig)` starts it; `train` asks. Between two questions the rig may change its links: the same
actors then work over the kernel's rate or over our own emulation, and nothing else differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from tests.cluster.rig import GOODPUT, Rig

COLD_STEPS = 2


class Service:
    """Trains on the rig's cluster, one stage per host."""

    def __init__(self, rig: Rig, num_stages: int) -> None:
        self._rig = rig
        words = [rig.python, "-m", "tests.cluster.service", str(num_stages)]
        self._log = rig.hosts[0].folder / "service.log"  # a full pipe would stop it
        with open(self._log, "wb") as log:
            self._process = rig.hosts[0].popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self.placed: dict[str, Any] = self._answer()

    def train(
        self, settings: Mapping[str, Any], *, rate_bps: float, kernel: bool
    ) -> dict[str, Any]:
        """An arm over links of `rate_bps`: the kernel's, or as much goodput by our emulation."""
        goodput_bps = GOODPUT * rate_bps
        self._rig.set_rate(rate_bps if kernel else None)
        link = "unlimited" if kernel else goodput_bps
        question = {
            "settings": {**settings, "network.bandwidth_bps": link},
            "real_bps": goodput_bps if kernel else None,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        arm = self._answer()
        times = [after[0] - before[0] for before, after in pairwise(arm["losses"])]
        arm["step_times_s"] = times
        arm["warm_step_s"] = median(times[COLD_STEPS - 1 :])
        arm["kernel"] = kernel
        return arm

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            said = self._log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the driver ended: {line}{said[-4000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Let the driver end; its actors go with it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def main() -> None:
    """Inside: answer each line of questions by a line."""
    from benchmarks.bench import train_arm
    from ray_pipe.cluster import connect
    from ray_pipe.metrics import to_json
    from ray_pipe.stage_actors import StageActors

    answers, sys.stdout = sys.stdout, sys.stderr
    with connect("auto"), StageActors(int(sys.argv[1])) as actors:
        placed = {"nodes": [node.ip for node in actors.placement.nodes]}
        print(to_json(placed), file=answers, flush=True)
        for line in sys.stdin:
            question = json.loads(line)
            arm = train_arm(actors, question["settings"], real_bps=question["real_bps"])
            print(to_json(arm), file=answers, flush=True)


if __name__ == "__main__":
    main()
