"""AC-SGD: both ends remember the same rows, and the error stays bounded because of it."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from torch import Tensor

from compressors import kernels
from compressors.base import (
    CodecError,
    NeedCold,
    Packet,
    RowMarks,
    SampleKeys,
)
from compressors.delta import Delta
from compressors.entropy import Entropy
from compressors.frame import FrameHeader, pack, unpack
from compressors.quantize import Uniform
from compressors.topk import TopK

torch.set_num_threads(1)

NAMESPACE = ("0->1", 0, "wikitext-2:ab12")
HEADER = FrameHeader(kind="activation", source=0, target=1, step=0)


def keys(*ids: int, lengths: Sequence[int] | None = None, remember: bool = True) -> SampleKeys:
    return SampleKeys(
        ids=ids, lengths=None if lengths is None else tuple(lengths), remember=remember
    )


def over_the_wire(packet: Packet) -> Packet:
    arrived = unpack(pack(HEADER, packet))[1]
    assert arrived is not None
    return arrived


class Pair:
    """Both ends of an edge; `visit` carries a micro-batch across and compares the rows."""

    def __init__(self, bits: int = 4, *, inner: type[Any] | None = None, **options: Any) -> None:
        def end() -> Delta:
            codec = Uniform(bits) if inner is None else inner()
            return Delta(codec, namespace=NAMESPACE, **options)

        self.sender = end()
        self.receiver = end()

    def visit(self, h: Tensor, sample_keys: SampleKeys, *, same_rows: bool = True) -> Tensor:
        new = self.receiver.decode(over_the_wire(self.sender.encode(h, keys=sample_keys)))
        if same_rows:
            assert self.digests_match()
        return new

    def digests_match(self) -> bool:
        pending = self.sender.pending_evictions
        return self.sender.row_digest() == self.receiver.row_digest(without=pending)

    def commit(self) -> None:
        self.sender.commit()
        self.receiver.commit()

    def abort(self) -> None:
        self.sender.abort()
        self.receiver.abort()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(new: Tensor, h: Tensor) -> float:
    return float((new - h).norm() / h.norm())


def drifting(*, num: int, epochs: int, drift: float = 0.15, decay: float = 0.8) -> Iterator[Tensor]:
    """Activations [num, 16, 64] that move less each epoch, as in training."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(num, 16, 64, generator=generator)
    for epoch in range(epochs):
        yield h
        step = torch.randn(h.shape, generator=generator) * (drift * decay**epoch)
        h = h + step


# The invariant: (d) 1


INNER: dict[str, Any] = {
    "2 bit": lambda: Uniform(2),
    "4 bit": lambda: Uniform(4),
    "3 bit symmetric": lambda: Uniform(3, grid="symmetric"),
    "4 bit stochastic": lambda: Uniform(4, rounding="stochastic"),
    "group of 5": lambda: Uniform(4, group=5),
    "top 30 %": lambda: TopK(0.3),
    "zstd": lambda: Entropy(Uniform(2)),
}


@pytest.mark.parametrize("rows", ["bf16", "fp32", "int8", "int4", "int2"])
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER.keys())
def test_rows_are_equal_at_both_ends_after_every_visit(inner: Any, rows: str) -> None:
    pair = Pair(inner=inner, rows=rows)
    for h in drifting(num=4, epochs=4):
        for ids in ((0, 1), (3, 2)):
            pair.visit(h[list(ids)], keys(*ids))
        pair.commit()

    assert pair.sender.stats()["rows"] == 4


def test_the_receiver_computes_on_the_unrounded_value() -> None:
    pair = Pair(8, first_visit=32)
    h = noise(1, 4, 32)

    new = pair.visit(h, keys(0))

    assert torch.equal(new, h)  # fp32 first visit: exact, though the row is bf16
    row = pair.receiver._store.value(0)
    assert row.dtype == torch.bfloat16
    assert torch.equal(row, h[0].to(torch.bfloat16))


def test_rows_hold_the_decoded_value_never_h() -> None:
    pair = Pair(2)
    first, second = drifting(num=1, epochs=2)
    pair.visit(first, keys(0))
    new = pair.visit(second, keys(0))

    row = pair.sender._store.value(0)
    assert torch.equal(row, new[0].to(torch.bfloat16))
    assert not torch.equal(row, second[0].to(torch.bfloat16))


def test_mutant_rows_of_two_dtypes_drift_apart_and_are_seen() -> None:
    pair = Pair(4)
    pair.receiver = Delta(Uniform(4), namespace=NAMESPACE, rows="fp32")
    packet = pair.sender.encode(noise(1, 8, 32), keys=keys(0))
    with pytest.raises(CodecError, match="sender keeps 'bf16' rows, this end keeps 'fp32'"):
        pair.receiver.decode(packet)
    lie = dataclasses.replace(packet, meta={**packet.meta, "rows": "fp32"})
    pair.receiver.decode(lie)

    assert pair.sender.row_digest() != pair.receiver.row_digest()


