"""Fleets of quadratics for the tests of the sync strategies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from netsim.clock import run_virtual
from netsim.link import Link
from netsim.topology import Topology
from stages.sync.fleet import Fleet, num_nodes
from stages.sync.priced import PRICED_WIRE, PricedCoder
from stages.sync.problems import ComputeTime, Priced, Quadratic
from stages.sync.slowness import draw, parse_slow, slow_factor
from stages.sync.strategies import SyncSpec

DIM = 24


def uniform_time(num: int, slow: str = "", *, seed: int = 0) -> ComputeTime:
    """U(1, 1.1) seconds for a step, times what `slow` says."""
    causes = parse_slow(slow, num_replicas=num)

    def compute_s(replica: int, k: int) -> float:
        base = 1.0 + 0.1 * draw(seed, replica, k, "base")
        return base * slow_factor(causes, replica, k, seed=seed)

    return compute_s


def quadratics(
    num: int,
    *,
    lr: float = 0.1,
    spread: float = 0.0,
    offset: float = 0.0,
    noise: float = 0.0,
    num_shards: int = 1,
    dim: int = DIM,
    dtype: torch.dtype = torch.float64,
    compute_s: ComputeTime | None = None,
    seed: int = 0,
) -> list[Quadratic]:
    """`spread` of the optima (non-IID), `offset` of the starting points."""
    generator = torch.Generator().manual_seed(seed)
    optima = 1.0 + spread * torch.randn(num, dim, generator=generator, dtype=dtype)
    starts = offset * torch.randn(num, dim, generator=generator, dtype=dtype)
    return [
        Quadratic(
            r,
            start=starts[r],
            optimum=optima[r],
            lr=lr,
            noise=noise,
            num_shards=num_shards,
            compute_s=compute_s or uniform_time(num, seed=seed),
            seed=seed,
        )
        for r in range(num)
    ]


def priced(num: int, compute_s: ComputeTime, *, nbytes: int = 1000) -> dict[str, Any]:
    """Options of a fleet that has costs instead of tensors."""
    return {
        "trainers": [Priced(r, compute_s=compute_s) for r in range(num)],
        "wire": PRICED_WIRE,
        "coder_of": lambda: PricedCoder(nbytes),
    }


def slow_net(num: int, num_stages: int = 1, *, rate_bps: float = 1e5) -> Topology:
    """Links of 20 ms, as in the spec's reference numbers."""
    return Topology.uniform(num_nodes(num, num_stages), bandwidth_bps=rate_bps, latency_s=0.02)


def run_fleet(
    trainers: Sequence[Any],
    sync: SyncSpec,
    num_steps: int,
    *,
    during: Callable[[Fleet], Any] | None = None,
    limit_s: float | None = 1e6,
    **options: Any,
) -> Fleet:
    """Run to the end in virtual time; `during(fleet)` may order deaths and births."""

    async def main() -> Fleet:
        fleet = Fleet(sync=sync, trainers=trainers, **options)
        if during is not None:
            during(fleet)
        await fleet.run(num_steps)
        await asyncio.sleep(30)  # letters in flight arrive
        return fleet

    return run_virtual(main(), limit_s=limit_s)


def mean_of(trainers: Sequence[Quadratic]) -> Tensor:
    return torch.stack([trainer.x for trainer in trainers]).mean(0)


def disagreement(trainers: Sequence[Quadratic]) -> float:
    stacked = torch.stack([trainer.x for trainer in trainers])
    return float((stacked - stacked.mean(0)).norm() / len(trainers) ** 0.5)


class Shuffling:
    """A link that delivers out of order within a window, and some frames twice."""

    def __init__(self, link: Link, *, seed: int, by_s: float, share_twice: float) -> None:
        self.link = link
        self._random = random.Random(seed)
        self._by_s = by_s
        self._share_twice = share_twice
        self._right = link.deliver
        link.deliver = self._deliver

    def _deliver(self, frame: Any) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(1 + (self._random.random() < self._share_twice)):
            loop.call_later(self._random.uniform(0, self._by_s), self._right, frame)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


def shuffled(*, seed: int = 0, by_s: float = 2.0, share_twice: float = 0.01) -> Any:
    """A `wrap_link` for `Fleet`."""
    count = iter(range(1 << 30))
    return lambda link: Shuffling(
        link, seed=seed * 7919 + next(count), by_s=by_s, share_twice=share_twice
    )
