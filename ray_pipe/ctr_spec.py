"""`--columns`: what a file of clicks means, in words.

Path: ray_pipe.ctr_workload -> ray_pipe.ctr_spec -> ray_pipe.ctr_formats

    label=clicked; dense=age; ids=user,item                             columns of a plain CSV file
    format=libsvm; fields=user:0-942,item:943-2624; dense=2625; threshold=4
    format=movielens; threshold=3.5

Without it the format is told by the first line, with its plain settings.
"""

from __future__ import annotations

from pathlib import Path

from ray_pipe.ctr_columns import ColumnSpec
from ray_pipe.ctr_formats import Criteo, Format, Libsvm, MovieLens, guess
from ray_pipe.errors import DataError, nearest

KEYS = {"libsvm": ("fields", "dense", "threshold"), "movielens": ("threshold",), "criteo": ()}


def form_of(path: str | Path, columns: str | None) -> Format:
    """The format of a file: as it is told, or as its first line says."""
    if not columns:
        return guess(path)
    pairs = [part.partition("=") for part in columns.split(";") if part.strip()]
    given = {key.strip(): value.strip() for key, _, value in pairs}
    name = given.pop("format", None)
    if name is None or name == "csv":
        text = ";".join("".join(pair) for pair in pairs if pair[0].strip() != "format")
        return ColumnSpec.parse(text)
    if name not in KEYS:
        names = [*KEYS, "csv"]
        raise DataError(
            f"--columns: format={name}, expected one of {', '.join(names)}{nearest(name, names)}"
        )
    for key in given:
        if key not in KEYS[name]:
            known = ", ".join(KEYS[name]) or "no settings"
            raise DataError(
                f"--columns: {key!r} is no setting of {name}, which has {known}"
                f"{nearest(key, KEYS[name])}"
            )
    if len(given) + 1 != len(pairs):
        raise DataError("--columns: a key is given twice")
    if name == "criteo":
        return Criteo()
    threshold = {"threshold": _number(given["threshold"])} if "threshold" in given else {}
    if name == "movielens":
        return MovieLens(**threshold)
    return Libsvm(
        fields=dict(_field(part) for part in _list(given.get("fields", ""))),
        dense_indices=tuple(_whole(part, "dense") for part in _list(given.get("dense", ""))),
        **threshold,
    )


def _field(text: str) -> tuple[str, tuple[int, int]]:
    """`user:0-942`: both ends are part of it; `user:7` is one index."""
    name, colon, bounds = (part.strip() for part in text.partition(":"))
    first, _, last = bounds.partition("-")
    if not colon or not name:
        raise DataError(f"--columns: fields={text!r}, expected name:first-last, as user:0-942")
    start = _whole(first, "fields")
    return name, (start, _whole(last or first, "fields") + 1)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole(text: str, key: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise DataError(f"--columns: {key}={text.strip()!r}, expected a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"--columns: threshold={text!r}, expected a number") from None
