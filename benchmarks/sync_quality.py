"""Does it learn the same? A tiny GPT on equal shards, and unlike shards with late neighbours.

    python benchmarks/sync_quality.py            both tables and the JSON (about three minutes)

Like data: a GPT of two layers on Python's own documentation, four replicas, every strategy, three
seeds, equally many epochs; the loss is that of the mean model on text that nobody trained on. SGD
with momentum, whose steps add up: Adam's do not, a replica that normalises its own noisy gradient
makes smaller steps than one that normalises the mean. quantized-adam is held against Adam.
Unlike data: 16 replicas whose optima differ, and logistic regression on shards that hold one side
of the examples each; the gap is the mean model's loss above the best possible, averaged over the
last quarter of the run. All in virtual time, with the classes that run in the actors.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import arguments, load, markdown, write
from torch import Tensor, nn

from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from netsim.topology import Topology
from ray_pipe.data import TextSamples, read_text
from ray_pipe.models.gpt import GPTShape, gpt_block
from stages.sync.fleet import Fleet, num_nodes
from stages.sync.hop import Hop
from stages.sync.problems import ModuleTrainer, Quadratic
from stages.sync.strategies import SyncSpec
from stages.sync.trial import Costs

sys.path.insert(0, str(Path(__file__).parent.parent))
SHAPE = GPTShape(layers=2, width=48, heads=4, context=48)
NUM, BATCH, NUM_SAMPLES, NUM_HELD_OUT, EPOCHS = 4, 8, 768, 128, 8

ADAM = "all-reduce, Adam"
LIKE = {
    "all-reduce": SyncSpec(),
    "local, 4 steps": SyncSpec(name="local", local_steps=4, outer_lr=1.0, outer_momentum=0.0),
    "ripples, pairs": SyncSpec(name="ripples", group_size=2),
    "ripples, ruler": SyncSpec(name="ripples", groups="ruler"),
    "ad-psgd": SyncSpec(name="ad-psgd"),
    "hop": SyncSpec(name="hop"),
    "hop, backup 1": SyncSpec(name="hop", backup_workers=1),
    "hop, stale 3": SyncSpec(name="hop", staleness=3),
    "hop, skip 4": SyncSpec(name="hop", backup_workers=1, skip=4),
    "hop, 8 bits": SyncSpec(name="hop", codec=CodecSpec(name="directq", bits=8)),
    ADAM: SyncSpec(),
    "quantized-adam, 4 bits": SyncSpec(
        name="quantized-adam", warmup=40, codec=CodecSpec(name="directq", bits=4)
    ),
}


def gpt_loss(sync: SyncSpec, seed: int, tokens: Tensor, *, adam: bool) -> float:
    """Held-out loss of the mean model after `EPOCHS` epochs."""
    shard = NUM_SAMPLES // NUM
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(seed))

    def loss_of(module: nn.Module, windows: Tensor) -> Tensor:
        logits = module(windows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].reshape(-1))

    def loss_at(module: nn.Module, replica: int, k: int) -> Tensor:
        epoch, place = divmod(k * BATCH, shard)
        turn = torch.Generator().manual_seed(seed * 100 + epoch)
        own = order[replica * shard : (replica + 1) * shard][torch.randperm(shard, generator=turn)]
        return loss_of(module, tokens[own[place : place + BATCH]])

    def make(replica: int) -> ModuleTrainer:
        module = nn.Sequential(*(gpt_block(SHAPE, i, seed=seed) for i in range(SHAPE.layers)))
        own = module.parameters()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
        if adam:
            optimizer = torch.optim.AdamW(own, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        times = Costs().compute_time(NUM, "", seed)
        return ModuleTrainer(
            replica, module, loss_at=loss_at, optimizer=optimizer, lr=1e-3, compute_s=times
        )

    trainers = [make(replica) for replica in range(NUM)]

    async def main() -> None:
        topology = Topology.uniform(num_nodes(NUM), bandwidth_bps=1e8, latency_s=0.02)
        await Fleet(sync=sync, trainers=trainers, topology=topology).run(EPOCHS * shard // BATCH)

    run_virtual(main())
    mean = torch.stack([trainer.shards[0].parameters() for trainer in trainers]).mean(0)
    trainers[0].shards[0].set_parameters(mean)
    with torch.no_grad():
        return float(loss_of(trainers[0].module, tokens[NUM_SAMPLES:]))


def like_data(seeds: int) -> dict[str, Any]:
    samples = TextSamples(read_text("pydoc"), context=SHAPE.context)
    step = len(samples) // (NUM_SAMPLES + NUM_HELD_OUT)
    picked = samples.batch([step * i for i in range(NUM_SAMPLES + NUM_HELD_OUT)])
    tokens = torch.cat([picked.inputs, picked.targets[:, -1:]], dim=1)
    tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
    found: dict[str, Any] = {}
    base: list[float] = []
    for name, sync in LIKE.items():
        adam = name == ADAM or sync.name == "quantized-adam"
        losses = [gpt_loss(sync, seed, tokens, adam=adam) for seed in range(seeds)]
        base = losses if name == ADAM or not base else base
        apart = [loss / exact - 1 for loss, exact in zip(losses, base, strict=True)]
        found[name] = {"losses": losses, "apart": apart}
        print(
            name, [round(x, 4) for x in losses], f"{100 * max(apart, key=abs):+.2f} %", flush=True
        )
    return found


# --- unlike data ----------------------------------------------------------------------------------

UNLIKE = {
    "hop": SyncSpec(name="hop"),
    "hop, stale 5": SyncSpec(name="hop", staleness=5),
    "hop, backup 1": SyncSpec(name="hop", backup_workers=1),
    "hop, skip 8": SyncSpec(name="hop", backup_workers=1, skip=8, max_gap=8),
    "all-reduce": SyncSpec(),
    "ripples": SyncSpec(name="ripples"),
    "ad-psgd": SyncSpec(name="ad-psgd"),
}
STRAGGLERS = {"one 4x": "2:4x", "random 6x": "random:6x@0.0625"}
SIXTEEN = 16


def quadratics(slow: str) -> tuple[list[Any], Callable[[Tensor], float]]:
    """Every replica has an optimum of its own; the best point is their mean."""
    generator = torch.Generator().manual_seed(5)
    optima = 1.0 + torch.randn(SIXTEEN, 8, generator=generator, dtype=torch.float64)
    times = Costs().compute_time(SIXTEEN, slow, 0)
    start = torch.zeros(8, dtype=torch.float64)
    trainers = [
        Quadratic(r, start=start, optimum=optima[r], lr=0.1, noise=0.5, compute_s=times)
        for r in range(SIXTEEN)
    ]
    return trainers, lambda x: float((x - optima.mean(0)).pow(2).sum() / 2)


def logistic(slow: str) -> tuple[list[Any], Callable[[Tensor], float]]:
    """Shards sorted by the rule's first feature; the best point is found by Newton-like descent."""
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(1024, 6, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(1024, generator=generator, dtype=torch.float64)
    targets = (inputs.sum(1) + noise > 0).double()
    order = inputs[:, 0].argsort()
    inputs, targets = inputs[order], targets[order]
    decay = 0.02

    def loss_of(weights: Tensor, rows: slice) -> Tensor:
        found = nn.functional.binary_cross_entropy_with_logits(
            inputs[rows] @ weights, targets[rows]
        )
        return found + decay * weights.pow(2).sum() / 2

    best = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    descent = torch.optim.LBFGS([best], max_iter=200, tolerance_grad=1e-12)

    def closure() -> Tensor:
        descent.zero_grad()
        loss = loss_of(best, slice(None))
        loss.backward()
        return loss

    descent.step(closure)
    floor = float(loss_of(best.detach(), slice(None)))
    times = Costs().compute_time(SIXTEEN, slow, 0)

    def batch_of(replica: int, k: int) -> slice:
        start = 64 * replica + 16 * (k % 4)
        return slice(start, start + 16)

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(6, dtype=torch.float64))

    def make(replica: int) -> ModuleTrainer:
        module = Linear()
        return ModuleTrainer(
            replica,
            module,
            loss_at=lambda m, r, k: loss_of(m.weights, batch_of(r, k)),
            optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
            lr=0.5,
            compute_s=times,
        )

    return (
        [make(r) for r in range(SIXTEEN)],
        lambda x: float(loss_of(x, slice(None))) - floor,
    )


