"""Lost, repeated, malformed: what the receiver of AC-SGD does when packets go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compressors.base import CodecError, DuplicatePacket, NeedCold, Packet, RowMarks, SampleKeys
from compressors.delta import Delta
from compressors.quantize import Uniform

torch.set_num_threads(1)


def keys(*ids: int) -> SampleKeys:
    return SampleKeys(ids=ids)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_ends(bits: int = 4, **options: Any) -> tuple[Delta, Delta]:
    return (
        Delta(Uniform(bits), namespace="edge", **options),
        Delta(Uniform(bits), namespace="edge", **options),
    )


def visit_marks(end: Delta, sample: int) -> tuple[int, int]:
    mark = end._store.mark(sample)
    assert mark is not None
    return mark.generation, mark.visit


def with_rows(packet: Packet, **changes: Any) -> Packet:
    assert packet.rows is not None
    return dataclasses.replace(packet, rows=dataclasses.replace(packet.rows, **changes))


# The receiver rule: (d) 8


def test_a_repeated_packet_is_a_duplicate_and_is_not_applied_again() -> None:
    sender, receiver = two_ends()
    cold = sender.encode(noise(2, 4, 32), keys=keys(0, 1))
    receiver.decode(cold)
    warm = sender.encode(noise(2, 4, 32, seed=1), keys=keys(0, 1))
    receiver.decode(warm)
    digest = receiver.row_digest()

    for again in (warm, cold, warm):
        with pytest.raises(DuplicatePacket, match="sample 0 is at generation 1 visit 2"):
            receiver.decode(again)
    assert receiver.row_digest() == digest == sender.row_digest()


def test_a_duplicate_is_known_after_the_step_has_been_committed() -> None:
    sender, receiver = two_ends()
    packet = sender.encode(noise(1, 4, 32), keys=keys(0))
    receiver.decode(packet)
    receiver.commit()

    with pytest.raises(DuplicatePacket):
        receiver.decode(packet)


def test_a_lost_packet_is_a_gap_and_heals_by_a_cold_resend() -> None:
    sender, receiver = two_ends()
    receiver.decode(sender.encode(noise(2, 4, 32), keys=keys(0, 1)))
    sender.encode(noise(2, 4, 32, seed=1), keys=keys(0, 1))  # lost
    h = noise(2, 4, 32, seed=2)
    digest = receiver.row_digest()

    with pytest.raises(NeedCold, match="was last seen at visit 1, the packet brings 3") as caught:
        receiver.decode(sender.encode(h, keys=keys(0, 1)))
    assert caught.value.ids == (0, 1)
    assert receiver.row_digest() == digest

    resent = sender.resend_cold(h, keys=keys(0, 1))
    new = receiver.decode(resent)

    assert resent.rows == RowMarks(ids=(0, 1), visits=(1, 1), generations=(3, 4), cold=(True, True))
    assert (new - h).norm() / h.norm() < 0.01
    assert visit_marks(receiver, 0) == visit_marks(sender, 0) == (3, 1)
    assert receiver.row_digest() == sender.row_digest()
    receiver.decode(sender.encode(h, keys=keys(0, 1)))
    assert receiver.row_digest() == sender.row_digest()


def test_a_receiver_that_lost_its_rows_asks_for_cold_ones_and_is_in_step_again() -> None:
    sender, receiver = two_ends()
    h = noise(2, 4, 32)
    receiver.decode(sender.encode(h, keys=keys(0, 1)))
    _, fresh = two_ends()

    with pytest.raises(NeedCold, match="sample 0 has no row here, the packet brings the change"):
        fresh.decode(sender.encode(h, keys=keys(0, 1)))
    fresh.decode(sender.resend_cold(h, keys=keys(0, 1)))
    assert fresh.row_digest() == sender.row_digest()
    assert sender.stats()["resends"] == 1


def test_a_sender_that_lost_its_rows_is_heard_if_its_incarnation_is_higher() -> None:
    sender, receiver = two_ends()
    for seed in range(3):
        receiver.decode(sender.encode(noise(1, 4, 32, seed=seed), keys=keys(seed)))
    forgetful = Delta(Uniform(4), namespace="edge")
    with pytest.raises(DuplicatePacket, match="start it with a higher incarnation"):
        receiver.decode(forgetful.encode(noise(1, 4, 32), keys=keys(2)))
    reborn = Delta(Uniform(4), namespace="edge", incarnation=1)

    receiver.decode(reborn.encode(noise(1, 4, 32), keys=keys(2)))
    assert visit_marks(receiver, 2) == ((1 << 32) + 1, 1)


def test_one_missing_row_refuses_the_whole_packet() -> None:
    sender, receiver = two_ends()
    for sample in range(3):
        receiver.decode(sender.encode(noise(1, 4, 32), keys=keys(sample)))
    receiver._store.stage_drop(1)
    digest = receiver.row_digest()

    with pytest.raises(NeedCold) as caught:
        receiver.decode(sender.encode(noise(4, 4, 32), keys=keys(0, 1, 2, 9)))
    assert caught.value.ids == (1,)
    assert receiver.row_digest() == digest  # neither 0 and 2 nor the cold 9 were applied


def test_a_packet_that_is_old_only_in_part_is_asked_for_again() -> None:
    sender, receiver = two_ends()
    receiver.decode(sender.encode(noise(2, 4, 32), keys=keys(0, 1)))
    late = sender.encode(noise(2, 4, 32, seed=1), keys=keys(0, 1))
    receiver.decode(sender.resend_cold(noise(1, 4, 32, seed=2), keys=keys(0)))

    with pytest.raises(NeedCold, match="sample 0 is at generation 3 visit 1"):
        receiver.decode(late)  # sample 1 is new: its value has never been seen


def test_a_delta_of_a_newer_generation_is_no_duplicate_though_its_visit_is_low() -> None:
    sender, receiver = two_ends()
    h = noise(1, 4, 32)
    for _ in range(5):
        receiver.decode(sender.encode(h, keys=keys(0)))
    sender.resend_cold(h, keys=keys(0))  # generation 2, visit 1: lost

    with pytest.raises(NeedCold, match="is of generation 1 here, the packet's is 2"):
        receiver.decode(sender.encode(h, keys=keys(0)))


def test_packets_in_flight_behind_a_resend_are_refused_and_heal_in_turn() -> None:
    sender, receiver = two_ends()
    hs = [noise(2, 4, 32, seed=seed) for seed in range(3)]
    receiver.decode(sender.encode(hs[0], keys=keys(0, 1)))
    receiver._store.stage_drop(0)
    first = sender.encode(hs[1], keys=keys(0, 1))
    second = sender.encode(hs[2], keys=keys(1, 0))

    for packet in (first, second):
        with pytest.raises(NeedCold):
            receiver.decode(packet)
    receiver.decode(sender.resend_cold(hs[1], keys=keys(0, 1)))
    receiver.decode(sender.resend_cold(hs[2], keys=keys(1, 0)))
    assert receiver.row_digest() == sender.row_digest()


def test_a_resend_of_a_batch_with_a_sample_twice_is_cold_throughout() -> None:
    sender, receiver = two_ends()
    h = noise(3, 4, 32)
    packet = sender.resend_cold(h, keys=keys(4, 5, 4))
    new = receiver.decode(packet)

    assert packet.rows is not None
    assert packet.rows.cold == (True, True, True)
    assert (new - h).norm() / h.norm() < 0.01
    assert receiver.row_digest() == sender.row_digest()


def test_a_lost_eviction_notice_is_told_again_by_the_resend() -> None:
    sender, receiver = two_ends(cap_bytes=2 * 4 * 32 * 2)
    for sample in range(3):
        receiver.decode(sender.encode(noise(1, 4, 32), keys=keys(sample)))
    sender.commit()
    receiver.commit()
    h = noise(1, 4, 32, seed=4)
    lost = sender.encode(h, keys=keys(2))
    resent = sender.resend_cold(h, keys=keys(2))

    assert lost.rows is not None
    assert resent.rows is not None
    assert lost.rows.evicted == resent.rows.evicted == (0,)
    receiver.decode(resent)
    assert receiver.row_digest() == sender.row_digest()


# Malformed packets change nothing and are named


def drop_inner(packet: Packet) -> Packet:
    return dataclasses.replace(packet, inner=packet.inner[:-1])


def meta(**changes: Any) -> Callable[[Packet], Packet]:
    return lambda packet: dataclasses.replace(packet, meta={**packet.meta, **changes})


def shape(*sizes: int) -> Callable[[Packet], Packet]:
    return lambda packet: dataclasses.replace(packet, shape=sizes)


MALFORMED: dict[str, tuple[Callable[[Packet], Packet], str]] = {
    "codec": (lambda p: dataclasses.replace(p, codec="topk"), "expected a delta packet"),
    "no namespace": (meta(namespace=None), "reached the rows"),
    "namespace of another type": (meta(namespace=7), "reached the rows"),
    "rows unknown": (meta(rows=3), "sender keeps 3 rows"),
    "inner missing": (drop_inner, "needs 2 inner packets, has 1"),
    "samples missing": (shape(2, 4, 32), "has 3 ids"),
    "no samples": (shape(), "has 3 ids"),
    "other width": (shape(3, 4, 31), "has a row of shape"),
    "visits missing": (lambda p: with_rows(p, visits=(2,)), "1 visits"),
    "cold at visit 2": (lambda p: with_rows(p, visits=(2, 2, 2)), "not at visit 1"),
    "visit 0": (lambda p: with_rows(p, visits=(0, 2, 1)), "not at visit 1"),
    "raw out of range": (meta(raw=(9,)), "names raw samples"),
    "raw but warm": (meta(raw=(0,)), "names raw samples"),
    "raw of another type": (meta(raw=5), "names raw samples"),
    "lengths of another type": (meta(lengths="x"), "has lengths"),
    "lengths too long": (meta(lengths=(5, 4, 4)), "length 5"),
    "lengths missing": (meta(lengths=(4,)), "1 lengths"),
    "lengths negative": (meta(lengths=(-1, 4, 4)), "length -1"),
    "evaluation without values": (
        lambda p: dataclasses.replace(p, rows=None),
        "must hold one fp32 packet",
    ),
}


@pytest.mark.parametrize(("break_it", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_packet_is_refused_by_name_and_changes_nothing(
    break_it: Callable[[Packet], Packet], reason: str
) -> None:
    sender, receiver = two_ends()
    receiver.decode(sender.encode(noise(2, 4, 32), keys=keys(0, 1)))
    good = sender.encode(noise(3, 4, 32), keys=keys(0, 1, 2))
    digest = receiver.row_digest()

    with pytest.raises(CodecError, match=reason) as caught:
        receiver.decode(break_it(good))
    assert not isinstance(caught.value, DuplicatePacket)
    assert receiver.row_digest() == digest
    receiver.decode(good)
    assert receiver.row_digest() == sender.row_digest()


def test_a_damaged_inner_packet_changes_nothing() -> None:
    sender, receiver = two_ends()
    receiver.decode(sender.encode(noise(1, 4, 32), keys=keys(0)))
    good = sender.encode(noise(2, 4, 32), keys=keys(0, 1))
    digest = receiver.row_digest()
    cut = dataclasses.replace(good.inner[1], parts=(b"",) * len(good.inner[1].parts))

    with pytest.raises(CodecError):
        receiver.decode(dataclasses.replace(good, inner=(good.inner[0], cut)))
    assert receiver.row_digest() == digest
