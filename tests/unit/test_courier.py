"""The courier: frames leave in order, large ones as views, pieces as pieces; trouble is told."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from compressors.base import SampleKeys
from compressors.frame import FrameHeader, pack, scatter, unpack
from compressors.identity import Identity
from stages.courier import VIEW_NBYTES, Courier, disclose, enclose

HEADER = FrameHeader(kind="replica", source=0, target=0, step=1, body={"op": "up"})


class Peer:
    """An actor's handle that notes what was pushed to it."""

    def __init__(self) -> None:
        self.got: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.deliver = SimpleNamespace(remote=self._take)
        self.deliver_letter = SimpleNamespace(remote=self._take)

    def _take(self, *args: Any) -> None:
        self.got.put(args)

    def next(self) -> tuple[Any, ...]:
        return self.got.get(timeout=10)


def test_small_frames_go_as_one_bytes_and_large_ones_as_arrays_over_them() -> None:
    courier, peer = Courier(3, print), Peer()
    large = bytes(VIEW_NBYTES + 1)
    courier.push(peer, 1, 7, b"small")
    courier.push(peer, 1, 7, large)

    (tagged,) = peer.next()
    assert tagged == b"\x03\0\0\0\x07\0\0\0small"
    assert disclose((tagged,)) == (3, 7, b"small")
    source, generation, payload = disclose(peer.next())
    assert (source, generation) == (3, 7)
    assert payload.ctypes.data == np.frombuffer(large, dtype=np.uint8).ctypes.data


def test_parts_of_a_frame_stay_aligned_behind_the_tag() -> None:
    vector = torch.arange(1000, dtype=torch.float64)
    frame = pack(HEADER, Identity().encode(vector, keys=SampleKeys(ids=(0,))))

    _, _, payload = disclose(enclose(-1, 2**32 - 1, frame))

    assert np.frombuffer(payload, dtype=np.uint8).ctypes.data % 8 == 0
    header, packet = unpack(payload)
    assert header == HEADER
    assert packet is not None
    assert torch.equal(Identity().decode(packet), vector)


def test_a_letter_in_pieces_goes_without_a_copy_and_reads_as_it_was() -> None:
    courier, peer = Courier(0, print), Peer()
    vector = torch.arange(100_000, dtype=torch.float32)
    frame = scatter(HEADER, Identity().encode(vector, keys=SampleKeys(ids=(0,))))
    courier.post(peer, 2, 5, frame)

    generation, pieces = peer.next()
    assert generation == 5
    assert [type(piece) for piece in pieces] == [np.ndarray] * 3
    assert pieces[1].ctypes.data == vector.data_ptr()
    header, packet = unpack(pieces)
    assert header == HEADER
    assert packet is not None
    assert torch.equal(Identity().decode(packet), vector)


def test_a_push_that_fails_is_told_and_the_next_one_goes() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    courier, peer = Courier(0, told.put), Peer()
    courier.post(object(), 4, 0, b"lost")
    courier.post(peer, 4, 0, b"next")

    assert "pushing to replica 4 failed" in told.get(timeout=10)
    assert peer.next() == (0, b"next")


def test_a_letter_that_goes_to_several_is_stored_once() -> None:
    stored: list[Any] = []
    all_posted = threading.Event()

    def put(payload: Any) -> str:
        assert all_posted.wait(10)
        stored.append(payload)
        return f"ref {len(stored)}"

    courier, peer, other = Courier(0, print, put=put), Peer(), Peer()
    vector = torch.arange(100_000, dtype=torch.float32)
    packet = Identity().encode(vector, keys=SampleKeys(ids=(0,)))
    first, second = scatter(HEADER, packet), scatter(HEADER, packet)
    for target, frame in ((peer, first), (other, first), (peer, second), (peer, b"small")):
        courier.post(target, 1, 5, frame)
    all_posted.set()

    assert [peer.next(), other.next(), peer.next()] == [(5, "ref 1"), (5, "ref 1"), (5, "ref 2")]
    assert peer.next() == (5, b"small")
    assert len(stored) == 2
