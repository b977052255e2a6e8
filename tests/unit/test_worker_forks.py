"""Workers that are forks: a process like the one that Ray would have started, but for its start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from worker_forks import SHIM, forks
from worker_shim import FORKS

LOADED = "this"  # a module of Python's own that nobody else loads
TELLS = f"""
import json, os, sys
said = {{
    "words": sys.argv[1:], "cwd": os.getcwd(), "mark": os.environ.get("MARK"), "pid": os.getpid(),
    "parent": os.getppid(), "loaded": "{LOADED}" in sys.modules, "name": __name__,
    "first": sys.path[0], "group": os.getpgid(0),
}}
print(json.dumps(said), flush=True)
if "wait" in sys.argv:
    import time
    time.sleep(100)
sys.exit(7)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A worker that tells what it is."""
    path = tmp_path / "worker.py"
    path.write_text(TELLS)
    return path


def start(worker: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    """As a raylet does it."""
    return subprocess.Popen(
        [sys.executable, str(SHIM), str(worker), *words],
        cwd=worker.parent,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        text=True,
    )


def said_by(shim: subprocess.Popen[str]) -> dict[str, Any]:
    assert shim.stdout is not None
    said: dict[str, Any] = json.loads(shim.stdout.readline())
    return said


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_is_a_fork_with_the_words_the_environment_and_the_streams_of_its_shim(
    worker: Path,
) -> None:
    outer = os.environ.get(FORKS)  # of the tests' own cluster, if there is one
    with forks([LOADED]) as pid, start(worker, "a b", "--language=PYTHON", MARK="ours") as shim:
        said = said_by(shim)

    assert (said["parent"], said["loaded"]) == (pid, True)
    assert (said["words"], said["mark"], said["cwd"]) == (["a b"], "ours", str(worker.parent))
    assert (said["name"], said["first"]) == ("__main__", str(worker.parent))
    assert said["group"] == said["pid"]  # a raylet kills it
    assert os.environ.get(FORKS) == outer


def test_whoever_started_the_shim_sees_it_end_with_the_worker(worker: Path) -> None:
    with forks([]), start(worker, "wait") as shim:
        said = said_by(shim)
        assert shim.poll() is None
        os.kill(said["pid"], signal.SIGKILL)

        assert shim.wait(30) == 0
        assert not is_there(said["pid"])  # nor is it left for anyone to reap


def test_no_worker_outlives_the_process_that_forks(worker: Path) -> None:
    with forks([]):
        shims = [start(worker, "wait") for _ in range(2)]
        pids = [said_by(shim)["pid"] for shim in shims]
        assert all(is_there(pid) for pid in pids)

    for shim in shims:
        with shim:
            assert shim.wait(30) == 0
    until = time.monotonic() + 30
    while any(is_there(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(is_there(pid) for pid in pids)


def test_where_nobody_forks_the_shim_becomes_the_worker(worker: Path, tmp_path: Path) -> None:
    with start(worker, "x", "--language=PYTHON", **{FORKS: str(tmp_path / "nobody")}) as shim:
        said = said_by(shim)

        assert shim.wait(30) == 7
    assert (said["pid"], said["words"], said["loaded"]) == (shim.pid, ["x"], False)


def test_a_worker_with_an_environment_of_its_own_is_set_up_by_ray(worker: Path) -> None:
    (worker.parent / "setup_worker.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    asked = "--serialized-runtime-env-context={}"
    with forks([]), start(worker, asked) as shim:
        assert shim.stdout is not None
        assert shim.stdout.readline().strip() == str([str(worker), asked])
        assert shim.wait(30) == 3


def test_a_module_that_begins_a_thread_is_not_forked(
    worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fork has only the thread that forked: whoever waits for another would wait for ever."""
    code = "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True)"
    (tmp_path / "threaded.py").write_text(f"{code}.start()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with forks(["threaded"]), start(worker) as shim:
        said = said_by(shim)

    assert said["pid"] == shim.pid
    assert "2 threads are running" in capfd.readouterr().err


@pytest.mark.ray
@pytest.mark.slow
def test_workers_of_the_tests_cluster_are_forks_that_ray_titles_and_ends(
    cluster: None, request: pytest.FixtureRequest
) -> None:
    import ray

    if request.config.getoption("--cold-workers"):
        pytest.skip("Ray was to start its workers itself")

    @ray.remote(num_cpus=0)
    class Told:
        def about(self) -> tuple[int, int, bool]:
            return os.getpid(), os.getppid(), "torch" in sys.modules

    actor = Told.remote()
    pid, parent, has_torch = ray.get(actor.about.remote())

    assert has_torch
    assert b"worker_forks.py" in Path(f"/proc/{parent}/cmdline").read_bytes()
    assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Told")
    ray.kill(actor)
    until = time.monotonic() + 30
    while is_there(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_there(pid)
