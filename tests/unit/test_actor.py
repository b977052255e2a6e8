"""The stage's Ray face as a plain class: which frames it takes, what it can go back to."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

pytest.importorskip("ray")

from local_pipeline import Bench, acsgd

from stages import stage_process
from stages.actor import StageActor
from stages.stage_process import SPARE


class Context:
    def get_node_id(self) -> str:
        return "here"


BENCH = Bench(num_stages=1, activation=acsgd())


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StageActor]:
    """A stage that is alone in its pipeline, outside Ray."""
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray, "get_gpu_ids", list)
    made = StageActor(0)
    spec = BENCH.specs()[0]
    made.setup(_with(spec, generation=7, black_box=str(tmp_path), run="r"), BENCH.data())
    yield made
    made.close()
    made._loop.stop()
    gc.unfreeze()  # the tests' own process goes on


def _with(spec: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(spec, **changes)


def heard(actor: StageActor, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    frames: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        actor.stage, "on_frame", lambda source, frame: frames.append((source, frame))
    )
    return frames


def settle(actor: StageActor) -> None:
    actor._do(time.monotonic)


def test_frames_of_another_generation_are_dropped(
    actor: StageActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = heard(actor, monkeypatch)

    for generation in (6, 7, 8):
        actor.deliver(1, generation, f"of {generation}".encode())
    settle(actor)

    assert frames == [(1, b"of 7")]


def test_frames_that_come_before_the_stage_is_set_up_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", list)
    bare = StageActor(0)

    bare.deliver(1, 7, b"early")
    bare.abort("nothing runs")

    bare._loop.stop()


def test_a_stage_tells_what_it_can_go_back_to_and_goes(actor: StageActor) -> None:
    losses = [actor.run_step(BENCH.plan(step)).loss for step in range(3)]
    status = actor.status()

    assert (status.live, status.box) == (2, (1, 2))
    assert [record.step for record in status.records][-1] == 2
    actor.restore(1)
    again = actor.status()
    assert (again.live, again.box) == (1, (1,))
    assert actor.run_step(BENCH.plan(2, attempt=1)).loss == losses[2]


def test_a_new_process_finds_the_box_of_the_old_one(
    actor: StageActor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    losses = [actor.run_step(BENCH.plan(step)).loss for step in range(4)]
    actor.status()  # the box is written
    keeper = actor.stage.keeper
    assert keeper is not None
    keeper._box.close()  # as the kernel does for a process that was killed
    actor._stage = None
    reborn = StageActor(0)
    spec = _with(BENCH.specs()[0], generation=7, black_box=str(tmp_path), run="r")

    reborn.setup(spec, BENCH.data(), "push", True)
    status = reborn.status()
    reborn.restore(2)

    assert (status.live, status.box) == (-1, (2, 3))
    assert reborn.run_step(BENCH.plan(3, attempt=1)).loss == losses[3]
    reborn.close()
    reborn._loop.stop()


def test_a_folder_that_cannot_be_used_is_told_and_the_stage_works_without_a_box(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray, "get_gpu_ids", list)
    (tmp_path / "file").write_text("no folder")
    bare = StageActor(0)
    spec = _with(BENCH.specs()[0], black_box=str(tmp_path / "file"), run="r")

    info = bare.setup(spec, BENCH.data())

    assert info["box_trouble"].startswith("stage 0 has no black box: ")
    assert bare.run_step(BENCH.plan(0)).loss is not None
    assert bare.status().box == ()
    bare.close()
    bare._loop.stop()


def test_a_copy_is_written_while_the_stage_goes_on(actor: StageActor, tmp_path: Path) -> None:
    for step in range(2):
        actor.run_step(BENCH.plan(step))
    actor.keep_state("a", 1)
    before = bytes(actor.save_state())
    actor.run_step(BENCH.plan(2))

    note = actor.write_kept("a", str(tmp_path / "aside"), "stage_0.safetensors")

    assert (tmp_path / "aside" / "stage_0.safetensors").read_bytes() == before
    assert note.nbytes == len(before)
    assert len(actor._copies) == 0
    actor.keep_state("b", 2)
    sent = bytes(actor.write_kept("b", None, "stage_0.safetensors"))
    assert sent == bytes(actor.save_state())


def test_a_stage_whose_step_was_not_committed_is_not_saved_for_it(actor: StageActor) -> None:
    actor.run_step(BENCH.plan(0))

    actor.keep_state("a", 1)

    with pytest.raises(RuntimeError, match="it has committed step 0, not 1"):
        actor.write_kept("a", None, "stage_0.safetensors")
    assert len(actor._copies) == 0


def test_a_stage_sees_only_what_is_really_there(actor: StageActor, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"abc")

    assert actor.sees(str(tmp_path), "token", b"abc")
    assert not actor.sees(str(tmp_path), "token", b"abd")
    assert not actor.sees(str(tmp_path / "elsewhere"), "token", b"abc")


def test_a_stopped_neighbour_is_seen_and_ended_but_nobody_elses_process(actor: StageActor) -> None:
    """Only a process that Ray has titled as its own, on this node."""
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        subprocess.Popen(["ray::stage", *words[1:]], executable=sys.executable) as stage,
        subprocess.Popen(words) as stranger,
    ):
        try:
            info = {"node": "here", "pid": stage.pid}
            assert not actor.sees_stopped(info)
            os.kill(stage.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, stage.pid, os.WSTOPPED)

            assert actor.sees_stopped(info)
            assert not actor.end_process({**info, "node": "elsewhere"})
            assert not actor.end_process({**info, "pid": stranger.pid})
            assert actor.end_process(info)
            assert stage.wait(10) == -signal.SIGKILL
            assert not actor.sees_stopped(info)
            assert not actor.end_process(info)
        finally:
            stage.kill()
            stranger.kill()


def test_a_collection_does_not_walk_through_what_was_loaded(actor: StageActor) -> None:
    """Nearly all objects of a stage's process are torch's and Ray's, and stay."""
    assert len(gc.get_objects()) < gc.get_freeze_count() / 10


