"""What else runs on a node while its stages are measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stages.node_load import LoadWatch, busy_s
from stages.rehearsal import StageCosts, cores_left

TICK = os.sysconf("SC_CLK_TCK")


def stat(folder: Path, *ticks: int) -> Path:
    path = folder / "stat"
    path.write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 1 1 1\n")
    return path


def test_busy_is_everything_but_idle_and_waiting_for_disks(tmp_path: Path) -> None:
    # user nice system idle iowait irq softirq steal guest guest_nice
    times = stat(tmp_path, *(TICK * t for t in (1, 2, 4, 1000, 2000, 8, 16, 32, 1, 2)))

    assert busy_s(times) == 1 + 2 + 4 + 8 + 16 + 32


def test_what_cannot_be_read_is_not_guessed(tmp_path: Path) -> None:
    assert busy_s(tmp_path / "none") is None
    (tmp_path / "odd").write_text("cpu of another system")
    assert busy_s(tmp_path / "odd") is None
    assert LoadWatch(tmp_path / "none").load() is None


def test_a_part_of_the_cores_says_nothing_of_the_whole_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = stat(tmp_path, 1, 1, 1, 1, 1, 1, 1, 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    assert busy_s(times) is None


def test_a_watch_tells_the_machine_s_cores_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = {"monotonic": 100.0, "process_time": 7.0}
    for name in clocks:
        monkeypatch.setattr(time, name, lambda name=name: clocks[name])
    watch = LoadWatch(stat(tmp_path, 0, 0, 0, 0, 0, 0, 0, 0))
    clocks.update(monotonic=104.0, process_time=9.0)
    stat(tmp_path, 5 * TICK, 0, TICK, 999, 0, 0, 0, 0)

    load = watch.load()

    assert load is not None
    assert (load.all, load.own) == (1.5, 0.5)


def costs(node_load: float | None, own_load: float) -> StageCosts:
    return StageCosts(node_load=node_load, own_load=own_load)


def test_stages_have_the_cores_that_others_leave_them() -> None:
    measured = [costs(2.0, 0.9), costs(1.9, 0.8), costs(3.0, 1.0)]
    homes = [("a", 2.0), ("a", 2.0), ("b", 8.0)]

    assert cores_left(measured, homes) == [
        ("a", pytest.approx(2.0 - 0.25)),
        ("a", pytest.approx(2.0 - 0.25)),
        ("b", 6.0),
    ]


@pytest.mark.parametrize(
    ("measured", "left"),
    [
        ([costs(None, 0.0)] * 2, 4.0),
        ([costs(1.0, 0.7)] * 2, 4.0),
        ([costs(64.0, 0.1)] * 2, 1.0),
    ],
    ids=["not known", "they used more than the machine says", "all of them, for a moment"],
)
def test_cores_left_are_never_more_than_there_are_nor_next_to_none(
    measured: list[StageCosts], left: float
) -> None:
    assert cores_left(measured, [("a", 4.0)] * 2) == [("a", left)] * 2


def test_others_on_a_node_make_its_steps_slower_and_not_what_compute_alone_allows() -> None:
    from ray_pipe.config import PipelineConfig, RunConfig
    from ray_pipe.planner.cost import predict
    from ray_pipe.plans import arms_of
    from ray_pipe.workload import gpt_workload

    config = RunConfig(pipeline=PipelineConfig(stages=2))
    arm = arms_of(config, gpt_workload(config))[0]
    phases = {"forward": 0.02, "backward": 0.04}
    homes = [("here", 1.0)] * 2

    alone, beside = (
        predict(
            arm,
            [StageCosts(phases=phases, node_load=1.0, own_load=own)] * 2,
            ((8, 8),),
            homes=homes,
        )
        for own in (0.5, 0.4)
    )

    assert beside.step_s == pytest.approx(alone.step_s / 0.8, rel=0.02)
    assert beside.compute_step_s == alone.compute_step_s
    assert beside.link_to_compute == alone.link_to_compute
