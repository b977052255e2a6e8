"""Plain CSV with a column spec."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ray_pipe.ctr_columns import ColumnSpec
from ray_pipe.ctr_data import CtrRow
from ray_pipe.ctr_formats import load, read
from ray_pipe.ctr_ids import VocabIds
from ray_pipe.errors import DataError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "adult"
SPEC = ColumnSpec(label="clicked", numbers=("age",), log=("gain",), ids=("job",), lists=("seen",))
HEADER = "age,job,gain,seen,clicked\n"


def rows_of(path: Path, text: str, spec: ColumnSpec = SPEC) -> list[CtrRow]:
    path.write_text(text)
    return list(read(path, spec, ids=VocabIds()))


def test_numbers_categories_and_lists(tmp_path: Path) -> None:
    text = HEADER + '30, "clerk, senior",-1,a|b|a,1\n\n,,,,0\n'

    assert rows_of(tmp_path / "a.csv", text) == [
        CtrRow((30.0, -math.log(2.0)), ((1,), (1, 2, 1)), 1),
        CtrRow((0.0, 0.0), ((2,), ()), 0),
    ]
    assert SPEC.dense == ("age", "gain")
    assert [feature.name for feature in SPEC.features] == ["job", "seen"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "30,clerk,0,a,1\n30,clerk,0,a\n", "a.csv:3: 4 columns, expected 5"),
        (HEADER + "x,clerk,0,a,1\n", "a.csv:2: column age is 'x', expected a finite number"),
        (
            HEADER + "3,clerk,0,a,yes\n",
            "a.csv:2: the label clicked is 'yes', expected '0' or '1'; say which labels are "
            "`positive`, or a `threshold`",
        ),
        (
            "age,jobs,gain,seen,clicked\n",
            "a.csv:1: no column 'job' among age, jobs, gain, seen, clicked; did you mean 'jobs'?",
        ),
        (
            HEADER + '1,"a\nb",0,a,1\n2,"open,0,a,1\n3,c,0,a,1\n',
            "a.csv:4: the record that starts here is broken: unexpected end of data",
        ),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "a.csv", text)

    assert str(caught.value) == f"{tmp_path}/{message}"


def test_labels_are_words_numbers_or_both_named(tmp_path: Path) -> None:
    words = ColumnSpec(label="y", ids=("a",), positive=("yes", "yes."))
    strict = ColumnSpec(label="y", ids=("a",), positive=("yes",), negative=("no",))
    rated = ColumnSpec(label="y", ids=("a",), threshold=4.0)

    assert [row.label for row in rows_of(tmp_path / "a", "a,y\n1,yes\n1,no\n1,yes.\n", words)] == [
        1,
        0,
        1,
    ]
    assert [row.label for row in rows_of(tmp_path / "a", "a,y\n1,4\n1,3.5\n", rated)] == [1, 0]
    with pytest.raises(DataError, match=r"a:3: the label y is 'yes\.', expected 'no' or 'yes'"):
        rows_of(tmp_path / "a", "a,y\n1,no\n1,yes.\n", strict)


def test_a_file_without_a_header_names_its_columns_in_the_spec(tmp_path: Path) -> None:
    spec = ColumnSpec(label="y", ids=("a",), time="t", columns=("a", "t", "y"), delimiter="\t")

    assert rows_of(tmp_path / "a.tsv", "7\t12.5\t1\n", spec) == [CtrRow((), ((1,),), 1, 12.5)]


def test_columns_may_share_a_table(tmp_path: Path) -> None:
    spec = ColumnSpec(label="y", ids=("item",), lists=("seen",), tables=(("seen", "item"),))

    rows = rows_of(tmp_path / "a", "item,seen,y\n5,4|5,1\n", spec)

    assert rows == [CtrRow((), ((1,), (2, 1)), 1)]  # the same item is the same row
    assert [feature.table for feature in spec.features] == ["item", "item"]


def test_the_text_form() -> None:
    text = (
        "label=output; positive=>50K,>50K.; negative=<=50K; dense=age, hours; log=gain;"
        "ids=job,race; lists=seen; tables=seen:job; time=t; delimiter=tab; separator=/"
    )

    assert ColumnSpec.parse(text) == ColumnSpec(
        label="output",
        positive=(">50K", ">50K."),
        negative=("<=50K",),
        numbers=("age", "hours"),
        log=("gain",),
        ids=("job", "race"),
        lists=("seen",),
        tables=(("seen", "job"),),
        time="t",
        delimiter="\t",
        separator="/",
    )
    assert ColumnSpec.parse("label=y;ids=a;threshold=4").threshold == 4.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ids=a", "no `label=`"),
        ("label=y", "no `ids` and no `lists`, so there is nothing to embed"),
        ("label=y; idx=a", "'idx=a', expected key=value with one of the keys .*mean 'ids'"),
        ("label=y; ids=a; ids=b", "`ids` is given twice"),
        ("label=y; ids=a,y", "'y' is used twice"),
        ("label=y; ids=a; threshold=high", "threshold='high', expected a number"),
        ("label=y; ids=a; threshold=1; positive=1", "`threshold` or `positive` labels, not both"),
        ("label=y; ids=a; negative=1", "`negative` labels need `positive` ones"),
        ("label=y; ids=a; delimiter=::", "are single characters"),
        ("label=y; ids=a; tables=b:a", "`tables` names 'b', which is not in"),
        ("label=y; ids=a; tables=a", "tables='a', expected column:table"),
    ],
)
def test_a_wrong_spec_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=f"column spec: .*{message}"):
        ColumnSpec.parse(text)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the data folder beside the project is absent")
def test_the_census_file_and_its_test_file_read_with_one_spec() -> None:
    """Their headers differ in `-` and `_`, their labels in a full stop."""
    spec = ColumnSpec.parse(
        "label=output; positive=>50K,>50K.; negative=<=50K,<=50K.; dense=age,education_num;"
        "log=capital_gain; ids=workclass,native_country"
    )

    train, test = load(DATA / "adult.data", spec), load(DATA / "adult.test", spec)

    assert (len(train), int(train.labels.sum())) == (32_561, 7_841)
    assert (len(test), int(test.labels.sum())) == (16_281, 3_846)
    assert train.batch([0]).dense.tolist() == [[39.0, 13.0, pytest.approx(math.log(2175.0))]]
