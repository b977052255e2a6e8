"""Step time without shaping and compression, against torch.distributed.pipelining on gloo.

The same GPT, cut at the same places into the same number of processes on the same cores, the same
micro-batches, AdamW, one torch thread each. Runs alternate (peer, ours, peer, ours, ...) so that a
busy machine slows both; the figure is the ratio of the medians over all steps.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench import PHYSICS, arguments, markdown, physics, stage_actors, train_arm, write

SETTINGS: dict[str, Any] = {
    "codec.name": "fp32",
    "network.bandwidth_bps": float("inf"),
    "data.num_samples": 128,
}


def main() -> None:
    parser = arguments("peer_pipelining", __doc__ or "")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rank", type=int, help="internal: one process of the peer")
    parser.add_argument("--port", type=int, help="internal")
    parser.add_argument("--schedule", default="gpipe", help="internal")
    args = parser.parse_args()
    if args.rank is not None:
        peer_process(args.rank, args.stages, args.port, args.schedule, args.steps, args.out)
        return

    found, rows = [], []
    with stage_actors(args.stages) as actors:
        for schedule in ("gpipe", "1f1b"):
            ours: list[float] = []
            peers: list[float] = []
            our_losses: list[float] = []
            peer_losses: list[float] = []
            for _ in range(args.rounds):
                times, peer_losses = run_peer(args.stages, schedule, args.steps)
                peers += times
                arm = train_arm(
                    actors,
                    {**SETTINGS, "pipeline.schedule": schedule, "pipeline.stages": args.stages,
                     "steps": args.steps, "optim.clip": 0.0},
                )  # fmt: skip
                ours += [b[0] - a[0] for a, b in pairwise(arm["losses"][2:])]
                our_losses = [loss for *_, loss in arm["losses"]]
            apart = max(abs(a - b) for a, b in zip(our_losses, peer_losses, strict=True))
            assert apart < 1e-3, f"the two do not train the same model: losses {apart} apart"
            ratio = median(ours) / median(peers)
            limits = {name: arm[name] for name in ("step_s", "compute_step_s", "link_to_compute")}
            limits["step_s"] = median(ours)
            found.append(
                {"schedule": schedule, "ours_s": median(ours), "peer_s": median(peers),
                 "ratio": ratio, "largest_loss_difference": apart,
                 "ours_all_s": ours, "peer_all_s": peers, **limits}
            )  # fmt: skip
            rows.append(
                [
                    schedule,
                    f"{median(ours):.3f} s",
                    f"{median(peers):.3f} s",
                    f"{ratio:.2f}x",
                    *physics(limits),
                ]
            )
            print(" ".join(rows[-1]), flush=True)
    header = ["schedule", "ray_pipe", "torch pipelining (gloo)", "ratio", *PHYSICS]
    print("\n" + markdown(header, rows))
    write(args.out, {"stages": args.stages, "schedules": found})


def run_peer(stages: int, schedule: str, steps: int) -> tuple[list[float], list[float]]:
    """Start the peer's processes and wait for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        command = [sys.executable, __file__, "--stages", str(stages), "--port", str(port),
                   "--schedule", schedule, "--steps", str(steps), "--out", str(out)]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], env=env) for rank in range(stages)
        ]
        codes = [process.wait(timeout=600) for process in processes]
        if any(codes):
            raise SystemExit(f"the peer failed: exit codes {codes}")
        result = json.loads(out.read_text())
    return result["times"], result["losses"]


def peer_process(
    rank: int, num_stages: int, port: int, schedule: str, steps: int, out: Path
) -> None:
    """One stage of the peer."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    from ray_pipe.config import RunConfig
    from ray_pipe.plans import arms_of, optim_spec
    from ray_pipe.workload import gpt_workload
    from stages.optim import make_optimizer, set_lr

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_stages
    )
    settings = {**SETTINGS, "compare": [], "pipeline.stages": num_stages, "steps": steps}
    config = RunConfig.from_dict(settings)
    arm = arms_of(config, gpt_workload(config))[0]
    module = arm.workload.stage_builders(num_stages)[rank]()
    stage = PipelineStage(module, rank, num_stages, torch.device("cpu"))

    def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total, count = arm.workload.loss(logits, targets)
        return total / count

    kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
    runner = kind(stage, n_microbatches=config.pipeline.micro_batches, loss_fn=mean_loss)
    optimizer = make_optimizer(optim_spec(config), list(module.parameters()))
    ends, losses = [], []
    for step in range(steps):
        plan = arm.plan(step)
        batch = arm.workload.samples.batch([i for ids in plan.micro_batches for i in ids])
        own: list[torch.Tensor] = []
        if rank == 0:
            runner.step(batch.inputs)
        elif rank == num_stages - 1:
            runner.step(target=batch.targets, losses=own)
        else:
            runner.step()
        set_lr(optimizer, plan.lr)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
        losses += [float(torch.stack([loss.detach() for loss in own]).mean())] if own else []
    dist.barrier()
    if rank == num_stages - 1:
        times = [b - a for a, b in pairwise(ends[2:])]
        out.write_text(json.dumps({"times": times, "losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
