"""Rows: formats, staging, eviction, saving."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressors.buffers import Mark, RowStore
from compressors.row_format import RowFormat

torch.set_num_threads(1)

ROWS = ["bf16", "fp32", "int8", "int4", "int2"]


def store(**options: int | None) -> RowStore:
    return RowStore(row_format=RowFormat("bf16"), **options)  # type: ignore[arg-type]


def value(number: float) -> Tensor:
    return torch.full((2, 4), number, dtype=torch.bfloat16)  # 16 bytes


def stage(rows: RowStore, sample: int, number: float, *, generation: int = 1) -> None:
    rows.stage(sample, Mark(generation, 1, (2, 4)), value(number))


# Formats


@pytest.mark.parametrize(
    ("rows", "expected"),
    [("bf16", 65536), ("fp32", 131072), ("int8", 33280), ("int4", 16896), ("int2", 8704)],
)
def test_a_row_of_128_positions_and_256_channels_takes(rows: str, expected: int) -> None:
    row = RowFormat(rows).pack(torch.randn(128, 256))

    assert row is not None
    assert row.nbytes == expected == RowFormat(rows).nbytes((128, 256))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 33), (0, 4), (128, 64)])
def test_what_a_row_stands_for_is_its_own_row(rows: str, shape: tuple[int, int]) -> None:
    row_format = RowFormat(rows)
    once = row_format.pack(torch.randn(shape))
    assert once is not None
    again = row_format.pack(row_format.unpack(once, shape).float())

    assert again is not None
    assert torch.equal(once, again)
    assert row_format.nbytes(shape) == once.nbytes


@pytest.mark.parametrize(
    ("rows", "limit"), [("bf16", 0.003), ("fp32", 0), ("int8", 0.01), ("int4", 0.15), ("int2", 0.6)]
)
def test_rows_lose_no_more_than_their_bits_explain(rows: str, limit: float) -> None:
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    row_format = RowFormat(rows)
    row = row_format.pack(x)
    assert row is not None
    error = (row_format.unpack(row, (128, 64)).float() - x).norm() / x.norm()

    assert error <= limit


def test_low_bit_rows_have_a_scale_for_each_channel() -> None:
    x = torch.tensor([[1e-4, 1e4], [-1e-4, -1e4], [0.5e-4, 0.5e4]])
    row_format = RowFormat("int4")
    row = row_format.pack(x)
    assert row is not None

    assert torch.allclose(row_format.unpack(row, (3, 2)), x, rtol=0.13)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_no_row(rows: str, bad: float) -> None:
    x = torch.randn(4, 8)
    x[2, 3] = bad

    assert RowFormat(rows).pack(x) is None


def test_a_hundred_thousand_survives_in_bf16_and_would_not_in_fp16() -> None:
    row = RowFormat("bf16").pack(torch.tensor([[1e5]]))

    assert row is not None
    assert row.item() == pytest.approx(1e5, rel=0.004)
    assert torch.tensor(1e5).to(torch.float16).isinf()


def test_packing_never_aliases_the_value() -> None:
    x = torch.randn(2, 4)
    row = RowFormat("fp32").pack(x)
    assert row is not None
    before = row.clone()
    x.zero_()

    assert torch.equal(row, before)


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"'fp16' is no row format; choose one of bf16, fp32, int8"
    ):
        RowFormat("fp16")


# Staging


def test_staged_rows_are_seen_at_once_and_stay_after_commit() -> None:
    rows = store()
    stage(rows, 7, 1.0)
    assert torch.equal(rows.value(7), value(1.0))
    assert rows.num_rows == 0
    rows.commit(evict=True)

    assert rows.mark(7) == Mark(1, 1, (2, 4))
    assert torch.equal(rows.value(7), value(1.0))
    assert rows.row_bytes == 16


def test_abort_gives_back_what_was_committed_before() -> None:
    rows = store()
    stage(rows, 7, 1.0)
    stage(rows, 8, 1.0)
    rows.commit(evict=True)
    digest = rows.digest()
    rows.stage(7, Mark(1, 2, (2, 4)), value(2.0))
    rows.stage_drop(8)
    stage(rows, 9, 3.0)
    assert rows.digest() != digest
    rows.abort()

    assert rows.digest() == digest
    assert rows.samples() == [7, 8]


def test_generations_never_rewind() -> None:
    rows = store()
    assert [rows.next_generation(), rows.next_generation()] == [1, 2]
    rows.abort()

    assert rows.next_generation() == 3


def test_a_later_incarnation_is_newer_than_any_generation_of_an_earlier_one() -> None:
    assert store(incarnation=1).next_generation() > 2**32
    with pytest.raises(ValueError, match="incarnation must be in"):
        store(incarnation=-1)


def test_a_row_that_was_not_kept_holds_its_counters_and_no_bytes() -> None:
    rows = store()
    rows.stage(3, Mark(5, 1, (2, 4), kept=False), None)
    rows.commit(evict=True)

    assert rows.mark(3) == Mark(5, 1, (2, 4), False)
    assert rows.row_bytes == 0


def test_every_field_of_a_row_is_in_the_digest() -> None:
    digests = set()
    for sample, mark, row in [
        (1, Mark(1, 1, (2, 4)), value(1.0)),
        (2, Mark(1, 1, (2, 4)), value(1.0)),
        (1, Mark(2, 1, (2, 4)), value(1.0)),
        (1, Mark(1, 2, (2, 4)), value(1.0)),
        (1, Mark(1, 1, (4, 2)), value(1.0)),
        (1, Mark(1, 1, (2, 4)), value(1.0078125)),
        (1, Mark(1, 1, (2, 4), False), None),
    ]:
        rows = store()
        rows.stage(sample, mark, row)
        digests.add(rows.digest())

    assert len(digests) == 7


# Eviction


def test_the_least_recently_visited_go_first() -> None:
    rows = store(cap_bytes=3 * 16)
    for sample in range(3):
        stage(rows, sample, 1.0)
    assert rows.commit(evict=True) == 0
    rows.stage(0, Mark(1, 2, (2, 4)), value(2.0))  # sample 0 is the most recent now
    stage(rows, 3, 1.0)
    assert rows.commit(evict=True) == 1

    assert rows.samples() == [0, 2, 3]
    assert rows.pending_evictions == (1,)


def test_the_last_visit_of_a_step_counts_not_the_first() -> None:
    rows = store(cap_bytes=16)
    for sample in (0, 1, 0):
        stage(rows, sample, 1.0)
    rows.commit(evict=True)

    assert rows.samples() == [0]


def test_a_receiver_evicts_nothing_by_itself() -> None:
    rows = store(cap_bytes=16)
    for sample in range(3):
        stage(rows, sample, 1.0)

    assert rows.commit(evict=False) == 0
    assert rows.samples() == [0, 1, 2]


def evicted_store() -> RowStore:
    rows = store(cap_bytes=16)
    for sample in range(3):
        stage(rows, sample, 1.0)
    rows.commit(evict=True)
    assert rows.pending_evictions == (0, 1)
    return rows


def test_an_eviction_is_told_once_a_step_and_done_when_that_step_commits() -> None:
    rows = evicted_store()
    assert rows.announce_evictions(limit=10) == (0, 1)
    assert rows.announce_evictions(limit=10) == ()
    rows.commit(evict=True)

    assert rows.pending_evictions == ()


def test_an_eviction_told_in_an_aborted_step_is_told_again() -> None:
    rows = evicted_store()
    rows.announce_evictions(limit=10)
    rows.abort()

    assert rows.announce_evictions(limit=10) == (0, 1)


def test_a_packet_that_replaces_another_tells_its_evictions_again() -> None:
    rows = evicted_store()
    rows.announce_evictions(limit=10)

    assert rows.announce_evictions(limit=10, again=True) == (0, 1)


def test_more_evictions_than_fit_a_packet_wait_for_the_next() -> None:
    rows = evicted_store()

    assert rows.announce_evictions(limit=1) == (0,)
    assert rows.announce_evictions(limit=1) == (1,)
    rows.abort()
    rows.announce_evictions(limit=1)
    rows.commit(evict=True)
    assert rows.pending_evictions == (1,)


def test_a_sample_that_came_back_is_not_told_as_evicted() -> None:
    rows = evicted_store()
    stage(rows, 1, 5.0, generation=9)

    assert rows.announce_evictions(limit=10) == (0,)


def test_a_cap_must_be_positive() -> None:
    with pytest.raises(ValueError, match="cap_bytes must be positive or None for no cap, got 0"):
        store(cap_bytes=0)


# Saving


def test_a_saved_store_continues_to_the_bit() -> None:
    rows = evicted_store()
    rows.stage(5, Mark(rows.next_generation(), 1, (3, 4)), torch.randn(3, 4).to(torch.bfloat16))
    rows.stage(6, Mark(rows.next_generation(), 1, (), kept=False), None)
    rows.commit(evict=False)
    state = rows.state_dict()
    twin = store(cap_bytes=16)
    stage(twin, 77, 1.0)  # whatever was there is replaced
    twin.commit(evict=False)
    twin.load_state_dict(state)

    assert twin.digest() == rows.digest()
    assert twin.pending_evictions == rows.pending_evictions
    assert twin.row_bytes == rows.row_bytes
    assert twin.next_generation() == rows.next_generation()
    assert twin.commit(evict=True) == rows.commit(evict=True) == 2
    assert twin.pending_evictions == rows.pending_evictions


def test_a_state_is_flat_tensors_and_plain_values() -> None:
    state = evicted_store().state_dict()

    assert all(isinstance(v, (Tensor, int, str, list)) for v in state.values())
    assert state["values"].dtype == torch.uint8
    assert state["ids"].tolist() == [2]


def test_an_uncommitted_step_is_not_saved() -> None:
    rows = store()
    stage(rows, 1, 1.0)

    assert rows.state_dict()["ids"].tolist() == []


def test_rows_of_another_format_are_not_loaded() -> None:
    with pytest.raises(ValueError, match=r"saved rows are bf16, this store keeps fp32; resume"):
        RowStore(row_format=RowFormat("fp32")).load_state_dict(store().state_dict())