PROBLEMS = {"quadratic": quadratics, "logistic": logistic}


class MeanOfReceived(Hop):
    """The trap: renormalises over whoever arrived."""

    async def complete(self, plan: Any) -> Any:
        from dataclasses import replace

        tag = plan.number
        plan = await super().complete(plan)
        there = {j: w for j, w in plan.weights.items() if plan.versions.get(j) == tag}
        return replace(plan, weights=dict.fromkeys(there, 1 / (1 + len(there))))


def steady_gap(problem: str, slow: str, sync: SyncSpec, *, trap: bool, seconds: float) -> float:
    trainers, gap_of = PROBLEMS[problem](slow)
    seen: list[float] = []

    async def main() -> None:
        import asyncio

        from stages.sync.strategies import Assembly

        class Trapped(Assembly):
            def strategy(self, post: Any, exchanges: Any) -> Any:
                made = super().strategy(post, exchanges)
                made.__class__ = MeanOfReceived
                return made

        fleet = Fleet(
            sync=sync,
            trainers=trainers,
            topology=Topology.uniform(num_nodes(SIXTEEN), latency_s=0.02),
            assembly=Trapped if trap else Assembly,
        )

        async def sample() -> None:
            for count in range(1, 201):
                await asyncio.sleep(seconds * count / 200 - asyncio.get_running_loop().time())
                vectors = [trainer.shards[0].parameters() for trainer in trainers]
                seen.append(gap_of(torch.stack(vectors).mean(0)))

        sampling = asyncio.create_task(sample())
        await fleet.run_for(seconds)
        await sampling

    run_virtual(main())
    return statistics.mean(seen[-50:])


