"""Stages that hold a GPU each die, and are replaced; prints what came of it as JSON.

Ray believes in as many GPUs as it is told of; the stages find no CUDA and compute on the CPU, so
that what is tried here is who holds which GPU. Run as a program: its Ray is its own.

    PYTHONPATH=tests python -m tests.e2e.gpu_drill nodes | spares
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from worker_forks import forked_workers

from ray_pipe.pipeline import Pipeline
from ray_pipe.stage_actors import StageActors
from stages.mishap import Mishap
from tests.chaos.killing import make_arm


@contextmanager
def gpu_cluster(*num_gpus: int) -> Iterator[Any]:
    """Nodes of this machine with so many GPUs each, the head first."""
    with (
        tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp", ignore_cleanup_errors=True) as temp,
        forked_workers(),
    ):
        path = str(Path(__file__).resolve().parents[2])
        common = {"num_cpus": 1, "object_store_memory": 100 << 20, "env_vars": {"PYTHONPATH": path}}
        nodes = [common | {"num_gpus": count} for count in num_gpus]
        head = nodes[0] | {"include_dashboard": False, "temp_dir": temp}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for node in nodes[1:]:
                cluster.add_node(**node)
            ray.init(cluster.address, namespace="gpu-drill", log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def train(
    actors: StageActors, *deaths: tuple[int, int], in_step_1: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """A short training in which stage s dies in step t, for each (s, t)."""
    arm = make_arm(**{"pipeline.stages": 2, "model.layers": 2})
    mishaps = tuple((stage, Mishap(step=step, point="F0")) for stage, step in deaths)
    pipeline = Pipeline(actors, replace(arm, mishaps=mishaps), epoch_s=time.time())
    losses = []
    for step, records in enumerate(pipeline.train()):
        losses.append(records[-1].loss)
        if step == 1:
            in_step_1()
    return {
        "losses": losses,
        "replaced": [failure.replaced for failure in pipeline.failures],
        "spares": [failure.spares for failure in pipeline.failures],
        "devices": [info["device"] for info in pipeline.infos],
        "nodes": [node.id for node in actors.placement.nodes],
    }


def nodes() -> dict[str, Any]:
    """One GPU on each node: a stage dies, then a node, then a stage of another node."""
    with gpu_cluster(1, 1, 1) as cluster, StageActors(2, spares=1) as actors:
        said = {"right": train(actors), "stage": train(actors, (0, 2))}
        away = actors.placement.nodes[1].id
        lost = next(node for node in cluster.list_all_nodes() if node.node_id == away)
        said["node"] = train(actors, in_step_1=lambda: cluster.remove_node(lost))
        return said | {"again": train(actors, (0, 2))}


def spares() -> dict[str, Any]:
    """One GPU more than stages: a spare takes the place, and the next has the GPU of the dead."""
    with gpu_cluster(3), StageActors(2, spares=1) as actors:
        said = {"right": train(actors)}
        for name in ("first", "second"):
            assert actors.spares.num_idle == 1
            assert actors.spares.wait(60.0), "the spare has no GPU"
            said[name] = train(actors, (1, 2))
        return said


if __name__ == "__main__":
    print(json.dumps({"nodes": nodes, "spares": spares}[sys.argv[1]]()))  # noqa: T201
