"""The driver's loader as a node of the topology: batches leave over shaped links, and are counted.

Path: ray_pipe.rec_batches -> ray_pipe.rec_loader -> stages.embedding.loaded

Ids and dense features go to stage 0 (counted as `embedding`), labels to the last stage (counted as
`activation`: they are what the last stage needs of a sample, as outputs are).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from compressors.base import Packet
from compressors.frame import FrameHeader, Kind, pack
from netsim.link import Link
from netsim.loop_thread import LoopThread
from netsim.shaper import Uplink
from netsim.topology import Topology
from ray_pipe.ledger import Sent
from ray_pipe.rec_batches import Loaded
from stages.courier import Courier
from stages.embedding.loaded import FEATURES, LABELS, features_packet, labels_packet, sample_ids_of


class Letter(NamedTuple):
    """Part of a micro-batch, for one stage."""

    target: int
    kind: Kind
    frame: bytes


def letters(loaded: Sequence[Loaded], *, step: int, first: int, last: int) -> Iterator[Letter]:
    """What stage 0 and stage `last` are sent of a step's micro-batches, numbered from `first`."""
    for place, one in enumerate(loaded):
        body = {"number": first + place, "of": len(loaded)}
        posts: tuple[tuple[int, Kind, str, Packet], ...] = (
            (0, "embedding", FEATURES, features_packet(one.part)),
            (last, "activation", LABELS, labels_packet(one.label)),
        )
        for target, kind, op, packet in posts:
            header = FrameHeader(
                kind=kind,
                source=-1,
                target=target,
                step=step,
                micro_batch=place,
                body={"op": op, **body},
            )
            yield Letter(target, kind, pack(header, packet))


_log = logging.getLogger("ray_pipe")


class Loader:
    """Sends micro-batches, in order, to the two stages that need them."""

    def __init__(
        self, *, node: int, topology: Topology, handles: Sequence[Any], generation: int, seed: int
    ) -> None:
        self.troubles: list[str] = []
        self._num_told = 0
        self._node, self._last = node, len(handles) - 1
        self._next = 0
        self._loop = LoopThread(name="loader", on_error=lambda e: self.troubles.append(repr(e)))
        self._courier = Courier(node, self.troubles.append)
        self._counted: Sent = {}
        uplink = Uplink(topology.uplink_bps(node))

        def link_to(target: int) -> Link:
            return Link(
                topology.link(node, target),
                uplink,
                lambda frame: self._courier.push(handles[target], target, generation, frame),
                seed=seed * 1009 + node * 31 + target,
                name=f"loader->{target}",
            )

        self._links = {target: link_to(target) for target in {0, self._last}}

    def send(self, loaded: Sequence[Loaded], *, step: int) -> tuple[tuple[int, ...], ...]:
        """Send the micro-batches of a training step, or of none (-1); what a plan calls them."""
        first, self._next = self._next, self._next + len(loaded)
        self.send_again(loaded, step=step, first=first)
        return tuple(
            sample_ids_of(first + place, one.part.num_samples) for place, one in enumerate(loaded)
        )

    def send_again(self, loaded: Sequence[Loaded], *, step: int, first: int) -> None:
        """Micro-batches that were sent as number `first` and following, to whoever is there now."""
        for letter in letters(loaded, step=step, first=first, last=self._last):
            self._loop.call_soon(self._post, letter)

    def _post(self, letter: Letter) -> None:
        self._links[letter.target].send(letter.frame, kind=letter.kind)

    def look(self) -> Sent:
        """Bytes sent since the last look, by link and kind; warns of what went wrong since."""
        for text in self.troubles[self._num_told :]:
            _log.warning("[loader] %s", text)
            self._num_told += 1
        sent = {link.name: dict(link.sent) for link in self._links.values()}
        fresh = {
            name: {
                kind: nbytes - self._counted.get(name, {}).get(kind, 0)
                for kind, nbytes in kinds.items()
            }
            for name, kinds in sent.items()
        }
        self._counted = sent
        return fresh

    def close(self) -> None:
        """Send nothing any more."""

        def end() -> None:
            for link in self._links.values():
                link.close()

        self._loop.call_soon(end)
        self._loop.stop()
