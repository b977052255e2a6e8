"""Frames: what goes in comes out, what is broken is refused by name."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from compressors.base import Packet, RowMarks
from compressors.frame import (
    KINDS,
    BadChecksum,
    BadHeader,
    BadMagic,
    FrameError,
    FrameHeader,
    TooLarge,
    Truncated,
    UnknownVersion,
    frame_nbytes,
    header_nbytes,
    pack,
    unpack,
)
from compressors.frame_fields import WORDS

HEADER = FrameHeader(
    kind="activation", replica=1, source=2, target=3, step=500, micro_batch=7, seq=10_000,
    generation=2, attempt=1, flags=5,
)  # fmt: skip


def delta_packet(num: int = 8) -> Packet:
    inner = Packet(
        codec="uniform",
        shape=(num, 64, 96),
        meta={"bits": 4, "grid": "signed", "group": 32, "dtype": "float32"},
        parts=(bytes(range(256)) * 3, b"scales"),
    )
    rows = RowMarks(
        ids=tuple(20_000 - 7 * i for i in range(num)),
        visits=tuple(2 + i % 2 for i in range(num)),
        generations=(1,) * num,
        cold=tuple(i == 3 for i in range(num)),
        evicted=(5, 1 << 40),
        checksum=0xDEADBEEF,
    )
    meta = {"namespace": ("activation", "2->3", 1, "9f86d081884c7d65"), "rows": "bf16"}
    return Packet(codec="delta", shape=(num, 64, 96), meta=meta, inner=(inner,), rows=rows)


def same(a: Packet, b: Packet) -> bool:
    return (
        (a.codec, tuple(a.shape), dict(a.meta), a.rows)
        == (b.codec, tuple(b.shape), dict(b.meta), b.rows)
        and [bytes(part) for part in a.parts] == [bytes(part) for part in b.parts]
        and len(a.inner) == len(b.inner)
        and all(same(x, y) for x, y in zip(a.inner, b.inner))
    )


def test_a_frame_brings_header_and_packet_back() -> None:
    header, packet = unpack(pack(HEADER, delta_packet()))

    assert header == HEADER
    assert packet is not None
    assert same(packet, delta_packet())


def test_a_control_frame_has_a_body_and_no_packet() -> None:
    body = {"nack": [3, 4], "reason": "row lost", "at": 1.5, "deep": {"ok": None}}
    header = FrameHeader(kind="control", source=0, target=-1, step=3, body=body)

    got, packet = unpack(pack(header))

    assert packet is None
    assert got.target == -1
    assert got.body == {"nack": (3, 4), "reason": "row lost", "at": 1.5, "deep": {"ok": None}}


def test_the_layout_is_what_the_module_says() -> None:
    frame = pack(HEADER, Packet(codec="fp32", shape=(2,), parts=(b"12345678",)))

    assert frame[:4] == b"RPF\x01"
    assert struct.unpack_from("<I", frame, 8)[0] == len(frame)
    assert frame[-12:-4] == b"12345678"
    assert struct.unpack("<I", frame[-4:])[0] == zlib.crc32(frame[:-4])


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, "numpy", "float numpy"])
def test_parts_are_views_of_the_buffer_aligned_to_eight(wrap: Any) -> None:
    frame = pack(HEADER, delta_packet())
    if wrap == "numpy":
        buffer: Any = np.frombuffer(frame, dtype=np.uint8)
        assert not buffer.flags.writeable
    elif wrap == "float numpy":
        buffer = np.frombuffer(frame, dtype=np.float32)
    else:
        buffer = wrap(frame)
    base = np.frombuffer(buffer, dtype=np.uint8).ctypes.data

    _, packet = unpack(buffer)

    assert packet is not None
    for part in packet.inner[0].parts:
        assert isinstance(part, memoryview)
        offset = np.frombuffer(part, dtype=np.uint8).ctypes.data - base
        assert 0 < offset < len(frame)
        assert offset % 8 == 0


def test_packing_copies_each_part_once() -> None:
    part = np.zeros(8_000_000, dtype=np.uint8)
    packet = Packet(codec="fp32", shape=(2_000_000,), parts=(memoryview(part),))
    tracemalloc.start()
    frame = pack(HEADER, packet)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(frame) < 8_000_200
    assert peak < 8_100_000


def test_unpacking_copies_no_part() -> None:
    frame = pack(HEADER, Packet(codec="fp32", shape=(2_000_000,), parts=(bytes(8_000_000),)))
    tracemalloc.start()
    unpack(frame)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 100_000


def test_parts_of_any_contiguous_buffer_are_packed_as_bytes() -> None:
    floats = np.arange(3, dtype=np.float32)
    parts = (memoryview(floats), memoryview(np.empty((0, 4))), b"", bytearray(b"x"))

    _, packet = unpack(pack(HEADER, Packet(codec="c", shape=(3,), parts=parts)))

    assert packet is not None
    assert [bytes(part) for part in packet.parts] == [floats.tobytes(), b"", b"", b"x"]


def test_eight_samples_cost_less_than_two_hundred_bytes_of_header() -> None:
    assert header_nbytes(HEADER, delta_packet(8)) < 200
    assert header_nbytes(HEADER, Packet(codec="fp32", shape=(8, 64, 96))) < 100


@pytest.mark.parametrize("text", ["dtype", "", "\0", "\x01", "\x01x", "\x1f", "\0dtype", "plain"])
def test_words_and_characters_that_stand_for_words_survive(text: str) -> None:
    meta = {text: (text, {text: text}), "k": text}

    _, packet = unpack(pack(HEADER, Packet(codec=text, shape=(1,), meta=meta)))

    assert packet is not None
    assert packet.codec == text
    assert packet.meta == meta


def test_the_words_of_the_format_keep_their_numbers() -> None:
    assert len(WORDS) <= 31
    assert WORDS[:3] + WORDS[-1:] == ("dtype", "float32", "bits", "values")
    assert zlib.crc32("/".join(WORDS[:21]).encode()) == 0x1BA118A8


def test_frame_nbytes_is_the_packed_length() -> None:
    for packet in (None, delta_packet(), Packet(codec="fp32", shape=(1,), parts=(b"abcd",))):
        assert frame_nbytes(HEADER, packet) == len(pack(HEADER, packet))


@pytest.mark.parametrize(
    "ids",
    [(), (7,), (7, 7, 7), (0, 127), (-129, 3), (1 << 31, 0), (-(1 << 63), 5), ((1 << 64) - 1, 0)],
)
def test_ids_of_any_64_bit_range_survive(ids: tuple[int, ...]) -> None:
    num = len(ids)
    rows = RowMarks(ids=ids, visits=(1,) * num, generations=(0,) * num, cold=(True,) * num)

    _, packet = unpack(pack(HEADER, Packet(codec="delta", shape=(num,), rows=rows)))

    assert packet is not None
    assert packet.rows == rows


# What is refused, and by which name


def reseal(frame: bytes) -> bytes:
    """The same bytes with a right total and checksum: a hostile sender can compute both."""
    body = bytearray(frame[:-4])
    struct.pack_into("<I", body, 8, len(frame))
    return bytes(body) + struct.pack("<I", zlib.crc32(body))


def frame_of(coded: bytes, data: bytes = b"") -> bytes:
    head = b"RPF\x01" + struct.pack("<II", len(coded), 0) + coded
    return reseal(head + bytes(-len(head) % 8) + data + bytes(4))


def fields(packet: Any = None, **change: Any) -> list[Any]:
    names = ["kind", "replica", "source", "target", "step", "micro_batch", "seq", "generation"]
    names += ["attempt", "flags", "body"]
    values = dict.fromkeys(names, 0) | {"body": {}} | change
    return [*values.values(), packet]


def test_each_kind_of_damage_has_its_name() -> None:
    frame = pack(HEADER, delta_packet())
    flipped = bytearray(frame)
    flipped[len(frame) // 2] ^= 16
    wide = struct.pack_into

    with pytest.raises(BadMagic, match="begins with b'PNG'"):
        unpack(b"PNG" + frame[3:])
    with pytest.raises(UnknownVersion, match="version 9, this build reads 1; run the same source"):
        unpack(frame[:3] + b"\x09" + frame[4:])
    with pytest.raises(Truncated, match=f"states {len(frame)} bytes, {len(frame) - 1} arrived"):
        unpack(frame[:-1])
    with pytest.raises(Truncated, match="frame has 0 bytes"):
        unpack(b"")
    with pytest.raises(BadChecksum, match="the sender's was"):
        unpack(flipped)
    with pytest.raises(BadHeader, match="1 more follow it"):
        unpack(frame + b"x")
    big = bytearray(frame)
    wide("<I", big, 4, 1 << 31)
    with pytest.raises(TooLarge, match="frame header of 2147483648 bytes, limit is 262144"):
        unpack(big)
    big = bytearray(frame)
    wide("<I", big, 8, (1 << 32) - 1)
    with pytest.raises(TooLarge, match="frame of 4294967295 bytes, limit is 1073741824"):
        unpack(big)
    with pytest.raises(BadHeader, match="not a contiguous buffer"):
        unpack(np.zeros((9, 9), dtype=np.uint8)[:, ::2])
    with pytest.raises(BadHeader, match="not a contiguous buffer"):
        unpack("text")


def packet_fields(**change: Any) -> list[Any]:
    values = {"codec": "c", "shape": [1], "meta": {}, "parts": [], "inner": [], "rows": None}
    return list((values | change).values())


def nested(depth: int) -> list[Any]:
    packet = packet_fields()
    for _ in range(depth - 1):
        packet = packet_fields(inner=[packet])
    return packet


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def rows(**change: Any) -> list[Any]:
    values = {"num": 2, "ids": b"b\1\2", "visits": 1, "generations": 0, "cold": 0}
    values |= {"num_evicted": 0, "evicted": b"", "checksum": None}
    return list((values | change).values())


HOSTILE: dict[str, tuple[Any, type[FrameError], str]] = {
    "no list": (7, BadHeader, "frame header is a int"),
    "too few fields": ([1, 2], BadHeader, "tuple of 2 items, expected 12"),
    "kind out of range": (fields(kind=5), BadHeader, "kind number 5"),
    "negative kind": (fields(kind=-1), BadHeader, "kind number -1"),
    "text step": (fields(step="x"), BadHeader, "holds 'x', expected an integer"),
    "bool step": (fields(step=True), BadHeader, "holds True"),
    "body no mapping": (fields(body=[1]), BadHeader, "body is a tuple, expected a mapping"),
    "body too deep": (fields(body={"a": deep(9)}), TooLarge, "nested deeper than 8"),
    "packet no list": (fields("x"), BadHeader, "packet is a str"),
    "codec no text": (fields(packet_fields(codec=5)), BadHeader, "codec 5"),
    "negative dim": (fields(packet_fields(shape=[-4])), BadHeader, "shape"),
    "float dim": (fields(packet_fields(shape=[1.5])), BadHeader, "shape holds 1.5"),
    "many dims": (fields(packet_fields(shape=[1] * 9)), TooLarge, "9 dimensions, limit is 8"),
    "huge shape": (fields(packet_fields(shape=[1 << 40])), TooLarge, "more than 268435456"),
    "negative part": (fields(packet_fields(parts=[-8])), BadHeader, "part of -8 bytes"),
    "huge part": (fields(packet_fields(parts=[1 << 60])), BadHeader, "0 are left"),
    "many parts": (fields(packet_fields(parts=[0] * 513)), TooLarge, "more than 512 parts"),
    "deep packets": (fields(nested(5)), TooLarge, "nested 4 deep"),
    "deeper packets": (fields(nested(100)), TooLarge, "nested 4 deep"),
    "wide packets": (
        fields(packet_fields(inner=[packet_fields()] * 256)), TooLarge, "at most 256 packets",
    ),
    "unknown short word": (fields(packet_fields(codec="\x1f")), BadHeader, "short word"),
    "unknown short key": (fields(packet_fields(meta={"\x1e": 1})), BadHeader, "short word"),
    "huge row count": (
        fields(packet_fields(rows=rows(num=1 << 40, ids=1))), TooLarge, "limit is 65536",
    ),
    "negative row count": (fields(packet_fields(rows=rows(num=-1))), TooLarge, "-1 row marks"),
    "ids of wrong length": (
        fields(packet_fields(rows=rows(ids=b"q\1\2"))), BadHeader, "2 row marks in 2 bytes",
    ),
    "ids of unknown width": (
        fields(packet_fields(rows=rows(ids=b"z\1\2"))), BadHeader, "row marks coded as bytes",
    ),
    "ids as text": (fields(packet_fields(rows=rows(ids="b12"))), BadHeader, "coded as str"),
    "text checksum": (fields(packet_fields(rows=rows(checksum="a"))), BadHeader, "row checksum"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_sealed_frame_with_a_senseless_header_is_refused(name: str) -> None:
    value, error, words = HOSTILE[name]

    with pytest.raises(error, match=words):
        unpack(frame_of(msgpack.packb(value)))


RAW_HOSTILE = {
    "array of 2**32-1": b"\xdd\xff\xff\xff\xff",
    "map of 2**32-1": b"\xdf\xff\xff\xff\xff",
    "bytes of 2**32-1": b"\xc6\xff\xff\xff\xff",
    "text of 2**32-1": b"\xdb\xff\xff\xff\xff",
    "arrays of 4096 in each other": b"\xdc\x10\x00" * 600,
    "arrays in each other without end": b"\x91" * 200_000,
    "maps in each other without end": b"\x81\xa1a" * 60_000,
    "never used byte": b"\xc1",
    "extension": b"\xd4\x05\x00",
    "empty extension": b"\xc7\x00\x05",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "text that is no utf-8": b"\x91\xa1\xff",
    "map keyed by a list": b"\x81\x90\x01",
    "map keyed by a number": b"\x81\x01\x01",
    "two values": b"\x01\x01",
    "nothing": b"",
    "a quarter of a million empty maps": b"\xdc\x10\x00" + b"\x80" * 200_000,
}


@pytest.mark.parametrize("name", RAW_HOSTILE)
def test_hostile_msgpack_is_refused_without_much_memory(name: str) -> None:
    frame = frame_of(RAW_HOSTILE[name])
    tracemalloc.start()
    with pytest.raises(BadHeader, match="frame header"):
        unpack(frame)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 32 << 20


def test_bytes_that_belong_to_no_part_are_refused() -> None:
    coded = msgpack.packb(fields(packet_fields(parts=[8])))

    with pytest.raises(BadHeader, match="8 bytes that belong to no part"):
        unpack(frame_of(coded, bytes(16)))


@pytest.mark.parametrize(
    ("header", "packet", "error", "words"),
    [
        ({"kind": "party"}, None, BadHeader, "kind 'party'"),
        ({"step": 1 << 70}, None, BadHeader, "integer of 64 bits"),
        ({"body": {"a": {1, 2}}}, None, BadHeader, "body holds a set"),
        ({"body": {3: 1}}, None, BadHeader, "keys that are not text"),
        ({"body": {"a": list(range(5000))}}, None, TooLarge, "5000 items"),
        ({"body": {"a": "x" * 300_000}}, None, TooLarge, "limit is 262144"),
        ({"body": {"a": 1 << 80}}, None, BadHeader, "cannot be coded"),
        ({}, Packet(codec="c", shape=(), meta={"a": np.int64(3)}), BadHeader, "holds a int64"),
        ({}, Packet(codec="c", shape=(1 << 40,)), TooLarge, "elements"),
        ({}, Packet(codec="c", shape=(1,), parts=(b"",) * 513), TooLarge, "more than 512 parts"),
    ],
)
def test_packing_refuses_what_unpacking_would(
    header: dict[str, Any], packet: Packet | None, error: type[FrameError], words: str
) -> None:
    values: dict[str, Any] = {"kind": "control", "source": 0, "target": 1, "step": 0} | header

    with pytest.raises(error, match=words):
        pack(FrameHeader(**values), packet)


def test_packing_refuses_row_marks_of_unequal_length() -> None:
    marks = RowMarks(ids=(1, 2), visits=(1,), generations=(0, 0), cold=(False, False))

    with pytest.raises(BadHeader, match="2 ids, 1 visits"):
        pack(HEADER, Packet(codec="delta", shape=(2,), rows=marks))


# Fuzz: nothing but a FrameError may escape


def refused_or_read(buffer: bytes) -> bool:
    try:
        unpack(buffer)
    except FrameError:
        return False
    return True


def test_every_truncation_is_refused() -> None:
    frame = pack(HEADER, delta_packet())

    for length in range(len(frame)):
        assert not refused_or_read(frame[:length]), length


def test_every_single_bit_flip_is_refused() -> None:
    frame = bytearray(pack(HEADER, delta_packet()))

    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        assert not refused_or_read(frame), bit
        frame[bit // 8] ^= 1 << bit % 8
    assert refused_or_read(frame)


def test_mutant_without_a_checksum_lets_flips_through(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = bytearray(pack(HEADER, delta_packet()))
    monkeypatch.setattr(
        "compressors.scattered.crc32", lambda *_: struct.unpack("<I", frame[-4:])[0]
    )
    frame[-20] ^= 1

    assert refused_or_read(frame)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert not refused_or_read(data)
    assert not refused_or_read(b"RPF\x01" + data)


@settings(deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=40))
def test_a_random_header_under_a_right_checksum_is_refused(coded: bytes, data: bytes) -> None:
    assert not refused_or_read(frame_of(coded, data))


@settings(deadline=None, max_examples=examples(300))
@given(st.data())
def test_a_header_with_changed_bytes_under_a_right_checksum_raises_only_frame_errors(
    data: st.DataObject,
) -> None:
    frame = bytearray(pack(HEADER, delta_packet(3)))
    end = 12 + struct.unpack_from("<I", frame, 4)[0]
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(4, end))] = data.draw(st.integers(0, 255))

    refused_or_read(reseal(bytes(frame)))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
    | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.tuples(inner, inner) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(plain, min_size=12, max_size=12), st.lists(plain, min_size=6, max_size=6))
def test_wrong_types_in_any_field_raise_only_frame_errors(outer: Any, packet: Any) -> None:
    refused_or_read(frame_of(msgpack.packb(outer)))
    refused_or_read(frame_of(msgpack.packb(fields(packet))))
    refused_or_read(frame_of(msgpack.packb(fields(packet_fields(rows=[*packet, 0, b""])))))


int64 = st.integers(-(1 << 63), (1 << 63) - 1)


@st.composite
def marks(draw: st.DrawFn) -> RowMarks:
    num = draw(st.integers(0, 9))
    ints = st.lists(int64, min_size=num, max_size=num).map(tuple)
    small = st.lists(st.integers(0, 3), min_size=num, max_size=num).map(tuple)
    return RowMarks(
        ids=draw(ints),
        visits=draw(small),
        generations=draw(small),
        cold=tuple(bool(flag) for flag in draw(small)),
        evicted=draw(st.lists(int64, max_size=4).map(tuple)),
        checksum=draw(st.none() | st.integers(0, (1 << 32) - 1)),
    )


@st.composite
def packets(draw: st.DrawFn, depth: int = 3) -> Packet:
    inner = draw(st.lists(packets(depth - 1), max_size=2)) if depth else []
    return Packet(
        codec=draw(st.text(max_size=10)),
        shape=tuple(draw(st.lists(st.integers(0, 20), max_size=4))),
        meta=draw(st.dictionaries(st.text(max_size=4), plain, max_size=3)),
        parts=tuple(draw(st.lists(st.binary(max_size=20), max_size=3))),
        inner=tuple(inner),
        rows=draw(st.none() | marks()),
    )


@settings(deadline=None)
@given(
    st.builds(
        FrameHeader, kind=st.sampled_from(KINDS), replica=int64, source=int64, target=int64,
        step=int64, micro_batch=int64, seq=int64, generation=int64, attempt=int64, flags=int64,
        body=st.dictionaries(st.text(max_size=4), plain, max_size=3),
    ),
    st.none() | packets(),
)  # fmt: skip
def test_whatever_packs_unpacks_to_the_same(header: FrameHeader, packet: Packet | None) -> None:
    frame = pack(header, packet)
    got, got_packet = unpack(frame)

    assert got == header
    assert frame_nbytes(header, packet) == len(frame)
    if packet is None:
        assert got_packet is None
    else:
        assert got_packet is not None
        assert same(got_packet, packet)
