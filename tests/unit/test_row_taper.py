"""What chunks compete with: literal weights, and rows that are not used any more."""

from __future__ import annotations

import numpy as np
import pytest

from stages.embedding import row_taper
from stages.embedding.row_rules import Sgd
from stages.embedding.row_store import RowStore
from stages.embedding.row_taper import column_weights


def test_a_row_keeps_its_advance_until_half_of_its_utility_is_gone() -> None:
    lines = column_weights(4, taper=2.0, decay=0.5)

    for used_lately in lines[:2]:
        assert used_lately.tolist() == pytest.approx([1, 1 / 4, 1 / 9, 1 / 16])
    assert lines[2].tolist() == pytest.approx([1 / 4, 1 / 8, 1 / 12, 1 / 16])
    assert lines[3].tolist() == pytest.approx([1 / 8, 8**-1 * 2**-0.5, 8**-1 * 3**-0.5, 1 / 16])
    assert lines[-1].tolist() == pytest.approx([1 / 16] * 4, rel=0.03)
    assert (np.diff(lines[:, 0])[1:] < 0).all()
    assert lines[:, 3].tolist() == pytest.approx([1 / 16] * len(lines))


def test_a_long_tail_keeps_its_advance_between_two_uses() -> None:
    lines = column_weights(8, taper=2.0, decay=0.98)

    assert (lines[:34] == lines[0]).all()  # 0.98 ** 34 is just above a half
    assert lines[40, 0] < 1


@pytest.mark.parametrize(("taper", "decay"), [(0.0, 0.5), (2.0, 1.0)])
def test_without_a_taper_or_without_forgetting_the_last_use_does_not_matter(
    taper: float, decay: float
) -> None:
    (line,) = column_weights(4, taper=taper, decay=decay)

    assert line.tolist() == pytest.approx([n**-taper for n in (1, 2, 3, 4)])


def switched(core: str) -> list[int]:
    """Row 1 was hot three periods ago, row 2 is used in each; four of eight chunks are to stay."""
    store = RowStore(capacity="4MiB", slab="64KiB", pages="4k", core=core)
    rows = store.table("t", dim=8, chunks=4, optimizer=Sgd(lr=0.1), decay=0.5, utility_scale=1.0)
    both = np.array([1, 2], np.int64)
    rows.lookup(both)
    gradient = np.zeros((1, 8), np.float32)
    gradient[0, ::2] = 1.0
    rows.apply(both[:1], 64 * gradient)
    for keep in (1.0, 1.0, 0.5):
        rows.apply(both[1:], 4 * gradient)
        rows.prune(keep=keep, taper=2.0)
    return [int(bits) for bits in rows.alive(both)]


@pytest.mark.parametrize("core", ["native", "twin"])
def test_a_row_that_is_not_used_any_more_gives_chunks_to_one_that_is(core: str) -> None:
    assert switched(core) == [0b0011, 0b0011]


@pytest.mark.parametrize("core", ["native", "twin"])
def test_mutant_an_advance_that_never_ends_keeps_them(
    core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_taper, "HALF", 1e-9)

    assert switched(core) == [0b0111, 0b0001]


@pytest.mark.parametrize("core", ["native", "twin"])
def test_a_cut_is_no_use_of_a_row(core: str) -> None:
    """Utilities keep the period that they are of, whatever became of the row's chunks."""
    store = RowStore(capacity="4MiB", slab="64KiB", pages="4k", core=core)
    rows = store.table("t", dim=4, chunks=2, optimizer=Sgd(lr=0.1), decay=0.5, utility_scale=1.0)
    one = np.array([1], np.int64)
    rows.lookup(one)
    rows.apply(one, np.array([[3, 0, 1, 0]], np.float32))
    before = next(rows.scan()).raw[0, 8:14].tobytes()  # the epoch, and two utilities
    rows.prune(keep=0.5)

    assert rows.alive(one).tolist() == [0b01]
    assert next(rows.scan()).raw[0, 8:14].tobytes() == before
