"""Puts a stage together: codecs, links and lanes of one place in the pipeline.

Used by the actor with threads and real links, and by the simulator with costs and virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from compressors.base import Compressor
from compressors.registry import CodecSpec, make_codec
from netsim.link import Link
from netsim.shaper import Uplink
from netsim.topology import Topology
from stages.ends import Edge, ReceivingEnd, SendingEnd
from stages.lanes import Recorder
from stages.optim import OptimSpec
from stages.stage import Lanes, Stage, Wiring


class Place(Protocol):
    """What `assemble` reads of a stage's specification."""

    index: int
    num_stages: int
    replica: int
    activation_codec: CodecSpec
    gradient_codec: CodecSpec
    topology: Topology
    dataset: str
    optim: OptimSpec
    seed: int


MakeCodec = Callable[[CodecSpec, tuple[str | int, ...]], Compressor]


def _real_codec(spec: CodecSpec, namespace: tuple[str | int, ...]) -> Compressor:
    return make_codec(spec, namespace=namespace)


def assemble(
    place: Place,
    *,
    compute: Any,
    samples: Any,
    lanes: Lanes,
    recorder: Recorder,
    deliver_to: Callable[[int], Callable[[Any], object]],
    codec_for: MakeCodec = _real_codec,
) -> Stage:
    """A stage ready to run, wired to every other stage. Must be called on the stage's loop."""
    index, last = place.index, place.num_stages - 1
    uplink = Uplink(place.topology.uplink_bps(index))
    links = {
        target: Link(
            place.topology.link(index, target),
            uplink,
            deliver_to(target),
            seed=place.seed * 1009 + index * 31 + target,
            name=f"{index}->{target}",
        )
        for target in range(place.num_stages)
        if target != index
    }
    wiring = Wiring(links=links)
    stage = Stage(
        index=index,
        num_stages=place.num_stages,
        compute=compute,
        samples=samples,
        wiring=wiring,
        lanes=lanes,
        recorder=recorder,
        clip=place.optim.clip,
        replica=place.replica,
    )

    def codec(edge: Edge) -> Compressor:
        spec = place.activation_codec if edge.kind == "activation" else place.gradient_codec
        return codec_for(spec, (edge.kind, edge.name, place.replica, place.dataset))

    def sending(target: int, kind: str) -> SendingEnd:
        edge = Edge(source=index, target=target, kind=kind, replica=place.replica)
        return SendingEnd(edge, codec(edge), links[target], lanes.transmit)

    def receiving(source: int, kind: str) -> ReceivingEnd:
        edge = Edge(source=source, target=index, kind=kind, replica=place.replica)
        return ReceivingEnd(
            edge, codec(edge), lanes.receive, lambda body: stage.complain(kind, source, body)
        )

    if index > 0:
        wiring.activation_in = receiving(index - 1, "activation")
        wiring.gradient_out = sending(index - 1, "gradient")
    if index < last:
        wiring.activation_out = sending(index + 1, "activation")
        wiring.gradient_in = receiving(index + 1, "gradient")
    return stage
