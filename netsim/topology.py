"""Who is joined to whom, and at what price.

A node has one uplink, shared by everything it sends; a link is one direction between two nodes
and has its own latency, jitter, loss and, if asked, its own rate below the uplink's. As a file:

    default: {bandwidth: 100Mbps, latency: 20ms, jitter: 2ms, loss: 0.1%}
    nodes:                     # the bandwidth of `default` is every node's uplink; other uplinks:
      0: {uplink: 1Gbps}
    links:                     # what a link does not say it takes from `default`
      0->1: {latency: 80ms}
      1<->2: {bandwidth: 10Mbps, latency: 5ms}
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from netsim.units import (
    UnitError,
    parse_bandwidth,
    parse_duration,
    parse_fraction,
    show_bandwidth,
    show_duration,
)

MAX_LOSS_RATE = 0.5
_PAIR = re.compile(r"\s*(\d+)\s*(<->|->)\s*(\d+)\s*")
_LINK_KEYS = ("bandwidth", "latency", "jitter", "loss")


class TopologyError(ValueError):
    """A topology that cannot be built, with the place in it that is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The price of one direction between two nodes."""

    bandwidth_bps: float = math.inf
    """The link's own rate; its sender's uplink limits it further."""

    latency_s: float = 0.0
    """One way. A delay line: it never costs bandwidth."""

    jitter_s: float = 0.0
    """Each frame is late by up to this much more; order is kept."""

    loss_rate: float = 0.0
    """Share of the segments that are lost, sent again and a round trip late."""

    def __post_init__(self) -> None:
        if not self.bandwidth_bps > 0:
            raise TopologyError(f"bandwidth_bps is {self.bandwidth_bps}, must be more than 0")
        for name, value in (("latency_s", self.latency_s), ("jitter_s", self.jitter_s)):
            if not 0 <= value < math.inf:
                raise TopologyError(f"{name} is {value}, must be 0 or more and finite")
        if not 0 <= self.loss_rate <= MAX_LOSS_RATE:
            raise TopologyError(
                f"loss_rate is {self.loss_rate}, must be from 0 to {MAX_LOSS_RATE}: "
                "a link that loses more carries next to nothing"
            )

    @property
    def is_ideal(self) -> bool:
        """Costs nothing: no rate, no delay, no loss."""
        return self == _IDEAL

    def transfer_s(self, nbytes: int) -> float:
        """From the first byte sent to the last received, alone, without jitter and loss."""
        return 8 * nbytes / self.bandwidth_bps + self.latency_s


_IDEAL = LinkSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes 0 to `num_nodes - 1`, their uplinks, and a link for each ordered pair."""

    num_nodes: int
    uplinks_bps: tuple[float, ...]
    default: LinkSpec = _IDEAL
    links: Mapping[tuple[int, int], LinkSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise TopologyError(f"num_nodes is {self.num_nodes}, must be at least 1")
        if len(self.uplinks_bps) != self.num_nodes:
            raise TopologyError(f"{len(self.uplinks_bps)} uplinks for {self.num_nodes} nodes")
        for node, rate_bps in enumerate(self.uplinks_bps):
            if not rate_bps > 0:
                raise TopologyError(f"uplink of node {node} is {rate_bps}, must be more than 0")
        for source, target in self.links:
            self._check_pair(source, target)

    @classmethod
    def uniform(
        cls,
        num_nodes: int,
        bandwidth_bps: float = math.inf,
        latency_s: float = 0.0,
        jitter_s: float = 0.0,
        loss_rate: float = 0.0,
    ) -> Topology:
        """Every node with the same uplink, every link with the same delay."""
        return cls(
            num_nodes=num_nodes,
            uplinks_bps=(bandwidth_bps,) * num_nodes,
            default=LinkSpec(latency_s=latency_s, jitter_s=jitter_s, loss_rate=loss_rate),
        )

    @classmethod
    def load(cls, path: str | Path, num_nodes: int) -> Topology:
        """Read a topology file; errors name the file and the place in it."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            data = yaml.load(text, Loader=StrictLoader)
        except OSError as error:
            raise TopologyError(f"topology file {path}: cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise TopologyError(f"topology file {path}: not valid YAML: {error}") from None
        try:
            return cls.parse({} if data is None else data, num_nodes)
        except TopologyError as error:
            raise TopologyError(f"topology file {path}: {error}") from None

    @classmethod
    def parse(cls, data: Any, num_nodes: int) -> Topology:
        """Read what a topology file holds, as plain dicts."""
        top = _section(data, "topology", ("default", "nodes", "links"))
        defaults = _section(top.get("default"), "default", _LINK_KEYS)
        spec = _link_spec(defaults, "default", _IDEAL)
        uplinks = [spec.bandwidth_bps] * num_nodes
        spec = replace(spec, bandwidth_bps=math.inf)
        for name, options in _section(top.get("nodes"), "nodes").items():
            node = _node(name, num_nodes)
            options = _section(options, f"nodes.{node}", ("uplink",))
            if "uplink" in options:
                uplinks[node] = _read(parse_bandwidth, options["uplink"], f"nodes.{node}.uplink")
        links: dict[tuple[int, int], LinkSpec] = {}
        for name, options in _section(top.get("links"), "links").items():
            where = f"links.{name}"
            options = _section(options, where, _LINK_KEYS)
            for source, target in _pairs(name, num_nodes):
                if (source, target) in links:
                    raise TopologyError(f"{where}: link {source}->{target} is given twice")
                links[source, target] = link = _link_spec(options, where, spec)
                if uplinks[source] < link.bandwidth_bps < math.inf:
                    raise TopologyError(
                        f"{where}: {show_bandwidth(link.bandwidth_bps)} is more than node {source} "
                        f"can send, its uplink is {show_bandwidth(uplinks[source])}; "
                        f"raise nodes.{source}.uplink, or leave the link's bandwidth out"
                    )
        return cls(num_nodes=num_nodes, uplinks_bps=tuple(uplinks), default=spec, links=links)

    def link(self, source: int, target: int) -> LinkSpec:
        """The link from one node to another."""
        self._check_pair(source, target)
        return self.links.get((source, target), self.default)

    def uplink_bps(self, node: int) -> float:
        """What a node can send, all its links together."""
        return self.uplinks_bps[_node(node, self.num_nodes)]

    def rate_bps(self, source: int, target: int) -> float:
        """What one link can carry when its node sends nothing else."""
        return min(self.link(source, target).bandwidth_bps, self.uplink_bps(source))

    @property
    def slowest_bps(self) -> float:
        """Of all uplinks and links; infinite where nothing is shaped."""
        specs = (self.default, *self.links.values())
        return min(*self.uplinks_bps, *(spec.bandwidth_bps for spec in specs))

    @property
    def is_unlimited(self) -> bool:
        """Nothing is shaped: frames pass as the real network carries them."""
        specs = (self.default, *self.links.values())
        return all(map(math.isinf, self.uplinks_bps)) and all(spec.is_ideal for spec in specs)

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and strings that `parse` reads back to an equal topology."""
        rate_bps = max(set(self.uplinks_bps), key=lambda rate: (self.uplinks_bps.count(rate), rate))
        data: dict[str, Any] = {
            "default": _show_link(replace(self.default, bandwidth_bps=rate_bps)),
            "nodes": {
                node: {"uplink": show_bandwidth(uplink)}
                for node, uplink in enumerate(self.uplinks_bps)
                if uplink != rate_bps
            },
            "links": {
                f"{source}->{target}": _show_link(spec)
                for (source, target), spec in sorted(self.links.items())
            },
        }
        return {key: value for key, value in data.items() if value}

    def dump(self, path: str | Path) -> None:
        """Write a file that `load` reads back to an equal topology."""
        Path(path).write_text(yaml.safe_dump(self.as_dict(), sort_keys=False), encoding="utf-8")

    def _check_pair(self, source: int, target: int) -> None:
        _node(source, self.num_nodes)
        _node(target, self.num_nodes)
        if source == target:
            raise TopologyError(f"link {source}->{target} joins node {source} to itself")


class StrictLoader(yaml.SafeLoader):
    """Refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []  # as written: what `<<` brings may be written over
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                problem = f"key {key!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.append(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _section(data: Any, where: str, known: Collection[str] | None = None) -> dict[Any, Any]:
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise TopologyError(f"{where}: expected `key: value` lines, got {data!r}")
    for key in data:
        if known is not None and key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise TopologyError(
                f"{where}: unknown key {key!r}; did you mean {near[0]!r}? "
                f"known are {', '.join(known)}"
            )
    return data


def _node(name: Any, num_nodes: int) -> int:
    if isinstance(name, bool) or not isinstance(name, int):
        raise TopologyError(f"node {name!r} is not a number from 0 to {num_nodes - 1}")
    if not 0 <= name < num_nodes:
        raise TopologyError(
            f"node {name} does not exist: with {num_nodes} nodes they are 0 to {num_nodes - 1}"
        )
    return name


def _pairs(name: Any, num_nodes: int) -> list[tuple[int, int]]:
    match = _PAIR.fullmatch(str(name))
    if match is None:
        raise TopologyError(f"link {name!r} is not understood: expected '0->1' or '0<->1'")
    source, target = (_node(int(match[group]), num_nodes) for group in (1, 3))
    if source == target:
        raise TopologyError(f"link {name!r} joins node {source} to itself")
    return [(source, target), (target, source)] if match[2] == "<->" else [(source, target)]


def _link_spec(options: dict[str, Any], where: str, base: LinkSpec) -> LinkSpec:
    fields = {
        "bandwidth": ("bandwidth_bps", parse_bandwidth),
        "latency": ("latency_s", parse_duration),
        "jitter": ("jitter_s", parse_duration),
        "loss": ("loss_rate", parse_fraction),
    }
    values = {
        fields[key][0]: _read(fields[key][1], value, f"{where}.{key}")
        for key, value in options.items()
    }
    try:
        return replace(base, **values)
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from None


def _read(parse: Any, value: Any, where: str) -> float:
    try:
        result: float = parse(str(value))
    except UnitError as error:
        raise TopologyError(f"{where}: {error}") from None
    return result


def _show_link(spec: LinkSpec) -> dict[str, Any]:
    """Every field, because a link that is silent takes the default's."""
    return {
        "bandwidth": show_bandwidth(spec.bandwidth_bps),
        "latency": show_duration(spec.latency_s),
        "jitter": show_duration(spec.jitter_s),
        "loss": spec.loss_rate,
    }