def test_garbage_of_an_earlier_arm_is_collected_though_it_was_set_aside(actor: StageActor) -> None:
    class Knot:
        itself: Any

    knot = Knot()
    knot.itself = knot
    gc.freeze()
    gone = weakref.ref(knot)
    del knot
    gc.collect()
    assert gone() is not None, "the collector walks through what is set aside"
    actor.setup(_with(BENCH.specs()[0], generation=8), BENCH.data())
    assert gone() is None


def test_a_spare_becomes_a_stage(actor: StageActor) -> None:
    spare = StageActor(SPARE)
    spec = BENCH.specs()[0]

    assert spare.warm_up(spec) == os.getpid()
    assert repr(spare) == "PipelineStage(spare)"
    spare.become(2)
    assert repr(spare) == "PipelineStage(stage=2)"
    assert spare._courier.source == 2
    spare._loop.stop()


@pytest.mark.parametrize(
    ("given", "count"), [({"threads": 3}, 3), ({"threads": 0, "sharing": 2}, 4), ({}, 1)]
)
def test_the_lane_that_computes_has_the_threads_that_the_spec_says(
    actor: StageActor, monkeypatch: pytest.MonkeyPatch, given: dict[str, int], count: int
) -> None:
    """Torch has a number for each thread that calls it: the lane's is the one that counts."""
    monkeypatch.setattr(stage_process, "num_cores", lambda: 8)

    def in_the_lane() -> int:
        asked = actor._lanes.compute.run("load", "x", 0, torch.get_num_threads)
        return actor._loop.submit(asked).result()

    try:
        assert in_the_lane() == 1
        info = actor.setup(_with(BENCH.specs()[0], **given), BENCH.data())
        assert (in_the_lane(), info["threads"]) == (count, count)
    finally:
        torch.set_num_threads(1)


def test_a_stage_that_shares_few_cores_with_many_has_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_process, "num_cores", lambda: 2)

    assert [stage_process.threads_for(sharing) for sharing in (1, 2, 4)] == [2, 1, 1]
