"""Row ids that are the same in every process, and numbers hashed out of numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_pipe import ctr_ids
from ray_pipe.ctr_ids import UNKNOWN, HashIds, VocabIds, mixed, uniform
from ray_pipe.errors import DataError


def test_a_hashed_id_is_this_number_for_ever() -> None:
    """A change of these numbers orphans every saved row."""
    ids = HashIds()

    assert ids.id_of("user", "42") == 81_358_126_237_779_381
    assert ids.id_of("item", "42") == 6_585_057_621_281_560_508
    assert ids.id_of("user", "") == 1_811_023_088_068_958_249


def test_another_process_finds_the_same_ids_where_pythons_hash_does_not() -> None:
    program = (
        "from ray_pipe.ctr_ids import HashIds; print(HashIds().id_of('user', 'zoë'), hash('zoë'))"
    )
    seen = []
    for salt in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).resolve().parents[2],
            env={"PYTHONHASHSEED": salt, "PYTHONPATH": "."},
        )
        seen.append(done.stdout.split())

    assert seen[0][0] == seen[1][0] == str(HashIds().id_of("user", "zoë"))
    assert seen[0][1] != seen[1][1]  # the mutant that uses `hash` would be seen


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_different_tables_or_tokens_have_different_ids(
    table: str, token: str, other_table: str, other: str
) -> None:
    ids = HashIds()
    same = (table, token) == (other_table, other)

    assert (ids.id_of(table, token) == ids.id_of(other_table, other)) is same
    assert -(2**63) <= ids.id_of(table, token) < 2**63


def test_forgetting_cached_tokens_changes_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctr_ids, "CACHED_TOKENS", 2)
    ids = HashIds()

    first = [ids.id_of("user", str(token)) for token in range(7)]

    assert [HashIds().id_of("user", str(token)) for token in range(7)] == first
    assert len(ids._cached["user"]) <= 2


def test_a_vocabulary_counts_each_table_in_order_of_appearance() -> None:
    vocab = VocabIds()

    assert [vocab.id_of("user", name) for name in "abac"] == [1, 2, 1, 3]
    assert vocab.id_of("item", "c") == 1
    vocab.freeze()
    assert [vocab.id_of("user", name) for name in "cz"] == [3, UNKNOWN]
    assert (vocab.num_ids("user"), vocab.num_ids("item"), vocab.num_ids("none")) == (4, 2, 1)


def test_a_saved_vocabulary_comes_back_frozen(tmp_path: Path) -> None:
    vocab = VocabIds()
    for name in ("zoë", "", "b"):
        vocab.id_of("user", name)
    vocab.save(tmp_path / "vocab.json")

    loaded = VocabIds.load(tmp_path / "vocab.json")

    assert [loaded.id_of("user", name) for name in ("zoë", "", "b", "new")] == [1, 2, 3, UNKNOWN]


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"tables": {}}', '{"ray_pipe_vocab": 1, "tab', '{"ray_pipe_vocab": 2}']
)
def test_what_is_no_saved_vocabulary_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "vocab.json").write_text(text)

    with pytest.raises(DataError, match=r"vocab.json is no vocabulary"):
        VocabIds.load(tmp_path / "vocab.json")


def test_a_vocabulary_that_names_a_token_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text('{"ray_pipe_vocab": 1, "tables": {"user": ["a", "a"]}}')

    with pytest.raises(DataError, match="table 'user' names a token twice"):
        VocabIds.load(tmp_path / "v.json")


def test_mixing_is_one_to_one_and_uniform_numbers_are_uniform() -> None:
    values = np.arange(100_000, dtype=np.uint64)

    assert len(np.unique(mixed(values, salt=3))) == 100_000
    drawn = uniform(values, salt=3)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 5000).max() < 5 * 5000**0.5
    other = uniform(values, salt=4)
    assert abs(float(np.corrcoef(drawn, other)[0, 1])) < 0.015
    assert abs(float(np.corrcoef(drawn[1:], drawn[:-1])[0, 1])) < 0.015
