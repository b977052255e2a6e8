"""AC-SGD: send the quantised change of a sample's activation since its last visit.

Path: compressors.base -> compressors.delta -> compressors.kernels

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
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from compressors.base import Compressor, NeedCold, Packet, SampleKeys, State
from compressors.buffers import RowStore
from compressors.delta_coding import changes_for
from compressors.delta_layout import NAME, End, StepStats, check_tensor
from compressors.delta_receive import Receiving
from compressors.delta_send import Sending
from compressors.identity import Identity
from compressors.quantize import Uniform
from compressors.row_format import RowFormat
from compressors.spill import Spill, SpillShelf

Namespace = tuple[str | int, ...]


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

    name = NAME

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
        compressed_evaluation: bool = False,
        incarnation: int = 0,
    ) -> None:
        self.inner = inner
        self.namespace: Namespace = (namespace,) if isinstance(namespace, str) else (*namespace,)
        self.first_visit = _first_visit_codec(first_visit)
        row_format = RowFormat(rows)
        self._store = RowStore(
            row_format=row_format,
            shelf=None if spill is None else SpillShelf(Spill.of(spill)),
            cap_bytes=cap_bytes,
            incarnation=incarnation,
        )
        self._end = End(
            namespace=self.namespace,
            row_format=row_format,
            store=self._store,
            changes=changes_for(inner, row_format),
            first_visit=self.first_visit,
            checksum=checksum,
            compressed_evaluation=compressed_evaluation,
        )
        self._sending = Sending(self._end)
        self._receiving = Receiving(self._end)
        self._role: str | None = None
        self._lock = threading.RLock()
        self._last_step = StepStats()
        self._num_evicted = 0
        self._rows_left_out = False

    # The sender

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        """The packet of a micro-batch, cold and warm samples mixed as they come.

        With `keys.remember` False (evaluation) the values travel as fp32, or with
        `compressed_evaluation` as on a first visit, and nothing changes.
        """
        with self._lock:
            values, shapes = check_tensor(tensor, keys)
            if not keys.remember:
                return self._sending.encode_evaluation(values, keys, dtype=tensor.dtype)
            self._take_role("sender")
            return self._sending.encode(values, shapes, keys, dtype=tensor.dtype)

    def resend_cold(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        """The same micro-batch for a receiver that could not apply it: all cold, new generations.

        `tensor` is what was given to `encode`. Later packets of these samples that are already in
        flight will be refused too, and need the same.
        """
        with self._lock:
            values, shapes = check_tensor(tensor, keys)
            self._take_role("sender")
            self._end.step.resends += 1
            return self._sending.encode(values, shapes, keys, dtype=tensor.dtype, all_cold=True)

    # The receiver

    def decode(self, packet: Packet) -> Tensor:
        """The values to compute on, in the tensor's own dtype, padded positions zero.

        All or nothing: if any sample cannot be applied, no row changes. Raises `NeedCold` (ask
        the sender for `resend_cold`), `DuplicatePacket` (every sample was applied before) or
        `CodecError` (the packet is malformed, or of another namespace).
        """
        with self._lock:
            self._receiving.check_origin(packet)
            if packet.rows is None:
                return self._receiving.decode_evaluation(packet)
            self._take_role("receiver")
            try:
                return self._receiving.decode(packet, packet.rows)
            except NeedCold:
                self._end.step.nacks += 1
                raise

    # Both ends

    def commit(self) -> None:
        """The step's rows become permanent; the sender gives up what exceeds the cap."""
        with self._lock:
            self._num_evicted += self._store.commit(evict=self._role == "sender")
            self._last_step, self._end.step = self._end.step, StepStats()
            self.inner.commit()
            self.first_visit.commit()

    def abort(self) -> None:
        """Forget the step, as the other end does too: visits revert, generations do not."""
        with self._lock:
            self._store.abort()
            self._end.step = StepStats()
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
            step = self._end.step if self._end.step != StepStats() else self._last_step
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

    @property
    def store(self) -> RowStore:
        """The rows; whoever touches them holds no other end's work up: use it between steps."""
        return self._store

    @contextmanager
    def rows_left_out(self) -> Iterator[None]:
        """Inside, `state_dict` tells everything but the rows."""
        with self._lock:
            self._rows_left_out = True
            try:
                yield
            finally:
                self._rows_left_out = False

    def state_dict(self) -> State:
        """What the last commit left: flat tensors and plain values."""
        with self._lock:
            store = self._store.state_dict(rows=not self._rows_left_out)
            state: State = {"namespace": list(self.namespace), **store}
            state["num_evicted"] = self._num_evicted
            state.update({f"inner.{key}": v for key, v in self.inner.state_dict().items()})
            state.update({f"first.{key}": v for key, v in self.first_visit.state_dict().items()})
            return state

    def load_state_dict(self, state: State) -> None:
        """Continue from `state` as if nothing had happened since it was taken."""
        if list(state["namespace"]) != list(self.namespace):
            raise ValueError(
                f"the saved rows belong to {state['namespace']}, this codec serves "
                f"{list(self.namespace)}; drop them at both ends instead of mixing them"
            )
        with self._lock:
            self._store.load_state_dict(state)
            self._end.step = self._last_step = StepStats()
            self._num_evicted = int(state.get("num_evicted", 0))
            self.inner.load_state_dict(_under("inner.", state))
            self.first_visit.load_state_dict(_under("first.", state))

    def _take_role(self, role: str) -> None:
        if self._role not in (None, role):
            raise ValueError(
                f"this Delta is a {self._role} and cannot be a {role} too; rows belong to one end "
                "of an edge: give the other end an instance of its own"
            )
        self._role = role


def _under(prefix: str, state: State) -> State:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _first_visit_codec(first_visit: int | Compressor) -> Compressor:
    if not isinstance(first_visit, int):
        return first_visit
    if first_visit == 32:
        return Identity()
    if not 1 <= first_visit <= 8:
        raise ValueError(f"first_visit takes 1 to 8 bits, or 32 for fp32, got {first_visit}")
    return Uniform(first_visit)
