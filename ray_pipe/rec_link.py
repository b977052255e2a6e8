"""The links of a pipeline from Python, as people write them. No torch, no ray."""

from __future__ import annotations

from netsim.topology import Topology
from netsim.units import UnitError, parse_bandwidth, parse_duration, parse_fraction
from ray_pipe.errors import ConfigError


class Link:
    """What every node can send, and how far it is to the others: `Link("100Mbit", rtt="80ms")`."""

    def __init__(
        self,
        bandwidth: str = "unlimited",
        *,
        rtt: str = "0ms",
        jitter: str = "0ms",
        loss: str | float = 0.0,
    ) -> None:
        """`rtt` is there and back: half of it each way. Unlimited: the network as it is."""
        rate = f"{bandwidth}/s" if bandwidth.endswith("bit") else bandwidth
        try:
            self.bandwidth_bps = parse_bandwidth(rate)
            self.latency_s = parse_duration(rtt) / 2
            self.jitter_s = parse_duration(jitter)
            self.loss_rate = parse_fraction(loss)
        except UnitError as error:
            raise ConfigError(f"Link: {error}") from None

    def topology(self, num_nodes: int) -> Topology:
        """Every node alike."""
        return Topology.uniform(
            num_nodes, self.bandwidth_bps, self.latency_s, self.jitter_s, self.loss_rate
        )
