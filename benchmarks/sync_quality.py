"""Does it learn the same? A tiny GPT on equal shards, and unlike shards with late neighbours.

    python benchmarks/sync_quality.py               all of it (about ten minutes of one core)
    python benchmarks/sync_quality.py --part adam   a part; the rest of the JSON stays

Like data: a GPT of two layers on Python's own documentation, four replicas, every strategy, three
seeds, equally many epochs; the loss is that of the mean model on text that nobody trained on. As in
a run of ours gradients are clipped to a norm of 1: without that the first large ones fill a
replica's own moments, and the strategies part by 2 to 6 %. The learning rate warms up and decays.

`sgd`: momentum 0.9, whose steps add up, so that averaging parameters is averaging gradients but
for where they were taken: one rate for all. `adam`: AdamW, and quantized-adam against it. A replica
that normalises its own noisy gradient makes shorter steps than one that normalises the mean of n,
by up to sqrt(n); and one that mixes in what is some iterations old goes slower. One rate for all
would compare rates. So all strategies, all-reduce as well, try the same ones with a seed that is
not among the three, and train with what was best then.

Unlike data (`sync_unlike.py`): 16 replicas, how far the mean model stays above the best possible
once it no longer falls. All in virtual time, with the classes that run in the actors.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from bench import arguments, load, write
from sync_tables import like_table
from sync_unlike import unlike_data
from torch import Tensor, nn

from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from netsim.topology import Topology
from ray_pipe.data import TextSamples, read_text
from ray_pipe.models.gpt import GPTShape, gpt_block
from stages.optim import OptimSpec, lr_at, make_optimizer, set_lr
from stages.sync.fleet import Fleet, num_nodes
from stages.sync.problems import ModuleShard, ModuleTrainer
from stages.sync.strategies import SyncSpec
from stages.sync.trial import Costs

SHAPE = GPTShape(layers=2, width=32, heads=2, context=32)
NUM, BATCH, NUM_SAMPLES, NUM_HELD_OUT, EPOCHS = 4, 8, 1536, 256, 8
STEPS = EPOCHS * NUM_SAMPLES // NUM // BATCH
WARMUP, CLIP = STEPS // 20, 1.0
RATES = {"sgd": (0.1,), "adam": (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)}
"""Tried in this order, until one is worse than the one before."""

TUNING_SEED = 100
OPTIM = {
    "sgd": OptimSpec(name="sgd", momentum=0.9, weight_decay=0.0),
    "adam": OptimSpec(name="adamw", weight_decay=0.0),
}
FOUR_BITS, TOP = CodecSpec(name="directq", bits=4), CodecSpec(name="topk", density=0.1)
AVERAGING = {
    "local, 4 steps": SyncSpec(name="local", local_steps=4, outer_lr=1.0, outer_momentum=0.0),
    "diloco, 8 steps": SyncSpec(name="local", local_steps=8),
    "ripples, pairs": SyncSpec(name="ripples", group_size=2),
    "ripples, ruler": SyncSpec(name="ripples", groups="ruler"),
    "ad-psgd": SyncSpec(name="ad-psgd"),
    "hop": SyncSpec(name="hop"),
    "hop, backup 1": SyncSpec(name="hop", backup_workers=1),
    "hop, stale 3": SyncSpec(name="hop", staleness=3),
    "hop, skip 4": SyncSpec(name="hop", backup_workers=1, skip=4),
    "hop, skip 4, one 4x slower": SyncSpec(name="hop", backup_workers=1, skip=4),
    "hop, 8 bits": SyncSpec(name="hop", codec=CodecSpec(name="directq", bits=8)),
    "hop, top 10 %": SyncSpec(name="hop", codec=TOP),
    "ripples, pairs, 4 bits": SyncSpec(name="ripples", group_size=2, codec=FOUR_BITS),
    "ripples, pairs, top 10 %": SyncSpec(name="ripples", group_size=2, codec=TOP),
}
"""Strategies that average parameters."""

SLOW = {"hop, skip 4, one 4x slower": "2:4x"}
"""Among equals nobody jumps. The slow replica's skipped steps are samples that nobody sees."""

