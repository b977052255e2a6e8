"""AC-SGD: send the quantised change of a sample's activation since its last visit.

Path: stages.compute -> compressors.delta -> compressors.kernels

    A: c = Q(h - m);  new = m + deq(c);  m = store(new)      never store(h)
    B:                new = m + deq(c);  m = store(new)      and computes on `new`, unrounded

Both ends add the same decoded change to the same old row, so the rows stay equal to the bit and
the error of one visit is part of the change that the next visit sends: the loop is closed. A first
visit, and any visit whose row cannot serve, is cold: the value itself, at 8 bits by default.

    delta (this)  ->  visits        which visit is it, may it be applied
                  ->  delta_coding  the arithmetic, fused or generic
                  ->  buffers       rows: staged, committed, evicted  ->  spill
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compressors.base import CodecError, Compressor, NeedCold, Packet, RowMarks, SampleKeys, State
from compressors.buffers import Mark, RowStore
from compressors.delta_coding import (
    Shape,
    changes_for,
    check_shape,
    is_finite,
    keys_of,
    square,
    stack,
    unstack,
)
from compressors.delta_layout import Draft, check_tensor, read_layout, valid_part
from compressors.identity import Identity
from compressors.quantize import Uniform
from compressors.row_format import RowFormat
from compressors.spill import Spill, SpillShelf
from compressors.visits import Kind, check_visits, groups, waves

Namespace = tuple[str | int, ...]
MAX_EVICTIONS_PER_PACKET = 4096


@dataclass(slots=True)
class StepStats:
    """Counts and sums of squares since the last commit."""

    hits: int = 0
    cold: int = 0
    nonfinite: int = 0
    resends: int = 0
    nacks: int = 0
    warm_delta: float = 0.0
    warm_value: float = 0.0
    value: float = 0.0
    error: float = 0.0


class Delta:
    """One end of one edge: an instance either encodes or decodes.

    `namespace` is (edge, replica, dataset hash): sample ids are unique only within it, and a
    packet of another namespace is refused. `inner` codes changes and must map 0 to 0.
    `first_visit` codes cold samples: a number of bits (32 is fp32) or a codec. Namespace, row
    format and kernels are the same at both ends; `spill` may differ.

    `cap_bytes` bounds all rows of an end; the sender alone decides which to give up, and tells.
    `spill` (a directory, or `Spill`) moves rows that memory should not hold to a file.
    `incarnation` must rise when a sender restarts without its rows, so that its cold packets
    are newer than those the receiver has seen.

    The receiver decodes packets in the order in which they were encoded, and those of the next
    step after its own `commit`. Any method may be called from any thread.
    """

    name = "delta"

    def __init__(
        self,
        inner: Compressor,
        *,
        namespace: Namespace | str,
        first_visit: int | Compressor = 8,
        rows: str = "bf16",
        cap_bytes: int | None = None,
        spill: str | Path | Spill | None = None,
        checksum: bool = False,
        incarnation: int = 0,
    ) -> None:
        self.inner = inner
        self.namespace: Namespace = (namespace,) if isinstance(namespace, str) else (*namespace,)
        self.first_visit = _first_visit_codec(first_visit)
        self.checksum = checksum
        self._format = RowFormat(rows)
        self._changes = changes_for(inner, self._format)
        self._store = RowStore(
            row_format=self._format,
            shelf=None if spill is None else SpillShelf(Spill.of(spill)),
            cap_bytes=cap_bytes,
            incarnation=incarnation,
        )
        self._raw = Identity()
        self._role: str | None = None
        self._lock = threading.RLock()
        self._step = self._last_step = StepStats()
        self._num_evicted = 0

    # The sender

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        """The packet of a micro-batch, cold and warm samples mixed as they come.

        With `keys.remember` False (evaluation) the values travel as fp32 and nothing changes.
        """
        with self._lock:
            values, shapes = check_tensor(tensor, keys)
            if not keys.remember:
                meta = {"namespace": self.namespace}
                raw = self._raw.encode(values, keys=keys)
                return Packet(codec=self.name, shape=raw.shape, meta=meta, inner=(raw,))
            self._take_role("sender")
            return self._encode(values, shapes, keys, all_cold=False)

    def resend_cold(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        """The same micro-batch for a receiver that could not apply it: all cold, new generations.

        `tensor` is what was given to `encode`. Later packets of these samples that are already in
        flight will be refused too, and need the same.
        """
        with self._lock:
            values, shapes = check_tensor(tensor, keys)
            self._take_role("sender")
            for sample in keys.ids:
                self._store.stage_drop(sample)
            self._step.resends += 1
            return self._encode(values, shapes, keys, all_cold=True)

    def _encode(
        self, values: Tensor, shapes: list[Shape], keys: SampleKeys, *, all_cold: bool
    ) -> Packet:
        matrices = [valid_part(values, p, shape) for p, shape in enumerate(shapes)]
        draft = Draft(keys.ids, shapes)
        inner: list[Packet] = []
        raw: list[int] = []
        for wave in waves(keys.ids):
            if not all_cold:
                inner += self._encode_warm(wave, matrices, draft)
            cold = [p for p in wave if p not in draft.visits and is_finite(matrices[p])]
            inner += self._encode_cold(cold, matrices, draft)
            infinite = [p for p in wave if p not in draft.visits]
            inner += self._encode_raw(infinite, matrices, draft)
            raw += infinite
        marks = [mark for mark, _ in draft.in_order()]
        cold_flags = tuple(mark.visit == 1 for mark in marks)
        self._step.cold += sum(cold_flags)
        self._step.hits += len(marks) - sum(cold_flags)
        self._stage(draft)
        rows = RowMarks(
            ids=keys.ids,
            visits=tuple(mark.visit for mark in marks),
            generations=tuple(mark.generation for mark in marks),
            cold=cold_flags,
            evicted=self._store.announce_evictions(limit=MAX_EVICTIONS_PER_PACKET, again=all_cold),
            checksum=draft.checksum() if self.checksum else None,
        )
        meta = {"namespace": self.namespace, "rows": self._format.name}
        if keys.lengths is not None:
            meta["lengths"] = keys.lengths
        if raw:
            meta["raw"] = tuple(raw)
        shape = tuple(values.shape)
        return Packet(codec=self.name, shape=shape, meta=meta, inner=tuple(inner), rows=rows)

    def _encode_warm(self, wave: list[int], matrices: list[Tensor], draft: Draft) -> list[Packet]:
        """Code the changes of samples that have a row; what is not finite stays undone."""
        marks: list[Mark] = []
        warm: list[int] = []
        for position in wave:
            mark = self._mark(draft, draft.ids[position])
            if mark is not None and mark.kept and mark.shape == draft.shapes[position]:
                marks.append(mark)
                warm.append(position)
        if not warm:
            return []
        rows = [self._row(draft, draft.ids[p]) for p in warm]
        outcome = self._changes.encode(draft.batch(warm, matrices), rows)
        self._step.nonfinite += sum(is_finite(matrices[warm[i]]) for i in outcome.refused)
        coded = [(p, m) for i, (p, m) in enumerate(zip(warm, marks)) if i not in outcome.refused]
        for (position, mark), row, sums in zip(coded, outcome.rows, outcome.sums):
            draft.put(position, generation=mark.generation, visit=mark.visit + 1, row=row)
            self._step.warm_delta += sums.delta
            self._step.warm_value += sums.value
            self._step.value += sums.value
            self._step.error += sums.error
        return [] if outcome.packet is None else [outcome.packet]

    def _encode_cold(
        self, positions: list[int], matrices: list[Tensor], draft: Draft
    ) -> list[Packet]:
        if not positions:
            return []
        batch = draft.batch(positions, matrices)
        keys = keys_of(batch.ids, batch.shapes)
        packet = self.first_visit.encode(stack(batch.values, batch.shapes), keys=keys)
        sent = unstack(self.first_visit.decode(packet), batch.shapes)
        for position, value, new in zip(positions, batch.values, sent):
            row = self._format.pack(new)
            self._step.nonfinite += row is None
            self._step.value += square(value)
            self._step.error += square(value - new)
            draft.put(position, generation=self._store.next_generation(), visit=1, row=row)
        return [packet]

    def _encode_raw(
        self, positions: list[int], matrices: list[Tensor], draft: Draft
    ) -> list[Packet]:
        """Values that are not finite, as they are: hide nothing, and remember nothing."""
        if not positions:
            return []
        batch = draft.batch(positions, matrices)
        self._step.nonfinite += len(positions)
        for position in positions:
            draft.put(position, generation=self._store.next_generation(), visit=1, row=None)
        keys = keys_of(batch.ids, batch.shapes)
        return [self._raw.encode(stack(batch.values, batch.shapes), keys=keys)]

    # The receiver

    def decode(self, packet: Packet) -> Tensor:
        """The values to compute on, fp32, padded positions zero.

        All or nothing: if any sample cannot be applied, no row changes. Raises `NeedCold` (ask
        the sender for `resend_cold`), `DuplicatePacket` (every sample was applied before) or
        `CodecError` (the packet is malformed, or of another namespace).
        """
        with self._lock:
            self._check_origin(packet)
            if packet.rows is None:
                return self._decode_evaluation(packet)
            self._take_role("receiver")
            try:
                return self._decode(packet, packet.rows)
            except NeedCold:
                self._step.nacks += 1
                raise

    def _decode(self, packet: Packet, rows: RowMarks) -> Tensor:
        shapes, raw = read_layout(packet, rows)
        check_visits(rows, shapes, self._store.mark)
        found = groups(rows, raw)
        if len(found) != len(packet.inner):
            raise CodecError(
                f"delta packet needs {len(found)} inner packets, has {len(packet.inner)}"
            )
        draft = Draft(rows.ids, shapes)
        out = torch.zeros(packet.shape) if "lengths" in packet.meta else torch.empty(packet.shape)
        num_nonfinite = 0
        for (kind, positions), inner in zip(found, packet.inner):
            for position, (new, row) in zip(positions, self._read(kind, positions, inner, draft)):
                visit, generation = rows.visits[position], rows.generations[position]
                draft.put(position, generation=generation, visit=visit, row=row)
                valid_part(out, position, shapes[position]).copy_(new)
                num_nonfinite += row is None
        self._check_sum(rows, draft)
        for sample in rows.evicted:
            self._store.stage_drop(sample)
        self._stage(draft)
        self._step.cold += sum(rows.cold)
        self._step.hits += len(rows.cold) - sum(rows.cold)
        self._step.nonfinite += num_nonfinite
        return out

    def _read(
        self, kind: Kind, positions: list[int], inner: Packet, draft: Draft
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The new value and the new row of each sample of an inner packet."""
        shapes = [draft.shapes[p] for p in positions]
        check_shape(inner, shapes)
        if kind == "warm":
            rows = [self._row(draft, draft.ids[p]) for p in positions]
            return [*self._changes.decode(inner, rows, shapes)]
        plain = kind == "raw" or inner.codec == self._raw.name
        news = unstack((self._raw if plain else self.first_visit).decode(inner), shapes)
        return [(new, None if kind == "raw" else self._format.pack(new)) for new in news]

    def _decode_evaluation(self, packet: Packet) -> Tensor:
        if len(packet.inner) != 1 or packet.inner[0].codec != self._raw.name:
            raise CodecError("delta packet without row marks must hold one fp32 packet")
        return self._raw.decode(packet.inner[0])

    def _check_origin(self, packet: Packet) -> None:
        if packet.codec != self.name:
            raise CodecError(f"expected a delta packet, got codec {packet.codec!r:.40}")
        namespace = packet.meta.get("namespace")
        if not isinstance(namespace, (tuple, list)) or tuple(namespace) != self.namespace:
            raise CodecError(
                f"packet of namespace {namespace!r:.200} reached the rows of {self.namespace!r}; "
                "equal sample ids there are other samples: check edge, replica and dataset"
            )
        if packet.rows is not None and packet.meta.get("rows") != self._format.name:
            raise CodecError(
                f"the sender keeps {packet.meta.get('rows')!r:.40} rows, this end keeps "
                f"{self._format.name!r}: they would drift apart; set `rows` alike at both ends"
            )

    def _check_sum(self, rows: RowMarks, draft: Draft) -> None:
        if rows.checksum is not None and (own := draft.checksum()) != rows.checksum:
            raise NeedCold(
                f"checksum of the new rows is {own:08x} here, {rows.checksum:08x} at the sender",
                tuple(sorted(set(rows.ids))),
            )

    # Both ends

    def commit(self) -> None:
        """The step's rows become permanent; the sender gives up what exceeds the cap."""
        with self._lock:
            self._num_evicted += self._store.commit(evict=self._role == "sender")
            self._last_step, self._step = self._step, StepStats()
            self.inner.commit()
            self.first_visit.commit()

    def abort(self) -> None:
        """Forget the step, as the other end does too: visits revert, generations do not."""
        with self._lock:
            self._store.abort()
            self._step = StepStats()
            self.inner.abort()
            self.first_visit.abort()

    def prefetch(self, ids: Collection[int]) -> None:
        """Begin to read the rows of the coming step from the spill file; returns at once."""
        self._store.shelf.prefetch(ids)

    def close(self) -> None:
        """Give back memory and the spill file; the rows are gone."""
        with self._lock:
            self._store.shelf.close()

    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        """Payload of a micro-batch whose samples all have rows."""
        return self.inner.estimate_nbytes(shape)

    def stats(self) -> dict[str, float]:
        """The step so far, or right after a commit the step committed; then the store's totals.

        `delta_ratio` is ‖Δ‖/‖h‖ over samples with a row, `error` ‖h-new‖/‖h‖ over all; only the
        sender knows h, so only it has them.
        """
        with self._lock:
            step = self._step if self._step != StepStats() else self._last_step
            visits = step.hits + step.cold
            found: dict[str, float] = {
                "hits": step.hits,
                "cold": step.cold,
                "nonfinite": step.nonfinite,
                "resends": step.resends,
                "nacks": step.nacks,
                "evictions": self._num_evicted,
                "rows": self._store.num_rows,
                "resident_bytes": self._store.shelf.resident_bytes,
                "spilled_bytes": self._store.shelf.spilled_bytes,
            }
            if visits:
                found["hit_rate"] = step.hits / visits
            if step.warm_value > 0:
                found["delta_ratio"] = math.sqrt(step.warm_delta / step.warm_value)
            if step.value > 0:
                found["error"] = math.sqrt(step.error / step.value)
            return found

    def row_digest(self, *, without: Collection[int] = ()) -> str:
        """Hash over all rows and counters: equal at both ends after each visit."""
        with self._lock:
            return self._store.digest(without=without)

    @property
    def pending_evictions(self) -> tuple[int, ...]:
        """Samples given up here that the receiver has not been told of for good."""
        with self._lock:
            return self._store.pending_evictions

    def state_dict(self) -> State:
        """What the last commit left: flat tensors and plain values."""
        with self._lock:
            state: State = {"namespace": list(self.namespace), **self._store.state_dict()}
            state.update({f"inner.{key}": v for key, v in self.inner.state_dict().items()})
            return state

    def load_state_dict(self, state: State) -> None:
        """Continue from `state` as if nothing had happened since it was taken."""
        if list(state["namespace"]) != list(self.namespace):
            raise ValueError(
                f"the saved rows belong to {state['namespace']}, this codec serves "
                f"{list(self.namespace)}; drop them at both ends instead of mixing them"
            )
        prefix = "inner."
        inner = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        with self._lock:
            self._store.load_state_dict(state)
            self._step = StepStats()
            self.inner.load_state_dict(inner)

    def _take_role(self, role: str) -> None:
        if self._role not in (None, role):
            raise ValueError(
                f"this Delta is a {self._role} and cannot be a {role} too; rows belong to one end "
                "of an edge: give the other end an instance of its own"
            )
        self._role = role

    def _mark(self, draft: Draft, sample: int) -> Mark | None:
        if sample in draft.latest:
            return draft.visits[draft.latest[sample]][0]
        return self._store.mark(sample)

    def _row(self, draft: Draft, sample: int) -> Tensor:
        if sample in draft.latest:
            row = draft.visits[draft.latest[sample]][1]
            assert row is not None, f"row {sample} was not kept"
            return row
        return self._store.value(sample)

    def _stage(self, draft: Draft) -> None:
        for sample, (mark, row) in zip(draft.ids, draft.in_order()):
            self._store.stage(sample, mark, row)


def _first_visit_codec(first_visit: int | Compressor) -> Compressor:
    if not isinstance(first_visit, int):
        return first_visit
    if first_visit == 32:
        return Identity()
    if not 1 <= first_visit <= 8:
        raise ValueError(f"first_visit takes 1 to 8 bits, or 32 for fp32, got {first_visit}")
    return Uniform(first_visit)
