"""What the pipeline benchmarks share: train one arm on running actors, and write JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LOAD_AT_START = os.getloadavg()[0]
"""Before the benchmark itself made any."""

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray on this machine only, for minutes
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parent.parent))


def arguments(name: str, description: str) -> ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    return parser


@contextmanager
def stage_actors(num_stages: int) -> Iterator[Any]:
    """A Ray of our own with some stage actors, and a warm spare as in every run."""
    from ray_pipe.cluster import connect
    from ray_pipe.stage_actors import StageActors

    with connect(None), StageActors(num_stages, spares=1) as actors:
        yield actors


def wait_for_spares(actors: Any, arm: Any) -> None:
    """Until the spare has loaded everything: it would do so during the first steps otherwise."""
    actors.tend(arm.specs()[0])
    assert actors.spares.wait(120), "no spare was warm after two minutes"


def subset(actors: Any, num_stages: int) -> Any:
    """The first actors of a pool, as a pipeline of their own."""
    return Namespace(handles=actors.handles[:num_stages], tend=actors.tend, spares=actors.spares)


def train_arm(
    actors: Any,
    settings: Mapping[str, Any],
    *,
    target: float | None = None,
    real_bps: float | None = None,
) -> dict[str, Any]:
    """Prepare, predict and train one arm; the arm of results.json with the limits beside it.

    With `target` the arm trains on after its own steps until it has reached that loss. `real_bps`
    is for links that are not emulated: what the prediction shall take them to carry.
    """
    from netsim.topology import Topology
    from ray_pipe.arms import time_to_target
    from ray_pipe.config import RunConfig
    from ray_pipe.driver import train_on
    from ray_pipe.metrics import ArmMeter
    from ray_pipe.planner.cost import measure_costs, predict
    from ray_pipe.plans import arms_of
    from ray_pipe.refs_pipeline import TRANSPORTS
    from ray_pipe.trained import Trained
    from ray_pipe.workload import gpt_workload

    config = RunConfig.from_dict({"compare": [], **settings})
    arm = arms_of(config, gpt_workload(config))[0]
    pool = subset(actors, config.pipeline.stages)
    pipeline = TRANSPORTS[config.pipeline.transport](pool, arm, epoch_s=time.time())
    wait_for_spares(pool, arm)
    costs, shapes = measure_costs(pipeline)
    links = Topology.uniform(arm.topology.num_nodes, real_bps) if real_bps else arm.topology
    # The cores of this machine, however many hosts it plays.
    homes = [("here", float(len(os.sched_getaffinity(0))))] * len(costs)
    prediction = predict(replace(arm, topology=links), costs, shapes, homes=homes)
    one = Trained(arm=arm, prediction=prediction, meter=ArmMeter(arm.name))
    before = cpu_by_phase(pool)
    for records in pipeline.train():
        one.meter.add(records)
    used = cpu_by_phase(pool)
    summary = one.summary()
    if target is not None and not time_to_target(
        summary.losses, target=target, window=summary.final_window
    ):
        train_on(pipeline, one, target)
    return {
        **one.summary().as_dict(),
        "compute_step_s": prediction.compute_step_s,
        "link_step_s": prediction.link_step_s,
        "link_to_compute": prediction.link_to_compute,
        "costs": [dict(own.phases) for own in costs],
        "cpu_per_step_s": {
            phase: (seconds - before.get(phase, 0.0)) / arm.num_steps
            for phase, seconds in used.items()
        },
        "message_s": [costs[0].push_s, costs[0].deliver_s],
        "settings": {key: str(value) for key, value in settings.items()},
    }


def cpu_by_phase(actors: Any) -> dict[str, float]:
    """CPU seconds so far of all stages: whole processes, and their lanes' work by phase."""
    import ray

    total: Counter[str] = Counter()
    for own in ray.get([handle.cpu_by_phase.remote() for handle in actors.handles]):
        total.update(own)
    return dict(total)


def physics(arm: Mapping[str, Any]) -> list[str]:
    """The cells that stand beside every measured time: link time over compute time, and the limit
    it implies, that is how much faster a step would be if nothing but compute took time."""
    limit = arm["step_s"] / arm["compute_step_s"]
    return [f"{arm['link_to_compute']:.1f}", f"{limit:.2f}x"]


PHYSICS = ["link/compute", "limit"]
"""The header of `physics`."""


def stamp() -> dict[str, Any]:
    """The code and the machine that made a result, and how busy the machine was before."""
    from ray_pipe.machine import environment

    return {
        "commit": _commit(),
        "environment": environment(),
        "load_at_start": LOAD_AT_START,
    }


def _commit() -> str | None:
    """The commit, with a + if files differ from it; None outside a checkout."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", *words], cwd=here, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write(path: Path, results: Mapping[str, Any], *, stamped: bool = True) -> None:
    """Results with the code and environment they were taken with, unless each part has its own.

    The stamp is of this run, also where `results` were read from a file of an earlier one.
    """
    from compressors import kernels
    from ray_pipe.metrics import to_json

    assert kernels.core() == "native", "no claim without the native core; run `make` first"
    path.parent.mkdir(parents=True, exist_ok=True)
    now = stamp() if stamped else {}
    body = now | {name: value for name, value in results.items() if name not in now}
    path.write_text(to_json(body, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {os.path.relpath(path)}")


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table as the README shows it."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def load(path: Path) -> dict[str, Any]:
    """Results of an earlier run."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