QUANTIZED = SyncSpec(name="quantized-adam", warmup=STEPS // 4, codec=FOUR_BITS)
LIKE = {
    "sgd": {"all-reduce": SyncSpec(), **AVERAGING},
    "adam": {"all-reduce": SyncSpec(), "quantized-adam, 4 bits": QUANTIZED, **AVERAGING},
}


def rates_tried(sync: SyncSpec, tokens: Tensor, *, optimizer: str, slow: str) -> dict[float, float]:
    """Peak learning rates and the losses they lead to, the best one first."""
    found: dict[float, float] = {}
    for lr in RATES[optimizer]:
        if len(RATES[optimizer]) == 1:
            return {lr: math.nan}
        found[lr] = gpt_loss(sync, TUNING_SEED, tokens, optimizer=optimizer, lr=lr, slow=slow)
        if not found[lr] <= min(found.values()):
            break
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


class GptShard(ModuleShard):
    """Clips and follows the schedule, as a stage does."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, lr: float) -> None:
        super().__init__(module, optimizer, lr=lr)
        self._peak = lr

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)

    def update(self, k: int) -> None:
        self.clip()
        set_lr(self.optimizer, self.lr(k))
        super().update(k)

    def lr(self, k: int) -> float:
        return lr_at(
            k, lr=self._peak, warmup_steps=WARMUP, num_steps=STEPS, decay="cosine", min_ratio=0.0
        )


class GptTrainer(ModuleTrainer):
    """A replica; with `clips_first` what it exchanges is clipped, as quantized-adam's is."""

    clips_first = False

    async def compute(self, k: int) -> None:
        await super().compute(k)
        shard = self.shards[0]
        if self.clips_first and isinstance(shard, GptShard):
            shard.clip()


def gpt_loss(
    sync: SyncSpec, seed: int, tokens: Tensor, *, optimizer: str, lr: float, slow: str = ""
) -> float:
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

    def make(replica: int) -> GptTrainer:
        module = nn.Sequential(*(gpt_block(SHAPE, i, seed=seed) for i in range(SHAPE.layers)))
        own = make_optimizer(OPTIM[optimizer], module.parameters())
        times = Costs().compute_time(NUM, slow, seed)
        trainer = GptTrainer(
            replica, module, loss_at=loss_at, optimizer=own, lr=lr, compute_s=times
        )
        trainer.clips_first = sync.name == "quantized-adam"
        trainer.shards = [GptShard(module, own, lr=lr)]
        return trainer

    trainers = [make(replica) for replica in range(NUM)]
    skipped: list[int] = []

    async def main() -> None:
        topology = Topology.uniform(num_nodes(NUM), bandwidth_bps=1e8, latency_s=0.02)
        fleet = Fleet(sync=sync, trainers=trainers, topology=topology)
        await fleet.run(STEPS)
        skipped.extend(replica.num_skipped for replica in fleet.replicas.values())

    run_virtual(main())
    if slow:
        print(f"  {sum(skipped)} of {STEPS} steps skipped by the slow replica", flush=True)
    mean = torch.stack([trainer.shards[0].parameters() for trainer in trainers]).mean(0)
    trainers[0].shards[0].set_parameters(mean)
    with torch.no_grad():
        return float(loss_of(trainers[0].module, tokens[NUM_SAMPLES:]))


def windows() -> Tensor:
    """Samples from all over the text, in a fixed order; the last ones are held out."""
    samples = TextSamples(read_text("pydoc"), context=SHAPE.context)
    step = len(samples) // (NUM_SAMPLES + NUM_HELD_OUT)
    picked = samples.batch([step * i for i in range(NUM_SAMPLES + NUM_HELD_OUT)])
    tokens = torch.cat([picked.inputs, picked.targets[:, -1:]], dim=1)
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]


def like_data(optimizer: str, seeds: int) -> dict[str, Any]:
    tokens = windows()
    found: dict[str, Any] = {}
    for name, sync in LIKE[optimizer].items():
        start = time.process_time()
        slow = SLOW.get(name, "")
        tried = rates_tried(sync, tokens, optimizer=optimizer, slow=slow)
        lr = next(iter(tried))
        losses = [
            gpt_loss(sync, seed, tokens, optimizer=optimizer, lr=lr, slow=slow)
            for seed in range(seeds)
        ]
        base = found["all-reduce"]["losses"] if found else losses
        apart = [loss / exact - 1 for loss, exact in zip(losses, base, strict=True)]
        found[name] = {"losses": losses, "apart": apart, "lr": lr}
        if len(tried) > 1:
            found[name]["tried"] = {f"{rate:g}": loss for rate, loss in tried.items()}
        print(
            f"{optimizer} {name}: {[round(x, 4) for x in losses]}, "
            f"{100 * max(apart, key=abs):+.2f} %, {time.process_time() - start:.0f} s of CPU",
            flush=True,
        )
    return found


def main() -> None:
    parser = arguments("sync_quality", __doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", choices=["all", "sgd", "adam", "unlike"], default="all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path: Path = args.out
    results = load(path) if path.exists() else {}
    results = {key: results[key] for key in ("like", "unlike") if key in results}
    for part in ("sgd", "adam"):
        if args.part in ("all", part):
            results.setdefault("like", {})[part] = like_data(part, args.seeds)
            print("\n" + like_table(results["like"][part]) + "\n", flush=True)
    if args.part in ("all", "unlike"):
        results["unlike"] = unlike_data()
    settings = {"replicas": NUM, "batch": BATCH, "samples": NUM_SAMPLES, "epochs": EPOCHS}
    write(path, {**results, "settings": {**settings, "steps": STEPS, "clip": CLIP}})


if __name__ == "__main__":
    main()
