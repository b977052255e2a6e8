"""Ids on the wire: every int64, every shape of batch, never much longer than they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from compressors import id_lists
from compressors.base import CodecError
from compressors.frame import FrameHeader, pack, unpack
from compressors.id_lists import (
    decode_id_lists,
    decode_ids,
    decode_varints,
    dedupe,
    encode_id_lists,
    encode_ids,
    encode_varints,
)
from stages.embedding.letters import ids_packet, read_ids
from stages.embedding.row_rules import Sgd
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import Table

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def through_the_wire(packet: Any) -> Any:
    return unpack(pack(FrameHeader(kind="embedding", source=0, target=1, step=3), packet))[1]


@settings(max_examples=examples(60), deadline=None)
@given(st.sets(st.one_of(INT64, st.integers(0, 300)), max_size=80))
def test_distinct_ids_come_back_as_they_were(values: set[int]) -> None:
    sent = ids(*sorted(values))

    packet = encode_ids(sent)

    assert decode_ids(through_the_wire(packet)).tolist() == sent.tolist()
    assert packet.nbytes <= 8 * len(sent)


def sent_as(flat: Any) -> tuple[Any, IdSet]:
    """A step's ids of one table as they travel, with their counts, and as they arrive."""
    unique, _, counts = dedupe(flat)
    packet = ids_packet({"user": IdSet(ids=unique, counts=counts.astype(np.float32))})
    tables = {"user": Table("user", dim=2, optimizer=Sgd(lr=0.1))}
    return packet, read_ids(through_the_wire(packet), tables)["user"]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.one_of(INT64, st.integers(0, 9)), max_size=80))
def test_a_step_s_ids_arrive_with_their_counts_and_never_cost_much_more(values: list[int]) -> None:
    packet, back = sent_as(ids(*values))

    assert back.counts is not None
    assert dict(zip(back.ids.tolist(), back.counts.tolist(), strict=True)) == Counter(values)
    assert packet.nbytes <= 8 * len(values) + 4 * len(set(values)) + 16


def test_the_ends_of_int64_and_the_reference_s_colliding_ids_stay_distinct() -> None:
    sent = ids(-(1 << 63), -1, 0, (1 << 56) - 1, 1 << 56, (1 << 63) - 1)

    assert decode_ids(encode_ids(sent)).tolist() == sent.tolist()


@pytest.mark.parametrize("num", [65_535, 65_536])
@pytest.mark.parametrize("spread", [7, 1 << 40])
def test_a_batch_may_have_more_samples_than_sixteen_bits_can_number(num: int, spread: int) -> None:
    flat = np.arange(num, dtype=np.int64) * 977 % spread

    packet, back = sent_as(flat)
    unique, _, counts = dedupe(flat)
    assert back.ids.tolist() == unique.tolist()
    assert back.counts is not None
    assert back.counts.tolist() == counts.tolist()
    assert packet.nbytes <= 8 * num + 16


def test_one_id_may_occur_more_often_than_sixteen_bits_can_count() -> None:
    packet, back = sent_as(np.full(70_000, 1 << 60, np.int64))

    assert (back.ids.tolist(), back.counts is not None and back.counts.tolist()) == (
        [1 << 60],
        [70_000.0],
    )
    assert packet.nbytes == 3  # of the count; the id itself is in the header


def test_no_ids_and_random_ones_cost_what_they_are() -> None:
    nothing, back = sent_as(ids())
    assert (nothing.nbytes, len(back.ids)) == (0, 0)
    random = np.unique(np.random.default_rng(0).integers(-(1 << 62), 1 << 62, 5000))

    assert encode_ids(random).nbytes / len(random) < 6.6  # log2(2**63 e / 5000) / 8 is 6.52


def test_random_ids_of_a_range_cost_little_more_than_their_entropy() -> None:
    sent = np.unique(np.random.default_rng(1).integers(0, 1 << 20, 10_000))

    assert 8 * encode_ids(sent).nbytes / len(sent) < 8.6  # log2(2**20 e / 10**4) is 8.15


