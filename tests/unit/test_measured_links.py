"""Measured links as a topology file: what `--topology` and the simulator read."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_patients import healthy, with_link, with_node, without_bandwidth

from netsim.topology import LinkSpec, Topology
from ray_pipe.errors import ConfigError
from ray_pipe.measured_links import topology_of, write_topology


def measured(tmp_path: Path) -> Path:
    checkup = with_link(healthy(), 1, 2, bandwidth_bps=9_612_345.0, handshake_s=0.16)
    path = tmp_path / "links.yaml"
    write_topology(checkup, path, when="2026-11-16 12:00")
    return path


def test_the_measured_file_loads_to_the_measured_links(tmp_path: Path) -> None:
    topology = Topology.load(measured(tmp_path), 3)

    assert topology.uplinks_bps == (94.8e6, 94.8e6, 94.8e6)
    assert topology.link(1, 2) == LinkSpec(bandwidth_bps=9.61e6, latency_s=0.08)
    assert topology.link(2, 1) == LinkSpec(bandwidth_bps=94.8e6, latency_s=0.02)
    assert topology.rate_bps(1, 2) == 9.61e6
    assert topology == topology_of(
        with_link(healthy(), 1, 2, bandwidth_bps=9_612_345.0, handshake_s=0.16)
    )


def test_the_file_says_who_is_who(tmp_path: Path) -> None:
    lines = measured(tmp_path).read_text().splitlines()

    assert "#   0: 10.0.0.10 host0" in lines
    assert "#   2: 10.0.0.12 host2" in lines


def test_a_head_that_takes_no_stage_is_no_node_of_the_topology() -> None:
    checkup = with_node(with_link(healthy(), 1, 2, bandwidth_bps=5e6), 0, ray_cpus=0.0)

    topology = topology_of(checkup)

    assert topology.num_nodes == 2
    assert (topology.rate_bps(0, 1), topology.rate_bps(1, 0)) == (5e6, 94.8e6)


def test_without_a_handshake_half_a_call_is_the_latency() -> None:
    topology = topology_of(with_link(healthy(), 0, 1, handshake_s=None))

    assert topology.link(0, 1).latency_s == 0.021


def test_a_step_time_can_be_predicted_from_the_measured_file(tmp_path: Path) -> None:
    from ray_pipe.config import NetworkConfig, PipelineConfig, RunConfig
    from ray_pipe.planner.cost import simulated_step_s
    from ray_pipe.plans import arms_of
    from ray_pipe.workload import gpt_workload
    from stages.rehearsal import StageCosts

    config = RunConfig(
        pipeline=PipelineConfig(stages=3),
        network=NetworkConfig(topology=str(measured(tmp_path))),
    )
    costs = [StageCosts(phases={"forward": 0.02, "backward": 0.04}) for _ in range(3)]
    step_s = {
        arm.name: simulated_step_s(
            arm, costs, ((128, 128),) * 2, homes=[("here", 6.0)] * arm.config.pipeline.stages
        )
        for arm in arms_of(config, gpt_workload(config))
    }

    # fp32: 4 micro-batches of 16 x 128 x 128 floats, 1.05 MB each, over 9.61 Mbps take 3.5 s.
    assert 3.5 < step_s["fp32"] < 4.4
    assert step_s["acsgd"] < step_s["fp32"] / 2


@pytest.mark.parametrize(
    ("checkup", "message"),
    [
        (healthy(1), "1 node has no links"),
        (without_bandwidth(healthy(2)), r"2 links have no measured bandwidth \(0->1, 1->0\)"),
        (with_link(healthy(), 0, 2, error="torn"), r"1 links have no measured bandwidth \(0->2\)"),
    ],
)
def test_what_was_not_measured_is_not_written(tmp_path: Path, checkup, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_topology(checkup, tmp_path / "links.yaml", when="now")

    assert not (tmp_path / "links.yaml").exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--topology-out .*links.yaml: cannot be written"):
        write_topology(healthy(), tmp_path / "no" / "links.yaml", when="now")
