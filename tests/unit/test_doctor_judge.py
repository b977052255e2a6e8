"""What findings mean: each rule alone, on a cluster that is otherwise healthy."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from doctor_patients import (
    DISK,
    SOFTWARE,
    VERSIONS,
    healthy,
    with_link,
    with_node,
    without_bandwidth,
)
from hypothesis import given
from hypothesis import strategies as st

from ray_pipe.doctor_judge import judge
from ray_pipe.doctor_reports import Checkup, Finding, Software
from ray_pipe.planner.placement import Node, place
from ray_pipe.same_source import CHECKS

ON_GPUS = replace(SOFTWARE, versions=VERSIONS | {"torch": "2.13.0+cu128"})


def only_finding(checkup: Checkup) -> Finding:
    (finding,) = judge(checkup).findings
    return finding


def test_a_healthy_cluster_is_told_to_train_with_a_stage_for_each_node() -> None:
    verdict = judge(healthy())

    assert (verdict.state, verdict.exit_code, verdict.findings) == ("ok", 0, ())
    assert [step.command for step in verdict.next_commands] == [
        "python -m ray_pipe.run --address 10.0.0.10:6379 --stages 3 --bandwidth unlimited"
    ]


def test_a_head_that_is_kept_free_gets_no_stage() -> None:
    (step,) = judge(with_node(healthy(), 0, ray_cpus=0.0)).next_commands

    assert "--stages 2 " in step.command


def test_a_written_topology_can_be_rehearsed() -> None:
    verdict = judge(healthy(6), topology_path="my links.yaml")

    assert [step.command for step in verdict.next_commands] == [
        "python -m ray_pipe.run --address 10.0.0.10:6379 --stages 6 --set model.layers=6 "
        "--bandwidth unlimited",
        "python -m ray_pipe.run --stages 6 --set model.layers=6 --topology 'my links.yaml'",
    ]


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 7])
def test_the_next_command_is_one_that_the_run_accepts(num_nodes: int) -> None:
    from ray_pipe.flags import build_config, parse_flags

    for step in judge(healthy(num_nodes)).next_commands:
        python, m, module, *words = shlex.split(step.command)
        config = build_config(parse_flags(words))

        assert (python, m, module) == ("python", "-m", "ray_pipe.run")
        assert config.pipeline.stages == max(2, num_nodes)
        config.validate()


def test_one_machine_is_told_to_train_over_emulated_links() -> None:
    verdict = judge(healthy(1, address=None))

    assert verdict.state == "ok"
    assert [s.command for s in verdict.next_commands] == [
        "python -m ray_pipe.run --bandwidth 100Mbps"
    ]


def test_after_a_fault_the_next_command_is_to_look_again() -> None:
    verdict = judge(with_node(healthy(), 1, error="gone"), topology_path="links.yaml")

    assert (verdict.state, verdict.exit_code) == ("faults", 1)
    assert [step.command for step in verdict.next_commands] == [
        "python -m ray_pipe.doctor --address 10.0.0.10:6379"
    ]


def test_a_cluster_that_cannot_be_reached_is_one_fault_with_its_way_out() -> None:
    error = "--address h:1: nobody answers there (refused); is the cluster up, and reachable?"

    finding = only_finding(Checkup(address="h:1", here=SOFTWARE, error=error))

    assert (finding.level, finding.code, finding.where) == ("fault", "cluster", "h:1")
    assert finding.what == "nobody answers there (refused)"
    assert finding.way_out == "is the cluster up, and reachable?"


def test_a_cluster_of_one_node_is_worth_a_warning_but_one_machine_is_not() -> None:
    assert only_finding(healthy(1)).code == "one-node"
    assert judge(healthy(1, address=None)).findings == ()


def test_nodes_with_other_source_are_one_fault_that_names_them_and_their_digests() -> None:
    other = replace(SOFTWARE, source="bad1")
    checkup = with_node(with_node(healthy(), 1, software=other), 2, software=other)

    finding = only_finding(checkup)

    assert (finding.level, finding.code) == ("fault", "source")
    assert finding.where == "node 1 (10.0.0.11), node 2 (10.0.0.12)"
    assert finding.what == (
        "other source than here: node 1 (10.0.0.11) has bad1, node 2 (10.0.0.12) has bad1, "
        "here is 5eed"
    )
    assert "install the same version everywhere" in finding.way_out


def test_a_node_without_ray_pipe_is_not_installed_rather_than_of_other_source() -> None:
    bare = Software(
        versions=VERSIONS | {"ray_pipe": None}, source_error="ModuleNotFoundError: no ray_pipe"
    )

    finding = only_finding(with_node(healthy(), 2, software=bare))

    assert (finding.level, finding.code) == ("fault", "not-installed")
    assert "ray_pipe cannot be loaded there: ModuleNotFoundError: no ray_pipe" in finding.what


def test_another_core_is_a_fault_and_no_core_at_all_a_warning() -> None:
    slow = replace(SOFTWARE, core="torch")
    mixed = only_finding(with_node(healthy(), 1, software=slow))
    checkup = replace(healthy(1, address=None), here=slow)
    everywhere = only_finding(with_node(checkup, 0, software=slow))

    assert (mixed.level, mixed.code) == ("fault", "core")
    assert "node 1 (10.0.0.11) has torch, here is native" in mixed.what
    assert (everywhere.level, everywhere.code, everywhere.where) == ("warning", "core", "here")


def test_a_core_of_other_cpp_source_is_a_fault_as_it_is_to_a_run() -> None:
    other = replace(SOFTWARE, native="01d")

    finding = only_finding(with_node(healthy(), 1, software=other))

    assert (finding.level, finding.code) == ("fault", "core")
    assert "node 1 (10.0.0.11) has 01d, here is c0de" in finding.what


def test_torch_for_other_machines_is_the_same_torch() -> None:
    software = replace(SOFTWARE, versions=VERSIONS | {"torch": "2.13.0+cu128"})

    assert judge(with_node(healthy(), 1, software=software)).findings == ()


def test_whatever_a_run_refuses_is_a_fault() -> None:
    changes: dict[str, dict[str, Any]] = {
        "source": {"source": "other"},
        "core": {"core": "torch"},
        "native": {"native": "other"},
        "torch": {"versions": VERSIONS | {"torch": "2.12.0"}},
        "numpy": {"versions": VERSIONS | {"numpy": "1.26.4"}},
    }
    assert changes.keys() == CHECKS.keys()

    for name, change in changes.items():
        verdict = judge(with_node(healthy(), 1, software=replace(SOFTWARE, **change)))
        assert verdict.state == "faults", name


def test_with_gpus_on_several_nodes_the_stages_are_counted_there() -> None:
    # As examples/cluster-aws.yaml has it: a head without a GPU, workers with one each.
    checkup = healthy(5)
    for index in range(1, 5):
        checkup = with_node(checkup, index, ray_gpus=1.0, gpus=("A10G",), software=ON_GPUS)
    checkup = replace(with_node(checkup, 0, software=ON_GPUS), here=ON_GPUS)

    (step,) = judge(checkup).next_commands
    nodes = [
        Node(id=n.node_id, ip=n.address, num_cpus=n.ray_cpus, num_gpus=n.ray_gpus)
        for n in checkup.nodes
    ]
    placement = place(len(checkup.stage_nodes), nodes)

    assert "--stages 4" in step.command
    assert placement.num_gpus == 1.0
    assert [node.id for node in placement.nodes] == [n.node_id for n in checkup.stage_nodes]


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("ray", "2.59.0", "fault"),
        ("torch", "2.12.0", "fault"),  # a run refuses it
        ("torch", None, "fault"),
        ("numpy", "1.26.4", "fault"),
        ("python", "3.11.9", "warning"),
    ],
)
def test_versions_that_differ_are_named(name: str, version: str | None, level: str) -> None:
    software = replace(SOFTWARE, versions=VERSIONS | {name: version})

    finding = only_finding(with_node(healthy(), 1, software=software))

    assert (finding.level, finding.code) == (level, "versions")
    assert f"another {name} than here: node 1 (10.0.0.11) has {version or 'none'}" in finding.what
    assert finding.way_out == f"install {name} {VERSIONS[name]} on every node"


@pytest.mark.parametrize(
    ("changes", "level", "code", "what"),
    [
        ({"error": "no worker"}, "fault", "no-probe", "nothing could be started there: no worker"),
        (
            {"disks": (replace(DISK, error="Read-only file system"),)},
            "fault", "disk", "nothing can be written to /tmp/ray: Read-only file system",
        ),
        (
            {"disks": (replace(DISK, free_nbytes=9 * 10**9),)},
            "fault", "disk", "the disk of /tmp/ray is 96 % full; Ray stops at 95 %",
        ),
        (
            {"disks": (replace(DISK, free_nbytes=10**9, total_nbytes=10**10),)},
            "warning", "disk", "1GB left for /tmp/ray",
        ),
        ({"free_memory_nbytes": 10**8}, "warning", "memory", "100MB of memory left"),
        ({"shm_nbytes": 64 << 20}, "warning", "shm", "/dev/shm has only 67.1MB"),
        (
            {"gpus": ("Tesla", "Tesla"), "ray_gpus": 1.0,
             "software": replace(SOFTWARE, versions=VERSIONS | {"torch": "2.13.0"})},
            "warning", "gpu", "it has 2 GPUs, Ray was told of 1",
        ),
        (
            {"shm_goes_at_logout": True},
            "warning", "logout", "nobody is logged in, systemd removes",
        ),
        (
            {"gpus": ("Tesla",), "ray_gpus": 1.0},
            "warning", "gpu", "torch 2.13.0+cpu is built for CPUs",
        ),
        ({"clock_offset_s": -3.2}, "warning", "clock", "its clock is 3.20 s behind"),
        ({"clock_offset_s": 0.3}, "warning", "clock", "its clock is 0.30 s ahead"),
        ({"load": 6.5}, "warning", "busy", "than there are cores (6.5 on 4)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_node(
    changes: dict[str, Any], level: str, code: str, what: str
) -> None:
    findings = [
        finding
        for finding in judge(with_node(healthy(), 1, **changes)).findings
        if finding.code != "versions"
    ]

    assert [(f.level, f.code, f.where) for f in findings] == [(level, code, "node 1 (10.0.0.11)")]
    assert what in findings[0].what
    assert findings[0].way_out


@pytest.mark.parametrize(
    "changes",
    [
        {"clock_offset_s": 0.3, "clock_error_s": 0.25},  # a slow line cannot tell
        {"load": 6.0},
        {"disks": (replace(DISK, free_nbytes=10_000_000_001),)},  # 94.99 % full
        {"shm_nbytes": None},
        {"gpus": ()},
    ],
)
def test_what_is_still_well_with_a_node(changes: dict[str, Any]) -> None:
    assert judge(with_node(healthy(), 1, **changes)).findings == ()


def test_a_full_disk_of_the_driver_is_found_here() -> None:
    finding = only_finding(replace(healthy(), disks=(replace(DISK, path="runs", error="full"),)))

    assert (finding.level, finding.where) == ("fault", "here")


def test_ports_that_are_closed_one_way_are_named_with_the_ports_to_open() -> None:
    checkup = with_link(
        healthy(), 0, 2, error="port 1234 of 10.0.0.12: timed out", ports_open=False
    )

    finding = only_finding(checkup)

    assert (finding.level, finding.code) == ("fault", "unreachable")
    assert finding.where == "node 0 (10.0.0.10) -> node 2 (10.0.0.12)"
    assert finding.what == "port 1234 of 10.0.0.12: timed out; the other way works"
    assert "let 10.0.0.10 connect to 10.0.0.12" in finding.way_out


def test_open_ports_without_an_answer_point_at_the_workers_ports() -> None:
    checkup = with_link(with_link(healthy(), 0, 2, error="no answer"), 2, 0, error="no answer")

    findings = judge(checkup).findings

    assert [finding.what for finding in findings] == ["no answer", "no answer"]
    assert "--min-worker-port" in findings[0].way_out


def test_a_link_below_a_megabit_is_worth_a_warning() -> None:
    finding = only_finding(with_link(healthy(), 1, 0, bandwidth_bps=0.5e6))

    assert (finding.level, finding.code) == ("warning", "slow-link")
    assert "500kbps: slower than 1 Mbps" in finding.what


def test_links_that_were_not_measured_are_no_finding() -> None:
    assert judge(without_bandwidth(healthy())).state == "ok"


def test_busy_nodes_are_one_warning() -> None:
    finding = only_finding(with_node(with_node(healthy(), 0, load=9.0), 2, load=7.25))

    assert finding.where == "node 0 (10.0.0.10), node 2 (10.0.0.12)"
    assert "(9.0 on 4, 7.2 on 4)" in finding.what


def test_faults_come_before_warnings() -> None:
    checkup = with_node(healthy(), 0, load=99.0)
    checkup = with_node(checkup, 2, error="gone")

    assert [finding.level for finding in judge(checkup).findings] == ["fault", "warning"]


@given(
    st.floats(0, 1e12), st.floats(-1e6, 1e6), st.integers(0, 2**50), st.sampled_from([None, "torn"])
)
def test_any_numbers_give_a_verdict(rate: float, offset: float, free: int, error: str) -> None:
    checkup = with_link(healthy(), 0, 1, bandwidth_bps=rate, error=error)
    checkup = with_node(checkup, 1, clock_offset_s=offset, free_memory_nbytes=free)

    verdict = judge(checkup)

    assert verdict.exit_code == (1 if error else 0)
    assert verdict.next_commands
