"""Links, uplinks and the topology file."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netsim.topology import LinkSpec, Topology, TopologyError

FILE = """
default: {bandwidth: 100Mbps, latency: 20ms, jitter: 2ms, loss: 0.1%}
nodes:
  0: {uplink: 1Gbps}
links:
  0->1: {latency: 80ms}
  "1<->2": {bandwidth: 10Mbps, latency: 5ms}
"""


def test_ten_megabytes_over_eighty_megabits_take_a_second_plus_latency() -> None:
    link = LinkSpec(bandwidth_bps=80e6, latency_s=0.05)

    assert link.transfer_s(10_000_000) == pytest.approx(1.05)


def test_a_link_without_limits_is_ideal_and_takes_no_time() -> None:
    assert LinkSpec().is_ideal
    assert LinkSpec().transfer_s(10**12) == 0
    assert not LinkSpec(latency_s=1e-6).is_ideal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bandwidth_bps": 0}, "bandwidth_bps is 0, must be more than 0"),
        ({"bandwidth_bps": math.nan}, "bandwidth_bps is nan"),
        ({"latency_s": -1}, "latency_s is -1"),
        ({"jitter_s": math.inf}, "jitter_s is inf"),
        ({"loss_rate": 0.6}, "loss_rate is 0.6, must be from 0 to 0.5"),
    ],
)
def test_an_impossible_link_is_refused(options, message) -> None:
    with pytest.raises(TopologyError, match=message):
        LinkSpec(**options)


def test_uniform_gives_every_node_the_bandwidth_and_every_link_the_delay() -> None:
    topology = Topology.uniform(3, 100e6, 0.02, 0.001, 0.01)

    assert topology.uplinks_bps == (100e6, 100e6, 100e6)
    assert topology.link(0, 2) == LinkSpec(latency_s=0.02, jitter_s=0.001, loss_rate=0.01)
    assert topology.rate_bps(2, 1) == 100e6
    assert not topology.is_unlimited


def test_unlimited_means_that_nothing_is_shaped() -> None:
    assert Topology.uniform(4).is_unlimited
    assert not Topology.uniform(4, latency_s=0.001).is_unlimited


def test_the_slowest_is_looked_for_among_uplinks_and_links() -> None:
    topology = Topology.uniform(3, 100e6)
    slow = replace(topology, links={(0, 1): LinkSpec(bandwidth_bps=5e6)})

    assert (Topology.uniform(3).slowest_bps, topology.slowest_bps) == (math.inf, 100e6)
    assert slow.slowest_bps == 5e6


def test_a_file_sets_uplinks_and_links(tmp_path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(FILE)

    topology = Topology.load(path, 3)

    assert topology.uplinks_bps == (1e9, 100e6, 100e6)
    slow = LinkSpec(bandwidth_bps=10e6, latency_s=0.005, jitter_s=0.002, loss_rate=0.001)
    assert topology.link(1, 2) == topology.link(2, 1) == slow
    assert topology.link(0, 1) == LinkSpec(latency_s=0.08, jitter_s=0.002, loss_rate=0.001)
    assert topology.link(1, 0) == LinkSpec(latency_s=0.02, jitter_s=0.002, loss_rate=0.001)
    assert topology.rate_bps(1, 2) == 10e6
    assert topology.rate_bps(0, 1) == 1e9


def test_an_empty_file_is_unlimited(tmp_path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text("# nothing\n")

    assert Topology.load(path, 2).is_unlimited


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defualt: {bandwidth: 1Mbps}", "unknown key 'defualt'; did you mean 'default'"),
        ("default: {bandwith: 1Mbps}", "default: unknown key 'bandwith'; did you mean 'bandwidth'"),
        ("default: {bandwidth: 100}", "default.bandwidth: bandwidth '100' .* mean '100Mbps'"),
        ("default: {latency: 20}", "default.latency: duration '20' .* mean '20ms'"),
        ("default: {loss: 80%}", "default: loss_rate is 0.8, must be from 0 to 0.5"),
        ("default: 100Mbps", "default: expected `key: value` lines, got '100Mbps'"),
        ("nodes: {3: {uplink: 1Mbps}}", "node 3 does not exist: with 3 nodes they are 0 to 2"),
        ("nodes: {a: {uplink: 1Mbps}}", "node 'a' is not a number from 0 to 2"),
        ("nodes: {0: {upload: 1Mbps}}", "nodes.0: unknown key 'upload'; did you mean 'uplink'"),
        ("links: {0->7: {latency: 1ms}}", "node 7 does not exist"),
        ("links: {0-1: {latency: 1ms}}", "link '0-1' is not understood: expected '0->1'"),
        ("links: {1->1: {latency: 1ms}}", "joins node 1 to itself"),
        ("links: {0->1: {latency: 1ms}, 1<->0: {latency: 2ms}}", "link 0->1 is given twice"),
        ("links: {0->1: {latency: 1ms}, 0->1: {latency: 2ms}}", "key '0->1' is given twice"),
        (
            "default: {bandwidth: 100Mbps}\nlinks: {0->1: {bandwidth: 1Gbps}}",
            "1Gbps is more than node 0 can send, its uplink is 100Mbps; raise nodes.0.uplink",
        ),
        ("default: {bandwidth: [", "not valid YAML"),
        ("- 1", "topology: expected `key: value` lines"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_way_out(tmp_path, text, message) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(text)

    with pytest.raises(TopologyError, match=message) as refused:
        Topology.load(path, 3)

    assert "net.yaml" in str(refused.value)


def test_a_missing_file_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(TopologyError, match=r"net\.yaml: cannot be read: No such file"):
        Topology.load(tmp_path / "net.yaml", 2)


def test_a_pair_that_does_not_exist_has_no_link() -> None:
    topology = Topology.uniform(2)

    with pytest.raises(TopologyError, match="node 2 does not exist"):
        topology.link(0, 2)
    with pytest.raises(TopologyError, match="to itself"):
        topology.link(1, 1)
    with pytest.raises(TopologyError, match="node 5 does not exist"):
        topology.uplink_bps(5)


rates = st.floats(min_value=1, max_value=1e12) | st.just(math.inf)
times = st.floats(min_value=0, max_value=100)
losses = st.floats(min_value=0, max_value=0.5)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    num_nodes = draw(st.integers(1, 4))
    uplinks = tuple(draw(rates) for _ in range(num_nodes))
    pairs = [(s, t) for s in range(num_nodes) for t in range(num_nodes) if s != t]
    links = {
        pair: LinkSpec(
            bandwidth_bps=draw(
                st.just(math.inf) | st.floats(min_value=0.5, max_value=min(uplinks[pair[0]], 1e12))
            ),
            latency_s=draw(times),
            jitter_s=draw(times),
            loss_rate=draw(losses),
        )
        for pair in (draw(st.sets(st.sampled_from(pairs))) if pairs else ())
    }
    default = LinkSpec(latency_s=draw(times), jitter_s=draw(times), loss_rate=draw(losses))
    return Topology(num_nodes=num_nodes, uplinks_bps=uplinks, default=default, links=links)


@given(topologies())
def test_every_topology_reads_back_equal(tmp_path_factory, topology) -> None:
    path = tmp_path_factory.mktemp("net") / "net.yaml"

    topology.dump(path)

    assert Topology.load(path, topology.num_nodes) == topology
