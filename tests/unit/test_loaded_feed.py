"""Batches of a loader through real stages and shards, in one process and virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rec_bench import Plain, batches, blocks, tables
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from netsim.link import Link
from netsim.shaper import Uplink
from netsim.simulate import Cores
from netsim.topology import Topology
from ray_pipe import rec
from ray_pipe.config import RunConfig
from ray_pipe.plans import optim_spec
from ray_pipe.rec_arm import OwnLoss
from ray_pipe.rec_batches import Batches
from ray_pipe.rec_loader import letters
from stages.assembly import assemble
from stages.compute import Compute
from stages.embedding.front import Front
from stages.embedding.loaded import Inbox, sample_ids_of
from stages.embedding.loaded_feed import REFUSAL
from stages.embedding.shard import Shard
from stages.embedding.shard_server import ShardServer
from stages.ends import StageTimeout
from stages.lanes import Recorder
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.rehearsal import CostLane, StageCosts
from stages.spec import StageSpec
from stages.stage import Stage
from stages.wiring import Lanes

WORK = StageCosts(phases={"forward": 0.01, "backward": 0.02})
LOADER = 4


class Bench:
    """Two dense stages, two shards and a loader, 20 ms apart."""

    def __init__(
        self, *, tau: int = 0, micro_batches: int = 1, loader_bps: float = math.inf
    ) -> None:
        self.emb = rec.EmbeddingStage(
            tables(), max_staleness=tau, wire=rec.Wire(values="fp32"), capacity="64MiB"
        )
        self.micro_batches = micro_batches
        self.reader = Batches(self.emb, shards=2)
        self.topology = Topology.uniform(5, latency_s=0.02)
        self.spec = self.emb.spec(2)
        first, second = blocks()
        front = Front(first, features=self.emb.features, tables=self.emb.tables, seed=0)
        self.shards: list[Shard] = []
        self.servers: list[ShardServer] = []
        for index in range(2):
            self._start_shard(index)
        self.stages = [self._stage(0, front), self._stage(1, second)]
        uplink = Uplink(loader_bps)
        self.loader = [Link(self.topology.link(LOADER, i), uplink, self._to(i)) for i in range(2)]
        self.number = 0
        self.losses: list[float] = []

    def _to(self, stage: int) -> Callable[[Any], None]:
        return lambda frame: self.stages[stage].on_frame(LOADER, frame)

    def _start_shard(self, index: int) -> None:
        shard = Shard(
            self.spec.tables, index=index, num_shards=2, tau=self.spec.bound, core="twin",
            capacity="8MiB", slab="64KiB", pages="4k",
        )  # fmt: skip
        node = 2 + index
        back = Link(
            self.topology.link(node, 0), Uplink(),
            lambda frame: self.stages[0].on_frame(node, frame),
        )  # fmt: skip
        self.shards.append(shard)
        self.servers.append(ShardServer(shard, link_to=lambda c: back, wire=self.spec.wire))

    def _stage(self, index: int, module: nn.Module) -> Stage:
        config = RunConfig.from_dict({"task": "ctr"})
        loss: Any = None
        if index == 1:
            loss = OwnLoss(micro_batches=self.micro_batches)
            loss.function = binary_cross_entropy_with_logits
        spec = StageSpec(
            index=index, num_stages=2, build=lambda: module, loss=loss, optim=optim_spec(config),
            activation_codec=CodecSpec(name="fp32"), gradient_codec=CodecSpec(name="fp32"),
            topology=self.topology, dataset="loader", loader=LOADER,
            embedding=self.spec if index == 0 else None,
        )  # fmt: skip
        recorder, cores = Recorder(), Cores(1e9)
        lane = [CostLane(cores, WORK, recorder) for _ in range(3)]

        def deliver_to(target: int) -> Callable[[Any], None]:
            if target >= 2:
                return lambda frame: self.servers[target - 2].on_frame(frame)
            return lambda frame: self.stages[target].on_frame(index, frame)

        return assemble(
            spec,
            compute=Compute(nn.Sequential(module), optim=spec.optim, loss=loss),
            samples=Inbox(self.emb.features),
            lanes=Lanes(receive=lane[0], compute=lane[1], transmit=lane[2]),
            recorder=recorder,
            deliver_to=deliver_to,
            session=1,
        )

    def send(self, batch: Any, *, step: int) -> StepPlan:
        """A batch leaves the loader; the plan that speaks of it."""
        loaded = self.reader.read(batch, micro_batches=self.micro_batches)
        for letter in letters(loaded, step=step, first=self.number, last=1):
            self.loader[letter.target].send(letter.frame, kind=letter.kind)
        ids = tuple(
            sample_ids_of(self.number + i, one.part.num_samples) for i, one in enumerate(loaded)
        )
        self.number += len(loaded)
        return StepPlan(step=step, micro_batches=ids, schedule="gpipe", lr=1e-3, deadline_s=5.0)

    async def run(self, plan: StepPlan) -> list[StepRecord]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stage.run(plan)) for stage in self.stages]
        records = [task.result() for task in tasks]
        if plan.train:
            assert records[-1].loss is not None
            self.losses.append(records[-1].loss)
        return records

    async def train(self, made: list[Any], *, first: int = 0, ahead: int = 1) -> None:
        """Steps on batches, each sent so many steps before its own."""
        plans = []
        for step in range(first, first + len(made)):
            while len(plans) < min(len(made), step - first + ahead):
                plans.append(self.send(made[len(plans)], step=first + len(plans)))
            await self.run(plans[step - first])

    async def drain(self) -> None:
        assert self.stages[0].feed is not None
        await self.stages[0].feed.drain()

    def assert_same_as(self, plain: Plain) -> None:
        """Every weight and every row, to the bit."""
        weights = {
            name.replace("0.", f"{index}.", 1).replace(".block.", "."): tensor
            for index, stage in enumerate(self.stages)
            for name, tensor in stage.compute.module.state_dict().items()
        }
        for name, tensor in plain.net.state_dict().items():
            assert torch.equal(weights[name], tensor), name
        for name, tensor in plain.small().items():
            assert torch.equal(weights[f"0.{name}"], tensor), name
        (one,) = plain.emb.shards
        for name in ("user", "item"):
            total = 0
            for shard in self.shards:
                keys = np.concatenate([p.keys for p in shard.rows[name].scan()])
                total += len(keys)
                there = one.rows[name].read(keys).weights
                assert np.array_equal(shard.rows[name].read(keys).weights, there), name
            assert total == one.rows[name].stats()["rows"]


def drive(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return run_virtual(main(), limit_s=1e5)


@pytest.mark.parametrize("ahead", [1, 4])
def test_tau_zero_is_a_plain_loop_to_the_bit(ahead: int) -> None:
    made, plain = batches(8), Plain(tables())

    async def main() -> None:
        bench = Bench()
        await bench.train(made, ahead=ahead)
        await bench.drain()

        assert bench.losses == [plain.step(batch) for batch in made]
        bench.assert_same_as(plain)

    drive(main)


@pytest.mark.quick(2)
@pytest.mark.parametrize("tau", [0, 3])
@pytest.mark.parametrize("loader_bps", [1e5, 4e5, 2e6])
def test_batches_that_come_one_by_one_while_a_step_begins_are_asked_for_once(
    loader_bps: float, tau: int
) -> None:
    made, plain = batches(8), Plain(tables())

    async def main() -> None:
        bench = Bench(tau=tau, loader_bps=loader_bps)
        await bench.train(made, ahead=5)
        await bench.drain()

        feed = bench.stages[0].feed
        assert feed is not None
        assert (feed.permits.in_use, feed.hybrid.counts.voided) == (0, 0)
        assert [shard.version for shard in bench.shards] == [8, 8]
        if tau == 0:
            assert bench.losses == [plain.step(batch) for batch in made]

    drive(main)


@pytest.mark.quick(2)
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.01, 0.015, 0.02, 0.03])
def test_a_step_that_is_run_again_stands_in_line_before_those_whose_batches_come_again(
    after_s: float,
) -> None:
    """Seen on Ray: a batch that came again while the old pulls were voided took the only permit,
    and the step that it follows waited for ever."""
    made, plain = batches(5), Plain(tables())
    expected = [plain.step(batch) for batch in made]

    async def main() -> list[float]:
        bench = Bench()
        plans = [bench.send(batch, step=step) for step, batch in enumerate(made)]
        for plan in plans[:2]:
            await bench.run(plan)
        broken = asyncio.create_task(bench.stages[0].run(plans[2]))
        await asyncio.sleep(0.07)  # its rows are here, later ones are asked for
        for stage in bench.stages:
            stage.abort("the last stage died")
        with pytest.raises(Exception, match="the last stage died"):
            await broken

        async def come_again(*steps: int) -> None:
            for step in steps:
                bench.number = step
                bench.send(made[step], step=step)
                await asyncio.sleep(after_s)

        await come_again(2, 3)
        await asyncio.sleep(0.05)
        sending = asyncio.create_task(come_again(2, 3, 4))
        for plan in plans[2:]:
            await bench.run(replace(plan, attempt=1))
        await sending
        return bench.losses

    assert run_virtual(main()) == expected


@pytest.mark.slow
def test_rows_of_batches_that_are_here_are_pulled_before_their_step() -> None:
    """With the batches ahead a step costs its work; without them, the way to the shards too."""

    async def main(ahead: int) -> tuple[float, dict[int, int]]:
        bench = Bench(tau=4)
        made = batches(20)
        loop = asyncio.get_running_loop()
        start = loop.time()
        await bench.train(made, ahead=ahead)
        took_s = loop.time() - start
        await bench.drain()
        assert all(shard.version == 20 for shard in bench.shards)
        ages = [dict(shard.counts.staleness) for shard in bench.shards]
        assert ages[0] == ages[1]
        return took_s, ages[0]

    alone_s, _ = drive(lambda: main(1))
    ahead_s, ages = drive(lambda: main(6))
    assert 2 <= max(ages) <= 4
    assert ahead_s < alone_s - 15 * 2 * 0.02  # there and back, in nearly every step


def test_evaluation_reads_what_training_has_pushed_and_leaves_no_trace() -> None:
    made, plain = batches(6), Plain(tables())
    held_out = batches(2, seed=7)

    async def main() -> None:
        bench = Bench()
        await bench.train(made[:4], ahead=2)
        rows = [shard.stats()["rows"] for shard in bench.shards]
        for part, batch in enumerate(held_out, start=1):
            plan = replace(bench.send(batch, step=-1), step=3, train=False, part=part)
            await bench.run(replace(plan, schedule="forward"))
        outputs, labels = bench.stages[1].compute.loss.scores(
            sum(len(batch["label"]) for batch in held_out)
        )
        assert [shard.stats()["rows"] for shard in bench.shards] == rows
        await bench.train(made[4:], first=4)
        await bench.drain()

        losses = [plain.step(batch) for batch in made[:4]]
        plain.emb.eval()
        with torch.no_grad():
            expected = torch.cat([plain.logits(batch) for batch in held_out])
        plain.emb.train()
        assert bench.losses == losses + [plain.step(batch) for batch in made[4:]]
        assert np.array_equal(outputs, expected.numpy())
        assert np.array_equal(labels, torch.cat([b["label"] for b in held_out]).numpy())
        bench.assert_same_as(plain)

    drive(main)


def test_several_micro_batches_are_one_version_and_nearly_the_same_loss() -> None:
    made, plain = batches(5), Plain(tables())

    async def main() -> None:
        bench = Bench(micro_batches=3)
        await bench.train(made)
        await bench.drain()
        assert [shard.version for shard in bench.shards] == [5, 5]
        assert bench.losses == pytest.approx([plain.step(batch) for batch in made], rel=1e-4)

    drive(main)


def test_a_batch_that_never_comes_ends_the_step_by_name() -> None:
    async def main() -> None:
        bench = Bench()
        plan = bench.send(batches(1)[0], step=0)
        lost = sample_ids_of(7, 23)
        with pytest.raises(ExceptionGroup) as raised:
            await bench.run(replace(plan, micro_batches=(lost,)))
        assert raised.group_contains(StageTimeout, match="the (features|labels) of step 0 did not")

    drive(main)


def test_gradients_that_are_not_finite_are_told_once_and_applied_nowhere() -> None:
    async def main() -> None:
        bench = Bench()
        bad, good = batches(2)
        bad = bad | {"dense": bad["dense"] * float("nan")}
        records = await bench.run(bench.send(bad, step=0))
        feed = bench.stages[0].feed
        assert feed is not None
        await bench.drain()
        told = [event for event in records[0].events if REFUSAL in event]
        told += [*feed.numbers()["refusals"], *feed.numbers()["refusals"]]
        assert len(told) == 1
        assert "NonFiniteGradientError: table 'user'" in told[0]
        assert [shard.version for shard in bench.shards] == [0, 0]
        await bench.run(bench.send(good, step=1))
        await bench.drain()
        assert [shard.version for shard in bench.shards] == [1, 1]

    drive(main)
