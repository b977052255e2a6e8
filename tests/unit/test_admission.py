"""Who gets a row: after so many sightings, or by chance at each of them."""

from __future__ import annotations

import numpy as np
import pytest

from stages.embedding.admission import Admission
from stages.embedding.row_store import RowStore
from stages.embedding.shard import Shard
from stages.embedding.shard_terms import IdSet
from stages.embedding.tables import MinCount, Probability, Table, shard_of

IDS = np.arange(-10_000, 10_000, dtype=np.int64)


def admission(rule: MinCount | Probability) -> Admission:
    return Admission(RowStore(capacity="64MiB"), "user", rule)


def test_each_sighting_lets_the_same_share_of_the_strangers_in() -> None:
    door = admission(Probability(0.25))
    has_row = np.zeros(len(IDS), np.bool_)
    shares = []
    for _ in range(6):
        before = has_row
        has_row = door.admitted(IDS, before)
        shares.append(float((has_row & ~before).sum() / (~before).sum()))
        assert has_row[before].all()

    assert shares == pytest.approx([0.25] * 6, abs=0.015)
    assert admission(Probability(1.0)).admitted(IDS, np.zeros(len(IDS), np.bool_)).all()


def test_chance_is_of_the_id_and_the_table_and_not_of_where_it_lives() -> None:
    rule = Probability(0.3)
    needed = rule.needed(IDS, "user")

    assert np.array_equal(rule.needed(IDS[::-1].copy(), "user")[::-1], needed)
    assert (rule.needed(IDS, "item") != needed).mean() > 0.3
    for shard in range(2):
        mine = needed[shard_of(IDS, 2) == shard]
        assert (mine == 1).mean() == pytest.approx(0.3, abs=0.02)
    assert MinCount(3).needed(IDS, "user").tolist() == [3] * len(IDS)


def test_a_shard_gives_rows_to_those_who_are_in_and_zeros_to_the_others() -> None:
    shard = Shard((Table("user", dim=4, admit=Probability(0.5)),), tau=0, capacity="64MiB")
    pulled = shard.pull(1, {"user": IdSet(ids=IDS)}).tables["user"]

    lucky = Probability(0.5).needed(IDS, "user") == 1
    assert pulled.admitted is not None
    assert np.array_equal(pulled.admitted, lucky)
    assert np.array_equal(pulled.weights.any(axis=1), lucky)


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.1])
def test_a_probability_that_is_none_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="above 0 and up to 1"):
        Probability(probability)