def test_dedupe_counts_every_occurrence() -> None:
    unique, inverse, counts = dedupe(ids(5, -2, 5, 5))

    assert unique.tolist() == [-2, 5]
    assert inverse.tolist() == [1, 0, 1, 1]
    assert counts.tolist() == [1, 3]


def test_ids_that_do_not_rise_are_refused_before_they_are_sent() -> None:
    with pytest.raises(CodecError, match="rise strictly"):
        encode_ids(ids(3, 3))


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_damaged_packets_are_refused_or_rise_strictly(data: st.DataObject) -> None:
    values = sorted(data.draw(st.sets(st.integers(0, 5000), min_size=2, max_size=40)))
    packet = encode_ids(ids(*values))
    parts = [bytearray(part) for part in packet.parts]
    part = data.draw(st.sampled_from([part for part in parts if part] or [bytearray(1)]))
    part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        del part[-1]

    try:
        back = decode_ids(replace(packet, parts=tuple(parts)))
    except CodecError:
        return

    assert (np.diff(back) > 0).all()
    assert len(back) == len(values)


# --- lists of ids: the batches of a loader --------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.one_of(INT64, st.integers(0, 9)), max_size=6), max_size=20))
def test_lists_come_back_as_they_were_and_never_cost_much_more(lists: list[list[int]]) -> None:
    flat = ids(*[value for part in lists for value in part])
    lengths = np.array([len(part) for part in lists], np.int64)

    packet = encode_id_lists(flat, lengths)
    back, back_lengths = decode_id_lists(through_the_wire(packet))

    assert back.tolist() == flat.tolist()
    assert back_lengths is not None
    assert back_lengths.tolist() == lengths.tolist()
    assert packet.nbytes <= 8 * len(flat) + 4 * len(lists) + 16


@pytest.mark.parametrize("num", [65_535, 65_536])
def test_lists_may_have_more_samples_than_sixteen_bits_can_number(num: int) -> None:
    flat = np.arange(num, dtype=np.int64) % 7

    packet = encode_id_lists(flat)

    assert decode_id_lists(packet)[0].tolist() == flat.tolist()
    assert packet.nbytes == (3 * num + 7) // 8 + encode_ids(np.arange(7, dtype=np.int64)).nbytes


def test_one_bag_may_have_more_ids_than_sixteen_bits_can_count() -> None:
    flat, lengths = np.arange(70_000, dtype=np.int64), np.array([0, 70_000, 0], np.int64)

    back, back_lengths = decode_id_lists(encode_id_lists(flat, lengths))

    assert (back == flat).all()
    assert back_lengths is not None
    assert back_lengths.tolist() == [0, 70_000, 0]


def test_equal_ids_cost_nothing_each_and_random_ones_what_they_are() -> None:
    same = encode_id_lists(np.full(5000, 1 << 60, np.int64))
    random = encode_id_lists(np.random.default_rng(0).integers(-(1 << 62), 1 << 62, 5000))

    assert same.nbytes == 0  # the id itself is in the header
    assert random.nbytes == 8 * 5000


def test_an_index_beyond_its_ids_is_refused() -> None:
    packet = encode_id_lists(ids(*([1, 2, 3] * 20)))

    with pytest.raises(CodecError, match="beyond its 3 ids"):
        decode_id_lists(replace(packet, parts=(b"\xff" * len(packet.parts[0]),)))


# --- numbers of seven bits a byte -----------------------------------------------------------------

SEVENS = [
    (0, "00"),
    (1, "01"),
    ((1 << 7) - 1, "7f"),
    (1 << 7, "8001"),
    ((1 << 14) - 1, "ff7f"),
    (1 << 14, "808001"),
    ((1 << 21) - 1, "ffff7f"),
    (1 << 21, "80808001"),
    ((1 << 28) - 1, "ffffff7f"),
    (1 << 28, "8080808001"),
    ((1 << 35) - 1, "ffffffff7f"),
    (1 << 35, "808080808001"),
    ((1 << 42) - 1, "ffffffffff7f"),
    (1 << 42, "80808080808001"),
    ((1 << 49) - 1, "ffffffffffff7f"),
    (1 << 49, "8080808080808001"),
    ((1 << 56) - 1, "ffffffffffffff7f"),
    (1 << 56, "808080808080808001"),
    ((1 << 63) - 1, "ffffffffffffffff7f"),
    (1 << 63, "80808080808080808001"),
    ((1 << 64) - 1, "ffffffffffffffffff01"),
]
"""The largest number of each length and the smallest of the next, as they are written."""


