"""Memory of vectors: used again, and never while anybody can still read it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from compressors.base import SampleKeys
from compressors.identity import Identity
from stages.sync.memory import LARGE_NBYTES, NUM_LARGEST, VectorMemory

SIZE = LARGE_NBYTES // 4


def test_memory_that_nobody_holds_is_used_again() -> None:
    memory = VectorMemory()
    for _ in range(5):
        memory.vector(SIZE).fill_(1.0)

    assert memory.num_made == 1


@pytest.mark.slow
@pytest.mark.parametrize("hold", [
    lambda vector: vector,
    lambda vector: vector[5:9],
    lambda vector: vector.view(torch.int32),
    lambda vector: vector.numpy(),
    lambda vector: Identity().encode(vector[3:], keys=SampleKeys(ids=(0,))),
], ids=["vector", "view", "other dtype", "array", "packet"])  # fmt: skip
def test_memory_is_not_used_again_while_it_is_held(hold: object) -> None:
    memory = VectorMemory()
    first = memory.vector(SIZE).fill_(1.0)
    address = first.data_ptr()
    held = hold(first)  # type: ignore[operator]
    del first
    gc.collect()

    second = memory.vector(SIZE)
    assert second.data_ptr() != address
    del held, second
    addresses = {memory.vector(SIZE).data_ptr() for _ in range(3)}
    assert memory.num_made == 2
    assert len(addresses) <= 2


def test_sizes_and_dtypes_are_those_asked_for() -> None:
    memory = VectorMemory()
    single, double = memory.vector(SIZE + 7), memory.vector(SIZE, torch.float64)

    assert (single.shape, single.dtype) == ((SIZE + 7,), torch.float32)
    assert (double.shape, double.dtype) == ((SIZE,), torch.float64)
    assert memory.vector(10).shape == (10,)
    assert memory.num_made == 2


def test_no_more_than_a_few_times_the_largest_is_kept_and_the_longest_unused_goes_first() -> None:
    memory = VectorMemory()
    small = memory.vector(SIZE)
    many = [memory.vector(2 * SIZE) for _ in range(NUM_LARGEST + 2)]
    del small
    assert [len(spare) for spare in memory._spares] == [4 * SIZE]
    del many

    assert [len(spare) for spare in memory._spares] == [8 * SIZE] * NUM_LARGEST


@pytest.mark.slow
def test_vectors_outlive_the_memorys_owner() -> None:
    memory = VectorMemory()
    vector = memory.vector(SIZE).fill_(2.0)
    del memory
    gc.collect()

    assert float(vector.sum()) == 2.0 * SIZE


def test_threads_never_share_a_vector() -> None:
    memory = VectorMemory()
    mixed: list[float] = []

    def work(value: float) -> None:
        for _ in range(200):
            vector = memory.vector(SIZE)
            vector[::4096] = value
            if not bool((vector[::4096] == value).all()):
                mixed.append(value)

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert mixed == []
