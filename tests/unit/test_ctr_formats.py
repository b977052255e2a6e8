"""Criteo TSV, libsvm and libFM, MovieLens: read as a stream, bad lines refused where they are."""

from __future__ import annotations

import gzip
import math
from itertools import islice
from pathlib import Path

import pytest

from ray_pipe.ctr_columns import ColumnSpec
from ray_pipe.ctr_data import CtrRow
from ray_pipe.ctr_formats import Criteo, Format, Libsvm, MovieLens, guess, load, read
from ray_pipe.ctr_ids import HashIds, VocabIds
from ray_pipe.errors import DataError


def criteo_line(label: str = "1", counts: str = "3", category: str = "68fd1e64") -> str:
    return "\t".join([label, counts, *[""] * 12, category, *[""] * 25])


def rows_of(path: Path, text: str, form: Format) -> list[CtrRow]:
    path.write_text(text)
    return list(read(path, form, ids=VocabIds()))


def refused(path: Path, text: str, form: Format) -> str:
    with pytest.raises(DataError) as caught:
        rows_of(path, text, form)
    return str(caught.value).removeprefix(str(path.parent) + "/")


# --- Criteo ---------------------------------------------------------------------------------------


def test_criteo_has_13_counts_and_26_categories(tmp_path: Path) -> None:
    text = criteo_line() + "\n" + criteo_line("0", "-2", "be589b51") + "\n"

    one, two = rows_of(tmp_path / "a.tsv", text, Criteo())

    assert (one.label, two.label) == (1, 0)
    assert one.dense == (math.log(4.0), *[0.0] * 12)
    assert two.dense[0] == pytest.approx(-math.log(3.0))
    assert (one.ids[0], two.ids[0]) == ((1,), (2,))
    assert one.ids[1:] == two.ids[1:] == ((1,),) * 25  # a missing category is a category


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (criteo_line(label="2"), "the label is '2', expected 0 or 1"),
        (criteo_line(counts="many"), "column I1 is 'many', expected a finite number"),
        (criteo_line(counts="nan"), "column I1 is 'nan', expected a finite number"),
        (criteo_line(counts="1e39"), "column I1 is '1e39', expected a finite number"),
        (criteo_line(counts="1_0"), "column I1 is '1_0', expected a finite number"),
        (criteo_line()[2:], "39 columns, expected the 40 of Criteo (label, 13 counts, "),
        ("", "1 columns, expected the 40 of Criteo (label, 13 counts, "),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, line: str, message: str) -> None:
    text = f"{criteo_line()}\n{criteo_line()}\n{line}\n{criteo_line()}\n"

    assert refused(tmp_path / "day_0.tsv", text, Criteo()).startswith(f"day_0.tsv:3: {message}")


