"""The doctor on hosts of their own: it measures what the kernel limits, and finds what is cut."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from netsim.topology import Topology
from tests.cluster.host import Host
from tests.cluster.rig import GOODPUT, Rig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NUM_HOSTS = 3
RATE_BPS = 100e6


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(NUM_HOSTS, rate_bps=RATE_BPS, laptop=True, name="doctor-rig") as made:
        made.start_ray()
        yield made


def doctor(host: Host, *words: str, address: str = "auto") -> tuple[int, dict[str, Any]]:
    command = [host.python, "-m", "ray_pipe.doctor", "--address", address, "--json", *words]
    done = host.run(command, timeout_s=300, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.quiet
@pytest.mark.parametrize("rate_bps", [RATE_BPS, 10e6])
def test_every_link_is_measured_at_what_the_kernel_lets_through(rig: Rig, rate_bps: float) -> None:
    rig.set_rate(rate_bps)
    links = rig.hosts[0].home / "links.yaml"

    code, found = doctor(rig.hosts[0], "--topology-out", str(links))

    assert code == 0, found["findings"]
    assert [node["address"] for node in found["nodes"]] == [host.ip for host in rig.hosts]
    assert [node["host"] for node in found["nodes"]] == ["node0", "node1", "node2"]
    assert len(found["links"]) == NUM_HOSTS * (NUM_HOSTS - 1)
    for link in found["links"]:
        assert link["bandwidth_bps"] == pytest.approx(rate_bps * GOODPUT, rel=0.1), link
        assert link["latency_s"] < 0.02, link
    topology = Topology.load(links, NUM_HOSTS)
    assert topology.rate_bps(0, 2) == pytest.approx(rate_bps * GOODPUT, rel=0.1)


def test_a_way_that_is_cut_in_one_direction_is_named_with_the_way_out(rig: Rig) -> None:
    blocked = ["ip", "route", "add", "unreachable", f"{rig.hosts[2].ip}/32"]
    rig.hosts[1].run(blocked)
    try:
        code, found = doctor(rig.hosts[0], "--quick")
    finally:
        rig.hosts[1].run([*blocked[:2], "delete", *blocked[3:]])

    faults = [finding for finding in found["findings"] if finding["level"] == "fault"]
    assert code == 1
    assert {fault["code"] for fault in faults} == {"unreachable"}
    assert "node 1 (10.99.0.11) -> node 2 (10.99.0.12)" in {fault["where"] for fault in faults}
    assert "let 10.99.0.11 connect to 10.99.0.12" in " ".join(x["way_out"] for x in faults)


def test_a_machine_outside_the_cluster_is_told_where_to_run(rig: Rig) -> None:
    assert rig.laptop is not None
    address = f"{rig.hosts[0].ip}:6379"

    code, found = doctor(rig.laptop, address=address)

    (fault,) = found["findings"]
    assert code == 1
    assert fault["what"] == (
        f"the cluster answers ({NUM_HOSTS} nodes), but this machine is none of its nodes"
    )
    assert f"`ray start --address={address}`" in fault["way_out"]


def test_the_next_command_trains_on_the_cluster(rig: Rig) -> None:
    rig.set_rate(RATE_BPS)
    _, found = doctor(rig.hosts[0], "--quick")
    (command,) = found["next_commands"]
    small = ["--model", "gpt-nano", "--set", "model.layers=4", "--steps", "2", "--codec", "acsgd"]

    words = [rig.hosts[0].python, *shlex.split(command)[1:], *small]
    done = rig.hosts[0].run([*words, "--out", str(rig.hosts[0].home / "runs")], timeout_s=300)

    assert "--stages 3" in command
    assert "acsgd" in done.stdout
