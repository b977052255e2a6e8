"""The receiving end of AC-SGD: may it be applied, what does it decode to, what is remembered.

Path: compressors.delta_coding -> compressors.delta_receive -> compressors.delta

All or nothing: a packet of which one sample cannot be applied changes no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressors.base import CodecError, NeedCold, Packet, RowMarks
from compressors.delta_coding import check_shape, unstack
from compressors.delta_layout import NAME, Draft, End, read_layout, stated_dtype, valid_parts
from compressors.visits import Kind, check_visits, groups


class Receiving:
    """Decodes packets and brings the rows of one end up to date."""

    def __init__(self, end: End) -> None:
        self.end = end

    def decode(self, packet: Packet, rows: RowMarks) -> Tensor:
        """The values of all samples; rows are staged once everything has succeeded."""
        shapes, raw = read_layout(packet, rows)
        dtype = stated_dtype(packet)
        check_visits(rows, shapes, self.end.store.mark)
        found = groups(rows, raw)
        if len(found) != len(packet.inner):
            raise CodecError(
                f"delta packet needs {len(found)} inner packets, has {len(packet.inner)}"
            )
        draft = Draft(rows.ids, shapes)
        out = torch.zeros(packet.shape) if "lengths" in packet.meta else torch.empty(packet.shape)
        matrices = valid_parts(out, shapes)
        num_nonfinite = 0
        for (kind, positions), inner in zip(found, packet.inner):
            outs = [matrices[position] for position in positions]
            new_rows = self._read(kind, positions, inner, draft, outs)
            for position, row in zip(positions, new_rows):
                visit, generation = rows.visits[position], rows.generations[position]
                draft.put(position, generation=generation, visit=visit, row=row)
                num_nonfinite += row is None
        self._check_sum(rows, draft)
        for sample in rows.evicted:
            self.end.store.stage_drop(sample)
        self.end.stage(draft)
        self.end.step.cold += sum(rows.cold)
        self.end.step.hits += len(rows.cold) - sum(rows.cold)
        self.end.step.nonfinite += num_nonfinite
        return out.to(dtype)

    def _read(
        self, kind: Kind, positions: list[int], inner: Packet, draft: Draft, outs: list[Tensor]
    ) -> Sequence[Tensor | None]:
        """Write the new value of each sample of an inner packet; returns its new row."""
        shapes = [draft.shapes[p] for p in positions]
        check_shape(inner, shapes)
        if kind == "warm":
            rows = [self.end.row(draft, draft.ids[p]) for p in positions]
            return self.end.changes.decode(inner, rows, shapes, outs)
        plain = kind == "raw" or inner.codec == self.end.raw.name
        news = unstack((self.end.raw if plain else self.end.first_visit).decode(inner), shapes)
        for new, out in zip(news, outs):
            out.copy_(new)
        return [None if kind == "raw" else self.end.row_format.pack(new) for new in news]

    def decode_evaluation(self, packet: Packet) -> Tensor:
        """The values of a packet that no row has to do with."""
        codecs = {codec.name: codec for codec in (self.end.first_visit, self.end.raw)}
        if len(packet.inner) != 1 or packet.inner[0].codec not in codecs:
            raise CodecError(
                "delta packet without row marks must hold one fp32 packet, or one of a first visit"
            )
        if tuple(packet.inner[0].shape) != tuple(packet.shape):
            raise CodecError(
                f"delta packet of shape {tuple(packet.shape)} holds one of "
                f"{tuple(packet.inner[0].shape)}"
            )
        dtype = stated_dtype(packet)
        return codecs[packet.inner[0].codec].decode(packet.inner[0]).to(dtype)

    def check_origin(self, packet: Packet) -> None:
        """Refuse what was not sent to these rows."""
        if packet.codec != NAME:
            raise CodecError(f"expected a delta packet, got codec {packet.codec!r:.40}")
        if packet.parts:
            raise CodecError(f"delta packet has {len(packet.parts)} parts of its own, expected 0")
        namespace = packet.meta.get("namespace")
        if not isinstance(namespace, (tuple, list)) or tuple(namespace) != self.end.namespace:
            raise CodecError(
                f"packet of namespace {namespace!r:.200} reached the rows of "
                f"{self.end.namespace!r}; equal ids there are other samples: check edge, replica "
                "and dataset"
            )
        if packet.rows is not None and packet.meta.get("rows") != self.end.row_format.name:
            raise CodecError(
                f"the sender keeps {packet.meta.get('rows')!r:.40} rows, this end keeps "
                f"{self.end.row_format.name!r}: they would drift apart; set `rows` alike at both"
            )

    def _check_sum(self, rows: RowMarks, draft: Draft) -> None:
        if rows.checksum is not None and (own := draft.checksum()) != rows.checksum:
            raise NeedCold(
                f"checksum of the new rows is {own:08x} here, {rows.checksum:08x} at the sender",
                tuple(sorted(set(rows.ids))),
            )
