"""Puts a stage together: codecs, links and lanes of one place in the pipeline.

Used by the actor with threads and real links, and by the simulator with costs and virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compressors.base import Compressor
from compressors.frame import Kind
from compressors.registry import CodecSpec, make_codec
from netsim.link import Link, LinkLike
from netsim.shaper import Uplink
from stages.embedding.feed import Feed
from stages.embedding.front import Front
from stages.embedding.loaded import FEATURES, LABELS, Inbox
from stages.embedding.loaded_feed import LoadedFeed
from stages.ends import FRAMES, Edge, SendingEnd, WireFormat
from stages.lanes import Recorder
from stages.receiving import ReceivingEnd
from stages.spec import StageSpec
from stages.stage import Stage
from stages.wiring import Lanes, Wiring

MakeCodec = Callable[[CodecSpec, tuple[str | int, ...]], Compressor]


def _real_codec(spec: CodecSpec, namespace: tuple[str | int, ...]) -> Compressor:
    return make_codec(spec, namespace=namespace)


def _plain_link(link: Link) -> LinkLike:
    return link


def assemble(
    spec: StageSpec,
    *,
    compute: Any,
    samples: Any,
    lanes: Lanes,
    recorder: Recorder,
    deliver_to: Callable[[int], Callable[[Any], object]],
    codec_for: MakeCodec = _real_codec,
    wrap_link: Callable[[Link], LinkLike] = _plain_link,
    wire: WireFormat = FRAMES,
    session: int = 0,
) -> Stage:
    """A stage ready to run, wired to every other stage. Must be called on the stage's loop.

    `session` tells lives of a client of embedding shards apart; it only rises.
    """
    index, last = spec.index, spec.num_stages - 1
    first, node = spec.first_node, spec.node
    uplink = Uplink(spec.topology.uplink_bps(node))

    def link_to(target: int, name: str) -> LinkLike:
        return wrap_link(
            Link(
                spec.topology.link(node, first + target),
                uplink,
                deliver_to(target),
                seed=spec.seed * 1009 + node * 31 + first + target,
                name=f"{node}->{name}",
            )
        )

    links = {
        target: link_to(target, str(first + target))
        for target in range(spec.num_stages)
        if target != index
    }
    wiring = Wiring(links=links, uplink=uplink)
    stage = Stage(
        index=index,
        num_stages=spec.num_stages,
        compute=compute,
        samples=samples,
        wiring=wiring,
        lanes=lanes,
        recorder=recorder,
        clip=spec.optim.clip,
        replica=spec.replica,
        wire=wire,
        first_block=spec.first_block,
        first_node=first,
    )

    if spec.loader is not None:
        _listen(stage, spec.loader, samples)
    if spec.embedding is not None:
        shards = {
            spec.embedding.node(shard, spec.num_stages): f"e{shard}"
            for shard in range(spec.embedding.num_shards)
        }
        to_shards = {node: link_to(node, name) for node, name in shards.items()}
        links |= to_shards
        feed = Feed if spec.loader is None else LoadedFeed
        stage.feed = stage.passes.feed = feed(
            spec.embedding,
            samples=samples,
            links=list(to_shards.values()),
            session=session,
        )

    def codec_of(edge: Edge) -> CodecSpec:
        return spec.activation_codec if edge.kind == "activation" else spec.gradient_codec

    def codec(edge: Edge) -> Compressor:
        return codec_for(codec_of(edge), (edge.kind, edge.name, spec.replica, spec.dataset))

    def sending(target: int, kind: Kind) -> SendingEnd:
        edge = Edge(source=index, target=target, kind=kind, replica=spec.replica)
        return SendingEnd(
            edge,
            codec(edge),
            links[target],
            lanes.transmit,
            wire=wire,
            compressed_evaluation=codec_of(edge).compressed_evaluation,
        )

    def receiving(source: int, kind: Kind) -> ReceivingEnd:
        edge = Edge(source=source, target=index, kind=kind, replica=spec.replica)
        return ReceivingEnd(
            edge,
            codec(edge),
            lanes.receive,
            lambda turn, body: stage.complain(kind, source, turn, body),
            wire=wire,
        )

    if index > 0:
        wiring.activation_in = receiving(index - 1, "activation")
        wiring.gradient_out = sending(index - 1, "gradient")
    if index < last:
        wiring.activation_out = sending(index + 1, "activation")
        wiring.gradient_in = receiving(index + 1, "gradient")
    return stage


def _listen(stage: Stage, loader: int, inbox: Inbox) -> None:
    """Batches come from a loader: to the inbox, and from there to whoever wants a part of them."""
    inbox.open([FEATURES] * stage.is_first + [LABELS] * stage.is_last)
    stage.inbox, stage.loader = inbox, loader
    for module in stage.compute.module.modules():
        if isinstance(module, Front):
            module.inbox = inbox
