"""The driver of a run over several hosts is gone: the next one goes on from the black boxes, each
of which lies on another host. No checkpoint is written before the last step.

Killed: the cluster stays as it was. Anew: Ray was ended and started on all hosts, and they join
only after the new driver has begun. The head: its whole host dies with driver and Ray's books; the
stages were on the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import pytest

from tests.cluster.command import Run, num_alive, wait_for
from tests.cluster.host import Host
from tests.cluster.rig import Rig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_HOSTS, STEPS, FATAL = 3, 30, 10


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(NUM_HOSTS) as rig:
        rig.start_ray()
        rig.set_rate(20e6)
        yield rig


def start(rig: Rig, name: str, *words: str, stages: int = NUM_HOSTS) -> Run:
    return Run(rig, name, "--checkpoint-every", str(STEPS), *words, steps=STEPS, stages=stages)


def train(rig: Rig, name: str, **options: int) -> Run:
    """A run that nothing happens to."""
    run = start(rig, name, **options)
    said = run.end()
    assert run.process.returncode == 0, said
    return run


@pytest.fixture(scope="module")
def unbroken(rig: Rig) -> Run:
    return train(rig, "unbroken")


def boxes(hosts: Sequence[Host]) -> list[list[str]]:
    """The black boxes on each host, as `stage-1`."""
    words = ["find", "/dev/shm", "/tmp", "-type", "d", "-name", "stage-*"]
    found = [host.run(words, check=False).stdout.split() for host in hosts]
    return [sorted(path.rpartition("/")[2] for path in paths) for paths in found]


def weights(run: Run, num_stages: int) -> list[bytes]:
    """Every stage's file of the checkpoint after the last step."""
    folder = run.path / "checkpoints" / "acsgd" / f"checkpoint_{STEPS:06d}"
    return [(folder / f"stage_{i}.safetensors").read_bytes() for i in range(num_stages)]


def stop_ray(rig: Rig, hosts: Sequence[Host]) -> None:
    for host in hosts:
        host.run([rig.python, "-m", "ray.scripts.scripts", "stop", "--force"], check=False)


def leave(rig: Rig, name: str) -> None:
    """A run whose driver is killed after some steps; each host has the box of its own stage."""
    run = start(rig, name)
    run.wait_for_step(FATAL)
    said = run.kill()
    assert "Traceback" not in said
    assert not (run.path / "results.json").exists()
    assert list(run.path.rglob("checkpoint_*")) == []
    assert boxes(rig.hosts) == [[f"stage-{i}"] for i in range(NUM_HOSTS)]


def check(rig: Rig, again: Run, said: str, unbroken: Run, *, stages: int = NUM_HOSTS) -> None:
    """It went on from the boxes, to the same losses, weights and lines, and left nothing."""
    assert again.process.returncode == 0, said
    assert again.losses == unbroken.losses
    assert weights(again, stages) == weights(unbroken, stages)
    lines = (again.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS))
    (failure,) = again.results["failures"]
    assert (failure["kind"], failure["source"]) == ("driver", "box"), said
    assert failure["resumed_from"] >= FATAL - 1
    assert failure["replayed_steps"] <= 1
    assert again.results["resumed"]["acsgd"] == failure["resumed_from"] + 1
    assert "from the black boxes of its stages" in " ".join(said.split())
    assert not (again.path / "unfinished.json").exists()
    assert boxes(rig.hosts) == [[]] * NUM_HOSTS


def test_a_killed_driver_is_resumed_from_the_boxes_of_all_hosts(rig: Rig, unbroken: Run) -> None:
    leave(rig, "killed")

    again = start(rig, "killed", "--resume", "auto")
    said = again.end()

    check(rig, again, said, unbroken)


def test_on_a_cluster_that_was_started_anew_the_hosts_with_boxes_are_waited_for(
    rig: Rig, unbroken: Run
) -> None:
    leave(rig, "anew")
    stop_ray(rig, rig.hosts)
    rig.start_ray([0])

    again = start(rig, "anew", "--resume", "auto")
    rig.start_ray(range(1, NUM_HOSTS))
    said = again.end()

    check(rig, again, said, unbroken)
    assert re.search(rf"waiting for node \S* ?{re.escape(rig.hosts[-1].ip)},", said)
    wait_for("all are there", lambda: num_alive(rig) == NUM_HOSTS)


def test_a_head_that_dies_with_the_driver_costs_no_step_where_it_had_no_stage(rig: Rig) -> None:
    unbroken = train(rig, "two", stages=2)
    run = start(rig, "head", stages=2)
    run.wait_for_step(FATAL)

    rig.kill_host(0)
    run.end()
    assert boxes(rig.hosts[1:]) == [["stage-0"], ["stage-1"]]
    rig.revive_host(0)
    stop_ray(rig, rig.hosts[1:])
    rig.start_ray()
    again = start(rig, "head", "--resume", "auto", stages=2)
    said = again.end()

    check(rig, again, said, unbroken, stages=2)