def test_a_file_is_a_stream_read_until_the_bad_line(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(f"{criteo_line()}\n" * 3 + "broken\n")

    stream = read(tmp_path / "a.tsv", Criteo())

    assert len(list(islice(stream, 3))) == 3
    with pytest.raises(DataError, match=r"a\.tsv:4: 1 columns"):
        next(stream)


def test_a_gzipped_file_reads_the_same_and_a_cut_one_is_refused(tmp_path: Path) -> None:
    text = "".join(f"{criteo_line(counts=str(place))}\n" for place in range(500))
    (tmp_path / "a.tsv").write_text(text)
    packed = gzip.compress(text.encode())
    (tmp_path / "a.tsv.gz").write_bytes(packed)
    (tmp_path / "cut.tsv.gz").write_bytes(packed[: len(packed) // 2])

    same = load(tmp_path / "a.tsv.gz", Criteo())

    assert same.digest == load(tmp_path / "a.tsv", Criteo()).digest
    with pytest.raises(DataError, match=r"cut\.tsv\.gz:\d+: the gzip stream ends early"):
        load(tmp_path / "cut.tsv.gz", Criteo())


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such data file: .*none\.tsv"):
        load(tmp_path / "none.tsv", Criteo())
    with pytest.raises(DataError, match=r"cannot read .*: Is a directory"):
        load(tmp_path, Criteo())
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(DataError, match=r"empty\.tsv holds no samples"):
        load(tmp_path / "empty.tsv", Criteo())
    (tmp_path / "latin.tsv").write_bytes(f"{criteo_line()}\n".encode() + b"1\t\xe9\n")
    with pytest.raises(DataError, match=r"latin\.tsv:2: byte 0xe9 at column 3 is not UTF-8"):
        load(tmp_path / "latin.tsv", Criteo())
    (tmp_path / "text.gz").write_text("no gzip")
    with pytest.raises(DataError, match=r"cannot read .*text\.gz: Not a gzipped file"):
        load(tmp_path / "text.gz", Criteo())


def test_ids_are_hashed_unless_a_vocabulary_is_given(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(criteo_line())

    row = next(read(tmp_path / "a.tsv", Criteo()))

    assert row.ids[0] == (HashIds().id_of("C1", "68fd1e64"),)


# --- libsvm ---------------------------------------------------------------------------------------


def test_libsvm_is_one_bag_unless_fields_are_named(tmp_path: Path) -> None:
    text = "1 3:1 7:1 # a comment\n\n-1 7:1.0 9:0\n0\n"

    assert rows_of(tmp_path / "a.svm", text, Libsvm()) == [
        CtrRow((), ((1, 2),), 1),
        CtrRow((), ((2,),), 0),
        CtrRow((), ((),), 0),
    ]


def test_libfm_fields_and_numbers(tmp_path: Path) -> None:
    form = Libsvm(fields={"user": (0, 5), "item": (5, 9)}, dense_indices=(9,), threshold=4.0)

    rows = rows_of(tmp_path / "a.libfm", "5 0:1 6:1 9:0.25\n3.5 4:1 5:1\n", form)

    assert rows == [CtrRow((0.25,), ((1,), (1,)), 1), CtrRow((0.0,), ((2,), (2,)), 0)]
    assert [feature.name for feature in form.features] == ["user", "item"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 3:0.5", "index 3 has the value 0.5, expected 1 of a category; if it is a number, name"),
        ("1 3:1 3:1", "index 3 comes twice"),
        ("1 3", "'3', expected index:value"),
        ("1 -3:1", "'-3:1', expected index:value"),
        ("1 3:x", "column 3 is 'x', expected a finite number"),
        ("1 8:1", "index 8 is in none of the fields {'user': (0, 5)}"),
        ("4 3:1", "the label is 4, expected 0, 1 or -1; for ratings say `threshold`"),
        ("3:1 4:1", "column label is '3:1', expected a finite number"),
    ],
)
def test_a_bad_libsvm_line_is_refused(tmp_path: Path, line: str, message: str) -> None:
    form = Libsvm(fields={"user": (0, 5)})

    assert refused(tmp_path / "a.svm", f"1 0:1\n{line}\n", form).startswith(f"a.svm:2: {message}")


def test_fields_that_overlap_are_refused() -> None:
    with pytest.raises(DataError, match="fields 'a' and 'b' share index 4"):
        Libsvm(fields={"b": (4, 9), "a": (0, 5)})
    with pytest.raises(DataError, match="field 'a' has the range 5 to 5, which is empty"):
        Libsvm(fields={"a": (5, 5)})


# --- MovieLens ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n7,31,4.0,1260759179\n",
        "1\t31\t2\t1260759144\n7\t31\t5\t1260759179\n",
        "1::31::2::1260759144\n7::31::5::1260759179\n",
    ],
)
def test_movielens_in_its_three_shapes(tmp_path: Path, text: str) -> None:
    rows = rows_of(tmp_path / "ratings", text, MovieLens())

    assert rows == [
        CtrRow((), ((1,), (1,)), 0, 1260759144.0),
        CtrRow((), ((2,), (1,)), 1, 1260759179.0),
    ]


def test_only_the_first_line_may_be_a_header(tmp_path: Path) -> None:
    header = "userId,movieId,rating,timestamp\n"

    assert refused(tmp_path / "r.csv", header + "1,2,3,4\n" + header, MovieLens()) == (
        "r.csv:3: column rating is 'rating', expected a finite number"
    )
    assert refused(tmp_path / "r.csv", "1,2,3\n", MovieLens()) == (
        "r.csv:1: 3 columns, expected user, item, rating, time"
    )
    assert refused(tmp_path / "r.csv", ",2,3,4\n", MovieLens()) == (
        "r.csv:1: a rating without a user or item"
    )


# --- guessing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (criteo_line(), Criteo()),
        ("+1 3:1 7:1", Libsvm()),
        ("userId,movieId,rating,timestamp", MovieLens()),
        ("1\t31\t2\t1260759144", MovieLens()),
        ("1::31::2.5::1260759144", MovieLens()),
    ],
)
def test_a_format_is_known_by_its_first_line(tmp_path: Path, line: str, expected: Format) -> None:
    (tmp_path / "data").write_text(line + "\n")

    assert guess(tmp_path / "data") == expected


@pytest.mark.parametrize("line", ["", "age,job,output", "a\tb\tc\td", "just text"])
def test_a_format_that_is_not_known_asks_for_a_column_spec(tmp_path: Path, line: str) -> None:
    (tmp_path / "data.csv").write_text(line + "\n")

    with pytest.raises(DataError, match="for plain CSV say which column is what") as caught:
        guess(tmp_path / "data.csv")
    example = str(caught.value).rsplit("'", 2)[1]
    assert ColumnSpec.parse(example).label == "clicked"  # what the error proposes is valid