def test_mutant_an_end_that_adds_in_bf16_is_seen_by_the_checksum() -> None:
    pair = Pair(4, checksum=True)
    pair.visit(noise(2, 8, 32), keys(0, 1))
    row = pair.receiver._store.value(1)
    row[3, 3] += row[3, 3].abs() * 2**-7  # one unit in the last place
    h = noise(2, 8, 32, seed=1)
    digest = pair.receiver.row_digest()

    with pytest.raises(NeedCold, match=r"checksum of the new rows is .* here, .* at the sender"):
        pair.receiver.decode(pair.sender.encode(h, keys=keys(0, 1)))
    assert pair.receiver.row_digest() == digest
    assert pair.receiver.stats()["nacks"] == 1
    pair.receiver.decode(pair.sender.resend_cold(h, keys=keys(0, 1)))
    assert pair.digests_match()


def test_the_native_core_and_the_torch_twin_may_sit_at_the_two_ends() -> None:
    pair = Pair(3)
    for h in drifting(num=3, epochs=3):
        packet = pair.sender.encode(h, keys=keys(0, 1, 2))
        with kernels.use("torch"):
            pair.receiver.decode(packet)
        assert pair.digests_match()


# Bounded error: T8, T9, (d) 2, (d) 3


def errors_over(pair: Pair, *, epochs: int = 8, id_is_position: bool = False) -> list[float]:
    """Error of each epoch, in another order each time."""
    order = random.Random(0)
    errors = []
    for h in drifting(num=8, epochs=epochs):
        ids = list(range(8))
        order.shuffle(ids)
        squares = 0.0
        for batch in (ids[:4], ids[4:]):
            names = range(4) if id_is_position else batch
            new = pair.visit(h[batch], keys(*names), same_rows=False)
            squares += float((new - h[batch]).square().sum())
        errors.append(math.sqrt(squares) / float(h.norm()))
        pair.commit()
    return errors


@pytest.mark.parametrize(("bits", "contraction"), [(2, 0.37), (3, 0.18), (4, 0.09)])
def test_error_falls_with_the_drift_and_obeys_its_bound(bits: int, contraction: float) -> None:
    pair = Pair(bits)
    errors = []
    for epoch, h in enumerate(drifting(num=4, epochs=8)):
        new = pair.visit(h, keys(0, 1, 2, 3))
        stats = pair.sender.stats()
        errors.append(relative_error(new, h))
        assert stats["error"] == pytest.approx(errors[-1], rel=1e-3)
        if epoch:
            assert stats["error"] <= 1.1 * contraction * stats["delta_ratio"] + 0.0005
        pair.commit()

    assert all(after <= 1.1 * before for before, after in pairwise(errors[1:]))


def test_error_falls_by_the_contraction_per_visit_down_to_the_floor_of_bf16() -> None:
    pair = Pair(2, first_visit=2)
    h = noise(4, 16, 64)
    errors = [relative_error(pair.visit(h, keys(0, 1, 2, 3)), h) for _ in range(10)]

    for before, after in pairwise(errors[:5]):
        assert 0.25 < after / before < 0.45
    assert errors[-1] < 0.0014
    assert errors[-1] > 0.0002


def test_fp32_rows_have_no_such_floor() -> None:
    pair = Pair(2, rows="fp32")
    h = noise(4, 16, 64)
    errors = [relative_error(pair.visit(h, keys(0, 1, 2, 3)), h) for _ in range(16)]

    assert errors[-1] < 1e-6


class StoresH(Delta):
    """The mutant of (d) 2: the sender remembers what it had, not what it sent."""

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        packet = super().encode(tensor, keys=keys)
        for value, sample in zip(tensor, keys.ids):
            mark = self._store.mark(sample)
            assert mark is not None
            self._store.stage(sample, mark, value.to(torch.bfloat16))
        return packet


def test_mutant_that_stores_h_accumulates_error_instead() -> None:
    sound, mutant = Pair(2), Pair(2)
    mutant.sender = StoresH(Uniform(2), namespace=NAMESPACE)
    closed, opened = errors_over(sound), errors_over(mutant)

    assert closed[-1] < closed[1]
    assert opened[-1] > 1.3 * opened[1]
    assert opened[-1] > 4 * closed[-1]
    assert not mutant.digests_match()


def test_mutant_with_positions_as_ids_is_worse_than_no_memory_at_all() -> None:
    by_id = errors_over(Pair(2))
    by_position = errors_over(Pair(2), id_is_position=True)
    h = noise(8, 16, 64, seed=5)
    direct = Uniform(2)
    direct_q = relative_error(direct.decode(direct.encode(h, keys=keys(*range(8)))), h)

    assert by_id[-1] < 0.1 * direct_q
    assert by_position[-1] > 1.0 * direct_q


# Keys: (d) 4


