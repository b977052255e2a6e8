"""The sending end of AC-SGD: which samples are warm, what travels, what is remembered.

Path: compressors.delta -> compressors.delta_send -> compressors.delta_coding

A micro-batch may mix samples that have a row with samples that have none; each kind travels in
an inner packet of its own. What is remembered is what the packet decodes to, never h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressors.base import Packet, RowMarks, SampleKeys
from compressors.buffers import Mark
from compressors.delta_coding import Shape, keys_of, square, stack, unstack
from compressors.delta_layout import NAME, Draft, End, dtype_meta, valid_parts
from compressors.row_format import is_finite
from compressors.visits import waves

MAX_EVICTIONS_PER_PACKET = 4096


class Sending:
    """Encodes micro-batches against the rows of one end."""

    def __init__(self, end: End) -> None:
        self.end = end

    def encode(
        self,
        values: Tensor,
        shapes: list[Shape],
        keys: SampleKeys,
        *,
        dtype: torch.dtype = torch.float32,
        all_cold: bool = False,
    ) -> Packet:
        """The packet of a micro-batch; with `all_cold` no row is used and generations are new.

        `dtype` is what the values had before they became fp32, and have again at the receiver.
        """
        matrices = valid_parts(values, shapes)
        draft = Draft(keys.ids, shapes)
        inner: list[Packet] = []
        raw: list[int] = []
        for wave in waves(keys.ids):
            if not all_cold:
                inner += self._warm(wave, matrices, draft)
            cold = [p for p in wave if p not in draft.visits and is_finite(matrices[p])]
            inner += self._cold(cold, matrices, draft)
            infinite = [p for p in wave if p not in draft.visits]
            inner += self._raw(infinite, matrices, draft)
            raw += infinite
        marks = [mark for mark, _ in draft.in_order()]
        cold_flags = tuple(mark.visit == 1 for mark in marks)
        self.end.step.cold += sum(cold_flags)
        self.end.step.hits += len(marks) - sum(cold_flags)
        self.end.stage(draft)
        rows = RowMarks(
            ids=keys.ids,
            visits=tuple(mark.visit for mark in marks),
            generations=tuple(mark.generation for mark in marks),
            cold=cold_flags,
            evicted=self.end.store.announce_evictions(
                limit=MAX_EVICTIONS_PER_PACKET, again=all_cold
            ),
            checksum=draft.checksum() if self.end.checksum else None,
        )
        meta = {
            "namespace": self.end.namespace,
            "rows": self.end.row_format.name,
            **dtype_meta(dtype),
        }
        if keys.lengths is not None:
            meta["lengths"] = keys.lengths
        if raw:
            meta["raw"] = tuple(raw)
        shape = tuple(values.shape)
        return Packet(codec=NAME, shape=shape, meta=meta, inner=tuple(inner), rows=rows)

    def encode_evaluation(
        self, values: Tensor, keys: SampleKeys, *, dtype: torch.dtype = torch.float32
    ) -> Packet:
        """The values as fp32, or if asked as on a first visit; no row, counter or order of use
        changes."""
        codec = self.end.first_visit if self.end.compressed_evaluation else self.end.raw
        packet = codec.encode(values, keys=keys)
        meta = {"namespace": self.end.namespace, **dtype_meta(dtype)}
        return Packet(codec=NAME, shape=packet.shape, meta=meta, inner=(packet,))

    def _warm(self, wave: list[int], matrices: list[Tensor], draft: Draft) -> list[Packet]:
        """Code the changes of samples that have a row; what is not finite stays undone."""
        marks: list[Mark] = []
        warm: list[int] = []
        for position in wave:
            mark = self.end.mark(draft, draft.ids[position])
            if mark is not None and mark.kept and mark.shape == draft.shapes[position]:
                marks.append(mark)
                warm.append(position)
        if not warm:
            return []
        rows = [self.end.row(draft, draft.ids[p]) for p in warm]
        outcome = self.end.changes.encode(draft.batch(warm, matrices), rows)
        self.end.step.nonfinite += sum(is_finite(matrices[warm[i]]) for i in outcome.refused)
        coded = [(p, m) for i, (p, m) in enumerate(zip(warm, marks)) if i not in outcome.refused]
        for (position, mark), row, sums in zip(coded, outcome.rows, outcome.sums):
            draft.put(position, generation=mark.generation, visit=mark.visit + 1, row=row)
            self.end.step.warm_delta += sums.delta
            self.end.step.warm_value += sums.value
            self.end.step.value += sums.value
            self.end.step.error += sums.error
        return [] if outcome.packet is None else [outcome.packet]

    def _cold(self, positions: list[int], matrices: list[Tensor], draft: Draft) -> list[Packet]:
        if not positions:
            return []
        batch = draft.batch(positions, matrices)
        keys = keys_of(batch.ids, batch.shapes)
        packet = self.end.first_visit.encode(stack(batch.values, batch.shapes), keys=keys)
        sent = unstack(self.end.first_visit.decode(packet), batch.shapes)
        for position, value, new in zip(positions, batch.values, sent):
            row = self.end.row_format.pack(new)
            self.end.step.nonfinite += row is None
            self.end.step.value += square(value)
            self.end.step.error += square(value - new)
            draft.put(position, generation=self.end.store.next_generation(), visit=1, row=row)
        return [packet]

    def _raw(self, positions: list[int], matrices: list[Tensor], draft: Draft) -> list[Packet]:
        """Values that are not finite, as they are: hide nothing, and remember nothing."""
        if not positions:
            return []
        batch = draft.batch(positions, matrices)
        self.end.step.nonfinite += len(positions)
        for position in positions:
            draft.put(position, generation=self.end.store.next_generation(), visit=1, row=None)
        keys = keys_of(batch.ids, batch.shapes)
        return [self.end.raw.encode(stack(batch.values, batch.shapes), keys=keys)]
