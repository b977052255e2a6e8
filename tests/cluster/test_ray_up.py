"""The shipped cluster.yaml, used as a user would: `ray up`, `exec`, `submit`, `job submit`, `down`.

From a laptop over ssh to three nodes that know nothing of ray_pipe before, tokens on.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.host import REPOSITORY
from tests.cluster.login import USER, open_doors, ray_command
from tests.cluster.packages import why_no_ssh
from tests.cluster.rig import Rig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_NODES = 3
LAPTOP = {"RAY_AUTH_MODE": "token"}
JOB = "python -m ray_pipe.run --address auto --model gpt-nano --stages 3 --steps 3 --compare acsgd"
NODES = "import ray; ray.init('auto', log_to_driver=False); " + (
    "print('alive:', sum(node['Alive'] for node in ray.nodes()))"
)


class Laptop:
    """Ray's own commands, as a user gives them."""

    def __init__(self, rig: Rig, config: Path) -> None:
        assert rig.laptop is not None
        self.rig, self.host, self.config = rig, rig.laptop, str(config)

    def ray(self, *words: str, timeout_s: float = 400.0, **options: Any) -> str:
        """What `ray ...` said; raises with it where it fails."""
        env = LAPTOP | options.pop("env", {})
        done = self.host.run(
            ray_command(*words), env=env, user=USER, timeout_s=timeout_s, **options
        )
        return done.stdout + done.stderr

    def exec(self, command: str) -> str:
        return self.ray("exec", self.config, command)

    def num_alive(self) -> int:
        said = self.exec(f"python -c {shlex.quote(NODES)}")
        found = re.search(r"^alive: (\d+)", said, re.MULTILINE)
        assert found is not None, said
        return int(found[1])


def shipped_with(rig: Rig) -> dict[str, Any]:
    """cluster.yaml with the lines marked CHANGE changed, and no others."""
    config = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text(encoding="utf-8"))
    head, *workers = (host.ip for host in rig.hosts)
    config["provider"] = {"type": "local", "head_ip": head, "worker_ips": workers}
    config["auth"]["ssh_user"] = USER
    return config


def wait_for(what: str, ready: Callable[[], bool], *, timeout_s: float) -> float:
    start = time.monotonic()
    while not ready():
        assert time.monotonic() - start < timeout_s, f"{what} took more than {timeout_s} s"
        time.sleep(2.0)
    return time.monotonic() - start


@pytest.fixture(scope="module")
def laptop() -> Iterator[Laptop]:
    reason = why_no_ssh()
    if reason is not None:
        pytest.skip(f"ray up is not tried: {reason}")
    with Rig(NUM_NODES, laptop=True) as rig:
        open_doors(rig)
        assert rig.laptop is not None
        config = rig.laptop.home / "cluster.yaml"
        config.write_text(yaml.safe_dump(shipped_with(rig)), encoding="utf-8")
        laptop = Laptop(rig, config)
        laptop.ray("get-auth-token", "--generate")
        laptop.ray("up", "-y", laptop.config)
        wait_for("joining", lambda: laptop.num_alive() == NUM_NODES, timeout_s=400.0)
        yield laptop


def test_ray_up_brings_every_node_and_ray_exec_runs_one_stage_on_each(laptop: Laptop) -> None:
    said = laptop.exec(f"{JOB} --json --out ~/runs")

    assert f"the stages are on {NUM_NODES} nodes and no --bandwidth was given" in said
    line = next(line for line in said.splitlines() if line.startswith('{"schema"'))
    results = json.loads(line)
    assert results["native"] is True
    assert results["config"]["network"]["bandwidth_bps"] == "unlimited"


def test_ray_submit_runs_a_script_of_ones_own(laptop: Laptop) -> None:
    said = laptop.ray("submit", laptop.config, "examples/own_model.py", "--address", "auto")

    assert re.search(r"^loss \d+\.\d+, report in ", said, re.MULTILINE)


@contextmanager
def tunnel(laptop: Laptop) -> Iterator[None]:
    """`ray dashboard` brings the head's dashboard to the laptop, through ssh."""
    words = ray_command("dashboard", laptop.config)
    process = laptop.host.popen(
        words, user=USER, env=LAPTOP, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    probe = "import socket; socket.create_connection(('127.0.0.1', 8265), 2)"
    try:
        wait_for(
            "the tunnel",
            lambda: laptop.host.run(["python3", "-c", probe], check=False).returncode == 0,
            timeout_s=60.0,
        )
        yield
    finally:
        process.kill()


def test_ray_job_submit_runs_the_same_job_and_refuses_strangers(laptop: Laptop) -> None:
    job = ("job", "submit", "--address", "http://127.0.0.1:8265", "--", *shlex.split(JOB))
    with tunnel(laptop):
        said = laptop.ray(*job)
        stranger = {"RAY_AUTH_TOKEN": "0" * 64}
        with pytest.raises(RuntimeError, match=r"(?i)authenti|token"):
            laptop.ray(*job, env=stranger)

    assert "succeeded" in said


def test_a_second_ray_up_changes_nothing_and_leaves_a_working_cluster(laptop: Laptop) -> None:
    laptop.ray("up", "-y", laptop.config)

    wait_for("joining", lambda: laptop.num_alive() == NUM_NODES, timeout_s=300.0)
    assert "installed on node0" in laptop.exec("bash ~/ray_pipe_src/tools/install_on_node.sh")


def test_ray_down_ends_the_head(laptop: Laptop) -> None:
    laptop.ray("down", "-y", laptop.config)

    processes = laptop.rig.hosts[0].run(["ps", "-e", "-o", "args="]).stdout
    assert "gcs_server" not in processes
    assert "raylet" not in processes
