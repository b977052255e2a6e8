"""The command on a host of the rig, watched and killed from outside; what a test waits for."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.rig import Rig

PROCESSES = ["ps", "-e", "-o", "args="]
WARM = re.compile(r"^ray::SpareStage$", re.MULTILINE)
"""A spare that has loaded; before, its title says `warm_up`."""

DRIVER = re.compile(r"\s*\d+ \S*python\S* -m ray_pipe\.run ")


class Run:
    """`python -m ray_pipe.run` on a host of the rig, one stage on each host, nothing emulated."""

    def __init__(
        self,
        rig: Rig,
        name: str,
        *words: str,
        steps: int,
        stages: int | None = None,
        host: int = 0,
    ) -> None:
        self.host = rig.hosts[host]
        stages = len(rig.hosts) if stages is None else stages
        command = [rig.python, "-m", "ray_pipe.run", "--address", "auto", "--codec", "acsgd"]
        command += ["--model", "gpt-nano", "--stages", str(stages), "--steps", str(steps)]
        command += ["--name", name, "--out", str(self.host.home), *words]
        self.path: Path = self.host.home / name
        self.process = self.host.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    @property
    def num_steps(self) -> int:
        """That were done so far."""
        metrics = self.path / "metrics.jsonl"
        return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 180
        while self.num_steps <= step:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the run did not begin"
            time.sleep(0.1)

    def wait_for_spares(self, rig: Rig) -> None:
        """Until one is warm on every host: one that loads is taken too, but is not called warm."""

        def are_warm() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return all(WARM.search(host.run(PROCESSES).stdout) for host in rig.hosts)

        wait_for("spares are warm", are_warm)

    def kill(self) -> str:
        """kill -9 of the driver alone; returns what it had said."""
        listed = self.host.run(["ps", "-e", "-o", "pid=,args="]).stdout.splitlines()
        (pid,) = [line.split()[0] for line in listed if DRIVER.match(line)]
        self.host.run(["kill", "-9", pid])
        return self.end()

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


def num_alive(rig: Rig) -> int:
    script = "import ray; ray.init('auto', log_to_driver=False); "
    script += "print('alive:', sum(node['Alive'] for node in ray.nodes()))"
    said = rig.hosts[0].run([rig.python, "-c", script]).stdout
    found = re.search(r"alive: (\d+)", said)  # Ray may tell of a death before or after it
    assert found is not None, said
    return int(found[1])


def wait_for(what: str, ready: Callable[[], bool], *, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.5)
