"""Lanes run one thing at a time in order, and measure it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from netsim.loop_thread import LoopThread
from stages.lanes import LANE_OF_PHASE, Recorder, ThreadLane, Unrecorded
from stages.record import LANES, PHASES


def test_every_phase_has_a_lane_that_the_record_knows() -> None:
    assert set(LANE_OF_PHASE) == set(PHASES)
    assert set(LANE_OF_PHASE.values()) <= set(LANES)


def test_work_runs_in_one_thread_in_the_order_it_was_given() -> None:
    seen: list[tuple[int, str]] = []

    def work(index: int) -> int:
        seen.append((index, threading.current_thread().name))
        return index * 2

    async def main() -> list[int]:
        lane = ThreadLane("compute", Recorder())
        return list(
            await asyncio.gather(*(lane.run("forward", f"F{i}", i, work, i) for i in range(20)))
        )

    loop = LoopThread()
    try:
        assert loop.submit(main()).result(60) == [2 * i for i in range(20)]
    finally:
        loop.stop()
    assert [index for index, _ in seen] == list(range(20))
    assert {name for _, name in seen} == {"compute"}


def test_work_that_nobody_waits_for_any_more_is_not_begun() -> None:
    """An abort cancels what waits for a lane; what runs there already ends first."""
    seen: list[str] = []
    running, go_on = threading.Event(), threading.Event()

    def first() -> None:
        running.set()
        go_on.wait(60)
        seen.append("first")

    async def main() -> None:
        lane = ThreadLane("compute", Recorder())
        tasks = [
            asyncio.create_task(lane.run("forward", "F0", 0, first)),
            asyncio.create_task(lane.run("forward", "F1", 1, seen.append, "second")),
        ]
        await asyncio.sleep(0)
        running.wait(60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        asyncio.get_running_loop().call_soon(go_on.set)
        await lane.run("forward", "F2", 2, seen.append, "third")

    loop = LoopThread()
    try:
        loop.submit(main()).result(60)
    finally:
        loop.stop()
    assert seen == ["first", "third"]


def test_an_error_comes_back_and_is_measured_too() -> None:
    recorder = Recorder()

    async def main() -> None:
        lane = ThreadLane("compute", recorder)
        with pytest.raises(ZeroDivisionError):
            await lane.run("backward", "B0", 0, lambda: 1 / 0)
        assert await lane.run("backward", "B1", 1, lambda: 7) == 7
        lane.close()

    loop = LoopThread()
    try:
        loop.submit(main()).result(60)
    finally:
        loop.stop()
    spans, seconds = recorder.drain()
    assert [span.name for span in spans] == ["B0", "B1"]
    assert set(seconds) == {"backward"}
    assert len(recorder.cpu["backward"]) == 2


def test_even_stop_iteration_comes_back_because_a_lost_error_would_hang_the_stage() -> None:
    def stop() -> None:
        raise StopIteration

    async def main() -> None:
        lane = ThreadLane("compute", Recorder())
        with pytest.raises(RuntimeError, match="F0 raised StopIteration"):
            await lane.run("forward", "F0", 0, stop)
        lane.close()

    loop = LoopThread()
    try:
        loop.submit(main()).result(60)
    finally:
        loop.stop()


def test_a_recorder_shifts_its_clock_and_forgets_what_was_drained() -> None:
    recorder = Recorder(offset_s=100.0)
    recorder.add("forward", "F0", 0, 1.0, 3.0)
    recorder.add("forward", "F1", 1, 3.0, 4.0)
    recorder.add("sync", "norm", -1, 4.0, 4.5)

    spans, seconds = recorder.drain()

    assert [(span.lane, span.start_s, span.end_s) for span in spans] == [
        ("compute", 101.0, 103.0),
        ("compute", 103.0, 104.0),
        ("wait", 104.0, 104.5),
    ]
    assert seconds == {"forward": 3.0, "sync": 0.5}
    assert recorder.drain() == ((), {})


def test_no_span_is_lost_between_threads() -> None:
    recorder = Recorder()
    total = 0

    def add() -> None:
        for index in range(3000):
            recorder.add("decode", "F", index, 0.0, 1.0)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        total += len(recorder.drain()[0])
    total += len(recorder.drain()[0])

    assert total == 9000


def test_an_unrecorded_lane_keeps_nothing_however_long_it_works() -> None:
    recorder = Unrecorded()
    loop = LoopThread("test")
    lane = ThreadLane("box", recorder)

    for _ in range(3):
        assert loop.submit(lane.run("sync", "box", -1, lambda: 7)).result(10) == 7

    assert (recorder.spans, recorder.seconds, recorder.cpu) == ([], {}, {})
    lane.close()
    loop.stop()


def test_a_phase_that_nobody_knows_is_an_error_of_its_caller_and_the_lane_goes_on() -> None:
    async def main() -> int:
        lane = ThreadLane("compute", Recorder())
        with pytest.raises(KeyError, match="idle"):
            await lane.run("idle", "threads", -1, int)
        return await lane.run("sync", "threads", -1, lambda: 7)

    loop = LoopThread()
    try:
        assert loop.submit(main()).result(60) == 7
    finally:
        loop.stop()
