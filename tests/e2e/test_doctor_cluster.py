"""The doctor on real Ray nodes: probes, links, a topology file, and a node with other source."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netsim.topology import Topology
from stages.digest import PACKAGES, source_digest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]

# An editable install is found by a hook that comes before PYTHONPATH; without it the copy wins.
NO_EDITABLE_HOOK = """\
import sys
sys.meta_path[:] = [x for x in sys.meta_path if "ScikitBuild" not in type(x).__name__]
"""


ENV = {"PYTHONPATH": str(ROOT)}


def command(module: str, *words: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command of ours in a process of its own."""
    clean = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    clean |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=tempfile.gettempdir(),  # workers search the driver's folder before anything else
        env=clean,
        capture_output=True,
        text=True,
        timeout=400,
    )
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """Two Ray nodes of this machine, with a folder of their own: nobody's `auto` finds them."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        node = {"num_cpus": 1, "object_store_memory": 100 << 20, "env_vars": ENV}
        head = node | {"include_dashboard": False, "temp_dir": temp}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**node)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def checkup(two_nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One look at the healthy cluster, for several tests."""
    path = tmp_path_factory.mktemp("doctor") / "links.yaml"
    words = ["--address", two_nodes.address, "--seconds", "0.3", "--topology-out", str(path)]
    code, out, err = command("ray_pipe.doctor", *words, "--json")

    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found | {"topology_path": path, "progress": err}


def test_every_node_is_looked_at_and_runs_our_source(checkup: dict[str, Any]) -> None:
    first, second = checkup["nodes"]

    assert checkup["verdict"] in ("ok", "warnings")  # others may use these cores
    assert {finding["code"] for finding in checkup["findings"]} <= {"busy", "memory"}
    assert (first["is_head"], second["is_head"]) == (True, False)
    assert first["node_id"] != second["node_id"]
    for node in (first, second):
        assert node["error"] is None
        assert node["software"] == {
            key: value for key, value in checkup["here"].items() if key != "disks"
        }
        assert node["software"]["source"] == source_digest()
        assert node["num_cores"] == len(os.sched_getaffinity(0))
        assert abs(node["clock_offset_s"]) <= node["clock_error_s"] + 0.01  # the same clock
        assert node["free_memory_nbytes"] > 0
        assert node["disks"][0]["free_nbytes"] > 0
    assert first["disks"][0]["path"].startswith("/tmp/rp-")


def test_every_pair_is_reached_both_ways_and_measured(checkup: dict[str, Any]) -> None:
    links = {(link["source"], link["target"]): link for link in checkup["links"]}

    assert set(links) == {(0, 1), (1, 0)}
    for link in links.values():
        assert link["error"] is None
        assert link["ports_open"] is True
        assert link["handshake_s"] > 0
        assert link["call_s"] > 0
        assert link["bandwidth_bps"] > 1e6
        assert 0 < link["nbytes"] <= 256_000_000
    assert "measuring 2 links, about 1 s" in checkup["progress"]
    assert "link 2/2  1 -> 0:" in checkup["progress"]


def test_the_measured_topology_is_what_the_links_say(checkup: dict[str, Any]) -> None:
    topology = Topology.load(checkup["topology_path"], 2)

    for link in checkup["links"]:
        pair = link["source"], link["target"]
        assert topology.rate_bps(*pair) == pytest.approx(link["bandwidth_bps"], rel=0.01)
        assert topology.link(*pair).latency_s == pytest.approx(link["latency_s"], rel=0.01)


def test_the_next_commands_are_for_this_cluster(checkup: dict[str, Any], two_nodes: Any) -> None:
    assert checkup["next_commands"] == [
        f"python -m ray_pipe.run --address {two_nodes.address} --stages 2 --bandwidth unlimited",
        f"python -m ray_pipe.run --stages 2 --topology {checkup['topology_path']}",
    ]


def test_another_port_of_a_node_is_not_its_head(two_nodes: Any) -> None:
    port = (
        two_nodes.head_node.raylet_socket_name and two_nodes.list_all_nodes()[1].node_manager_port
    )
    host = two_nodes.address.partition(":")[0]

    code, out, _ = command("ray_pipe.doctor", "--address", f"{host}:{port}")

    assert code == 1
    assert "is not the head of a Ray cluster" in " ".join(out.split())


def test_a_node_with_other_source_is_a_fault_with_its_name_and_digest(
    two_nodes: Any, tmp_path: Path
) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    (tmp_path / "stages" / "schedule.py").open("a").write("\n# another version\n")
    (tmp_path / "sitecustomize.py").write_text(NO_EDITABLE_HOOK)
    node = two_nodes.add_node(
        num_cpus=1, object_store_memory=100 << 20, env_vars={"PYTHONPATH": str(tmp_path)}
    )
    try:
        words = ["--address", two_nodes.address, "--quick"]
        code, out, err = command("ray_pipe.doctor", *words, "--json")
        shown = command("ray_pipe.doctor", *words)[1]
        ran = command(
            "ray_pipe.run", "--address", two_nodes.address, "--stages", "3", "--steps", "1",
            "--codec", "fp32", "--out", str(tmp_path / "runs"), "--bandwidth", "unlimited",
        )  # fmt: skip
    finally:
        two_nodes.remove_node(node)

    assert code == 1, err
    found = json.loads(out)
    (other,) = [x for x in found["nodes"] if x["software"]["source"] != source_digest()]
    (fault,) = [x for x in found["findings"] if x["level"] == "fault"]
    assert fault["code"] == "source"
    assert fault["where"].startswith(f"node {other['index']} (")
    assert f"has {other['software']['source']}, here is {source_digest()}" in fault["what"]
    assert found["next_commands"] == [f"python -m ray_pipe.doctor --address {two_nodes.address}"]
    assert other["software"]["source"] in shown  # as a column of the table
    assert ran[0] != 0
    assert "run other source than the driver" in " ".join(ran[2].split())
    assert other["software"]["source"] in ran[2]
