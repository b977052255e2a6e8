"""What `--columns` says of a file: plain CSV, and the settings of the other formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_pipe.config import RunConfig
from ray_pipe.ctr_columns import ColumnSpec
from ray_pipe.ctr_formats import Criteo, Libsvm, MovieLens, load
from ray_pipe.ctr_spec import form_of
from ray_pipe.ctr_workload import click_task
from ray_pipe.errors import DataError


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    """libFM: users 0 to 4, items 5 to 9, a number at 10, ratings from 1 to 5."""
    lines = [f"{1 + n % 5} {n % 5}:1 {5 + n % 3}:1 10:{n / 10}" for n in range(60)]
    path = tmp_path / "ratings.libfm"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_format_is_told_with_its_settings(ratings: Path) -> None:
    spec = "format=libsvm; fields=user:0-4,item:5-9; dense=10; threshold=4"
    form = form_of(ratings, spec)

    assert form == Libsvm(
        fields={"user": (0, 5), "item": (5, 10)}, dense_indices=(10,), threshold=4.0
    )
    samples = load(ratings, form)
    assert [feature.name for feature in samples.features] == ["user", "item"]
    assert samples.dense_names == ("10",)
    assert samples.labels.mean() == pytest.approx(0.4)
    assert form_of(ratings, "format=movielens; threshold=3.5") == MovieLens(threshold=3.5)
    assert form_of(ratings, "format=movielens") == MovieLens()
    assert form_of(ratings, "format=criteo") == Criteo()
    assert form_of(ratings, None) == Libsvm()
    assert form_of(ratings, "label=y; ids=a") == ColumnSpec(label="y", ids=("a",))
    assert form_of(ratings, "format=csv; label=y; ids=a") == ColumnSpec(label="y", ids=("a",))


def test_a_run_takes_it_from_its_configuration(ratings: Path) -> None:
    spec = "format=libsvm; fields=user:0-4,item:5-9; dense=10; threshold=4"
    task = click_task(
        RunConfig.from_dict({"task": "ctr", "data.source": str(ratings), "embedding.columns": spec})
    )

    assert [table.name for table in task.tables] == ["user", "item"]
    assert task.shape.num_dense == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("format=libsv", r"format=libsv, expected one of libsvm.*did you mean 'libsvm'"),
        ("format=libsvm; field=a:1-2", r"'field' is no setting of libsvm.*fields"),
        ("format=movielens; dense=3", "'dense' is no setting of movielens, which has threshold"),
        ("format=criteo; threshold=3", "'threshold' is no setting of criteo, which has no settin"),
        ("format=libsvm; fields=user", r"fields='user', expected name:first-last"),
        ("format=libsvm; fields=user:a-b", r"fields='a', expected a whole number"),
        ("format=libsvm; fields=a:1-5,b:5-9", "share index 5"),
        ("format=libsvm; fields=a:5-1", "is empty"),
        ("format=libsvm; threshold=many", r"threshold='many', expected a number"),
        ("format=libsvm; dense=1; dense=2", "a key is given twice"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(ratings: Path, spec: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        form_of(ratings, spec)
