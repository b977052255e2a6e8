"""What black boxes cost: the default training with and without them, taking turns.

Three numbers: the ratio of step times, pair by pair; the ratio of the CPU time of all stages, which
depends much less on who else uses the machine; and the CPU time of writing one box.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench import arguments, markdown, stage_actors, write

SETTINGS: dict[str, Any] = {"codec.name": "acsgd", "network.bandwidth_bps": "100Mbps"}
SKIPPED = 2
"""First steps of each turn: they also warm caches."""


def main() -> None:
    parser = arguments("black_box", __doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    cost = write_cost()
    print(
        f"writing the box of a middle stage takes {1e3 * cost['cpu_s']:.1f} ms of CPU for "
        f"{cost['nbytes'] / 1e6:.1f} MB"
    )
    steps: dict[str, list[float]] = {"off": [], "auto": []}
    cpu: dict[str, list[float]] = {"off": [], "auto": []}
    ratios = []
    with stage_actors(4) as actors:
        for turn in range(args.turns):
            medians = {}
            for setting in ("off", "auto") if turn % 2 else ("auto", "off"):
                times, cpu_s = train(actors, setting, args.steps)
                times = times[SKIPPED:]
                steps[setting] += times
                cpu[setting].append(cpu_s)
                medians[setting] = median(times)
            ratios.append(medians["auto"] / medians["off"])
            print(
                f"turn {turn}: {medians['off']:.3f} s without, {medians['auto']:.3f} s with; CPU "
                f"{cpu['off'][-1]:.3f} s and {cpu['auto'][-1]:.3f} s a step"
            )
    result = {
        "write": cost,
        "step_s": {key: median(own) for key, own in steps.items()},
        "cpu_step_s": {key: median(own) for key, own in cpu.items()},
        "cpu_ratio": median(a / b for a, b in zip(cpu["auto"], cpu["off"])),
        "cpu_ratios": [a / b for a, b in zip(cpu["auto"], cpu["off"])],
        "ratios": ratios,
        "ratio": median(ratios),
        "turns": args.turns,
        "steps_per_turn": args.steps - SKIPPED,
    }
    rows = [
        ["median step", f"{result['step_s']['off']:.3f} s", f"{result['step_s']['auto']:.3f} s"],
        ["ratio, median of pairs", "1", f"{result['ratio']:.3f}"],
        [
            "CPU of all stages a step",
            f"{result['cpu_step_s']['off']:.3f} s",
            f"{result['cpu_step_s']['auto']:.3f} s",
        ],
        ["ratio, median of pairs", "1", f"{result['cpu_ratio']:.3f}"],
        ["CPU of one write", "-", f"{1e3 * cost['cpu_s']:.1f} ms"],
    ]
    print(markdown(["", "without boxes", "with"], rows))
    write(args.out, result)


def train(actors: Any, setting: str, steps: int) -> tuple[list[float], float]:
    """Step times of a few steps of the default run, and the stages' CPU time for one."""
    import ray

    from ray_pipe.config import RunConfig
    from ray_pipe.metrics import ArmMeter
    from ray_pipe.pipeline import Pipeline
    from ray_pipe.plans import arms_of
    from ray_pipe.workload import gpt_workload

    config = RunConfig.from_dict(
        {"compare": [], **SETTINGS, "faults.black_box": setting, "steps": steps}
    )
    arm = arms_of(config, gpt_workload(config))[0]
    meter = ArmMeter(arm.name)
    pipeline = Pipeline(actors, arm, epoch_s=time.time())
    before = sum(ray.get([handle.cpu_seconds.remote() for handle in actors.handles]))
    times = [meter.add(records).step_s for records in pipeline.train()]
    after = sum(ray.get([handle.cpu_seconds.remote() for handle in actors.handles]))
    return times, (after - before) / steps


def write_cost() -> dict[str, float]:
    """CPU seconds of writing one image of a middle stage of the default model, rows and all."""
    import torch

    from compressors.buffers import Change, Mark
    from ray_pipe.config import RunConfig
    from ray_pipe.plans import arms_of, optim_spec
    from ray_pipe.workload import gpt_workload
    from stages.black_box import BlackBox, Image
    from stages.compute import Compute
    from stages.state import compute_parts

    torch.set_num_threads(1)
    config = RunConfig.from_dict({"compare": [], **SETTINGS, "steps": 1})
    arm = arms_of(config, gpt_workload(config))[0]
    spec = arm.specs()[1]
    compute = Compute(spec.build(), optim=optim_spec(config))
    for parameter in compute.parameters:
        parameter.grad = torch.zeros_like(parameter)
    compute.update(lr=0.0, factor=1.0)
    size = config.model.size
    rows = torch.randn(config.pipeline.samples_per_step, size.context, size.width).bfloat16()
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    times = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        box = BlackBox(Path(place) / "stage")
        for step in range(12):
            changes = [
                Change(sample, Mark(1, step + 1, tuple(row.shape)), row)
                for sample, row in enumerate(rows)
            ]
            arrays, notes = compute_parts(compute, spec.first_block, live=True)
            start = time.thread_time()
            box.write(
                Image(step=step, arrays=arrays, notes=notes,
                      changes={"activation_in": changes, "activation_out": changes})
            )  # fmt: skip
            times.append(time.thread_time() - start)
        nbytes = sum(array.nbytes for array in arrays.values()) + 2 * rows.nbytes
        box.close()
    return {"cpu_s": median(times[2:]), "nbytes": float(nbytes)}


if __name__ == "__main__":
    main()
