"""A host of the cluster dies under a run: the run goes on without it, to the same losses.

All processes of the host end at once, as when its power fails: the stage, its black box, its warm
spare and Ray's own. The stage goes to a host that is left, to the spare that waits there, and all
stages to the newest checkpoint.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.rig import Rig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_HOSTS, STEPS, EVERY, FATAL = 3, 40, 4, 10


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(NUM_HOSTS) as rig:
        rig.start_ray()
        rig.set_rate(20e6)
        yield rig


class Run:
    """The command on the head, where the driver is safe."""

    def __init__(self, rig: Rig, name: str) -> None:
        words = [rig.python, "-m", "ray_pipe.run", "--address", "auto", "--codec", "acsgd"]
        words += ["--model", "gpt-nano", "--stages", str(NUM_HOSTS), "--steps", str(STEPS)]
        words += ["--checkpoint-every", str(EVERY), "--set", "faults.spare_after=0s"]
        words += ["--name", name, "--out", str(rig.hosts[0].home)]
        self.path: Path = rig.hosts[0].home / name
        self.process = rig.hosts[0].popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def wait_for_step(self, step: int) -> None:
        metrics, deadline = self.path / "metrics.jsonl", time.monotonic() + 180
        while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") <= step:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the run did not begin"
            time.sleep(0.1)

    def end(self) -> str:
        said: str = self.process.communicate(timeout=300)[0]
        return said

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "results.json").read_text("utf-8"))
        return found

    @property
    def losses(self) -> list[float]:
        return [loss for _, _, loss in self.results["arms"][0]["losses"]]


def test_a_host_that_dies_is_done_without_and_the_losses_are_the_same(rig: Rig) -> None:
    unbroken = Run(rig, "unbroken")
    said = unbroken.end()
    assert unbroken.process.returncode == 0, said
    run = Run(rig, "killed")
    run.wait_for_step(FATAL)

    rig.kill_host(2)
    killed = time.monotonic()
    said = run.end()

    assert "Traceback" not in said
    assert run.process.returncode == 0, said
    assert run.losses == unbroken.losses
    failure = run.results["failures"][0]
    # Silence is all there is to see: Ray calls it a death after its health checks, the driver no
    # answer after its own deadline, whichever is sooner.
    words = {"died": "stage 2 died", "hung": "stage 2 did not answer"}[failure["kind"]]
    assert (failure["stage"], failure["replaced"]) == (2, [2])
    assert failure["source"] == "checkpoint"
    assert (failure["resumed_from"] + 1) % EVERY == 0
    assert failure["spares"] == [2]  # the one that waited on another host
    assert failure["recovery_s"] < 60
    assert re.search(rf"{words} in step \d+", " ".join(said.split()))
    assert time.monotonic() - killed < 150
