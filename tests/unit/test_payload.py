"""Vectors to and from packets: read where they lie, and sums in one order with one result."""

from __future__ import annotations

import pytest
import torch

from compressors.base import CodecError, Packet
from compressors.registry import CodecSpec
from stages.sync.payload import VectorCoder

VECTOR = torch.randn(400_000, generator=torch.Generator().manual_seed(1))


def arrived(packet: Packet) -> Packet:
    """In memory that may not be written to, as bytes and Ray's store are."""
    parts = tuple(memoryview(bytes(part)) for part in packet.parts)
    return Packet(codec=packet.codec, shape=packet.shape, meta=packet.meta, parts=parts)


def test_reading_an_exact_vector_copies_nothing_and_warns_of_nothing() -> None:
    coder = VectorCoder()
    packet = arrived(coder.encode("up", VECTOR)[0])
    first, second = coder.read(packet), coder.read(packet)

    assert torch.equal(first, VECTOR)
    assert first.data_ptr() == second.data_ptr()


def test_what_is_read_keeps_the_memory_alive() -> None:
    coder = VectorCoder()
    packet = arrived(coder.encode("up", VECTOR)[0])
    read = coder.read(packet)
    del packet
    other = [bytes(1_600_000) for _ in range(5)]

    assert torch.equal(read, VECTOR)
    assert len(other) == 5


def test_decoding_gives_memory_that_may_be_written_to() -> None:
    coder = VectorCoder()
    packet = arrived(coder.encode("up", VECTOR)[0])
    coder.decode(packet).zero_()

    assert torch.equal(coder.read(packet), VECTOR)


def test_a_lossy_codec_is_read_as_it_is_decoded() -> None:
    coder = VectorCoder(CodecSpec(name="directq", bits=4))
    packet, told = coder.encode("up", VECTOR)

    assert torch.equal(coder.read(packet), coder.decode(packet))
    assert torch.equal(coder.read(packet), told)


def test_a_packet_of_the_wrong_length_is_refused() -> None:
    packet = VectorCoder().encode("up", VECTOR)[0]
    short = Packet(
        codec=packet.codec, shape=packet.shape, meta=packet.meta, parts=(bytes(packet.nbytes - 4),)
    )

    with pytest.raises(CodecError, match="needs 1600000 bytes of float32, has 1599996"):
        VectorCoder().read(short)


@pytest.mark.parametrize("size", [7, 400_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_have_the_bits_of_one_addition_after_the_other(size: int, dtype: torch.dtype) -> None:
    coder = VectorCoder()
    generator = torch.Generator().manual_seed(2)
    a, b, c = (torch.randn(size, generator=generator, dtype=dtype) for _ in range(3))

    assert torch.equal(coder.mean([a, b, c]), (a + b + c) / 3)
    assert torch.equal(coder.combine([a, b], [1.0, 1.0]), a + b)
    assert torch.equal(coder.combine([a, b, c], [1.0, -1.0, 1.0]), a - b + c)
    assert torch.equal(coder.combine([a], [0.25]), a * 0.25)
    assert torch.equal(
        coder.combine([a, b, c], [0.5, 0.25, -0.75]),
        (a * 0.5).add_(b, alpha=0.25).add_(c, alpha=-0.75),
    )


def test_no_vector_is_written_to() -> None:
    coder = VectorCoder()
    a, b = VECTOR.clone(), 2 * VECTOR
    coder.mean([a, b])
    coder.combine([a, b], [1.0, 1.0])
    coder.join([a, b])

    assert torch.equal(a, VECTOR)
    assert torch.equal(b, 2 * VECTOR)


def test_where_rounding_draws_lots_each_replica_has_its_own() -> None:
    spec = CodecSpec(name="directq", bits=4, grid="symmetric", rounding="stochastic")
    one = VectorCoder(spec, replica=0).encode("up", VECTOR)[1]
    errors = [
        VectorCoder(spec, replica=replica).encode("up", VECTOR)[1] - VECTOR for replica in range(8)
    ]
    together = float(torch.stack(errors).mean(0).square().mean())
    alone = float((one - VECTOR).square().mean())

    assert together == pytest.approx(alone / 8, rel=0.05)


def test_mutant_the_same_lots_everywhere_round_alike() -> None:
    spec = CodecSpec(name="directq", bits=2, rounding="stochastic")
    first, second = (VectorCoder(spec).encode("up", VECTOR)[1] for _ in range(2))

    assert torch.equal(first, second)
