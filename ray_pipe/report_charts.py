"""Stacked bars and the parts that all charts share, as hand-made SVG.

Everything is drawn in a fixed view box and scales with the page. Colours are CSS variables (light
and dark), never the only mark: bars carry their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ray_pipe.report_markup import Markup, join, tag

WIDTH = 960


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One horizontal bar of coloured parts: (name, colour, value)."""

    name: str
    parts: Sequence[tuple[str, str, float]]
    text: str
    """Written at the end of the bar."""

    group: str = ""
    """Bars of one group stand together under its name."""

    inside: dict[str, str] = field(default_factory=dict)
    """Texts inside parts, where there is room."""


def bar_chart(bars: Sequence[Bar], *, title: str, width: float = WIDTH) -> Markup:
    """Stacked horizontal bars on one scale, in groups."""
    longest = max((sum(value for _, _, value in bar.parts) for bar in bars), default=0.0)
    if longest <= 0:
        return tag("p", "Nothing to draw.", class_="empty")
    left = 16 + 7.4 * max(len(bar.name) for bar in bars)
    right = 20 + 7.0 * max(len(bar.text) for bar in bars)
    scale = (width - left - right) / longest
    marks: list[Markup] = []
    y, group = 0.0, ""
    for bar in bars:
        if bar.group and bar.group != group:
            y += 8 if group else 0
            marks.append(text(bar.group, 0, y + 15, class_="group"))
            y += 24
            group = bar.group
        marks.append(text(bar.name, left - 8, y + 15, anchor="end", class_="tick"))
        drawn, end = _parts(bar, left, y, scale)
        marks += [*drawn, text(bar.text, end + 6, y + 15, class_="tick strong")]
        y += 24
    return svg(marks, title=title, width=width, height=y + 4)


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Names beside their colours."""
    return tag(
        "ul",
        *(
            tag("li", tag("i", style=f"background:var({color})", aria_hidden="true"), name)
            for name, color in entries
        ),
        class_="legend",
    )


def svg(
    marks: Sequence[str], *, title: str, width: float, height: float, **attributes: str | float
) -> Markup:
    """A picture that screen readers announce by its title."""
    return tag(
        "svg",
        tag("title", title),
        join(marks),
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=title,
        **attributes,
    )


def text(
    words: str,
    x: float,
    y: float,
    *,
    anchor: str | None = None,
    class_: str | None = None,
    style: str | None = None,
) -> Markup:
    """Words at a place in the picture."""
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_, style=style)


def tick_text(value: float) -> str:
    """A number at an axis."""
    return f"{value:,.6g}".replace("-", "−") if abs(value) < 1e6 else f"{value:.3g}"


def _parts(bar: Bar, x: float, y: float, scale: float) -> tuple[list[Markup], float]:
    """The coloured parts of a bar from `x` on, and where they end."""
    marks = []
    for name, color, value in bar.parts:
        length = value * scale
        if length <= 0:
            continue
        inside = bar.inside.get(name, "")
        hint = f"{bar.group} {bar.name}, {name}: {inside or bar.text}".strip()
        marks.append(
            tag(
                "rect",
                tag("title", hint),
                x=x,
                y=y + 1,
                width=max(length - 0.6, 0.4),
                height=19,
                style=f"fill:var({color})",
            )
        )
        if inside and length > 7.2 * len(inside):
            middle = x + length / 2
            marks.append(text(inside, middle, y + 15, anchor="middle", class_=f"in in{color}"))
        x += length
    return marks, x
