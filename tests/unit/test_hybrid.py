"""Hybrid training in virtual time: the bound, the bits, what is lost and what is not."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from netsim.clock import VirtualTimeout, run_virtual
from netsim.faults import FaultyLink
from netsim.link import Link
from netsim.shaper import Uplink
from netsim.topology import LinkSpec
from stages.embedding.asking import ShardRefused, ShardTimeout
from stages.embedding.hybrid import Hybrid
from stages.embedding.letters import Wire
from stages.embedding.permits import Permits, tau_for
from stages.embedding.routing import Step
from stages.embedding.row_errors import NonFiniteGradientError
from stages.embedding.row_rules import Adagrad, Adam, RowAdagrad, Sgd, Uniform
from stages.embedding.shard import Shard
from stages.embedding.shard_server import ShardServer
from stages.embedding.shard_terms import StalenessError
from stages.embedding.tables import ChunkPrune, Table

CORE = "twin"


@pytest.fixture(params=["native", "twin"], autouse=True)
def on_both_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CORE", request.param)


EXACT = Wire(rows="fp32", gradients="fp32")
SLOW = LinkSpec(bandwidth_bps=1e6, latency_s=0.05, jitter_s=0.2)


def table(name: str = "user", **options: Any) -> Table:
    return Table(
        **{"name": name, "dim": 4, "optimizer": Sgd(lr=0.1), "init": Uniform(0.5)} | options
    )


class Net:
    """Shards, clients and a link for each pair and direction."""

    def __init__(
        self,
        tables: tuple[Table, ...],
        *,
        tau: int = 0,
        shards: int = 2,
        clients: int = 1,
        spec: LinkSpec | None = None,
        wire: Wire = EXACT,
        permits: list[Permits] | None = None,
        **options: Any,
    ) -> None:
        self.tables, self.tau, self.wire = tables, tau, wire
        self.spec = spec or LinkSpec(latency_s=0.01)
        pools = permits or [Permits(tau, num_clients=clients)] * clients
        self.permits = pools[0]
        self.there = [[self.link(c, s) for s in range(shards)] for c in range(clients)]
        self.back = [[self.link(s, c + 50) for c in range(clients)] for s in range(shards)]
        self.shards: list[Shard] = []
        self.servers: list[ShardServer] = []
        for index in range(shards):
            self.start(index)
        self.clients = [
            Hybrid(tables, permits=pool, links=links, wire=wire, client=c, **options)
            for c, (pool, links) in enumerate(zip(pools, self.there, strict=True))
        ]
        for links in self.back:
            for c, link in enumerate(links):
                link.deliver = self.clients[c].on_frame

    def link(self, seed: int, more: int) -> Link:
        return Link(self.spec, Uplink(), lambda frame: None, seed=100 * seed + more)

    def start(self, index: int) -> Shard:
        """A new life of a shard, with nothing in it."""
        store = {"capacity": "8MiB", "slab": "64KiB", "pages": "4k", "core": CORE}
        shard = Shard(self.tables, index=index, tau=self.tau, seed=7, **store)
        server = ShardServer(shard, link_to=lambda c: self.back[index][c], wire=self.wire)
        self.shards[index:] = [shard, *self.shards[index + 1 :]]
        self.servers[index:] = [server, *self.servers[index + 1 :]]
        for links in self.there:
            links[index].deliver = server.on_frame
        return shard

    @property
    def histogram(self) -> dict[int, int]:
        total: dict[int, int] = {}
        for shard in self.shards:
            for staleness, num in shard.counts.staleness.items():
                total[staleness] = total.get(staleness, 0) + num
        return total


def batches(num: int, *, size: int = 8, num_ids: int = 20, seed: int = 0) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    return [{"user": generator.integers(0, num_ids, (size, 2))} for _ in range(num)]


def sum_of_squares(number: int, step: Step) -> None:
    rows = step.rows["user"][step.index["user"]]
    ((rows.sum(dim=(1, 2)) - 1) ** 2).mean().backward()


# --- tau = 0 is one process -----------------------------------------------------------------------


def single_process(rule: str, data: list[dict[str, Any]], start: Tensor, net: nn.Module) -> Tensor:
    """The same torch model in one process, with each rule as plain, correctly rounded arithmetic.

    torch's own optimizers fuse operations and round square roots as their build and the processor
    like, so those are held to be near, not equal.
    """
    weight = nn.Parameter(start.clone())
    w = weight.detach().numpy()  # the same memory
    m, v = np.zeros_like(w), np.zeros_like(w)
    dense = torch.optim.SGD(net.parameters(), lr=0.05)
    for number, batch in enumerate(data, 1):
        out = net(nn.functional.embedding(torch.from_numpy(batch["user"]), weight).flatten(1))
        ((out - 1) ** 2).mean().backward()
        assert weight.grad is not None
        t = np.unique(batch["user"])  # lazy, as SparseAdam: rows that it does not touch stay
        g, f32 = weight.grad.numpy()[t], np.float32
        if rule == "sgd":
            w[t] += g * f32(-0.1)
        elif rule == "adagrad":
            v[t] += g * g
            w[t] += (g * f32(-0.1)) / (np.sqrt(v[t]) + f32(1e-10))
        else:
            rate = f32(0.1 * math.sqrt(1 - 0.999**number) / (1 - 0.9**number))
            m[t] = (g - m[t]) * f32(1 - 0.9) + m[t]
            v[t] = (g * g - v[t]) * f32(1 - 0.999) + v[t]
            w[t] += (m[t] / (np.sqrt(v[t]) + f32(1e-8))) * -rate
        weight.grad = None
        dense.step()
        dense.zero_grad()
    return weight.detach()


def with_torch_s_optimizers(
    rule: str, data: list[dict[str, Any]], start: Tensor, net: nn.Module
) -> Tensor:
    weight = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=rule == "adam")
    kinds = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.SparseAdam,
    }
    optimizer: Any = kinds[rule](weight.parameters(), lr=0.1)
    dense = torch.optim.SGD(net.parameters(), lr=0.05)
    for batch in data:
        out = net(weight(torch.from_numpy(batch["user"])).flatten(1))
        ((out - 1) ** 2).mean().backward()
        for one in (optimizer, dense):
            one.step()
            one.zero_grad()
    return weight.weight.detach()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("shards", [1, 3])
def test_with_tau_0_two_hundred_steps_equal_a_single_torch_process_to_the_bit(
    rule: str, shards: int
) -> None:
    optimizer = {"sgd": Sgd(lr=0.1), "adagrad": Adagrad(lr=0.1), "adam": Adam(lr=0.1)}[rule]
    tables = (table(optimizer=optimizer),)
    data = batches(200, size=4, num_ids=12)
    ids = np.arange(12, dtype=np.int64)

    def make_net() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))

    async def hybrid() -> Tensor:
        net, dense_net = Net(tables, shards=shards), make_net()
        dense = torch.optim.SGD(dense_net.parameters(), lr=0.05)

        def train(number: int, step: Step) -> None:
            rows = nn.functional.embedding(step.index["user"], step.rows["user"])
            ((dense_net(rows.flatten(1)) - 1) ** 2).mean().backward()
            dense.step()
            dense.zero_grad()

        await net.clients[0].run(data, train)
        assert net.histogram == {0: len(data) * shards}
        return (await net.clients[0].read({"user": ids})).rows["user"]

    start = torch.from_numpy(first_rows(tables, ids))
    found = run_virtual(hybrid())

    expected = single_process(rule, data, start, make_net())
    assert found.numpy().tobytes() == expected.numpy().tobytes()
    assert torch.allclose(
        found, with_torch_s_optimizers(rule, data, start, make_net()), rtol=1e-3, atol=1e-4
    )


def first_rows(tables: tuple[Table, ...], ids: Any) -> Any:
    """What the rows begin as."""
    return (
        Shard(tables, tau=0, seed=7, capacity="8MiB", slab="64KiB", pages="4k", core=CORE)
        .store["user"]
        .initial(ids)
    )


def test_micro_batches_are_one_version_and_one_gradient() -> None:
    async def run(num_parts: int) -> tuple[int, bytes]:
        net = Net((table(optimizer=RowAdagrad(lr=0.1)),))

        def train(number: int, step: Step) -> None:
            rows = step.rows["user"][step.index["user"]]
            for part in rows.chunk(num_parts):
                part.sum().backward(retain_graph=True)

        await net.clients[0].run(batches(5), train)
        read = await net.clients[0].read({"user": np.arange(20)})
        return net.shards[0].version, read.rows["user"].numpy().tobytes()

    assert run_virtual(run(4)) == run_virtual(run(1))
    assert run_virtual(run(4))[0] == 5


# --- the bound ------------------------------------------------------------------------------------


async def with_workers(net: Net, num_steps: int, *, seed: int = 1) -> None:
    """Workers that take steps of their own at random speeds, each pushing separately."""
    generator = random.Random(seed)

    async def work(client: Hybrid, share: int) -> None:
        async def train(number: int, step: Step) -> None:
            await asyncio.sleep(generator.uniform(0, 0.3))
            sum_of_squares(number, step)

        await client.run(batches(share, size=2, seed=seed), train)

    share = num_steps // len(net.clients)
    await asyncio.gather(*(work(client, share) for client in net.clients))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("tau", "workers"), [(1, 2), (4, 2), (3, 3)])
def test_no_gradient_is_older_than_tau_whatever_the_delays(tau: int, workers: int) -> None:
    async def run() -> Net:
        net = Net((table(),), tau=tau, clients=workers, spec=SLOW)
        await with_workers(net, 240)
        return net

    net = run_virtual(run())
    assert max(net.histogram) <= tau
    assert sum(net.histogram.values()) == 240 * 2
    assert net.permits.free == tau + 1
    assert [shard.num_open for shard in net.shards] == [0, 0]


def test_the_bound_is_reached_when_pushes_are_slow() -> None:
    async def run() -> Net:
        net = Net((table(),), tau=3, spec=LinkSpec(latency_s=0.5))
        await net.clients[0].run(batches(40), sum_of_squares)
        return net

    net = run_virtual(run())
    assert max(net.histogram) == 3
    assert net.clients[0].counts.staleness == net.histogram


def test_mutant_permits_of_each_worker_break_the_bound_and_are_seen() -> None:
    async def run() -> None:
        pools = [Permits(1), Permits(1)]
        pools[1]._last_ticket = 1_000_000  # numbers of their own, too
        await with_workers(Net((table(),), tau=1, clients=2, spec=SLOW, permits=pools), 60)

    with pytest.raises(StalenessError, match="the bound is 1; a pool of permits is too large"):
        run_virtual(run())


def test_mutant_applying_out_of_order_breaks_the_bound_and_is_seen() -> None:
    class Hasty(Shard):
        def push(self, ticket: int, v_read: int, gradients: Any, number: Any = None) -> Any:
            if ticket in self._open:
                self._open.move_to_end(ticket, last=False)  # to the head of the line
            return super().push(ticket, v_read, gradients, number)

    async def run(kind: type[Shard]) -> None:
        net = Net((table(),), tau=2, shards=1)
        net.shards[0].__class__ = kind
        client = net.clients[0]
        slow = await client.pull(client.announce({"user": np.arange(4)}))
        for _ in range(4):
            quick = await client.pull(client.announce({"user": np.arange(4)}))
            client.push_soon(quick)
            await asyncio.sleep(1.0)
        await client.push(slow)
        await client.drain()

    with pytest.raises(VirtualTimeout):  # in order: the quick ones wait for the slow one
        run_virtual(run(Shard), limit_s=20)
    with pytest.raises(StalenessError, match="read at version 0, this is version 4"):
        run_virtual(run(Hasty), limit_s=20)


# --- faults ---------------------------------------------------------------------------------------


def test_letters_that_are_lost_doubled_or_damaged_change_nothing() -> None:
    async def run(faulty: bool) -> tuple[bytes, int]:
        net = Net((table(optimizer=Adagrad(lr=0.1)),), tau=0, deadline_s=1.0, num_tries=12)
        if faulty:
            for s in range(2):
                out = FaultyLink(net.there[0][s], seed=s)
                out.drop(share=0.1).duplicate(share=0.1).corrupt(share=0.05)
                net.clients[0]._asking.links[s] = out
                FaultyLink(net.back[s][0], seed=9 + s).drop(share=0.1).duplicate(share=0.1)
        await net.clients[0].run(batches(30), sum_of_squares)
        for link in (*net.there[0], *(links[0] for links in net.back)):  # whole again
            link.deliver = (
                getattr(link.deliver, "__self__", link)._deliver_right if faulty else (link.deliver)
            )
        read = await net.clients[0].read({"user": np.arange(20)})
        return read.rows["user"].numpy().tobytes(), net.clients[0].num_resent

    clean, none = run_virtual(run(False))
    same, resent = run_virtual(run(True))
    assert same == clean
    assert none == 0
    assert resent > 5


def test_a_shard_that_dies_and_restarts_empty_costs_counted_pushes_and_no_permit() -> None:
    async def run() -> Net:
        net = Net((table(),), tau=2, deadline_s=0.5, spec=LinkSpec(latency_s=0.1))

        async def train(number: int, step: Step) -> None:
            sum_of_squares(number, step)
            if number == 10:
                net.start(1)  # with steps under way: pulled before, pushed after
            await asyncio.sleep(0.05)

        await net.clients[0].run(batches(30), train)
        return net

    net = run_virtual(run())
    counts = net.clients[0].counts
    assert counts.pushed == 30
    assert counts.lost_pushes == net.shards[1].counts.lost_pushes >= 1
    assert counts.lost_versions >= 1
    assert net.shards[0].version == 30
    assert net.shards[1].version + counts.lost_pushes + counts.lost_versions == 30
    assert net.permits.free == 3


def test_a_client_that_begins_anew_leaves_nothing_open_though_a_push_was_held() -> None:
    """The push of its first step was lost, that of the second held, the third never pushed."""

    async def run() -> tuple[list[int], dict[str, int], list[Any]]:
        net = Net((table(),), tau=2, shards=1, session=1)
        (client,), (shard,) = net.clients, net.shards
        steps = [await client.pull(client.announce(batch)) for batch in batches(3)]
        for number, step in enumerate(steps):
            sum_of_squares(number, step)
        client.push_soon(steps[1])
        await asyncio.sleep(1.0)
        assert (shard.num_open, shard.version) == (3, 0)

        again = Hybrid(
            net.tables, permits=Permits(2, first_ticket=100), links=net.there[0], wire=EXACT,
            session=2, deadline_s=1.0, num_tries=2,
        )  # fmt: skip
        net.back[0][0].deliver = again.on_frame
        await again.run(batches(4, seed=1), sum_of_squares)
        left = list(client._pushes)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return [shard.num_open, shard.version], shard.stats(), list(net.servers[0]._client_of)

    (num_open, version), stats, owners = run_virtual(run(), limit_s=1e4)

    assert num_open == 0
    assert version == 1 + 4  # the one that was held, and those of the new life
    assert stats["voided"] == 2
    assert owners == []


def test_a_loss_that_raises_voids_its_step_and_brings_every_permit_home() -> None:
    async def run() -> Net:
        net = Net((table(),), tau=3)

        def train(number: int, step: Step) -> None:
            if number == 5:
                raise ZeroDivisionError("the loss")
            sum_of_squares(number, step)

        with pytest.raises(ZeroDivisionError, match="the loss"):
            await net.clients[0].run(batches(30), train)
        assert net.permits.free == 4
        await net.clients[0].run(batches(3), sum_of_squares)  # and training can go on
        return net

    net = run_virtual(run())
    assert [shard.version for shard in net.shards] == [8, 8]
    assert [shard.num_open for shard in net.shards] == [0, 0]
    assert net.clients[0].counts.voided >= 1


def test_a_gradient_that_is_not_finite_is_refused_by_table_and_id_on_all_shards() -> None:
    async def run() -> Net:
        net = Net((table(),), tau=1)

        def train(number: int, step: Step) -> None:
            sum_of_squares(number, step)
            if number == 4:
                grad = step.rows["user"].grad
                assert grad is not None
                grad[2, 1] = float("nan")

        with pytest.raises(NonFiniteGradientError, match=r"table 'user': the gradients of 1 of"):
            await net.clients[0].run(batches(20), train)
        return net

    net = run_virtual(run())
    assert net.shards[0].version == net.shards[1].version
    assert net.permits.free == 2


def test_a_backward_that_is_skipped_is_a_step_without_gradient() -> None:
    async def run() -> Net:
        net = Net((table(),), tau=1)
        await net.clients[0].run(batches(4), lambda number, step: None)
        return net

    net = run_virtual(run())
    assert [shard.version for shard in net.shards] == [4, 4]
    assert net.permits.free == 2


def test_evaluation_waits_for_pushes_takes_no_permit_and_creates_nothing() -> None:
    async def run() -> None:
        net = Net((table(),), tau=2)
        client = net.clients[0]
        await client.run(batches(5), sum_of_squares)
        rows = sum(shard.stats()["rows"] for shard in net.shards)
        step = await client.pull(client.announce({"user": np.arange(3)}))
        client.push_soon(step)
        read = await client.read({"user": np.array([10**9, 1])})

        assert net.permits.free == 3
        assert read.rows["user"][1].tolist() == [0, 0, 0, 0]  # ids rise: 10**9 is the second
        assert sum(shard.stats()["rows"] for shard in net.shards) == rows

    run_virtual(run())


def test_a_shard_that_never_answers_is_named() -> None:
    async def run() -> None:
        net = Net((table(),), deadline_s=0.5, num_tries=2)
        net.there[0][1].deliver = lambda frame: None
        await net.clients[0].run(batches(3), sum_of_squares)

    with pytest.raises(ShardTimeout, match=r"asked shard 1 2 times to (pull|void) step 1"):
        run_virtual(run())


def test_a_capacity_that_is_too_small_is_explained_by_the_shard() -> None:
    async def run() -> None:
        net = Net((table(max_rows=6, evict="lru"),), tau=3, shards=1)
        await net.clients[0].run(batches(3), sum_of_squares)

    with pytest.raises(ShardRefused, match=r"CapacityError: table 'user', shard 0: a step of"):
        run_virtual(run())


# --- the wire, pruning, tables --------------------------------------------------------------------


@pytest.mark.quick(1)
def test_lossy_wires_stay_close_and_cost_less() -> None:
    async def run(wire: Wire) -> tuple[Any, int]:
        net = Net((table(dim=32),), wire=wire)
        await net.clients[0].run(batches(20, size=64, num_ids=400), sum_of_squares)
        sent = sum(link.sent["embedding"] for link in (*net.there[0], net.back[0][0]))
        read = await net.clients[0].read({"user": np.arange(400)})
        return read.rows["user"].numpy(), sent

    exact, most = run_virtual(run(EXACT))
    half, less = run_virtual(run(Wire()))
    coarse, least = run_virtual(run(Wire(rows="int8", gradients="int8")))
    assert np.abs(half - exact).max() < 1e-3
    assert np.abs(coarse - exact).max() < 0.05
    assert least < 0.75 * less < 0.75 * 0.65 * most


@pytest.mark.quick(1)
def test_on_a_slow_link_hybrid_training_is_several_times_as_fast_as_synchronous_fp32() -> None:
    """100 Mbit/s, 50 ms each way, 25 ms of compute: the round trips hide behind the steps."""

    async def seconds(tau: int, wire: Wire) -> float:
        spec = LinkSpec(bandwidth_bps=100e6, latency_s=0.05)
        net = Net((table(dim=16),), tau=tau, spec=spec, wire=wire)

        async def train(number: int, step: Step) -> None:
            sum_of_squares(number, step)
            await asyncio.sleep(0.025)

        await net.clients[0].run(batches(30, size=64, num_ids=5000), train)
        return asyncio.get_running_loop().time()

    slow = run_virtual(seconds(0, EXACT))
    fast = run_virtual(seconds(tau_for(pull_s=0.1, step_s=0.025, push_s=0.1), Wire()))
    assert slow / 30 == pytest.approx(0.225, rel=0.05)
    assert fast / 30 < 0.034  # 25 ms a step, and the first and last round trip


def test_pruned_tables_travel_without_their_missing_chunks_both_ways() -> None:
    rule = ChunkPrune(chunk=8, ratio=0.5, warmup=4, every=4)

    async def run() -> tuple[Net, list[int]]:
        net = Net((table(dim=32, prune=rule),), tau=1, shards=1)
        sizes = []

        async def train(number: int, step: Step) -> None:
            sum_of_squares(number, step)
            sizes.append(net.back[0][0].sent["embedding"])
            await asyncio.sleep(0.1)

        await net.clients[0].run([{"user": np.arange(50)[:, None]}] * 12, train)
        return net, [b - a for a, b in itertools.pairwise(sizes)]

    net, sizes = run_virtual(run())
    assert len(net.shards[0].cuts) == 3
    assert net.shards[0].version == 12
    assert max(sizes) > 50 * 32 * 4
    assert sizes[-1] < 0.35 * max(sizes)


def test_ids_of_unknown_tables_and_other_types_are_refused() -> None:
    async def run() -> None:
        client = Net((table(),)).clients[0]
        with pytest.raises(ValueError, match=r"sharded tables are \['user'\], got ids for \['x'\]"):
            client.announce({"x": np.arange(3)})
        with pytest.raises(TypeError, match="int64, got int32"):
            client.announce({"user": np.arange(3, dtype=np.int32)})

    run_virtual(run())


def test_the_same_id_in_two_tables_is_two_rows() -> None:
    async def run() -> None:
        client = Net((table("a"), table("b"))).clients[0]
        step = await client.pull(client.announce({"a": np.arange(3), "b": np.arange(3)}))
        assert not torch.equal(step.rows["a"], step.rows["b"])
        await client.void(step)

    run_virtual(run())


# --- permits --------------------------------------------------------------------------------------


def test_fewer_permits_than_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 workers that push separately need as many permits"):
        Permits(1, num_clients=3)


def test_a_cancelled_waiter_takes_no_permit() -> None:
    async def run() -> None:
        permits = Permits(0)
        await permits.acquire(1)
        waiting = asyncio.get_running_loop().create_task(permits.acquire(2))
        last = asyncio.get_running_loop().create_task(permits.acquire(3))
        await asyncio.sleep(0)
        waiting.cancel()
        permits.release(1)
        permits.release(1)
        await last
        assert (permits.free, permits.in_use) == (0, 1)
        permits.release(3)
        await permits.all_home()
        assert permits.free == 1

    run_virtual(run())


def test_tau_for_covers_the_round_trip() -> None:
    assert tau_for(pull_s=0.100, step_s=0.025, push_s=0.075) == 7
    assert tau_for(pull_s=0.0, step_s=0.025, push_s=0.0) == 0
    assert tau_for(pull_s=9.0, step_s=0.025, push_s=9.0) == 16
