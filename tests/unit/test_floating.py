"""The codecs that only choose a float format: fp32 as it is, fp16, bf16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors.base import CodecError, Packet, SampleKeys
from compressors.floating import Bf16, Floating, Fp16
from compressors.frame import FrameHeader, pack, unpack
from compressors.identity import DTYPES, Identity

torch.set_num_threads(1)
ONE = SampleKeys(ids=(0,))
HEADER = FrameHeader(kind="activation", source=0, target=1, step=0)


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(torch.int32).flatten().tolist()


@settings(deadline=None)
@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=40))
def test_fp32_keeps_every_bit_pattern(patterns: list[int]) -> None:
    x = torch.tensor([patterns], dtype=torch.int32).view(torch.float32)

    _, packet = unpack(pack(HEADER, Identity().encode(x, keys=ONE)))

    assert packet is not None
    assert bits(Identity().decode(packet)) == patterns


@pytest.mark.parametrize("name", DTYPES)
def test_fp32_sends_any_dtype_as_it_is(name: str) -> None:
    x = torch.arange(12).reshape(3, 4).to(DTYPES[name])

    packet = Identity().encode(x, keys=SampleKeys(ids=(0, 1, 2)))

    assert packet.nbytes == 12 * DTYPES[name].itemsize
    assert Identity().decode(packet).dtype == DTYPES[name]
    assert torch.equal(Identity().decode(packet), x)


def test_fp32_encoding_shares_memory_and_decoding_a_writable_buffer_does_too() -> None:
    x = torch.ones(2, 3)
    packet = Identity().encode(x, keys=SampleKeys(ids=(0, 1)))

    assert np.frombuffer(packet.parts[0], dtype=np.uint8).ctypes.data == x.data_ptr()
    assert Identity().decode(packet).data_ptr() == x.data_ptr()


def test_decoding_a_read_only_buffer_gives_a_tensor_that_may_be_written_to() -> None:
    frame = pack(HEADER, Identity().encode(torch.ones(2, 3), keys=SampleKeys(ids=(0, 1))))
    _, packet = unpack(frame)
    assert packet is not None

    Identity().decode(packet).zero_()

    assert torch.equal(Identity().decode(packet), torch.ones(2, 3))


def test_decoding_an_unaligned_writable_buffer_copies() -> None:
    raw = bytearray(b"x" + np.arange(4, dtype=np.float32).tobytes())
    packet = Packet(
        codec="fp32", shape=(4,), meta={"dtype": "float32"}, parts=(memoryview(raw)[1:],)
    )

    assert Identity().decode(packet).tolist() == [0, 1, 2, 3]


def test_bf16_rounds_to_nearest_even() -> None:
    x = torch.tensor([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, -(1 + 2**-8) - 2**-20]])

    got = Bf16().decode(Bf16().encode(x, keys=ONE))

    assert got.tolist() == [[1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1 - 2**-7]]
    assert got.dtype == torch.float32


def test_fp16_clips_finite_values_and_counts_them() -> None:
    codec = Fp16()
    x = torch.tensor([[65519.0, 65520.0, 1e5, -1e30, 65504.0, 6e-8, 1e-9]])

    got = codec.decode(codec.encode(x, keys=ONE))

    assert got[0, :5].tolist() == [65504.0, 65504.0, 65504.0, -65504.0, 65504.0]
    assert got[0, 5] == pytest.approx(5.96e-8, rel=1e-3)
    assert got[0, 6] == 0
    assert codec.stats() == {"saturated": 3.0}


@pytest.mark.parametrize("codec", [Fp16(), Bf16()])
def test_infinities_and_nan_pass_as_they_are(codec: Floating) -> None:
    x = torch.tensor([[float("inf"), -float("inf"), float("nan"), 3.4e38]])

    got = codec.decode(codec.encode(x, keys=ONE))

    assert got[0, 0] == float("inf")
    assert got[0, 1] == -float("inf")
    assert got[0, 2].isnan()
    assert got[0, 3].isfinite()
    assert codec.stats() == {"saturated": 1.0}


def test_a_hundred_thousand_survives_bf16() -> None:
    got = Bf16().decode(Bf16().encode(torch.tensor([[1e5]]), keys=ONE))

    assert got.item() == pytest.approx(1e5, rel=2**-8)


def test_evaluation_counts_no_saturation() -> None:
    codec = Fp16()
    codec.encode(torch.tensor([[1e6]]), keys=SampleKeys(ids=(0,), remember=False))

    assert codec.stats() == {"saturated": 0.0}


def test_integers_are_refused_by_the_narrow_floats() -> None:
    with pytest.raises(CodecError, match="fp16 sends floating-point tensors, got int64; use fp32"):
        Fp16().encode(torch.tensor([[1]]), keys=ONE)


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (Packet(codec="fp32", shape=(2,), meta={"dtype": "float32"}), "0 parts .* expected 1"),
        (
            Packet(codec="fp32", shape=(2,), meta={"dtype": "float32"}, parts=(b"1234567",)),
            r"shape \(2,\) needs 8 bytes of float32, has 7",
        ),
        (Packet(codec="fp32", shape=(1,), parts=(b"1234",)), "has dtype None; known are float32"),
        (Packet(codec="fp32", shape=(1,), meta={"dtype": "object"}, parts=(b"1",)), "'object'"),
    ],
)
def test_a_packet_that_does_not_add_up_is_refused(packet: Packet, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        Identity().decode(packet)


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(CodecError, match="dtype complex64 cannot be sent"):
        Identity().encode(torch.zeros(1, dtype=torch.complex64), keys=ONE)
