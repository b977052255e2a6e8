"""The receiver rule as a table, and how a micro-batch falls into inner packets."""

from __future__ import annotations

import pytest

from compressors.base import DuplicatePacket, NeedCold, RowMarks
from compressors.buffers import Mark
from compressors.visits import check_visits, groups, waves

SHAPE = (4, 8)


def marks(
    *visits: tuple[int, int, int, bool], evicted: tuple[int, ...] = ()
) -> tuple[RowMarks, list[tuple[int, ...]]]:
    """Row marks of (id, generation, visit, cold)."""
    rows = RowMarks(
        ids=tuple(v[0] for v in visits),
        generations=tuple(v[1] for v in visits),
        visits=tuple(v[2] for v in visits),
        cold=tuple(v[3] for v in visits),
        evicted=evicted,
    )
    return rows, [SHAPE] * len(visits)


COLD, DELTA = True, False
OWN = Mark(generation=5, visit=3, shape=SHAPE)


@pytest.mark.parametrize(
    ("own", "generation", "visit", "cold", "outcome"),
    [
        (None, 1, 1, COLD, None),
        (OWN, 6, 1, COLD, None),
        (OWN, 5, 1, COLD, DuplicatePacket),
        (OWN, 4, 1, COLD, DuplicatePacket),
        (OWN, 5, 4, DELTA, None),
        (OWN, 5, 3, DELTA, DuplicatePacket),
        (OWN, 5, 2, DELTA, DuplicatePacket),
        (OWN, 4, 9, DELTA, DuplicatePacket),
        (OWN, 5, 5, DELTA, NeedCold),
        (OWN, 6, 4, DELTA, NeedCold),
        (OWN, 6, 2, DELTA, NeedCold),
        (None, 5, 4, DELTA, NeedCold),
        (Mark(5, 3, (4, 9)), 5, 4, DELTA, NeedCold),
        (Mark(5, 3, SHAPE, kept=False), 5, 4, DELTA, NeedCold),
        (Mark(5, 3, SHAPE, kept=False), 6, 1, COLD, None),
    ],
)
def test_the_receiver_rule(
    own: Mark | None, generation: int, visit: int, cold: bool, outcome: type[Exception] | None
) -> None:
    rows, shapes = marks((7, generation, visit, cold))
    if outcome is None:
        check_visits(rows, shapes, lambda sample: own)
        return

    with pytest.raises(outcome):
        check_visits(rows, shapes, lambda sample: own)


def test_visits_of_one_packet_follow_each_other() -> None:
    check_visits(*marks((7, 6, 1, COLD), (7, 6, 2, DELTA), (7, 6, 3, DELTA)), lambda s: OWN)
    check_visits(*marks((7, 5, 4, DELTA), (7, 5, 5, DELTA)), lambda s: OWN)

    with pytest.raises(NeedCold):
        check_visits(*marks((7, 5, 4, DELTA), (7, 5, 6, DELTA)), lambda s: OWN)


def test_a_row_given_up_by_the_packet_itself_is_no_base_for_it() -> None:
    with pytest.raises(NeedCold, match="has no row here"):
        check_visits(*marks((7, 5, 4, DELTA), evicted=(7,)), lambda s: OWN)


def test_need_cold_names_every_sample_that_failed() -> None:
    held = {1: OWN, 3: OWN}
    rows = marks((1, 5, 4, DELTA), (2, 5, 4, DELTA), (3, 5, 9, DELTA), (4, 9, 1, COLD))

    with pytest.raises(NeedCold, match=r"sample 2 has no row here.* \(and 1 more\)") as caught:
        check_visits(*rows, held.get)
    assert caught.value.ids == (2, 3)


def test_waves_count_how_often_a_sample_came_before() -> None:
    assert waves([4, 5, 4, 6, 4, 5]) == [[0, 1, 3], [2, 5], [4]]
    assert waves([]) == []


def test_inner_packets_are_ordered_by_wave_then_warm_cold_raw() -> None:
    rows, _ = marks((1, 1, 1, COLD), (2, 2, 2, DELTA), (3, 3, 1, COLD), (1, 1, 2, DELTA))

    assert groups(rows, frozenset({2})) == [
        ("warm", [1]),
        ("cold", [0]),
        ("raw", [2]),
        ("warm", [3]),
    ]
