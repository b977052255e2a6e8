"""Rows in a file: whatever the disk does in the background, the values read are the last put."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from torch import Tensor

from compressors.spill import Spill, SpillShelf
from compressors.spill_file import ChunkFile, Slot, SpillError

torch.set_num_threads(1)

CHUNK = 1 << 16
DEADLINE_S = 20.0  # of a thread that must not hang; never waited for when all is well


class GatedDisk(ChunkFile):
    """A disk as slow as the test wants: an access waits until its gate is open."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, CHUNK)
        self.may_write = threading.Event()
        self.may_read = threading.Event()
        self.read_begun = threading.Event()
        self.write_begun = threading.Event()
        self.num_reads = 0
        self.num_writes = 0

    def write(self, slot: Slot, raw: Tensor) -> None:
        self.write_begun.set()
        assert self.may_write.wait(DEADLINE_S)
        self.num_writes += 1
        super().write(slot, raw)

    def read(self, slot: Slot, nbytes: int) -> Tensor:
        self.read_begun.set()
        assert self.may_read.wait(DEADLINE_S)
        self.num_reads += 1
        return super().read(slot, nbytes)

    def open(self) -> None:
        self.may_write.set()
        self.may_read.set()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[GatedDisk]:
    disk = GatedDisk(tmp_path)
    yield disk
    disk.open()


@pytest.fixture
def shelf_on(tmp_path: Path) -> Iterator[Callable[..., SpillShelf]]:
    made: list[SpillShelf] = []

    def make(disk: GatedDisk | None = None, *, ram_bytes: int = 0, **more: int) -> SpillShelf:
        spill = Spill(directory=tmp_path, ram_bytes=ram_bytes, chunk_bytes=CHUNK, **more)
        made.append(SpillShelf(spill, disk=disk))
        return made[-1]

    yield make
    for shelf in made:
        if isinstance(shelf._disk, GatedDisk):
            shelf._disk.open()  # else its writer would wait for the gate while we wait for it
        shelf.close()


def row(number: float, size: int = 8) -> Tensor:
    return torch.full((2, size), number, dtype=torch.bfloat16)


def test_rows_beyond_the_memory_tier_come_back_from_the_file_unchanged(shelf_on) -> None:
    shelf = shelf_on(ram_bytes=3 * row(0).nbytes)
    rows = {sample: torch.randn(2, 8).to(torch.bfloat16) for sample in range(10)}
    for sample, value in rows.items():
        shelf.put(sample, value)
    shelf.flush()

    assert shelf.resident_bytes == 3 * 32
    assert shelf.spilled_bytes == 7 * 32
    for sample, value in rows.items():
        assert torch.equal(shelf.get(sample), value)


def test_dtype_and_shape_survive_the_file(shelf_on) -> None:
    shelf = shelf_on()
    values = [torch.randn(3, 5), row(1.5), torch.arange(7, dtype=torch.uint8), torch.empty(0, 4)]
    for sample, value in enumerate(values):
        shelf.put(sample, value)
    shelf.flush()

    for sample, value in enumerate(values):
        back = shelf.get(sample)
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert torch.equal(back, value)


def test_a_row_whose_write_is_pending_is_never_read_from_the_file(disk, shelf_on) -> None:
    shelf = shelf_on(disk)
    shelf.put(1, row(1))
    assert disk.write_begun.wait(DEADLINE_S)

    assert torch.equal(shelf.get(1), row(1))  # the gate is shut: the file has nothing yet
    assert disk.num_reads == 0


def test_a_slow_write_of_an_old_value_cannot_overtake_the_new_one(disk, shelf_on) -> None:
    shelf = shelf_on(disk)
    shelf.put(1, row(1))
    assert disk.write_begun.wait(DEADLINE_S)  # the old value is on its way ...
    shelf.put(1, row(2))  # ... when the new one comes
    disk.open()
    shelf.flush()

    assert torch.equal(shelf.get(1), row(2))


def test_a_slot_given_up_during_its_write_serves_its_next_owner(disk, shelf_on) -> None:
    shelf = shelf_on(disk)
    shelf.put(1, row(1))
    assert disk.write_begun.wait(DEADLINE_S)
    shelf.drop(1)
    shelf.put(2, row(2))  # takes the slot that row 1 is being written to
    disk.open()
    shelf.flush()

    assert disk.num_writes == 2
    assert torch.equal(shelf.get(2), row(2))


def test_a_prefetch_overtaken_by_a_put_is_thrown_away(disk, shelf_on) -> None:
    shelf = shelf_on(disk, ram_bytes=row(0).nbytes)
    disk.may_write.set()
    shelf.put(1, row(1))
    shelf.put(9, row(9))  # pushes row 1 to the file
    shelf.flush()
    shelf.prefetch([1])
    assert disk.read_begun.wait(DEADLINE_S)
    shelf.put(1, row(5))  # the reader still holds the old bytes
    disk.open()
    shelf.flush()
    assert torch.equal(shelf.get(1), row(5))
    shelf.put(8, row(8))  # now the new value is in the file only
    shelf.flush()

    assert torch.equal(shelf.get(1), row(5))


def test_get_waits_for_a_prefetch_under_way_instead_of_reading_twice(disk, shelf_on) -> None:
    shelf = shelf_on(disk)
    disk.may_write.set()
    shelf.put(1, row(1))
    shelf.flush()
    shelf.prefetch([1])
    assert disk.read_begun.wait(DEADLINE_S)
    threading.Timer(0.01, disk.open).start()

    assert torch.equal(shelf.get(1), row(1))
    assert disk.num_reads == 1


