"""Unlike shards: how far the mean model stays above the best possible loss.

    python benchmarks/sync_quality.py --part unlike

16 replicas. `quadratic`: optima that differ and noise in the gradient. `logistic`: regression on
shards sorted by a feature, whole shards, so that nothing is left at the end but the bias of the
strategy. The gap is averaged over the last quarter of the run, and is called steady only if the
quarter before was not much higher: with a permanent 4x straggler everybody makes a quarter of the
steps, and a run cut short shows how fast a strategy falls, not where it ends.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sync_tables import unlike_table
from torch import Tensor, nn

from netsim.clock import run_virtual
from netsim.topology import Topology
from stages.sync.fleet import Fleet, num_nodes
from stages.sync.hop import Hop
from stages.sync.problems import ComputeTime, Quadratic, VectorShard
from stages.sync.strategies import Assembly, SyncSpec
from stages.sync.trial import Costs

UNLIKE = {
    "hop": SyncSpec(name="hop"),
    "hop, stale 5": SyncSpec(name="hop", staleness=5),
    "hop, backup 1": SyncSpec(name="hop", backup_workers=1),
    "hop, skip 8": SyncSpec(name="hop", backup_workers=1, skip=8, max_gap=8),
    "all-reduce": SyncSpec(),
    "ripples": SyncSpec(name="ripples"),
    "ad-psgd": SyncSpec(name="ad-psgd"),
}
TRAPS = ("hop, stale 5", "hop, backup 1")
STRAGGLERS = {"one 4x": "2:4x", "random 6x": "random:6x@0.0625"}
NUM, POINTS, STEADY = 16, 200, 0.6
LONGER = (1, 2, 4)
"""A run that is not steady is tried again, so many times as long. All-reduce without noise never
is: it goes to nothing."""

ROWS, DIM, DECAY = 64, 6, 0.02

Problem = tuple[list[Any], Callable[[Tensor], float]]
"""Trainers, and how far a point is above the best one."""


def quadratics(slow: str) -> Problem:
    """Every replica has an optimum of its own; the best point is their mean."""
    generator = torch.Generator().manual_seed(5)
    optima = 1.0 + torch.randn(NUM, 8, generator=generator, dtype=torch.float64)
    times = Costs().compute_time(NUM, slow, 0)
    start = torch.zeros(8, dtype=torch.float64)
    trainers = [
        Quadratic(r, start=start, optimum=optima[r], lr=0.1, noise=0.5, compute_s=times)
        for r in range(NUM)
    ]
    return trainers, lambda x: float((x - optima.mean(0)).pow(2).sum() / 2)


class Logistic:
    """One replica's share of a regression, with its gradient written out."""

    def __init__(
        self, replica: int, inputs: Tensor, targets: Tensor, *, times: ComputeTime
    ) -> None:
        self._replica = replica
        self._inputs, self._targets, self._times = inputs, targets, times
        self.shards = [VectorShard(torch.zeros(DIM, dtype=torch.float64), lr=0.5)]

    async def compute(self, k: int) -> None:
        """The gradient at the parameters of the moment when the step began."""
        x, inputs = self.shards[0].x, self._inputs
        wrong = torch.sigmoid(inputs @ x) - self._targets
        gradient = inputs.T @ wrong / len(inputs) + DECAY * x
        await asyncio.sleep(self._times(self._replica, k))
        self.shards[0].gradient = gradient


