"""The command as a person runs it: a process of its own, with a Ray of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stages.crowding import crowding

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0
"""For a machine that many others use; only a run that hangs takes so long."""

SMALL = [
    "--model", "gpt-nano", "--stages", "2", "--micro-batches", "2", "--micro-batch-size", "2",
    "--set", "data.num_samples=8",
]  # fmt: skip
ARM_KEYS = {
    "name", "final_loss", "loss_gap", "tokens_per_s", "step_s", "predicted_step_s",
    "bytes_per_step", "bytes_total", "speedup", "time_to_target_s", "time_to_target_speedup",
    "wall_s", "steps", "losses", "time_share",
}  # fmt: skip


def start(*words: str) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "ray_pipe.run", *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Status, output and errors. One that hangs is ended with all its children."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        family = {process.pid, *children_of(process.pid)}
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def children_of(pid: int) -> set[int]:
    """Every process whose ancestor is `pid`."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def gone(pids: set[int], *, within_s: float) -> set[int]:
    """Wait for processes to end; returns those that did not."""
    end = time.monotonic() + within_s
    left = pids
    while left and time.monotonic() < end:
        left = {pid for pid in left if _alive(pid)}
        time.sleep(0.1)
    return left


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_comparison_writes_everything_and_ends_with_its_results(tmp_path: Path) -> None:
    words = ["--epochs", "3", "--bandwidth", "50Mbps", "--out", str(tmp_path), "--json", *SMALL]

    code, out, err = finish(start(*words))

    assert code == 0, err
    results: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    assert results["schema"] == 1
    assert results["native"] is True
    assert [arm["name"] for arm in results["arms"]] == ["fp32", "directq", "acsgd"]
    for arm in results["arms"]:
        assert set(arm) >= ARM_KEYS
        assert arm["steps"] == 6
        assert [step for _, step, _ in arm["losses"]][:6] == list(range(6))  # overtime may follow
        assert set(arm["bytes_total"]) == {
            "activation", "gradient", "replica", "embedding", "control",
        }  # fmt: skip
        assert sum(arm["time_share"].values()) == pytest.approx(1.0)
        assert arm["predicted_step_s"] > 0
    fp32, _, acsgd = results["arms"]
    assert fp32["loss_gap"] == 0.0
    assert acsgd["bytes_total"]["gradient"] < fp32["bytes_total"]["gradient"] / 5
    (folder,) = tmp_path.iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "results.json", "report.html", "loss_vs_time.png", "trace.json", "metrics.jsonl",
    }  # fmt: skip
    assert json.loads((folder / "results.json").read_text())["arms"] == results["arms"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["step"]) for line in lines if line["step"] < 6] == [
        (arm, step) for arm in ("fp32", "directq", "acsgd") for step in range(6)
    ]
    assert (folder / "loss_vs_time.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_stops_cleanly_and_leaves_no_process_behind(tmp_path: Path) -> None:
    process = start("--codec", "acsgd", "--steps", "100000", "--out", str(tmp_path), *SMALL)
    metrics = wait_for_steps(process, tmp_path, 3)
    children = children_of(process.pid)
    assert len(children) > 4

    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)

    assert code == 130, err
    assert "Traceback" not in err
    assert gone(children, within_s=PATIENCE_S) == set()
    results = json.loads((metrics.parent / "results.json").read_text())
    assert results["arms"][0]["steps"] >= 3


ENDS_WITHIN_S = 10.0
"""From the death of a stage to the end of the command, where a core is there for each thread."""


def test_a_stage_that_dies_ends_a_run_that_may_not_recover_with_its_name(tmp_path: Path) -> None:
    words = ["--codec", "acsgd", "--steps", "100000", "--max-failures", "0"]
    process = start(*words, "--out", str(tmp_path), *SMALL)
    wait_for_steps(process, tmp_path, 2)
    victim = next(pid for pid in children_of(process.pid) if is_stage(command_line(pid)))

    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = finish(process)
    took_s = time.monotonic() - killed

    assert code == 1
    assert took_s < ENDS_WITHIN_S * crowding(), f"{took_s:.1f} s at {crowding():.1f} threads a core"
    assert "stage 1 died in step" in err or "stage 0 died in step" in err
    assert "recovery is off (--max-failures 0)" in " ".join(err.split())
    assert "Traceback" not in err


def test_an_address_where_nobody_answers_is_refused_with_the_way_out(tmp_path: Path) -> None:
    words = ["--address", "127.0.0.1:1", "--out", str(tmp_path), *SMALL]

    code, _, err = finish(start(*words))

    assert code != 0
    assert "--address 127.0.0.1:1: nobody answers there" in " ".join(err.split())
    assert "Traceback" not in err


def is_stage(words: bytes) -> bool:
    """Ray titles a stage's process by what it is doing: a step, or nothing."""
    return words.startswith((b"ray::PipelineStage", b"ray::acsgd step"))


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for_steps(process: subprocess.Popen[str], out: Path, count: int) -> Path:
    """Until the run has written `count` lines of metrics."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[1]
        for path in out.glob("*/metrics.jsonl"):
            if len(path.read_text().splitlines()) >= count:
                return path
        time.sleep(0.2)
    raise AssertionError(f"no {count} steps within {PATIENCE_S:.0f} s")
