"""The whole command under faults: a stage killed from outside, the driver killed, disks full.

Each case is a process of its own with its own Ray, as a user would start it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from killing import note_end

from stages.crowding import crowding

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.chaos]

RESULTS = os.environ.get("RAY_PIPE_RECOVERY_RESULTS")
STEPS = 12
TIMEOUT_S = 420
TINY = [
    *("--codec", "acsgd", "--steps", str(STEPS), "--stages", "3", "--bandwidth", "20Mbps"),
    *("--latency", "100ms"),  # steps long enough to strike in between
    *("--model", "gpt-nano", "--micro-batches", "3", "--micro-batch-size", "2"),
    *("--set", "data.num_samples=12", "--set", "model.layers=3", "--set", "model.width=64"),
    *("--set", "codec.rounding=stochastic"),
]


class Run:
    """One run of the command, in its own session, found again by a mark in its environment."""

    def __init__(self, out: Path, name: str, *flags: str) -> None:
        self.mark = f"RAY_PIPE_CHAOS={uuid.uuid4().hex}"
        key, _, value = self.mark.partition("=")
        self.path = out / name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray_pipe.run", *TINY, "--out", str(out), "--name", name,
             *flags],
            env=os.environ | {key: value, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1",
                              "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_for_step(self, step: int) -> None:
        """Until the driver has written the line of a step."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until and self.process.poll() is None:
            with suppress(OSError):
                lines = (self.path / "metrics.jsonl").read_text().splitlines()
                if any(json.loads(line)["step"] >= step for line in lines if line.endswith("}")):
                    return
            time.sleep(0.02)
        raise AssertionError(f"step {step} never came: {self.output()}")

    def stages(self) -> list[int]:
        """Process ids of its stages; Ray titles them by what they are doing."""
        titles = ("ray::PipelineStage", "ray::fp32 step", "ray::directq step", "ray::acsgd step")
        return [pid for pid, words in self._processes() if words.startswith(titles)]

    def _processes(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        yield int(entry.name), (entry / "cmdline").read_bytes().decode()

    def end(self) -> int:
        """The exit status; nothing of the run is left afterwards."""
        try:
            code = self.process.wait(TIMEOUT_S)
        finally:
            for pid, _ in self._processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return code

    def output(self) -> str:
        self.end()
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def kill(self) -> None:
        """kill -9 of the driver alone; Ray and the stages end by themselves, or are ended."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.end()

    def weights(self) -> list[bytes]:
        """Every stage's file of the checkpoint after the last step."""
        folder = self.path / "checkpoints" / "acsgd" / f"checkpoint_{STEPS:06d}"
        return [(folder / f"stage_{stage}.safetensors").read_bytes() for stage in range(3)]

    @property
    def steps(self) -> list[int]:
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "results.json").read_text())
        return found

    @property
    def losses(self) -> list[float]:
        return [loss for _, _, loss in self.results["arms"][0]["losses"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("unbroken"), "run", "--checkpoint-every", str(STEPS))
    assert run.end() == 0, run.output()
    assert len(run.losses) == STEPS
    assert run.results["failures"] == []
    return run


@pytest.fixture(scope="module")
def unbroken(whole: Run) -> list[float]:
    return whole.losses


def test_a_stage_killed_from_outside_is_replaced_and_told(
    unbroken: list[float], tmp_path: Path
) -> None:
    run = Run(tmp_path, "run")
    run.wait_for_step(4)
    os.kill(run.stages()[1], signal.SIGKILL)
    output = run.output()

    assert run.process.returncode == 0, output
    assert run.losses == unbroken
    (failure,) = run.results["failures"]
    assert failure["kind"] == "died"
    assert failure["source"] == "box"
    assert "its process ended unexpectedly" in " ".join(output.split())
    assert "Failures" in (run.path / "report.html").read_text()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_without_recovery_a_death_ends_the_command_within_seconds_by_name(
    which: int, tmp_path: Path
) -> None:
    run = Run(tmp_path, "run", "--max-failures", "0")
    run.wait_for_step(3)
    os.kill(run.stages()[which], signal.SIGKILL)
    killed = time.monotonic()
    code = run.process.wait(TIMEOUT_S)
    exit_s, threads = time.monotonic() - killed, crowding()
    output = " ".join(run.output().split())
    if RESULTS:
        note_end(
            Path(RESULTS), f"kill without recovery {which}", exit_s=exit_s, threads_per_core=threads
        )

    assert code == 1, output
    (failure,) = run.results["failures"]
    assert (failure["kind"], failure["resumed_from"]) == ("died", None)
    told = (
        f"stage {failure['stage']} died in step {failure['step']}: its process ended unexpectedly"
    )
    assert told in output
    assert "recovery is off (--max-failures 0)" in output
    assert exit_s < 10.0 * threads, f"{exit_s:.1f} s at {threads:.1f} threads a core"


def test_a_killed_driver_is_resumed_to_the_same_losses(
    unbroken: list[float], tmp_path: Path
) -> None:
    run = Run(tmp_path, "run", "--checkpoint-every", "3")
    run.wait_for_step(7)
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()

    again = Run(tmp_path, "run", "--checkpoint-every", "3", "--resume", "auto")

    assert again.end() == 0, again.output()
    assert again.losses == unbroken
    assert 3 <= again.results["resumed"]["acsgd"] <= 10


def test_a_driver_killed_twice_without_any_checkpoint_goes_on_from_black_boxes(
    whole: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path, "run")
    run.wait_for_step(4)
    run.kill()
    assert not (run.path / "checkpoints").exists()
    again = Run(tmp_path, "run", "--resume", "auto")
    again.wait_for_step(8)
    again.kill()
    last = Run(tmp_path, "run", "--resume", str(run.path), "--checkpoint-every", str(STEPS))
    output = " ".join(last.output().split())

    assert last.process.returncode == 0, output
    assert last.losses == whole.losses
    assert last.weights() == whole.weights()
    assert last.steps == list(range(STEPS))
    first, second = last.results["failures"]
    assert (first["kind"], first["source"]) == (second["kind"], second["source"]) == (
        "driver", "box",
    )  # fmt: skip
    assert 3 <= first["resumed_from"] <= 6
    assert 7 <= second["resumed_from"] <= 10
    assert "the driver ended in step" in output
    assert "ended, and was started again" in (last.path / "report.html").read_text()


def test_black_boxes_beat_an_older_checkpoint(whole: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, "run", "--checkpoint-every", "6")
    run.wait_for_step(8)
    run.kill()
    assert [p.name for p in (run.path / "checkpoints" / "acsgd").glob("c*")] == [
        "checkpoint_000006"
    ]

    again = Run(tmp_path, "run", "--resume", "auto")

    assert again.end() == 0, again.output()
    assert again.losses == whole.losses
    assert again.weights() == whole.weights()
    (failure,) = again.results["failures"]
    assert failure["source"] == "box"
    assert again.results["resumed"]["acsgd"] == failure["resumed_from"] + 1 >= 8


@pytest.mark.parametrize("how", ["damaged", "cut", "lost"])
def test_a_box_that_is_of_no_use_sends_the_run_back_to_the_checkpoint_and_is_told(
    how: str, whole: Run, tmp_path: Path
) -> None:
    flags = ("--checkpoint-every", "6", "--set", f"faults.black_box={tmp_path / 'boxes'}")
    run = Run(tmp_path, "run", *flags)
    run.wait_for_step(8)
    run.kill()
    (box,) = (tmp_path / "boxes").rglob("stage-1")
    if how == "lost":
        shutil.rmtree(box)
    for slot in box.glob("slot-*"):
        raw = bytearray(slot.read_bytes())
        if how == "cut":
            slot.write_bytes(raw[: len(raw) // 2])
        else:
            raw[len(raw) // 2] ^= 1
            slot.write_bytes(raw)

    again = Run(tmp_path, "run", *flags, "--resume", "auto")
    output = " ".join(again.output().split())

    assert again.process.returncode == 0, output
    assert again.losses == whole.losses
    assert again.results["resumed"]["acsgd"] == 6
    (failure,) = again.results["failures"]
    assert (failure["kind"], failure["source"], failure["resumed_from"]) == (
        "driver", "checkpoint", 5,
    )  # fmt: skip
    assert failure["replayed_steps"] >= 3
    assert "cannot be used: " in output
    assert "checkpoint_000006, after 6 steps." in output
    assert list((tmp_path / "boxes").rglob("stage-*")) == []  # the old ones went, too


def test_a_driver_that_is_told_to_end_leaves_its_boxes_and_one_stopped_by_hand_does_not(
    whole: Run, tmp_path: Path
) -> None:
    boxes = tmp_path / "boxes"
    flags = ("--set", f"faults.black_box={boxes}")
    run = Run(tmp_path, "run", *flags)
    run.wait_for_step(4)
    os.kill(run.process.pid, signal.SIGTERM)
    told = " ".join(run.output().split())
    assert run.process.returncode == 130, told
    assert f"--resume {run.path} goes on from the last step" in told
    assert len(list(boxes.rglob("stage-*"))) == 3

    again = Run(tmp_path, "run", *flags, "--resume", "auto")
    again.wait_for_step(8)
    os.kill(again.process.pid, signal.SIGINT)

    assert again.process.wait(TIMEOUT_S) == 130, again.output()
    assert again.losses == whole.losses[: len(again.losses)]
    (failure,) = again.results["failures"]
    assert (failure["source"], failure["cause"]) == ("box", "it was told to end (SIGTERM)")
    assert list(boxes.rglob("stage-*")) == []
    assert not (again.path / "unfinished.json").exists()
    again.end()


def test_a_killed_driver_that_was_not_told_to_save_has_saved_by_time(
    unbroken: list[float], tmp_path: Path
) -> None:
    often = ("--set", "checkpoint.automatic=1s")
    run = Run(tmp_path, "run", *often)
    run.wait_for_step(8)
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()

    again = Run(tmp_path, "run", *often, "--resume", "auto")

    assert again.end() == 0, again.output()
    assert again.losses == unbroken
    assert again.results["resumed"]["acsgd"] >= 1


def test_without_boxes_a_killed_stage_goes_back_to_the_checkpoint(
    unbroken: list[float], tmp_path: Path
) -> None:
    run = Run(tmp_path, "run", "--checkpoint-every", "3", "--set", "faults.black_box=off")
    run.wait_for_step(7)
    os.kill(run.stages()[0], signal.SIGKILL)

    assert run.end() == 0, run.output()
    assert run.losses == unbroken
    (failure,) = run.results["failures"]
    assert failure["source"] == "checkpoint"
    assert failure["resumed_from"] in (2, 5, 8)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few hundred kilobytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_for_black_boxes_costs_only_the_boxes(
    unbroken: list[float], tmp_path: Path, tiny_disk: Path
) -> None:
    run = Run(tmp_path, "run", "--set", f"faults.black_box={tiny_disk}")

    assert run.end() == 0, run.output()
    assert run.losses == unbroken
    events = (run.path / "metrics.jsonl").read_text()
    assert "No space left on device" in events


def test_a_damaged_newest_checkpoint_sends_the_run_back_to_the_one_before(
    unbroken: list[float], tmp_path: Path
) -> None:
    run = Run(tmp_path, "run", "--checkpoint-every", "2", "--set", "faults.black_box=off")
    run.wait_for_step(7)
    newest = max((run.path / "checkpoints" / "acsgd").glob("checkpoint_00000?"))
    (newest / "stage_0.safetensors").write_bytes(b"damaged")
    os.kill(run.stages()[1], signal.SIGKILL)
    output = " ".join(run.output().split())

    assert run.process.returncode == 0, output
    assert run.losses == unbroken
    (failure,) = run.results["failures"]
    assert failure["source"] == "checkpoint"
    assert f"{newest.name} cannot be used" in output


def test_a_full_disk_for_checkpoints_ends_all_steps_and_then_fails_by_name(
    unbroken: list[float], tmp_path: Path, tiny_disk: Path
) -> None:
    flags = ("--checkpoint-every", "4", "--checkpoint-dir", str(tiny_disk))
    run = Run(tmp_path, "run", *flags)
    output = " ".join(run.output().split())

    assert run.losses == unbroken
    assert "could not be written" in output
    assert run.process.returncode == 1, output
    assert "the state after the last step could not be saved (acsgd: " in output
    assert "the disk is full" in run.results["lost_checkpoints"]["acsgd"]