def logistic(slow: str) -> Problem:
    """Shards sorted by the rule's first feature; the best point is found by L-BFGS."""
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(NUM * ROWS, DIM, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(NUM * ROWS, generator=generator, dtype=torch.float64)
    targets = (inputs.sum(1) + noise > 0).double()
    order = inputs[:, 0].argsort()
    inputs, targets = inputs[order], targets[order]

    def loss_of(weights: Tensor) -> Tensor:
        found = nn.functional.binary_cross_entropy_with_logits(inputs @ weights, targets)
        return found + DECAY * weights.pow(2).sum() / 2

    best = torch.zeros(DIM, dtype=torch.float64, requires_grad=True)
    descent = torch.optim.LBFGS([best], max_iter=200, tolerance_grad=1e-12)

    def closure() -> Tensor:
        descent.zero_grad()
        loss = loss_of(best)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    descent.step(closure)  # type: ignore[no-untyped-call]
    floor = float(loss_of(best.detach()))
    times = Costs().compute_time(NUM, slow, 0)
    trainers = [
        Logistic(
            r,
            inputs[ROWS * r : ROWS * (r + 1)],
            targets[ROWS * r : ROWS * (r + 1)],
            times=times,
        )
        for r in range(NUM)
    ]
    return trainers, lambda x: float(loss_of(x)) - floor


PROBLEMS: dict[str, tuple[Callable[[str], Problem], dict[str, float]]] = {
    "quadratic": (quadratics, {"one 4x": 800.0, "random 6x": 500.0}),
    "logistic": (logistic, {"one 4x": 2000.0, "random 6x": 1000.0}),
}
"""And how many seconds each is run for."""


class MeanOfReceived(Hop):
    """The trap: renormalises over whoever arrived."""

    async def complete(self, plan: Any) -> Any:
        tag = plan.number
        plan = await super().complete(plan)
        there = {j: w for j, w in plan.weights.items() if plan.versions.get(j) == tag}
        return replace(plan, weights=dict.fromkeys(there, 1 / (1 + len(there))))


class Trapped(Assembly):
    """Makes strategies that are in the trap."""

    def strategy(self, post: Any, exchanges: Any) -> Any:
        made = super().strategy(post, exchanges)
        made.__class__ = MeanOfReceived
        return made


def gaps(problem: str, case: str, sync: SyncSpec, *, trap: bool, times: int = 1) -> list[float]:
    """The mean model's gap at `POINTS` moments of the run, or of one `times` as long."""
    make, lengths = PROBLEMS[problem]
    seconds = times * lengths[case]
    trainers, gap_of = make(STRAGGLERS[case])
    seen: list[float] = []

    async def main() -> None:
        fleet = Fleet(
            sync=sync,
            trainers=trainers,
            topology=Topology.uniform(num_nodes(NUM), latency_s=0.02),
            assembly=Trapped if trap else Assembly,
        )

        async def sample() -> None:
            for count in range(1, POINTS + 1):
                await asyncio.sleep(seconds * count / POINTS - asyncio.get_running_loop().time())
                vectors = [trainer.shards[0].parameters() for trainer in trainers]
                seen.append(gap_of(torch.stack(vectors).mean(0)))

        sampling = asyncio.create_task(sample())
        await fleet.run_for(seconds)
        await sampling

    run_virtual(main())
    return seen


def unlike_data() -> dict[str, Any]:
    """For each strategy and case: the gap, and whether it was steady."""
    found: dict[str, Any] = {}
    for problem in PROBLEMS:
        for name, sync in UNLIKE.items():
            for trap in (False, True) if name in TRAPS else (False,):
                label = f"{name}, mean of whoever came (the trap)" if trap else name
                row = found.setdefault(label, {})
                for case in STRAGGLERS:
                    for times in LONGER:
                        seen = gaps(problem, case, sync, trap=trap, times=times)
                        last = statistics.mean(seen[-POINTS // 4 :])
                        before = statistics.mean(seen[-POINTS // 2 : -POINTS // 4])
                        steady = last > STEADY * before
                        if steady:
                            break
                    row[f"{problem}, {case}"] = {
                        "gap": last, "steady": steady, "before": before, "times": times,
                    }  # fmt: skip
                shown = {k: f"{v['gap']:.2g}{'' if v['steady'] else '?'}" for k, v in row.items()}
                print(problem, label, shown, flush=True)
    print("\n" + unlike_table(found))
    return found
