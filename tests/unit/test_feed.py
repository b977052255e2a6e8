"""Stage 0's rows and gradients in virtual time: run ahead, bound, abort, evaluation, NaN."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from netsim.clock import run_virtual
from netsim.link import Link
from netsim.shaper import Uplink
from netsim.topology import LinkSpec
from stages.embedding.embedding_spec import EmbeddingSpec
from stages.embedding.feed import Feed
from stages.embedding.letters import Wire
from stages.embedding.permits import Permits
from stages.embedding.row_rules import Sgd, Uniform
from stages.embedding.shard import Shard
from stages.embedding.shard_server import ShardServer
from stages.embedding.step_clicks import pool
from stages.embedding.tables import Table
from stages.plan import StepPlan

DIM = 4
TABLES = tuple(
    Table(name=name, dim=DIM, optimizer=Sgd(lr=0.5), init=Uniform(0.5)) for name in ("user", "item")
)


class Bag(NamedTuple):
    ids: Tensor
    offsets: Tensor


class Batch(NamedTuple):
    dense: Tensor
    bags: tuple[Bag, ...]


class Samples:
    """Sample i: one user, and the items i, i + 1, … up to i % 3 of them."""

    def clicks(self, ids: Any) -> Batch:
        lengths = [i % 3 for i in ids]
        items = [i + k for i, length in zip(ids, lengths, strict=True) for k in range(length)]
        ends = [0, *np.cumsum(lengths).tolist()]
        return Batch(
            dense=torch.tensor([[float(i), 1.0] for i in ids]),
            bags=(
                Bag(torch.tensor([i % 5 for i in ids]), torch.arange(len(ids) + 1)),
                Bag(torch.tensor(items, dtype=torch.int64), torch.tensor(ends)),
            ),
        )


class Order:
    def at(self, step: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(4 * step + 2 * m + k for k in range(2)) for m in range(2))


def spec(**changes: Any) -> EmbeddingSpec:
    plain = EmbeddingSpec(
        tables=TABLES,
        features=("user", "item"),
        num_shards=2,
        tau=0,
        wire=Wire(rows="fp32", gradients="fp32"),
        order=Order(),
        num_steps=20,
        seed=7,
    )
    return replace(plain, **changes)


class Bench:
    """A feed and its shards, joined by links of 50 ms."""

    def __init__(self, own: EmbeddingSpec, *, latency_s: float = 0.05) -> None:
        price = LinkSpec(latency_s=latency_s)
        self.spec = own
        self.there = [Link(price, Uplink(), lambda f: None) for _ in range(own.num_shards)]
        self.back = [Link(price, Uplink(), lambda f: None) for _ in range(own.num_shards)]
        self.shards: list[Shard] = []
        self.servers: list[ShardServer] = []
        for index in range(own.num_shards):
            self.start(index)
        self.feed = Feed(own, samples=Samples(), links=self.there, session=1)
        for link in self.back:
            link.deliver = self.feed.on_frame

    def start(self, index: int) -> None:
        """A shard, or a new life of it."""
        shard = Shard(
            self.spec.tables, index=index, tau=self.spec.bound, seed=7, core="twin",
            capacity="8MiB", slab="64KiB", pages="4k",
        )  # fmt: skip
        self.shards[index:] = [shard, *self.shards[index + 1 :]]
        server = ShardServer(shard, link_to=lambda c: self.back[index], wire=self.spec.wire)
        self.servers[index:] = [server, *self.servers[index + 1 :]]
        self.there[index].deliver = server.on_frame

    def plan(self, step: int, **changes: Any) -> StepPlan:
        plain = StepPlan(step=step, micro_batches=Order().at(step), schedule="gpipe", lr=0.1)
        return replace(plain, **changes)

    async def step(self, number: int, *, work_s: float = 0.0, gradient: float = 1.0) -> Tensor:
        """One training step; every input's gradient is `gradient`."""
        plan = self.plan(number)
        await self.feed.ready(plan)
        sources = [self.feed.source(plan, m) for m in range(2)]
        self.feed.idle()
        await asyncio.sleep(work_s)
        for m, source in enumerate(sources):
            self.feed.take(m, torch.full_like(source, gradient))
        self.feed.commit(plan, 1.0)
        return torch.cat(sources)

    @property
    def histogram(self) -> dict[int, int]:
        return dict(sorted(self.feed.hybrid.counts.staleness.items()))