def test_prefetched_rows_are_read_before_they_are_asked_for(disk, shelf_on) -> None:
    shelf = shelf_on(disk)
    disk.open()
    for sample in range(6):
        shelf.put(sample, row(sample))
    shelf.flush()
    shelf.prefetch([2, 3, 99])
    shelf.flush()
    reads = disk.num_reads

    assert torch.equal(shelf.get(2), row(2))
    assert torch.equal(shelf.get(3), row(3))
    assert reads == 2
    assert disk.num_reads == 2


def test_rows_read_for_the_running_step_outlive_the_prefetch_of_the_next(disk, shelf_on) -> None:
    shelf = shelf_on(disk)
    disk.open()
    for sample in range(4):
        shelf.put(sample, row(sample))
    shelf.flush()
    shelf.prefetch([0])
    shelf.flush()
    shelf.prefetch([1])
    shelf.flush()
    assert disk.num_reads == 2
    shelf.get(0)
    assert disk.num_reads == 2
    shelf.prefetch([2])

    assert shelf.resident_bytes <= 2 * row(0).nbytes  # row 0 is forgotten at last


def test_put_waits_when_too_much_waits_to_be_written(disk, shelf_on) -> None:
    shelf = shelf_on(disk, write_behind_bytes=row(0).nbytes)
    shelf.put(1, row(1))
    done = threading.Event()

    def put_more() -> None:
        shelf.put(2, row(2))
        done.set()

    thread = threading.Thread(target=put_more)
    thread.start()
    assert not done.wait(0.05)
    disk.open()
    assert done.wait(DEADLINE_S)
    thread.join()
    shelf.flush()

    assert torch.equal(shelf.get(2), row(2))


@settings(deadline=None, max_examples=examples(40))
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "drop", "prefetch", "flush"]),
            st.integers(0, 5),
            st.integers(1, 40),
        ),
        max_size=60,
    ),
    ram_bytes=st.sampled_from([0, 40, 200, 10_000]),
)
def test_any_sequence_of_calls_reads_what_a_dict_would(
    tmp_path_factory: pytest.TempPathFactory,
    actions: list[tuple[str, int, int]],
    ram_bytes: int,
) -> None:
    directory = tmp_path_factory.mktemp("spill")
    shelf = SpillShelf(Spill(directory=directory, ram_bytes=ram_bytes, chunk_bytes=CHUNK))
    model: dict[int, Tensor] = {}
    try:
        for number, (action, sample, size) in enumerate(actions):
            if action == "put":
                model[sample] = row(number, size)
                shelf.put(sample, row(number, size))
            elif action == "get" and sample in model:
                assert torch.equal(shelf.get(sample), model[sample])
            elif action == "drop":
                model.pop(sample, None)
                shelf.drop(sample)
            elif action == "prefetch":
                shelf.prefetch(range(sample))
            else:
                shelf.flush()
        for sample, value in model.items():
            assert torch.equal(shelf.get(sample), value)
    finally:
        shelf.close()


def test_slots_of_dropped_rows_are_used_again(tmp_path: Path) -> None:
    disk = ChunkFile(tmp_path, CHUNK)
    first = disk.reserve(1000)
    disk.release(first)

    assert disk.reserve(1000) == first
    disk.close()


def test_slots_of_one_file_do_not_overlap(tmp_path: Path) -> None:
    disk = ChunkFile(tmp_path, CHUNK)
    sizes = [1, 64, 65, 1000, 5000, 70_000, 70_000, 12]
    slots = [disk.reserve(nbytes) for nbytes in sizes for _ in range(20)]
    taken = [(s.chunk, s.offset, s.offset + s.size) for s in slots]

    assert all(slot.size >= n for slot, n in zip(slots[::20], sizes))
    for i, (chunk, start, end) in enumerate(sorted(taken)[:-1]):
        after = sorted(taken)[i + 1]
        assert after[0] != chunk or after[1] >= end > start
    disk.close()


def test_a_full_disk_says_how_much_was_wanted_and_what_to_do(
    tmp_path: Path, shelf_on, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    shelf = shelf_on()

    with pytest.raises(SpillError, match=r"cannot grow by 65536: the disk is full; free space"):
        shelf.put(1, row(1))
    assert torch.equal(shelf.get(1), row(1))  # the row itself was not lost


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")

    with pytest.raises(SpillError, match=r"cannot make a spill file in .*file/rows.*writable"):
        SpillShelf(Spill(directory=tmp_path / "file" / "rows"))


def test_an_error_of_the_background_writer_reaches_the_next_caller(disk, shelf_on) -> None:
    def broken(slot: Slot, raw: Tensor) -> None:
        raise OSError(errno.EIO, "Input/output error")

    disk.write = broken
    shelf = shelf_on(disk)
    shelf.put(1, row(1))

    with pytest.raises(SpillError, match="Input/output error"):
        shelf.flush()


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    shelf = SpillShelf(Spill(directory=tmp_path / "rows", ram_bytes=0))
    shelf.put(1, row(1))
    shelf.flush()
    threads = [t for t in threading.enumerate() if t.name.startswith("spill")]
    shelf.close()

    assert list((tmp_path / "rows").iterdir()) == []
    assert len(threads) >= 2
    assert not any(t.is_alive() for t in threads)
    with pytest.raises(ValueError, match="closed"):
        shelf.put(2, row(2))


def test_a_chunk_smaller_than_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chunk_bytes is 100"):
        Spill(directory=tmp_path, chunk_bytes=100)
