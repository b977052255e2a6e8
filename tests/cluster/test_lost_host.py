"""A host of the cluster is lost under a run: the run goes on without it, to the same losses.

Killed: all processes of the host end at once, as when its power fails: the stage, its black box,
its warm spare and Ray's own. The stage goes to a host that is left, to the spare that waits there,
and all stages to the newest checkpoint. Cut off: the same, but its processes live on, and come back
when the cable is mended.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest

from tests.cluster.command import PROCESSES, Run, num_alive, wait_for
from tests.cluster.rig import Rig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_HOSTS, STEPS, EVERY, FATAL = 3, 60, 4, 10
STAGE = re.compile(r"^ray::(PipelineStage|SpareStage|acsgd step)", re.MULTILINE)
"""How Ray titles the processes of stages."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(NUM_HOSTS) as rig:
        rig.start_ray()
        rig.set_rate(20e6)
        yield rig


@pytest.fixture(scope="module")
def unbroken(rig: Rig) -> list[float]:
    run = start(rig, "unbroken")
    said = run.end()
    assert run.process.returncode == 0, said
    return run.losses


def start(rig: Rig, name: str) -> Run:
    """On the head, where the driver is safe."""
    words = ["--checkpoint-every", str(EVERY), "--set", "faults.spare_after=0s"]
    return Run(rig, name, *words, steps=STEPS)


def come_back(rig: Rig, lost: int) -> None:
    """All hosts take part again, for the next test."""
    ray = [rig.python, "-m", "ray.scripts.scripts"]
    rig.hosts[lost].run([*ray, "stop", "--force"], check=False)
    wait_for("Ray sees the loss", lambda: num_alive(rig) < NUM_HOSTS)
    rig.start_ray([lost])
    wait_for("the host is back", lambda: num_alive(rig) == NUM_HOSTS)


def check_failure(run: Run, said: str, lost: int) -> None:
    """The stage of the lost host was missed, and went to the spare of another one."""
    assert "Traceback" not in said
    assert run.process.returncode == 0, said
    failure = run.results["failures"][0]
    # Silence is all there is to see: Ray calls it a death after its health checks, the driver no
    # answer after its own deadline, whichever is sooner.
    words = {"died": f"stage {lost} died", "hung": f"stage {lost} did not answer"}[failure["kind"]]
    assert (failure["stage"], failure["replaced"]) == (lost, [lost])
    assert failure["source"] == "checkpoint"
    assert (failure["resumed_from"] + 1) % EVERY == 0
    assert failure["spares"] == [lost]  # the one that waited on another host
    # Three hosts and their Ray share this machine: 138 s were seen with another suite beside them.
    assert failure["recovery_s"] < 60 * max(1.0, os.getloadavg()[0])
    assert re.search(rf"{words} in step \d+", " ".join(said.split()))


@pytest.mark.parametrize("lost", [1, 2], ids=["in the middle", "at the end"])
def test_a_host_that_dies_is_done_without_and_the_losses_are_the_same(
    rig: Rig, unbroken: list[float], lost: int
) -> None:
    run = start(rig, f"killed-{lost}")
    run.wait_for_step(FATAL)
    run.wait_for_spares(rig)

    rig.kill_host(lost)
    killed = time.monotonic()
    said = run.end()
    took_s = time.monotonic() - killed
    rig.revive_host(lost)
    come_back(rig, lost)

    check_failure(run, said, lost)
    assert run.losses == unbroken
    assert took_s < 150


def test_a_stage_that_was_cut_off_and_comes_back_does_no_harm(
    rig: Rig, unbroken: list[float]
) -> None:
    lost = 1
    run = start(rig, "cut")
    run.wait_for_step(FATAL)
    run.wait_for_spares(rig)

    begun = run.num_steps
    rig.cut(lost)
    try:
        run.wait_for_step(begun + 6)  # more than was under way: the run goes on without it
    finally:
        rig.mend(lost)
    said = run.end()

    check_failure(run, said, lost)
    assert run.losses == unbroken
    assert len(run.results["failures"]) == 1, "its return was another failure"

    def is_gone() -> bool:
        return not STAGE.search(rig.hosts[lost].run(PROCESSES).stdout)

    wait_for("the stage that was cut off has ended", is_gone)
