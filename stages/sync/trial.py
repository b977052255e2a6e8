"""One strategy tried out in virtual time: how fast it steps, and its loss against time.

The classes are those that run in the actors; compute takes the time that it is told to take, and
letters have the size of a larger model. Lock-step strategies of many replicas send n^2 letters a
step; above `LETTERS` replicas their clock is computed instead, which below it is the same.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from netsim.clock import run_virtual
from netsim.topology import Topology
from stages.sync.fleet import Fleet, num_nodes
from stages.sync.jobs import NUM_VALUES, Classify, JobTrainer, mean_model
from stages.sync.payload import VectorCoder
from stages.sync.priced import HEADER_NBYTES, PRICED_WIRE, PricedCoder, scaled_wire
from stages.sync.problems import ComputeTime, Priced, VectorShard
from stages.sync.slowness import (
    SlownessError,
    draw,
    parse_slow,
    parse_slow_link,
    slow_factor,
)
from stages.sync.strategies import Assembly, SyncSpec, check_spec
from stages.sync.strategy import SyncResult

LETTERS = 64
"""Most replicas whose all-reduce is simulated letter by letter."""

NUM_SAMPLES = 120
"""Points of a loss curve."""

ADAM_LR = 0.02
"""Of quantized-adam, whose steps do not have the length of the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a step and a letter take; the defaults are the reference of the sync strategies."""

    step_s: float = 1.0
    jitter: float = 0.1
    """A step takes up to this share longer, at random."""

    model_nbytes: int = 1_000_000
    """Of the model in fp32."""

    bandwidth_bps: float = 80e6
    """Of every node's uplink."""

    latency_s: float = 0.02

    slow_link: str = ""
    """Whose uplink is how many times slower than that, written as `--slow` is: 2:10x."""

    def topology(self, num: int) -> Topology:
        """Equal links, but for those that are slow."""
        even = Topology.uniform(
            num_nodes(num), bandwidth_bps=self.bandwidth_bps, latency_s=self.latency_s
        )
        uplinks = list(even.uplinks_bps)
        for one in parse_slow_link(self.slow_link, num_replicas=num):
            uplinks[one.replica or 0] /= one.factor
        return replace(even, uplinks_bps=tuple(uplinks))

    def compute_time(self, num: int, slow: str, seed: int) -> ComputeTime:
        """Seconds of every replica's steps; every strategy meets the same ones."""
        causes = parse_slow(slow, num_replicas=num)

        def compute_s(replica: int, k: int) -> float:
            base = self.step_s * (1.0 + self.jitter * draw(seed, replica, k, "base"))
            return base * slow_factor(causes, replica, k, seed=seed)

        return compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one strategy did in so many seconds."""

    num_replicas: int
    slow: str
    seconds: float
    iteration_s: float
    """Of the median replica, iterations that it skipped not counted."""

    slowest_iteration_s: float
    curve: tuple[tuple[float, float], ...] = ()
    """Time and loss of the mean model; empty if only costs were simulated."""

    largest_gap: int = 0
    num_skipped: int = 0
    waited_s: Mapping[str, float] = field(default_factory=dict)
    """By cause, of the mean replica."""

    nbytes_per_iteration: float = 0.0
    control_share: float = 0.0
    groups: Mapping[str, float] = field(default_factory=dict)
    """Counts of the Group Generator, where there is one."""

    is_computed: bool = False
    """Lock-step and large: the clock was computed, not simulated."""

    @property
    def final_loss(self) -> float | None:
        return self.curve[-1][1] if self.curve else None

    def reaches(self, loss: float) -> float | None:
        """When the curve is at or below a loss for the first time, between points on a line."""
        before: tuple[float, float] | None = None
        for at_s, here in self.curve:
            if here <= loss:
                if before is None or before[1] == here:
                    return at_s
                share = (before[1] - loss) / (before[1] - here)
                return before[0] + share * (at_s - before[0])
            before = (at_s, here)
        return None


def run_trial(
    sync: SyncSpec,
    *,
    num_replicas: int,
    slow: str = "",
    seconds: float = 120.0,
    costs: Costs | None = None,
    seed: int = 0,
    train: bool = True,
) -> Trial:
    """Try one strategy; without `train` tensors are left out, which is faster and has no curve."""
    check_spec(sync, num_replicas)
    costs = costs or Costs()
    if is_lock_step(sync) and num_replicas > LETTERS:
        if costs.slow_link:
            raise SlownessError(
                f"slow link {costs.slow_link!r}: the clock of {sync.name} is computed above "
                f"{LETTERS} replicas, for equal links; give {LETTERS} or fewer, not {num_replicas}"
            )
        return _compute_trial(sync, num_replicas, slow, seconds, costs, seed)
    compute_s = costs.compute_time(num_replicas, slow, seed)
    job = Classify(num_replicas, seed=seed)
    trainers = job.trainers(compute_s, lr=_lr(sync)) if train else []
    spread = Spread(num_replicas)
    curve: list[tuple[float, float]] = []

    async def sample() -> None:
        for count in range(NUM_SAMPLES + 1):
            await asyncio.sleep(seconds * count / NUM_SAMPLES - asyncio.get_running_loop().time())
            curve.append((asyncio.get_running_loop().time(), job.loss(mean_model(trainers))))

    async def main() -> Fleet:
        fleet = make_fleet(sync, num_replicas, costs, compute_s, trainers, spread.entered)
        sampling = asyncio.create_task(sample()) if train else None
        await fleet.run_for(seconds)
        if sampling is not None:
            await sampling
        return fleet

    with without_collector():
        fleet = run_virtual(main())
    replicas = list(fleet.replicas.values())
    num_run = [replica.num_run for replica in replicas]
    waits: dict[str, float] = {}
    for replica in replicas:
        for cause, waited_s in replica.waited.items():
            waits[cause] = waits.get(cause, 0.0) + waited_s / num_replicas
    return Trial(
        num_replicas=num_replicas,
        slow=slow,
        seconds=seconds,
        iteration_s=seconds / max(1.0, statistics.median(num_run)),
        slowest_iteration_s=seconds / max(1, min(num_run)),
        curve=tuple(curve),
        largest_gap=spread.largest,
        num_skipped=sum(replica.num_skipped for replica in replicas),
        waited_s=waits,
        nbytes_per_iteration=fleet.nbytes() / max(1, sum(num_run)),
        control_share=fleet.nbytes("control") / max(1, fleet.nbytes()),
        groups=fleet.generator.generator.stats() if fleet.generator else {},
    )


class Spread:
    """How far apart replicas were, seen at every iteration that one of them enters."""

    def __init__(self, num_replicas: int) -> None:
        self._at = [0] * num_replicas
        self._num_at: Counter[int] = Counter({0: num_replicas})
        self._lowest = self._highest = 0
        self.largest = 0

    def entered(self, replica: int, k: int) -> None:
        """In constant time: looking at everybody takes a thousand times as long in a large fleet"""
        self._num_at[self._at[replica]] -= 1
        self._num_at[k] += 1
        self._at[replica] = k
        self._highest = max(self._highest, k)
        while not self._num_at[self._lowest]:
            del self._num_at[self._lowest]
            self._lowest += 1
        self.largest = max(self.largest, self._highest - self._lowest)

    def entered_all(self, k: int, times: Sequence[Sequence[float]]) -> None:
        """All begin iteration `k` together, and run as many as each has `times` for."""
        entries = (
            (at_s, replica, k + step)
            for replica, took in enumerate(times)
            for step, at_s in enumerate(accumulate(took[:-1], initial=0.0))
        )
        for _, replica, step in sorted(entries):
            self.entered(replica, step)


@contextmanager
def without_collector() -> Iterator[None]:
    """Looking for garbage that is not there takes two thirds again of a large fleet's time."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def make_fleet(
    sync: SyncSpec,
    num_replicas: int,
    costs: Costs,
    compute_s: ComputeTime,
    trainers: Sequence[JobTrainer] = (),
    on_step: object = None,
) -> Fleet:
    """Replicas over their links; without trainers they are nothing but their costs."""
    topology = costs.topology(num_replicas)
    watch: dict[str, object] = {"on_step": on_step} if on_step is not None else {}
    if not trainers:
        nbytes = costs.model_nbytes
        if not VectorCoder(sync.payload).is_exact:
            nbytes = VectorCoder(sync.payload).nbytes(costs.model_nbytes // 4)
        return Fleet(
            sync=sync,
            trainers=[Priced(r, compute_s=compute_s) for r in range(num_replicas)],
            topology=topology,
            wire=PRICED_WIRE,
            coder_of=lambda: PricedCoder(nbytes),
            **watch,  # type: ignore[arg-type]
        )
    return Fleet(
        sync=sync,
        trainers=trainers,
        topology=topology,
        wire=scaled_wire(costs.model_nbytes / (4 * NUM_VALUES)),
        **watch,  # type: ignore[arg-type]
    )


# --- lock-step strategies of many replicas --------------------------------------------------------


def is_lock_step(sync: SyncSpec) -> bool:
    """All replicas exchange with all, every time."""
    return sync.name in ("allreduce", "quantized-adam", "local")


def reduce_s(sync: SyncSpec, num_replicas: int, costs: Costs, *, exact: bool = False) -> float:
    """An all-reduce from the moment when the last replica is there."""
    piece_s = 8 * _letter_nbytes(sync, num_replicas, costs, exact=exact) / costs.bandwidth_bps
    if sync.name == "allreduce" and sync.route == "ring":
        return 2 * (num_replicas - 1) * (piece_s + costs.latency_s)
    return 2 * ((num_replicas - 1) * piece_s + costs.latency_s)


def _compute_trial(
    sync: SyncSpec, num: int, slow: str, seconds: float, costs: Costs, seed: int
) -> Trial:
    """Everybody waits for the slowest, and then for the exchange; the loss as in one process."""
    compute_s = costs.compute_time(num, slow, seed)
    every = sync.local_steps if sync.name == "local" else 1
    job = Classify(num, seed=seed)
    twin = _Twin(sync, job)
    now, k, sent = 0.0, 0, 0.0
    spread = Spread(num)
    curve = [(0.0, job.loss(job.start))]
    while now < seconds:
        exact = sync.name == "quantized-adam" and k < sync.warmup
        times = [[compute_s(replica, k + i) for i in range(every)] for replica in range(num)]
        spread.entered_all(k, times)
        now += max(map(sum, times)) + reduce_s(sync, num, costs, exact=exact)
        sent += 2 * (num - 1) * _letter_nbytes(sync, num, costs, exact=exact)
        curve.append((now, job.loss(twin.exchange(k, every))))
        k += every
    return Trial(
        num_replicas=num,
        slow=slow,
        seconds=seconds,
        iteration_s=now / k,
        slowest_iteration_s=now / k,
        curve=tuple(curve),
        largest_gap=spread.largest,
        nbytes_per_iteration=sent / k,
        is_computed=True,
    )


class _Twin:
    """Replicas in lock-step as one: the strategy's own arithmetic on the mean; no rounding."""

    def __init__(self, sync: SyncSpec, job: Classify) -> None:
        self._job = job
        self._is_local = sync.name == "local"
        self._rule = Assembly(sync, range(job.num_replicas)).rule()
        self._rule.open(job.start)
        self._shard = VectorShard(job.start, lr=_lr(sync) or job.lr)

    def exchange(self, k: int, every: int) -> Tensor:
        """The parameters after the next `every` steps and an exchange."""
        job, rule, shard = self._job, self._rule, self._shard
        if self._is_local:
            ways = [self._way(replica, k, every) for replica in range(job.num_replicas)]
            value = torch.stack(ways).mean(0)
        else:
            shard.gradient = job.mean_gradient(shard.x, k)
            value = rule.outgoing(shard, k)
        rule.incoming(shard, k, SyncResult(value=value))
        if not (rule.updates or self._is_local):
            shard.update(k)
        return shard.x

    def _way(self, replica: int, k: int, every: int) -> Tensor:
        own = VectorShard(self._shard.x, lr=self._shard.lr(k))
        for step in range(k, k + every):
            own.gradient = self._job.gradient(own.x, self._job.rows(replica, step))
            own.update(step)
        way: Tensor = self._rule.outgoing(own, k)
        return way


def _letter_nbytes(sync: SyncSpec, num: int, costs: Costs, *, exact: bool = False) -> float:
    """With its header, which of a thousandth of a model is a large part."""
    coder = VectorCoder(sync.payload)
    if coder.is_exact or exact:
        return HEADER_NBYTES + costs.model_nbytes / num
    return HEADER_NBYTES + coder.nbytes(max(1, costs.model_nbytes // 4 // num))


def _lr(sync: SyncSpec) -> float | None:
    return ADAM_LR if sync.name == "quantized-adam" else None