def written(value: int) -> str:
    return encode_varints(np.array([value], np.uint64)).hex()


@pytest.mark.parametrize(("value", "coded"), SEVENS)
def test_a_number_takes_a_byte_for_every_seven_bits(value: int, coded: str) -> None:
    assert written(value) == coded
    assert decode_varints(bytes.fromhex(coded), 1).tolist() == [value]


def test_numbers_of_all_lengths_stand_one_after_the_other() -> None:
    values = np.array([value for value, _ in SEVENS], np.uint64)
    coded = "".join(part for _, part in SEVENS)

    assert encode_varints(values).hex() == coded
    assert decode_varints(bytes.fromhex(coded), len(SEVENS)).tolist() == values.tolist()


@pytest.mark.parametrize(
    "coded",
    [
        "80808080808080808002",  # 2 ** 64
        "ffffffffffffffffff7f",
        "8080808080808080808001",  # eleven bytes
    ],
)
def test_a_number_of_more_than_sixty_four_bits_is_refused(coded: str) -> None:
    with pytest.raises(CodecError, match="more than 64 bits"):
        decode_varints(bytes.fromhex(f"01{coded}"), 2)


@pytest.mark.parametrize(
    ("coded", "num"), [("80", 1), ("0180", 1), ("0101", 1), ("", 1), ("01", 0)]
)
def test_numbers_that_are_cut_or_too_many_are_refused(coded: str, num: int) -> None:
    with pytest.raises(CodecError, match="were announced"):
        decode_varints(bytes.fromhex(coded), num)


def without_a_tenth_byte(values: Any) -> Any:
    return np.minimum(SIZES(values), 9)


def with_a_wrong_limit(values: Any) -> Any:
    sizes = np.ones(len(values), np.int64)
    for place in range(1, 10):
        sizes += values > np.uint64(1 << (7 * place))
    return sizes


SIZES = id_lists._num_sevens


@pytest.mark.parametrize(
    ("mutant", "num_wrong"), [(without_a_tenth_byte, 2), (with_a_wrong_limit, 9)]
)
def test_mutant_lengths_are_seen(
    monkeypatch: pytest.MonkeyPatch, mutant: Any, num_wrong: int
) -> None:
    monkeypatch.setattr(id_lists, "_num_sevens", mutant)

    assert sum(written(value) != coded for value, coded in SEVENS) == num_wrong


@pytest.mark.parametrize("form", ["raw", "varint"])
def test_the_widest_gaps_survive_in_both_forms_that_can_hold_them(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = ids(-(1 << 63), -(1 << 63) + 1, -1, 0, 127, 128, 1 << 62, (1 << 63) - 1)
    monkeypatch.setattr(id_lists, "min", lambda *_, **__: form, raising=False)
    monkeypatch.setattr(id_lists, "_rice_bits", lambda *_: (0, 0))

    packet = encode_ids(sent)

    assert packet.meta["form"] == form
    assert decode_ids(through_the_wire(packet)).tolist() == sent.tolist()


def test_ids_at_both_ends_are_a_gap_of_sixty_four_bits_in_a_varint_too() -> None:
    packet = encode_ids(ids(-(1 << 63), (1 << 63) - 1))
    whole = replace(
        packet,
        meta=packet.meta | {"form": "varint"},
        parts=(bytes.fromhex("feffffffffffffffff01"),),
    )

    assert decode_ids(whole).tolist() == [-(1 << 63), (1 << 63) - 1]


def test_lists_of_a_negative_or_impossible_length_are_refused() -> None:
    packet = encode_id_lists(ids(1, 2, 3), np.array([1, 2], np.int64))
    for lengths in ([4, (1 << 64) - 1], [(1 << 64) - 1, 4]):  # they add up to three
        parts = (packet.parts[0], encode_varints(np.array(lengths, np.uint64)))

        with pytest.raises(CodecError, match="3 came in all"):
            decode_id_lists(replace(packet, parts=parts))
