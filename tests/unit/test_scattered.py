"""Frames in pieces: the same bytes as in one, read without a copy, and as hard to damage."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from compressors.base import Packet, SampleKeys
from compressors.frame import BadChecksum, BadHeader, FrameHeader, TooLarge, pack, scatter, unpack
from compressors.identity import Identity
from compressors.scattered import LARGE_NBYTES, Scattered, gather_small

HEADER = FrameHeader(kind="replica", source=1, target=1, step=7, body={"op": "up"})
SIZE = LARGE_NBYTES // 4 + 3


def packet_of(tensor: torch.Tensor) -> Packet:
    return Identity().encode(tensor, keys=SampleKeys(ids=(0,)))


def noise(size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(3))


def scattered(tensor: torch.Tensor) -> Scattered:
    frame = scatter(HEADER, packet_of(tensor))
    assert isinstance(frame, Scattered)
    return frame


def delivered(frame: Scattered) -> list[np.ndarray]:
    """As the other actor gets it: new memory, read-only."""
    arrays = [np.frombuffer(bytes(piece), dtype=np.uint8) for piece in frame.pieces]
    assert not any(array.flags.writeable for array in arrays if array.size)
    return arrays


def test_the_pieces_are_the_packed_frame() -> None:
    vector = noise()
    frame = scattered(vector)

    assert bytes(frame) == pack(HEADER, packet_of(vector))
    assert len(frame) == frame.nbytes == len(bytes(frame))


def test_a_large_part_is_the_tensors_own_memory_and_small_ones_are_joined() -> None:
    vector = noise()
    frame = scattered(vector)

    assert [piece.nbytes >= LARGE_NBYTES for piece in frame.pieces] == [False, True, False]
    assert np.frombuffer(frame.pieces[1], dtype=np.uint8).ctypes.data == vector.data_ptr()


def test_a_frame_without_large_parts_is_bytes() -> None:
    assert scatter(HEADER) == pack(HEADER)
    assert scatter(HEADER, packet_of(noise(50))) == pack(HEADER, packet_of(noise(50)))


def test_what_arrives_is_what_was_sent_and_stays_where_it_arrived() -> None:
    vector = noise()
    arrays = delivered(scattered(vector))
    header, packet = unpack(arrays)

    assert header == HEADER
    assert packet is not None
    assert torch.equal(Identity().decode(packet), vector)
    assert np.frombuffer(packet.parts[0], dtype=np.uint8).ctypes.data == arrays[1].ctypes.data


@pytest.mark.parametrize("num", [2, 5, 40])
def test_pieces_cut_anywhere_are_the_same_frame(num: int) -> None:
    whole = pack(HEADER, packet_of(noise()))
    cuts = sorted(random.Random(num).sample(range(len(whole)), num - 1))
    pieces = [
        whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)
    ]  # fmt: skip
    header, packet = unpack(pieces)

    assert header == HEADER
    assert packet is not None
    assert torch.equal(Identity().decode(packet), noise())


def test_any_flipped_bit_in_any_piece_is_refused() -> None:
    frame = scattered(noise())
    source = random.Random(1)
    for index, piece in enumerate(frame.pieces):
        for _ in range(20):
            damaged = [bytearray(piece) for piece in frame.pieces]
            damaged[index][source.randrange(piece.nbytes)] ^= 1 << source.randrange(8)
            with pytest.raises(ValueError, match="frame"):
                unpack(damaged)


def test_a_tensor_that_changes_on_the_way_is_found_out() -> None:
    vector = noise()
    frame = scattered(vector)
    vector[SIZE // 2] += 1.0

    with pytest.raises(BadChecksum):
        unpack(frame)


def test_lost_and_repeated_pieces_are_refused() -> None:
    head, part, tail = scattered(noise()).pieces
    for pieces in ([head, part], [part, tail], [head, tail], [head, part, part, tail], []):
        with pytest.raises(ValueError, match="frame"):
            unpack(pieces)


def test_what_is_no_buffer_and_what_is_too_many_of_them_is_refused() -> None:
    with pytest.raises(BadHeader, match="not a contiguous buffer"):
        unpack([3, "x"])
    with pytest.raises(TooLarge, match="in 1026 pieces, limit is 1025"):
        unpack([b""] * 1026)


def test_cut_views_one_piece_and_joins_several() -> None:
    frame = Scattered([b"abc", b"", b"defg"])

    assert bytes(frame.cut(0, 3)) == b"abc"
    assert bytes(frame.cut(2, 5)) == b"cde"
    assert bytes(frame.cut(4, 4)) == b""
    assert bytes(frame.cut(3, 7)) == b"defg"
    assert gather_small([b"a", b"b"]) == b"ab"
