"""Virtual time, and the real loop in its thread."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest

from netsim.clock import Deadlock, LoopThread, VirtualTimeout, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_hour_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return now()

    started = time.monotonic()

    assert run_virtual(main()) == 3600.0
    assert time.monotonic() - started < 600  # of 3600, however busy the machine is


def test_time_stands_still_while_code_runs() -> None:
    async def main() -> tuple[float, float]:
        before = now()
        for _ in range(1000):
            await asyncio.sleep(0)
        return before, now()

    assert run_virtual(main()) == (0.0, 0.0)


def test_sleepers_wake_in_order_of_time_and_then_of_birth() -> None:
    woken: list[tuple[float, str]] = []

    async def sleeper(name: str, delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append((now(), name))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for name, delay in [("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0), ("e", 2.0)]:
                group.create_task(sleeper(name, delay))

    run_virtual(main())

    assert woken == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d"), (2.0, "e")]


def test_timers_of_one_instant_run_in_the_order_of_their_booking() -> None:
    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(100):
            loop.call_at(5.0, seen.append, number)
        await asyncio.sleep(6)

    run_virtual(main())

    assert seen == list(range(100))


def test_queue_event_condition_and_wait_for_work_as_on_a_real_loop() -> None:
    async def main() -> list[Any]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        event = asyncio.Event()
        condition = asyncio.Condition()
        log: list[Any] = []

        async def producer() -> None:
            for number in range(3):
                await asyncio.sleep(1)
                await queue.put(number)
            event.set()
            await asyncio.sleep(1)
            async with condition:
                condition.notify_all()

        async with asyncio.TaskGroup() as group:
            group.create_task(producer())
            log.extend([(await queue.get(), now()) for _ in range(3)])
            await event.wait()
            log.append(("event", now()))
            async with condition:
                await condition.wait()
            log.append(("condition", now()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=10)
        log.append(("timeout", now()))
        return log

    assert run_virtual(main()) == [
        (0, 1.0),
        (1, 2.0),
        (2, 3.0),
        ("event", 3.0),
        ("condition", 4.0),
        ("timeout", 14.0),
    ]


def test_a_deadlock_is_an_exception_that_names_who_waits_where() -> None:
    async def taker(queue: asyncio.Queue[int]) -> None:
        await queue.get()

    async def main() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue()
        await asyncio.sleep(2)
        one = asyncio.create_task(taker(queue), name="stage-1")
        two = asyncio.create_task(taker(queue), name="stage-2")
        await asyncio.gather(one, two)

    with pytest.raises(Deadlock) as dead:
        run_virtual(main())

    text = str(dead.value)
    assert "at 2 s of virtual time" in text
    assert "stage-1 in test_a_deadlock" in text
    assert "stage-2 in test_a_deadlock" in text
    assert "taker (test_clock.py:" in text


def test_a_deadlock_names_the_task_whose_death_caused_it(caplog) -> None:
    async def main() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue()

        async def feeder() -> None:
            raise ValueError("no data")

        feeding = asyncio.create_task(feeder(), name="feeder")
        await queue.get()
        await feeding

    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(Deadlock, match=r"feeder died of ValueError\('no data'\)"),
    ):
        run_virtual(main())


def test_a_deadlock_cancels_the_waiting_tasks_so_that_they_clean_up() -> None:
    cleaned: list[str] = []

    async def waiter(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(name)

    async def main() -> None:
        await asyncio.gather(waiter("a"), waiter("b"))

    with pytest.raises(Deadlock):
        run_virtual(main())

    assert sorted(cleaned) == ["a", "b"]


def test_a_limit_ends_what_would_run_for_ever() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(VirtualTimeout, match="limit of 100 s; waiting: main in"):
        run_virtual(main(), limit_s=100)


def test_a_timer_at_the_limit_still_runs() -> None:
    async def main() -> float:
        await asyncio.sleep(100)
        return now()

    assert run_virtual(main(), limit_s=100) == 100.0


def test_an_error_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        def fail() -> None:
            raise KeyError("deliver failed")

        asyncio.get_running_loop().call_later(1, fail)
        await asyncio.sleep(10)

    with pytest.raises(KeyError, match="deliver failed"):
        run_virtual(main())


def test_an_error_of_the_main_coroutine_comes_out_as_it_is() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run_virtual(main())


def test_tasks_left_behind_are_cancelled_and_may_take_time_to_end() -> None:
    ends: list[float] = []

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(5)
            ends.append(now())

    async def main() -> str:
        task = asyncio.create_task(slow_to_end())
        await asyncio.sleep(1)
        assert not task.done()
        return "done"

    assert run_virtual(main(), limit_s=3) == "done"
    assert ends == [6.0]


def test_an_async_generator_left_open_is_closed() -> None:
    closed: list[bool] = []

    async def numbers() -> Any:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    kept = []

    async def main() -> None:
        generator = numbers()
        kept.append(generator)
        assert await anext(generator) == 1

    run_virtual(main())

    assert closed == [True]


def test_threads_are_forbidden_with_a_reason() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="virtual time cannot wait for real threads"):
        run_virtual(main())


def test_another_thread_may_not_schedule_anything() -> None:
    errors: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def foreign() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()

    run_virtual(main())

    assert "came from another thread" in errors[0]


def test_virtual_time_inside_a_running_loop_is_refused() -> None:
    async def inner() -> None: ...

    async def main() -> None:
        with pytest.raises(RuntimeError, match="called from a running event loop"):
            run_virtual(inner())

    run_virtual(main())


def test_two_runs_do_the_same_things_at_the_same_times() -> None:
    async def main() -> list[tuple[float, int]]:
        log: list[tuple[float, int]] = []
        queue: asyncio.Queue[int] = asyncio.Queue(3)

        async def worker(number: int) -> None:
            for turn in range(20):
                await asyncio.sleep((number * 7 + turn * 3) % 5 / 10)
                await queue.put(number)

        async def taker() -> None:
            while True:
                log.append((now(), await queue.get()))

        async with asyncio.TaskGroup() as group:
            taking = asyncio.create_task(taker())
            for number in range(8):
                group.create_task(worker(number))
        await asyncio.sleep(1)
        taking.cancel()
        return log

    assert run_virtual(main()) == run_virtual(main())


def test_cancelled_timeouts_do_not_pile_up() -> None:
    async def main() -> int:
        event = asyncio.Event()
        event.set()
        loop = asyncio.get_running_loop()
        for _ in range(10_000):
            loop.call_later(1e6, print).cancel()
        return len(loop._timers)  # type: ignore[attr-defined]

    assert run_virtual(main()) < 300


def test_a_timer_cancelled_after_it_ran_is_not_counted_as_waiting() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(1, int) for _ in range(50)]
        await asyncio.sleep(2)
        for handle in handles:
            handle.cancel()
        return loop._num_cancelled  # type: ignore[attr-defined]

    assert run_virtual(main()) == 0


def test_context_variables_reach_callbacks_and_tasks() -> None:
    stage: contextvars.ContextVar[int] = contextvars.ContextVar("stage")

    async def main() -> list[int]:
        seen: list[int] = []
        stage.set(3)
        asyncio.get_running_loop().call_later(1, lambda: seen.append(stage.get()))
        stage.set(4)
        await asyncio.sleep(2)
        return [*seen, stage.get()]

    assert run_virtual(main()) == [3, 4]


@pytest.fixture
def thread() -> Any:
    thread = LoopThread("test-loop")
    yield thread
    thread.stop()


def test_a_loop_thread_runs_coroutines_for_other_threads(thread) -> None:
    async def add(a: int, b: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return a + b, threading.current_thread().name

    assert thread.submit(add(2, 3)).result(timeout=60) == (5, "test-loop")


def test_calls_reach_the_loop_in_order(thread) -> None:
    seen: list[int] = []
    done = threading.Event()

    for number in range(100):
        thread.call_soon(seen.append, number)
    thread.call_soon(done.set)

    assert done.wait(60)
    assert seen == list(range(100))


def test_stopping_cancels_tasks_and_waits_for_their_clean_up() -> None:
    cleaned: list[str] = []
    started = threading.Event()

    async def forever() -> None:
        try:
            started.set()
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    thread = LoopThread("stopping")
    future = thread.submit(forever())
    assert started.wait(60)
    thread.stop()

    assert cleaned == ["yes"]
    with pytest.raises(CancelledError):
        future.result(timeout=60)


def test_a_stopped_loop_thread_takes_no_more_work() -> None:
    async def nothing() -> None: ...

    thread = LoopThread("gone")
    thread.stop()
    thread.stop()

    with pytest.raises(RuntimeError, match="'gone' is stopped"):
        thread.call_soon(print)
    with pytest.raises(RuntimeError, match="'gone' is stopped"):
        thread.submit(nothing())


def test_an_error_in_a_callback_of_a_loop_thread_is_reported() -> None:
    errors: list[BaseException] = []
    told = threading.Event()

    def hear(error: BaseException) -> None:
        errors.append(error)
        told.set()

    thread = LoopThread("reporting", on_error=hear)
    thread.call_soon([].index, 5)

    assert told.wait(60)
    thread.stop()
    assert isinstance(errors[0], ValueError)


def test_a_loop_thread_can_be_stopped_from_its_own_loop() -> None:
    thread = LoopThread("self-stopping")
    thread.call_soon(thread.stop)
    thread._thread.join(5)

    assert not thread._thread.is_alive()


def test_a_blocked_loop_thread_says_so_when_it_does_not_stop() -> None:
    free = threading.Event()
    thread = LoopThread("blocked")
    thread.call_soon(free.wait)

    with pytest.raises(TimeoutError, match=r"'blocked' did not stop within 0\.05 s"):
        thread.stop(timeout_s=0.05)
    free.set()
    thread._thread.join(5)
    assert not thread._thread.is_alive()