def unlike_data(seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for problem in PROBLEMS:
        for name, sync in UNLIKE.items():
            for trap in (False, True):
                if trap and name not in ("hop, stale 5", "hop, backup 1"):
                    continue
                label = f"{name}, mean of whoever came (the trap)" if trap else name
                row = found.setdefault(label, {})
                for case, slow in STRAGGLERS.items():
                    row[f"{problem}, {case}"] = steady_gap(
                        problem, slow, sync, trap=trap, seconds=seconds
                    )
                print(problem, label, {k: f"{v:.2g}" for k, v in row.items()}, flush=True)
    return found


def main() -> None:
    parser = arguments("sync_quality", __doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=400.0, help="of the unlike data's runs")
    parser.add_argument("--keep-like", action="store_true", help="measure unlike data only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    like = load(args.out)["like"] if args.keep_like else like_data(args.seeds)
    unlike = unlike_data(args.seconds)
    rows = [
        [name, *(f"{x:.4f}" for x in row["losses"]), f"{100 * max(row['apart'], key=abs):+.2f} %"]
        for name, row in like.items()
    ]
    print("\n" + markdown(["strategy", *(f"seed {i}" for i in range(args.seeds)), "worst"], rows))
    cases = list(unlike["hop"])
    rows = [
        [name, *(f"{row[c]:.2g} ({row[c] / unlike['hop'][c]:.2g}x)" for c in cases)]
        for name, row in unlike.items()
    ]
    print("\n" + markdown(["strategy", *cases], rows))
    write(args.out, {"like": like, "unlike": unlike, "seconds": args.seconds})


if __name__ == "__main__":
    main()
