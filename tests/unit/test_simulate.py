"""Cores that jobs share, and lanes on them."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netsim.clock import run_virtual
from netsim.simulate import Cores, Lane


def ends_of(num_cores: float, jobs: list[tuple[float, float, float]]) -> list[float]:
    """When each of the jobs (start, cost, parallelism) ends."""

    async def main() -> list[float]:
        cores = Cores(num_cores)
        loop = asyncio.get_running_loop()

        async def job(start: float, cost_s: float, parallelism: float) -> float:
            await asyncio.sleep(start)
            await cores.work(cost_s, parallelism)
            return loop.time()

        return list(await asyncio.gather(*(job(*options) for options in jobs)))

    return run_virtual(main())


def test_a_job_alone_takes_its_cost() -> None:
    assert ends_of(2, [(1.0, 3.0, 1)]) == [4.0]


def test_jobs_up_to_the_number_of_cores_do_not_slow_each_other() -> None:
    assert ends_of(2, [(0, 1.0, 1), (0, 2.0, 1)]) == [1.0, 2.0]


def test_four_stages_on_two_cores_take_twice_as_long() -> None:
    assert ends_of(2, [(0, 1.0, 1)] * 4) == [2.0] * 4


def test_speed_changes_as_jobs_come_and_go() -> None:
    # One core: A alone for 1 s (1 of 3 done); A, B at half speed until B's 1 s is done at 3 s;
    # then A, 1 s left, alone again.
    assert ends_of(1, [(0, 3.0, 1), (1.0, 1.0, 1)]) == [4.0, 3.0]


def test_three_jobs_on_two_cores_run_at_two_thirds() -> None:
    # All at 2/3 until the first ends at 1.5 s; the others then have a core each.
    assert ends_of(2, [(0, 1.0, 1), (0, 2.0, 1), (0, 2.0, 1)]) == [1.5, 2.5, 2.5]


def test_a_parallel_job_uses_free_cores_and_shares_by_threads() -> None:
    assert ends_of(2, [(0, 4.0, 2)]) == [2.0]
    # Three threads on two cores: two thirds each, so the parallel job does 4/3 a second.
    assert ends_of(2, [(0, 4.0, 2), (0, 2.0, 1)]) == [3.0, 3.0]


def test_work_without_cost_takes_no_time() -> None:
    assert ends_of(1, [(0, 0.0, 1), (0, 1.0, 1)]) == [0.0, 1.0]


def test_a_cancelled_job_gives_its_share_back() -> None:
    async def main() -> float:
        cores = Cores(1)
        loop = asyncio.get_running_loop()
        doomed = asyncio.create_task(cores.work(10.0))
        other = asyncio.create_task(cores.work(2.0))
        await asyncio.sleep(2.0)  # each has done 1 s
        doomed.cancel()
        await other
        assert cores.work_s == 2.0
        return loop.time()

    assert run_virtual(main()) == 3.0


def test_impossible_work_is_refused() -> None:
    async def main() -> None:
        cores = Cores(1)
        for cost_s, parallelism in [(-1.0, 1), (math.inf, 1), (math.nan, 1), (1.0, 0)]:
            with pytest.raises(ValueError, match="must be"):
                await cores.work(cost_s, parallelism)

    run_virtual(main())
    with pytest.raises(ValueError, match="num_cores is 0"):
        Cores(0)


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.floats(0, 3), st.floats(0.001, 2), st.sampled_from([1, 1, 1, 2])),
        min_size=1,
        max_size=10,
    ),
)
def test_sharing_agrees_with_small_steps(num_cores, jobs) -> None:
    ends = ends_of(num_cores, jobs)

    # The dull twin: recompute the speeds at every start and end, one interval after the other.
    left = {number: cost_s for number, (_, cost_s, _) in enumerate(jobs)}
    expected: dict[int, float] = {}
    now = 0.0
    while left:
        running = [number for number in left if jobs[number][0] <= now]
        threads = sum(jobs[number][2] for number in running)
        share = min(1.0, num_cores / threads) if threads else 1.0
        starts = [jobs[number][0] for number in left if jobs[number][0] > now]
        finishes = [now + left[number] / (share * jobs[number][2]) for number in running]
        then = min(starts + finishes)
        for number in running:
            left[number] -= (then - now) * share * jobs[number][2]
            if left[number] <= 1e-9:
                expected[number] = then
        left = {number: cost_s for number, cost_s in left.items() if number not in expected}
        now = then
    assert ends == pytest.approx([expected[number] for number in range(len(jobs))], abs=1e-6)


def test_a_lane_runs_one_job_at_a_time_in_order() -> None:
    async def main() -> list[tuple[float, float]]:
        lane = Lane(Cores(4), name="compute")
        spans = await asyncio.gather(lane.work(3.0), lane.work(1.0), lane.work(2.0))
        assert lane.busy_s == 6.0
        return list(spans)

    assert run_virtual(main()) == [(0.0, 3.0), (3.0, 4.0), (4.0, 6.0)]


def test_lanes_share_the_cores() -> None:
    async def main() -> list[tuple[float, float]]:
        cores = Cores(2)
        lanes = [Lane(cores) for _ in range(4)]
        return list(await asyncio.gather(*(lane.work(1.0) for lane in lanes)))

    assert run_virtual(main()) == [(0.0, 2.0)] * 4


def test_a_cancelled_job_frees_its_lane() -> None:
    async def main() -> tuple[float, float]:
        lane = Lane(Cores(1))
        doomed = asyncio.create_task(lane.work(100.0))
        await asyncio.sleep(1)
        waiting = asyncio.create_task(lane.work(1.0))
        await asyncio.sleep(1)
        doomed.cancel()
        return await waiting

    assert run_virtual(main()) == (2.0, 3.0)
