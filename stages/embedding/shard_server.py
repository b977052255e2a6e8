"""A shard's letters: frames in, frames out.

Path: netsim.link -> stages.embedding.shard_server -> stages.embedding.hybrid

Belongs to the event loop, does no waiting of its own. A damaged frame is dropped: whoever sent it
asks again. An acknowledgement goes out when a step is settled, not when its push arrives, because
it gives a permit back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compressors.base import CodecError, Packet
from compressors.frame import FrameError, FrameHeader, pack, unpack
from netsim.link import LinkLike
from stages.embedding import letters
from stages.embedding.letters import Wire
from stages.embedding.row_errors import RowStoreError
from stages.embedding.shard import Shard
from stages.embedding.shard_terms import CapacityError, Settled, UnknownTicketError, touch_of


class ShardServer:
    """Serves one shard to the clients that `link_to` reaches."""

    def __init__(
        self, shard: Shard, *, link_to: Callable[[int], LinkLike], wire: Wire | None = None
    ) -> None:
        self.shard = shard
        self.num_damaged = 0
        self._wire = wire or Wire()
        self._link_to = link_to
        self._client_of: dict[int, int] = {}
        self._sessions: dict[int, int] = {}
        self._num_sent = 0
        self.on_point: Callable[[str], None] | None = None
        """Called where a test may want the shard to end: see `ShardMishap.point`."""

    def on_frame(self, frame: Any) -> None:
        """A letter from a client."""
        try:
            header, packet = unpack(frame)
        except FrameError:
            self.num_damaged += 1
            return
        client, ticket = header.source, header.step
        if header.generation < self._sessions.get(client, 0):
            return  # of an earlier life of the client
        if header.generation > self._sessions.get(client, 0):
            self._begin(client, header.generation)
        try:
            self._serve(header.body.get("op", ""), client, ticket, header, packet)
        except UnknownTicketError:
            self._send(client, ticket, "need")
        except CodecError:
            self.num_damaged += 1
        except (CapacityError, RowStoreError, ValueError, OSError) as error:
            self._send(client, ticket, "error", why=f"{type(error).__name__}: {error}")

    def _begin(self, client: int, session: int) -> None:
        """A client restarted: what it had under way is void, so that nobody waits for it."""
        self._sessions[client] = session
        self.shard.on_new_client()
        for ticket in [t for t, owner in self._client_of.items() if owner == client]:
            if self._client_of.pop(ticket, None) is not None:  # else settled with one before it
                self._settle(client, self.shard.void(ticket))

    def _serve(
        self, op: str, client: int, ticket: int, header: FrameHeader, packet: Packet | None
    ) -> None:
        shard = self.shard
        if op == "ids" and packet is not None:
            shard.announce(ticket, letters.read_ids(packet, shard.tables))
            self._client_of[ticket] = client
        elif op == "pull":
            ids = None if packet is None else letters.read_ids(packet, shard.tables)
            pulled = shard.pull(ticket, ids, touch=touch_of(header.generation, ticket))
            self._client_of[ticket] = client
            answer = letters.rows_packet(pulled.tables, shard.tables, self._wire.rows)
            self._send(client, ticket, "rows", answer, version=pulled.version)
        elif op == "push" and packet is not None:
            v_read = header.body.get("v_read")
            if type(v_read) is not int:
                raise CodecError("a push that does not say what it read")
            number = header.body.get("number")
            if number is not None and type(number) is not int:
                raise CodecError("a push of a step without a number")
            rows = shard.pulled_rows(ticket)
            gradients = (
                letters.read_gradients(packet, rows, shard.tables) if rows is not None else {}
            )
            self.reach("push")
            settled = shard.push(ticket, v_read, gradients, number)
            self.reach("applied")
            self._settle(client, settled)
        elif op == "void":
            self._settle(client, shard.void(ticket))
        elif op == "read" and packet is not None:
            wanted = letters.read_ids(packet, shard.tables)
            self.reach("read")
            values = shard.read({name: part.ids for name, part in wanted.items()})
            answer = letters.rows_packet(values, shard.tables, self._wire.rows)
            self._send(client, ticket, "values", answer, version=shard.version)
        else:
            raise CodecError(f"unknown letter {op!r}")

    def reach(self, point: str) -> None:
        """A point of `on_point`."""
        if self.on_point is not None:
            self.on_point(point)

    def _settle(self, client: int, settled: list[Settled]) -> None:
        for one in settled:
            self._acknowledge(one, self._client_of.pop(one.ticket, client))

    def _acknowledge(self, one: Settled, client: int) -> None:
        self._send(
            client,
            one.ticket,
            "ack",
            outcome=one.outcome,
            version=one.version,
            staleness=one.staleness,
            why=one.why,
        )

    def _send(
        self, client: int, ticket: int, op: str, packet: Packet | None = None, **body: Any
    ) -> None:
        self._num_sent += 1
        header = FrameHeader(
            kind="control" if packet is None else "embedding",
            source=self.shard.index,
            target=client,
            step=ticket,
            seq=self._num_sent,
            generation=self._sessions.get(client, 0),
            body={"op": op, **body},
        )
        self._link_to(client).send(pack(header, packet), kind=header.kind)
