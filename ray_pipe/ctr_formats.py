"""The formats of click logs: Criteo TSV, libsvm and libFM, MovieLens ratings.

Path: ray_pipe.ctr_data -> ray_pipe.ctr_formats

A format knows its columns and turns lines into rows; `read` joins it with a file and an id map.
Plain CSV with a column spec is in `ctr_columns`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ray_pipe.ctr_columns import ColumnSpec
from ray_pipe.ctr_data import CtrRow, CtrSamples, Feature
from ray_pipe.ctr_ids import HashIds, IdMap
from ray_pipe.ctr_lines import Lines, signed_log
from ray_pipe.errors import DataError


class Format(Protocol):
    """What a file means. Implementations are values: the same file gives the same rows."""

    @property
    def dense(self) -> tuple[str, ...]: ...
    @property
    def features(self) -> tuple[Feature, ...]: ...
    def rows(self, lines: Lines, ids: IdMap) -> Iterator[CtrRow]: ...


@dataclass(frozen=True, slots=True)
class Criteo:
    """Label, 13 counts, 26 categories, separated by tabs; empty means missing.

    Counts are taken as signed logarithms, missing ones as 0. A missing category is a category.
    """

    @property
    def dense(self) -> tuple[str, ...]:
        return tuple(f"I{place}" for place in range(1, 14))

    @property
    def features(self) -> tuple[Feature, ...]:
        return _own_tables(*(f"C{place}" for place in range(1, 27)))

    def rows(self, lines: Lines, ids: IdMap) -> Iterator[CtrRow]:
        dense, names = self.dense, [feature.table for feature in self.features]
        for line in lines:
            cells = line.split("\t")
            if len(cells) != 40:
                raise lines.bad(
                    f"{len(cells)} columns, expected the 40 of Criteo (label, 13 counts, "
                    "26 categories) separated by tabs; the public test file has no labels and "
                    "cannot be used"
                )
            yield CtrRow(
                tuple(
                    signed_log(lines.number_in(cell, name)) if cell else 0.0
                    for name, cell in zip(dense, cells[1:14], strict=True)
                ),
                tuple(
                    (ids.id_of(table, cell),) for table, cell in zip(names, cells[14:], strict=True)
                ),
                _click(lines, cells[0]),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Libsvm:
    """`label index:value …`, as libsvm and libFM write it; `#` starts a comment.

    `fields` gives ranges of indices (first, one past the last) their feature; without it all are
    one bag. `dense_indices` are numbers, 0 where absent; every other index is a category, so its
    value must be 1 (0 is the same as absent). Labels are 0 or 1, or -1 or 1, or with `threshold`
    any number, positive from there on.
    """

    fields: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    dense_indices: tuple[int, ...] = ()
    threshold: float | None = None

    def __post_init__(self) -> None:
        last = None
        for name, (start, stop) in sorted(self.fields.items(), key=lambda item: item[1]):
            if not 0 <= start < stop:
                raise DataError(f"field {name!r} has the range {start} to {stop}, which is empty")
            if last is not None and start < last[1]:
                raise DataError(f"fields {last[0]!r} and {name!r} share index {start}")
            last = (name, stop)

    @property
    def dense(self) -> tuple[str, ...]:
        return tuple(str(index) for index in self.dense_indices)

    @property
    def features(self) -> tuple[Feature, ...]:
        return _own_tables(*(self.fields or ("index",)))

    def rows(self, lines: Lines, ids: IdMap) -> Iterator[CtrRow]:
        place_of = {index: place for place, index in enumerate(self.dense_indices)}
        names = [feature.table for feature in self.features]
        for line in lines:
            label, *pairs = line.split("#", 1)[0].split() or [""]
            if not label:
                continue
            dense = [0.0] * len(place_of)
            bags: list[list[int]] = [[] for _ in names]
            seen: set[int] = set()
            for pair in pairs:
                index, value = _pair(lines, pair)
                if index in seen:
                    raise lines.bad(f"index {index} comes twice")
                seen.add(index)
                if index in place_of:
                    dense[place_of[index]] = value
                elif value == 1.0:
                    place = self._field(lines, index)
                    bags[place].append(ids.id_of(names[place], str(index)))
                elif value != 0.0:
                    raise lines.bad(
                        f"index {index} has the value {value:g}, expected 1 of a category; if it "
                        f"is a number, name it: dense_indices=({index},)"
                    )
            yield CtrRow(tuple(dense), tuple(map(tuple, bags)), self._click(lines, label))

    def _field(self, lines: Lines, index: int) -> int:
        if not self.fields:
            return 0
        for place, (start, stop) in enumerate(self.fields.values()):
            if start <= index < stop:
                return place
        raise lines.bad(f"index {index} is in none of the fields {dict(self.fields)}")

    def _click(self, lines: Lines, text: str) -> int:
        value = lines.number_in(text, "label")
        if self.threshold is not None:
            return int(value >= self.threshold)
        if value not in (-1.0, 0.0, 1.0):
            raise lines.bad(
                f"the label is {text}, expected 0, 1 or -1; for ratings say `threshold`"
            )
        return int(value == 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLens:
    """Ratings: `user,item,rating,time`, with a header, or separated by tabs or `::` without one.

    A rating of `threshold` or more is a positive.
    """

    threshold: float = 4.0

    @property
    def dense(self) -> tuple[str, ...]:
        return ()

    @property
    def features(self) -> tuple[Feature, ...]:
        return _own_tables("user", "item")

    def rows(self, lines: Lines, ids: IdMap) -> Iterator[CtrRow]:
        for line in lines:
            separator = next((mark for mark in ("::", "\t") if mark in line), ",")
            cells = line.split(separator)
            if len(cells) != 4:
                raise lines.bad(f"{len(cells)} columns, expected user, item, rating, time")
            if lines.number == 1 and not _looks_numeric(cells[2]):
                continue
            user, item, rating, time = (cell.strip() for cell in cells)
            if not user or not item:
                raise lines.bad("a rating without a user or item")
            yield CtrRow(
                (),
                ((ids.id_of("user", user),), (ids.id_of("item", item),)),
                int(lines.number_in(rating, "rating") >= self.threshold),
                lines.number_in(time, "time"),
            )


def read(path: str | Path, form: Format, *, ids: IdMap | None = None) -> Iterator[CtrRow]:
    """Stream the rows of a file; hashed ids unless a vocabulary is given."""
    return form.rows(Lines(path), HashIds() if ids is None else ids)


def load(path: str | Path, form: Format, *, ids: IdMap | None = None) -> CtrSamples:
    """All rows of a file in memory; sample i is the i-th row."""
    samples = CtrSamples.collect(
        read(path, form, ids=ids), features=form.features, dense_names=form.dense
    )
    if not len(samples):
        raise DataError(f"{path} holds no samples")
    return samples


def guess(path: str | Path) -> Format:
    """The format of a file, from its first line; plain CSV needs to be told what is what."""
    first = next(iter(Lines(path)), "")
    if first.count("\t") == 39:
        return Criteo()
    if re.fullmatch(r"\S+(\s+\d+:\S+)+\s*(#.*)?", first):
        return Libsvm()
    for separator in ("::", "\t", ","):
        cells = first.split(separator)
        if len(cells) == 4 and (
            (separator == "," and "rating" in cells[2].lower())
            or (separator != "," and all(map(_looks_numeric, cells)))
        ):
            return MovieLens()
    raise DataError(
        f"{path}: cannot tell what its first line means, {first[:80]!r}; it is neither Criteo TSV "
        "(40 columns), libsvm (`label index:value …`) nor MovieLens (user, item, rating, time); "
        "for plain CSV say which column is what, for example "
        "'label=clicked; dense=age,price; ids=user,item'"
    )


def _own_tables(*names: str) -> tuple[Feature, ...]:
    return tuple(Feature(name=name, table=name) for name in names)


def _click(lines: Lines, text: str) -> int:
    if text not in ("0", "1"):
        raise lines.bad(f"the label is {text!r}, expected 0 or 1")
    return int(text)


def _pair(lines: Lines, text: str) -> tuple[int, float]:
    index, colon, value = text.partition(":")
    if not colon or not (index.isascii() and index.isdigit()):
        raise lines.bad(f"{text!r}, expected index:value")
    return int(index), lines.number_in(value, index)


def _looks_numeric(text: str) -> bool:
    return re.fullmatch(r"\s*[-+]?\d+(\.\d*)?\s*", text) is not None


__all__ = ["ColumnSpec", "Criteo", "Format", "Libsvm", "MovieLens", "guess", "load", "read"]
