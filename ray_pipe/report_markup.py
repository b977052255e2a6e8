"""HTML and SVG as nested calls, escaped by default, and numbers as people read them.

A plain string is text and is escaped wherever it lands; only `Markup` passes as it is. A number in
the page is a `<data value=…>`: rounded for the eye, exact for a check against results.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

_VOID = frozenset({"meta", "br", "input", "hr", "link"})
MISSING = "–"

Attribute = str | int | float | bool | None


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """`<name …>children</name>`; `class_` is class, `stroke_width` stroke-width, None left out."""
    opening = name + "".join(
        f' {_attribute_name(key)}="{escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Children one after the other, plain strings escaped."""
    return Markup(
        "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    )


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, class_: str = "numbers"
) -> Markup:
    """A table whose first column names the row."""
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption) if caption else Markup(""),
            tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
            if head
            else Markup(""),
            tag(
                "tbody",
                *(
                    tag("tr", tag("th", row[0], scope="row"), *(tag("td", c) for c in row[1:]))
                    for row in rows
                ),
            ),
            class_=class_,
        ),
        class_="scroll",
    )


def data(value: float | int | None, shown: str) -> Markup:
    """A number: `shown` for the eye, the value itself in the attribute."""
    if value is None or not math.isfinite(value):
        return tag("span", MISSING, class_="missing", title="not available")
    return tag("data", shown, value=repr(value))


def seconds(value: float | None) -> str:
    """ "84 ms", "1.23 s", "2 min 05 s"."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0 s"
    if abs(value) < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if abs(value) < 1:
        return f"{value * 1e3:.{0 if abs(value) >= 0.1 else 1}f} ms"
    if abs(value) < 120:
        return f"{value:.{2 if abs(value) < 10 else 1}f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(nbytes: float | None) -> str:
    """Decimal bytes, as links are priced: "812 B", "3.15 MB"."""
    if nbytes is None or not math.isfinite(nbytes):
        return MISSING
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{three(value)} {unit}"


def three(value: float | None) -> str:
    """Three significant digits, thousands with commas."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits}f}" if digits <= 6 else f"{value:.2e}"


def ratio(value: float | None) -> str:
    """ "4.31×"."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.{2 if value < 10 else 1}f}×"


def percent(value: float | None, *, sign: bool = False) -> str:
    """ "12.3 %", with `sign` "+12.3 %"."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value * 100:{'+' if sign else ''}.1f} %".replace("-", "−")


def loss(value: float | None, *, sign: bool = False) -> str:
    """Four decimals: where quality is decided."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:{'+' if sign else ''}.4f}".replace("-", "−")


def _attribute_name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _attribute(value: Attribute) -> str:
    if value is True:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"
    return str(value)