@pytest.mark.parametrize(
    "other",
    [("1->2", 0, "wikitext-2:ab12"), ("0->1", 1, "wikitext-2:ab12"), ("0->1", 0, "pydoc:77")],
    ids=["edge", "replica", "dataset"],
)
def test_a_packet_of_another_edge_replica_or_dataset_is_refused(other: tuple[Any, ...]) -> None:
    here, there = Pair(), Delta(Uniform(4), namespace=other)
    here.visit(noise(1, 4, 32), keys(5))
    digest = here.receiver.row_digest()

    for stray in (
        there.encode(noise(1, 4, 32, seed=1), keys=keys(5)),
        there.encode(noise(1, 4, 32, seed=1), keys=keys(5, remember=False)),
    ):
        with pytest.raises(CodecError, match=r"reached the rows of \('0->1', 0, "):
            here.receiver.decode(over_the_wire(stray))
    assert here.receiver.row_digest() == digest


def test_a_namespace_cannot_be_confused_by_where_its_parts_end() -> None:
    sender = Delta(Uniform(4), namespace=("a", "b/c"))
    receiver = Delta(Uniform(4), namespace=("a/b", "c"))

    with pytest.raises(CodecError, match="reached the rows"):
        receiver.decode(sender.encode(noise(1, 4, 32), keys=keys(0)))


def test_one_instance_cannot_be_both_ends() -> None:
    codec = Delta(Uniform(4), namespace="edge")
    packet = codec.encode(noise(1, 4, 32), keys=keys(0))

    with pytest.raises(ValueError, match=r"is a sender and cannot be a receiver too"):
        codec.decode(packet)


# Order: (d) 5


def test_a_sample_twice_in_a_batch_is_coded_against_its_own_first_visit() -> None:
    pair = Pair(4)
    h = noise(3, 8, 32)
    new = pair.visit(torch.stack([h[0], h[1], h[0], h[0]]), keys(7, 8, 7, 7))

    marks = pair.receiver._store.mark(7)
    assert marks is not None
    assert marks.visit == 3
    first, third = relative_error(new[0], h[0]), relative_error(new[3], h[0])
    assert third < first


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_any_interleaving_of_micro_batches_leaves_equal_rows(data: st.DataObject) -> None:
    """Sends run ahead of receipts, samples repeat within and across them, steps end or abort."""
    pair = Pair(3, rows=data.draw(st.sampled_from(["bf16", "int4"])), cap_bytes=1200)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    in_flight: list[tuple[Packet, Tensor]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["send", "send", "send", "receive", "commit", "abort"]))
        if action == "send":
            ids = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
            h = torch.randn(len(ids), 4, 32, generator=generator)
            in_flight.append((pair.sender.encode(h, keys=keys(*ids)), h))
        elif action == "receive" and in_flight:
            packet, h = in_flight.pop(0)
            assert relative_error(pair.receiver.decode(packet), h) < 0.6
        elif action in ("commit", "abort"):
            for packet, _ in in_flight:
                pair.receiver.decode(packet)
            in_flight.clear()
            assert pair.digests_match()
            pair.commit() if action == "commit" else pair.abort()
            assert pair.digests_match()
    for packet, _ in in_flight:
        pair.receiver.decode(packet)

    assert pair.digests_match()


def test_abort_reverts_visits_at_both_ends_and_keeps_generations_rising() -> None:
    pair = Pair(4)
    pair.visit(noise(2, 4, 32), keys(0, 1))
    pair.commit()
    before = pair.sender.row_digest()
    pair.visit(noise(2, 4, 32, seed=1), keys(0, 2))
    pair.abort()
    assert pair.sender.row_digest() == pair.receiver.row_digest() == before
    packet = pair.sender.encode(noise(2, 4, 32, seed=2), keys=keys(0, 2))

    assert packet.rows == RowMarks(
        ids=(0, 2), visits=(2, 1), generations=(1, 4), cold=(False, True)
    )
    pair.receiver.decode(packet)
    assert pair.digests_match()


# Evaluation: (d) 6


def test_evaluation_is_exact_and_changes_no_row_counter_or_order() -> None:
    pair = Pair(2, cap_bytes=2 * 4 * 32 * 2)
    for sample in (0, 1):
        pair.visit(noise(1, 4, 32, seed=sample), keys(sample))
    pair.commit()
    state, stats = pair.sender.state_dict(), pair.sender.stats()
    h = noise(2, 4, 32, seed=9)
    packet = pair.sender.encode(h, keys=keys(0, 77, remember=False))

    assert packet.rows is None
    assert torch.equal(pair.receiver.decode(over_the_wire(packet)), h)
    assert pair.digests_match()
    after = pair.sender.state_dict()
    assert all(
        torch.equal(after[k], v) if isinstance(v, Tensor) else after[k] == v
        for k, v in state.items()
    )
    assert pair.sender.stats() == stats
    pair.visit(noise(1, 4, 32, seed=2), keys(2))
    pair.commit()
    assert pair.sender.pending_evictions == (0,)  # still the oldest, though evaluated last
