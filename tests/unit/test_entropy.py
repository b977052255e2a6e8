"""The entropy stage: lossless, never much larger, and not to be bombed."""

from __future__ import annotations

import os
import tracemalloc

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressors.base import CodecError, Packet, RowMarks, SampleKeys
from compressors.entropy import Entropy, deflate, inflate
from compressors.floating import Bf16
from compressors.frame import FrameHeader, header_nbytes, pack, unpack
from compressors.identity import Identity
from compressors.topk import TopK

torch.set_num_threads(1)
KEYS = SampleKeys(ids=(0, 1))
ROWS = RowMarks(ids=(4, 5), visits=(2, 2), generations=(0, 0), cold=(False, False))


def contents(packet: Packet) -> object:
    parts = [bytes(part) for part in packet.parts]
    inner = [contents(p) for p in packet.inner]
    return packet.codec, tuple(packet.shape), dict(packet.meta), parts, inner, packet.rows


@settings(deadline=None)
@given(st.lists(st.binary(max_size=400), max_size=4), st.lists(st.binary(max_size=40), max_size=2))
def test_what_is_deflated_inflates_to_the_same_packet(own: list[bytes], deep: list[bytes]) -> None:
    inner = Packet(codec="uniform", shape=(1, 100), meta={"bits": 2}, parts=tuple(deep))
    packet = Packet(codec="delta", shape=(2, 50), parts=tuple(own), inner=(inner,), rows=ROWS)

    small = deflate(packet, level=1)

    assert contents(inflate(small)) == contents(packet)
    assert small.nbytes <= packet.nbytes


def test_row_marks_stay_where_the_stage_looks_for_them_and_are_sent_once() -> None:
    packet = Packet(codec="delta", shape=(2, 4), parts=(b"abc",), rows=ROWS)

    small = deflate(packet, level=1)

    assert small.rows == ROWS
    assert small.inner[0].rows is None


def test_zeros_shrink_to_almost_nothing() -> None:
    codec = Entropy(Identity())
    x = torch.zeros(2, 10_000)

    packet = codec.encode(x, keys=KEYS)

    assert packet.nbytes < 100
    assert torch.equal(codec.decode(packet), x)
    assert codec.stats()["zstd_ratio"] < 0.01


def test_noise_is_stored_as_it_is_and_costs_few_bytes_of_header() -> None:
    noise = torch.frombuffer(bytearray(os.urandom(8000)), dtype=torch.float32).reshape(2, 1000)
    header = FrameHeader(kind="activation", source=0, target=1, step=0)
    plain = Identity().encode(noise, keys=KEYS)

    packet = Entropy(Identity()).encode(noise, keys=KEYS)

    assert packet.nbytes == 8000
    assert header_nbytes(header, packet) - header_nbytes(header, plain) <= 32


def test_top_k_of_real_numbers_shrinks_and_survives_a_frame() -> None:
    x = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    codec = Entropy(TopK(0.1))

    packet = codec.encode(x, keys=KEYS)
    _, received = unpack(pack(FrameHeader(kind="gradient", source=1, target=0, step=0), packet))

    assert received is not None
    assert packet.nbytes < 0.95 * TopK(0.1).estimate_nbytes((2, 4000))
    assert torch.equal(codec.decode(received), TopK(0.1).decode(TopK(0.1).encode(x, keys=KEYS)))


def bomb(raw_nbytes: int, stated: object, shape: tuple[int, ...] = (1, 8)) -> Packet:
    part = zstandard.ZstdCompressor().compress(bytes(raw_nbytes))
    inner = Packet(codec="fp32", shape=shape, meta={"dtype": "float32"}, parts=(part,))
    return Packet(codec="zstd", shape=shape, meta={"raw": (stated,)}, inner=(inner,))


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (bomb(100_000_000, 100_000_000), "states 100000000 raw bytes, limit is 4224"),
        (bomb(100_000_000, 32), "of 100000000 raw bytes, the packet states 32"),
        (bomb(32, 1 << 60, (1 << 60,)), "limit is 1073741824"),
        (bomb(32, -5), "states -5 raw bytes"),
        (bomb(32, 0), "states 0 raw bytes"),
        (bomb(32, "32"), "states '32' raw bytes"),
        (bomb(32, True), "states True raw bytes"),
        (bomb(32, None), "states None raw bytes"),
    ],
)
def test_a_hostile_size_is_refused_before_memory_is_taken(packet: Packet, words: str) -> None:
    tracemalloc.start()
    with pytest.raises(CodecError, match=words):
        inflate(packet)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1 << 20


def with_part(part: bytes, sizes: object = (32,)) -> Packet:
    inner = Packet(codec="fp32", shape=(1, 8), meta={"dtype": "float32"}, parts=(part,))
    return Packet(codec="zstd", shape=(1, 8), meta={"raw": sizes}, inner=(inner,))


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_a_part_that_is_no_zstd_is_refused(part: bytes) -> None:
    with pytest.raises(CodecError, match="zstd part"):
        inflate(with_part(part))


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_a_damaged_zstd_part_raises_a_codec_error_or_gives_the_stated_size(at: int) -> None:
    part = bytearray(zstandard.ZstdCompressor().compress(b"abcdefgh" * 3 + b"12345678"))
    part[at // 8 % len(part)] ^= 1 << at % 8
    try:
        packet = inflate(with_part(bytes(part)))
    except CodecError:
        return
    assert len(packet.parts[0]) == 32


@pytest.mark.parametrize(
    "packet",
    [
        Packet(codec="zstd", shape=(1,)),
        Packet(codec="fp32", shape=(1,), inner=(Packet(codec="fp32", shape=(1,)),)),
        with_part(b"x", sizes=()),
        with_part(b"x", sizes=(-1, -1)),
        with_part(b"x", sizes=None),
        with_part(b"x", sizes=7),
    ],
)
def test_a_packet_that_does_not_add_up_is_refused(packet: Packet) -> None:
    with pytest.raises(CodecError, match="zstd packet"):
        inflate(packet)


class Remembering(Bf16):
    """Counts what the wrapper passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def commit(self) -> None:
        self.calls.append("commit")

    def abort(self) -> None:
        self.calls.append("abort")

    def state_dict(self) -> dict[str, int]:
        return {"n": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls.append(f"load {state}")

    def resend_cold(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        self.calls.append("cold")
        return self.encode(tensor, keys=keys)


def test_memory_is_the_inner_codecs() -> None:
    inner = Remembering()
    codec = Entropy(inner)
    codec.commit()
    codec.abort()
    codec.load_state_dict(codec.state_dict())

    packet = codec.resend_cold(torch.zeros(2, 100), keys=KEYS)

    assert inner.calls == ["commit", "abort", "load {'n': 3}", "cold"]
    assert packet.codec == "zstd"
    assert codec.stats()["saturated"] == 0


def test_a_codec_without_rows_has_no_cold_resend() -> None:
    with pytest.raises(CodecError, match=r"bf16\+zstd remembers no samples"):
        Entropy(Bf16()).resend_cold(torch.zeros(2, 3), keys=KEYS)


@pytest.mark.parametrize("level", [0, 20, -3])
def test_a_level_outside_its_range_is_refused(level: int) -> None:
    with pytest.raises(ValueError, match=r"expected 1 \(fast\) to 19"):
        Entropy(Bf16(), level=level)