def drive(main: Callable[[Bench], Coroutine[Any, Any, Any]], own: EmbeddingSpec) -> Any:
    async def everything() -> Any:
        return await main(Bench(own))

    return run_virtual(everything(), limit_s=1e5)


def test_a_source_is_dense_features_beside_the_sum_of_each_bag() -> None:
    async def main(bench: Bench) -> None:
        packed = await bench.step(0)  # samples 0 to 3: 0, 1, 2 and 0 items
        rows = bench.feed.hybrid.tables
        first = {name: bench.shards[0].store[name] for name in rows}
        users = first["user"].initial(np.arange(5))
        items = first["item"].initial(np.arange(5))

        assert packed.shape == (4, 2 + 2 * DIM)
        assert packed[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert torch.equal(packed[:, 2 : 2 + DIM], torch.from_numpy(users[:4]))
        assert packed[0, 2 + DIM :].tolist() == [0.0] * DIM
        assert torch.equal(packed[1, 2 + DIM :], torch.from_numpy(items[1]))
        assert torch.equal(packed[2, 2 + DIM :], torch.from_numpy(items[2] + items[3]))
        assert packed[3, 2 + DIM :].tolist() == [0.0] * DIM
        await bench.feed.drain()

    drive(main, spec())


def test_gradients_of_both_micro_batches_reach_a_row_in_one_version() -> None:
    async def main(bench: Bench) -> None:
        await bench.step(0)
        await bench.feed.drain()

        before = bench.shards[0].store["item"].initial(np.array([2, 3]))
        after = (await bench.feed.hybrid.read({"item": np.array([2, 3])})).rows["item"]
        assert torch.equal(after, torch.from_numpy(before - np.float32(0.5)))
        assert [shard.version for shard in bench.shards] == [1, 1]

    drive(main, spec())


def test_tau_zero_pulls_nothing_before_the_push_has_arrived() -> None:
    async def main(bench: Bench) -> float:
        for number in range(10):
            await bench.step(number)
        await bench.feed.drain()
        assert bench.histogram == {0: 20}
        return asyncio.get_running_loop().time()

    assert drive(main, spec()) == pytest.approx(10 * 0.2)


def test_permits_hide_the_round_trips_and_staleness_never_passes_tau() -> None:
    async def main(bench: Bench) -> float:
        for number in range(20):
            await bench.step(number, work_s=0.05)
        await bench.feed.drain()
        assert max(bench.histogram) == 4
        assert sum(bench.histogram.values()) == 40
        return asyncio.get_running_loop().time()

    assert drive(main, spec(tau=4)) == pytest.approx(0.1 + 20 * 0.05 + 0.1, abs=0.02)


def test_auto_measures_some_synchronous_steps_then_takes_the_permits_that_hide_the_links() -> None:
    async def main(bench: Bench) -> None:
        for number in range(20):
            await bench.step(number, work_s=0.05)
        await bench.feed.drain()

        assert bench.feed.permits.tau == 4  # (100 + 50 + 100) / 50 ms are 5 permits
        (event,) = bench.feed.events
        assert event == (
            "staleness auto: 200.0 ms to shards and back, 50.0 ms a step, so 5 steps may be under "
            "way (tau = 4)"
        )

    drive(main, spec(tau=None))


def test_when_the_next_rows_are_here_gradients_leave_behind_the_forward_pass() -> None:
    """Stage 0's uplink and loop belong to the activations first, then to the shards."""

    async def main(bench: Bench) -> None:
        def num_letters() -> int:
            return sum(link.messages["embedding"] for link in bench.there)

        await bench.step(0, work_s=0.5)  # long enough for the rows of step 1
        before = num_letters()
        await asyncio.sleep(0.01)
        assert num_letters() == before
        await bench.feed.ready(bench.plan(1))
        await asyncio.sleep(0.01)
        assert num_letters() == before
        bench.feed.idle()
        await asyncio.sleep(0.01)
        assert num_letters() >= before + 2  # a push to each shard, and ids
        await bench.feed.abort()
        await bench.feed.drain()
        assert [shard.version for shard in bench.shards] == [1, 1]

    drive(main, spec(tau=4))


@pytest.mark.parametrize("ending", ["drain", "abort"])
def test_gradients_that_were_put_off_leave_when_the_run_stops(ending: str) -> None:
    async def main(bench: Bench) -> None:
        await bench.step(0, work_s=0.5)
        await getattr(bench.feed, ending)()
        await bench.feed.drain()

        assert [shard.version for shard in bench.shards] == [1, 1]
        assert bench.feed.permits.in_use == 0

    drive(main, spec(tau=4))


def test_an_abort_voids_the_step_and_what_was_pulled_ahead_and_the_step_can_run_again() -> None:
    async def main(bench: Bench) -> None:
        await bench.step(0)
        await bench.feed.ready(bench.plan(1))
        bench.feed.source(bench.plan(1), 0)
        await bench.feed.abort()

        assert bench.feed.permits.in_use == 0 or bench.feed.permits.held <= {(1 << 20) + 1}
        await bench.step(1)
        await bench.step(2)
        await bench.feed.drain()
        assert [shard.version for shard in bench.shards] == [3, 3]
        assert bench.feed.permits.free == 4
        assert [shard.num_open for shard in bench.shards] == [0, 0]

    drive(main, spec(tau=3))


def test_an_evaluation_drains_reads_unknown_ids_as_zeros_and_makes_no_rows() -> None:
    async def main(bench: Bench) -> None:
        for number in range(3):
            await bench.step(number)
        plan = bench.plan(2, micro_batches=((901, 902), (1,)), train=False, part=1)
        await bench.feed.ready(plan)
        known = [shard.store["item"].stats()["rows"] for shard in bench.shards]
        first, second = bench.feed.source(plan, 0), bench.feed.source(plan, 1)
        bench.feed.finish()

        assert first[:, 2 + DIM :].abs().sum() == 0
        assert second[:, 2 + DIM :].abs().sum() > 0
        # What training pulls ahead may make rows meanwhile; the evaluation's own ids have none.
        strangers = np.array([901, 902, 903], np.int64)
        for shard in bench.shards:
            assert not shard.store["item"].multi_get(strangers)[1].any()
        again = [shard.store["item"].stats()["rows"] for shard in bench.shards]
        assert again == known
        assert bench.feed.permits.free == 3
        await bench.step(3)
        await bench.feed.drain()
        assert [shard.version for shard in bench.shards] == [4, 4]

    drive(main, spec(tau=2))


def test_gradients_that_are_not_finite_are_refused_by_table_and_id_and_training_goes_on() -> None:
    async def main(bench: Bench) -> None:
        await bench.step(0)
        await bench.step(1, gradient=float("nan"))
        await bench.step(2)
        await bench.feed.drain()

        assert bench.feed.num_refused == 1
        (event,) = bench.feed.events
        assert event.startswith("step 1: ")
        assert "table 'user'" in event
        assert [shard.version for shard in bench.shards] == [2, 2]
        assert bench.feed.permits.in_use == 0

    drive(main, spec(tau=1))


def test_a_step_that_the_dense_network_skipped_moves_no_row() -> None:
    async def main(bench: Bench) -> None:
        plan = bench.plan(0)
        await bench.feed.ready(plan)
        bench.feed.take(0, torch.ones_like(bench.feed.source(plan, 0)))
        bench.feed.commit(plan, 0.0)
        await bench.feed.drain()

        assert [shard.version for shard in bench.shards] == [0, 0]
        assert bench.feed.permits.in_use == 0

    drive(main, spec())


def test_a_new_shard_is_asked_at_once_and_the_lost_push_is_counted_not_applied() -> None:
    async def main(bench: Bench) -> float:
        await bench.step(0)
        await bench.feed.drain()
        await bench.feed.ready(bench.plan(1))
        start = asyncio.get_running_loop().time()
        plan = bench.plan(1)
        for m in range(2):
            bench.feed.take(m, torch.ones_like(bench.feed.source(plan, m)))
        bench.there[1].deliver = lambda frame: None  # it dies with the push on its way
        bench.feed.commit(plan, 1.0)
        await asyncio.sleep(1.0)
        bench.start(1)
        bench.feed.nudge(1)
        await bench.feed.drain()

        assert bench.feed.hybrid.counts.lost_pushes == 1
        assert [shard.version for shard in bench.shards] == [2, 0]
        assert bench.shards[1].counts.lost_pushes == 1
        return asyncio.get_running_loop().time() - start

    assert drive(main, spec()) == pytest.approx(1.1)


def test_steps_of_a_new_life_of_the_client_have_new_numbers() -> None:
    first, second = (
        Permits(0, first_ticket=session * (1 << 20) + 1).next_ticket() for session in (1, 2)
    )

    assert (first, second) == ((1 << 20) + 1, (2 << 20) + 1)


def test_pooling_sums_bags_and_an_empty_bag_is_zeros_without_a_gradient() -> None:
    rows = torch.arange(6.0).reshape(3, 2).requires_grad_()

    out = pool(rows, torch.tensor([2, 0]), torch.tensor([0, 2, 2]))
    out.sum().backward()

    assert out.tolist() == [[4.0, 6.0], [0.0, 0.0]]
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert pool(rows[:0], torch.empty(0, dtype=torch.int64), torch.zeros(3)).shape == (2, 2)


@pytest.mark.parametrize("tau", [0, 4])
def test_ids_that_went_ahead_are_let_go_by_every_drain(tau: int) -> None:
    async def main(bench: Bench) -> None:
        for number in range(6):
            await bench.step(number, work_s=0.2)
            await bench.feed.drain()  # as each checkpoint and evaluation does

            assert [shard.num_announced for shard in bench.shards] == [0, 0]
            assert bench.feed.hybrid.counts.voided == (number + 1) * tau  # only what was pulled
        assert [shard.version for shard in bench.shards] == [6, 6]

    drive(main, spec(tau=tau, num_steps=100))


def test_ids_of_a_stage_that_died_are_let_go_when_the_next_one_writes() -> None:
    async def main(bench: Bench) -> None:
        await bench.step(0, work_s=0.2)
        assert [shard.num_announced for shard in bench.shards] == [2, 2]
        bench.feed.close()
        bench.feed = Feed(bench.spec, samples=Samples(), links=bench.there, session=2)
        for link in bench.back:
            link.deliver = bench.feed.on_frame
        await bench.step(1, work_s=0.2)
        await bench.feed.drain()

        assert [shard.num_announced for shard in bench.shards] == [0, 0]

    drive(main, spec(num_steps=100))


def test_gradients_that_a_dead_stage_had_not_sent_are_counted_as_the_gap_of_versions() -> None:
    async def main(bench: Bench) -> None:
        for number in range(3):
            await bench.step(number, work_s=0.2)
        await bench.feed.drain()
        lost: list[Any] = []
        for number in (3, 4):  # the net makes them, their gradients arrive nowhere
            await bench.feed.ready(bench.plan(number))
            for link in bench.there:
                link.deliver = lost.append
            for m in range(2):
                source = bench.feed.source(bench.plan(number), m)
                bench.feed.take(m, torch.ones_like(source))
            bench.feed.commit(bench.plan(number), 1.0)
            if number == 3:  # the rows of the next were pulled ahead
                bench.feed.idle()
        await asyncio.sleep(1)
        assert lost
        bench.feed.close()
        bench.feed = Feed(bench.spec, samples=Samples(), links=bench.there, session=2)
        for index, shard in enumerate(bench.shards):
            bench.there[index].deliver = bench.servers[index].on_frame
            bench.back[index].deliver = bench.feed.on_frame
            assert shard.last_step == 2
        for number in range(5, 8):  # the dense net goes on from the state after step 4
            await bench.step(number, work_s=0.2)
        await bench.feed.drain()

        assert [shard.counts.unsent for shard in bench.shards] == [2, 2]
        assert [shard.stats()["unsent_pushes"] for shard in bench.shards] == [2, 2]
        assert [shard.version for shard in bench.shards] == [6, 6]

    drive(main, spec(tau=2, num_steps=100))


def test_a_stage_that_runs_steps_again_leaves_no_gap() -> None:
    async def main(bench: Bench) -> None:
        for number in range(4):
            await bench.step(number, work_s=0.2)
        await bench.feed.drain()
        bench.feed.close()
        bench.feed = Feed(bench.spec, samples=Samples(), links=bench.there, session=2)
        for link in bench.back:
            link.deliver = bench.feed.on_frame
        for number in range(2, 6):
            await bench.step(number, work_s=0.2)
        await bench.feed.drain()

        assert [shard.counts.unsent for shard in bench.shards] == [0, 0]
        assert [shard.counts.replayed for shard in bench.shards] == [2, 2]

    drive(main, spec(num_steps=100))
