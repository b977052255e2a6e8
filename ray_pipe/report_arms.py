"""The report's table of arms: arms are columns, numbers are rows.

There are few arms and many numbers: the other way round the table is wider than any page. Two
halves stand beside each other where there is room, and one below the other where there is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ray_pipe.report_curves import colors, label
from ray_pipe.report_markup import Markup, data, tag

Arm = Mapping[str, Any]

MAX_BESIDE = 4
"""Arms up to which half a page is wide enough for all of them."""


class Number(NamedTuple):
    """One row."""

    name: str
    key: str
    """In results.json's arms."""

    show: Callable[[Any], str]


def arms_tables(
    arms: Sequence[Arm],
    halves: Sequence[tuple[str, Sequence[Number]]],
    *,
    best: str | None = None,
) -> Markup:
    """Titled halves of the table; a number that no arm has is left out, and so is an empty half."""
    tables = []
    for title, numbers in halves:
        known = [one for one in numbers if any(arm.get(one.key) is not None for arm in arms)]
        if known:
            tables.append(_half(arms, title, known, best=best))
    return tag("div", *tables, class_="halves beside" if len(arms) <= MAX_BESIDE else "halves")


def _half(
    arms: Sequence[Arm], title: str, numbers: Sequence[Number], *, best: str | None
) -> Markup:
    color = colors(arms)
    marks = ["best" if arm["name"] == best else None for arm in arms]
    names = [
        tag(
            "th",
            tag("span", class_="dot", style=f"background:var({color[str(arm['name'])]})"),
            label(arm),
            scope="col",
            class_=mark,
        )
        for arm, mark in zip(arms, marks, strict=True)
    ]
    rows = [
        tag(
            "tr",
            tag("th", one.name, scope="row"),
            *(
                tag("td", data(arm.get(one.key), one.show(arm.get(one.key))), class_=mark)
                for arm, mark in zip(arms, marks, strict=True)
            ),
        )
        for one in numbers
    ]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", title),
            tag("thead", tag("tr", tag("td"), *names)),
            tag("tbody", *rows),
            class_="arms",
        ),
        class_="scroll",
    )
