"""Plain CSV with a column spec: which column is the label, a number, a category or a list.

Path: ray_pipe.ctr_data -> ray_pipe.ctr_columns

    label=output; positive=>50K; dense=age,hours_per_week; log=capital_gain; ids=workclass,race

Names of columns are compared without case, and `-`, `_` and blanks are one.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from ray_pipe.ctr_data import CtrRow, Feature
from ray_pipe.ctr_ids import IdMap
from ray_pipe.ctr_lines import Lines, signed_log
from ray_pipe.errors import DataError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """What the columns of a CSV file are."""

    label: str
    ids: tuple[str, ...] = ()
    """One category each; an empty cell is a category too."""

    lists: tuple[str, ...] = ()
    """Any number of categories each, separated by `separator`; an empty cell is an empty bag."""

    numbers: tuple[str, ...] = ()
    """Dense features as they are; an empty cell is 0."""

    log: tuple[str, ...] = ()
    """Dense features as signed logarithms."""

    positive: tuple[str, ...] = ()
    """Labels that mean 1; without it and `threshold`, labels are 0 or 1."""

    negative: tuple[str, ...] = ()
    """Labels that mean 0; if given, any other label is refused."""

    threshold: float | None = None
    """Labels are numbers, positive from here on."""

    time: str | None = None
    tables: tuple[tuple[str, str], ...] = ()
    """(column, table) where several columns share one, as `tables=last_item:item`."""

    columns: tuple[str, ...] = ()
    """Names of the columns of a file without a header."""

    delimiter: str = ","
    separator: str = "|"

    def __post_init__(self) -> None:
        used = [self.label, *self.numbers, *self.log, *self.ids, *self.lists]
        twice = sorted({name for name in used if used.count(name) > 1})
        if twice:
            raise DataError(f"column spec: {twice[0]!r} is used twice")
        if not self.ids and not self.lists:
            raise DataError("column spec: no `ids` and no `lists`, so there is nothing to embed")
        if self.threshold is not None and (self.positive or self.negative):
            raise DataError("column spec: give `threshold` or `positive` labels, not both")
        if self.negative and not self.positive:
            raise DataError("column spec: `negative` labels need `positive` ones")
        if len(self.delimiter) != 1 or len(self.separator) != 1:
            raise DataError("column spec: `delimiter` and `separator` are single characters")
        for column, _ in self.tables:
            if column not in (*self.ids, *self.lists):
                raise DataError(
                    f"column spec: `tables` names {column!r}, which is not in `ids` or `lists`"
                    + nearest(column, (*self.ids, *self.lists))
                )

    @classmethod
    def parse(cls, text: str) -> ColumnSpec:
        """The text form: `key=value` separated by `;`, lists by `,`; `dense` is `numbers`."""
        known = {"dense": "numbers", **{one.name: one.name for one in fields(cls)}}
        found: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(";"))):
            key, equals, value = part.partition("=")
            name = known.get(key.strip())
            if not equals or name is None:
                raise DataError(
                    f"column spec: {part!r}, expected key=value with one of the keys "
                    f"{', '.join(sorted(known))}{nearest(key.strip(), known)}"
                )
            if name in found:
                raise DataError(f"column spec: `{key.strip()}` is given twice")
            found[name] = _valued(name, value.strip())
        if "label" not in found:
            raise DataError("column spec: no `label=`; it names the column to predict")
        return cls(**found)

    @property
    def dense(self) -> tuple[str, ...]:
        return (*self.numbers, *self.log)

    @property
    def features(self) -> tuple[Feature, ...]:
        shared = dict(self.tables)
        return tuple(
            Feature(name=name, table=shared.get(name, name)) for name in (*self.ids, *self.lists)
        )

    def rows(self, lines: Lines, ids: IdMap) -> Iterator[CtrRow]:
        place: dict[str, int] | None = None
        if self.columns:
            place = self._places(lines, list(self.columns))
        width = len(self.columns)
        tables = [feature.table for feature in self.features]
        for start, cells in self._records(lines):
            if place is None:
                place, width = self._places(lines, cells), len(cells)
                continue
            if len(cells) != width:
                raise lines.bad(f"{len(cells)} columns, expected {width}", line=start)
            numbers = tuple(_number(lines, cells[place[name]], name) for name in self.numbers)
            logs = tuple(_number(lines, cells[place[name]], name) for name in self.log)
            tokens = [(cells[place[name]],) for name in self.ids]
            lists = [tuple(_split(cells[place[name]], self.separator)) for name in self.lists]
            yield CtrRow(
                numbers + tuple(map(signed_log, logs)),
                tuple(
                    tuple(ids.id_of(table, token) for token in bag)
                    for table, bag in zip(tables, [*tokens, *lists], strict=True)
                ),
                self._click(lines, cells[place[self.label]]),
                None if self.time is None else lines.number_in(cells[place[self.time]], self.time),
            )

    def _records(self, lines: Lines) -> Iterator[tuple[int, list[str]]]:
        """Records with the line they start on: a quoted cell may hold line breaks."""
        reader = csv.reader(lines, delimiter=self.delimiter, skipinitialspace=True, strict=True)
        start = 1
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise lines.bad(
                    f"the record that starts here is broken: {error}", line=start
                ) from None
            if cells:  # blank lines are no records
                yield start, [cell.strip() for cell in cells]
            start = lines.number + 1

    def _places(self, lines: Lines, header: list[str]) -> dict[str, int]:
        place = {_plain(name): index for index, name in enumerate(header)}
        wanted = [self.label, *self.dense, *self.ids, *self.lists]
        found = {}
        for name in (*wanted, self.time) if self.time is not None else wanted:
            if _plain(name) not in place:
                raise lines.bad(
                    f"no column {name!r} among {', '.join(header)}{nearest(name, header)}"
                )
            found[name] = place[_plain(name)]
        return found

    def _click(self, lines: Lines, text: str) -> int:
        if self.threshold is not None:
            return int(lines.number_in(text, self.label) >= self.threshold)
        positive = self.positive or ("1",)
        negative = self.negative if self.positive else ("0",)
        if text in positive:
            return 1
        if negative and text not in negative:
            wanted = " or ".join(map(repr, (*negative, *positive)))
            way_out = "" if self.positive else "; say which labels are `positive`, or a `threshold`"
            raise lines.bad(f"the label {self.label} is {text!r}, expected {wanted}{way_out}")
        return 0


_LISTS = {"ids", "lists", "numbers", "log", "positive", "negative", "columns"}


def _valued(name: str, value: str) -> Any:
    if name == "tables":
        pairs = [tuple(part.strip() for part in pair.split(":")) for pair in value.split(",")]
        if any(len(pair) != 2 for pair in pairs):
            raise DataError(f"column spec: tables={value!r}, expected column:table,column:table")
        return tuple(pairs)
    if name in _LISTS:
        return tuple(filter(None, (part.strip() for part in value.split(","))))
    if name == "delimiter":
        return {"tab": "\t", "comma": ",", "semicolon": ";", "space": " "}.get(value, value)
    if name == "threshold":
        try:
            return float(value)
        except ValueError:
            raise DataError(f"column spec: threshold={value!r}, expected a number") from None
    return value


def _number(lines: Lines, text: str, column: str) -> float:
    return lines.number_in(text, column) if text else 0.0


def _split(text: str, separator: str) -> Iterator[str]:
    return filter(None, (part.strip() for part in text.split(separator)))


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")
