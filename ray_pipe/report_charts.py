"""Charts as hand-made SVG: lines and stacked bars, with colours from the page's style sheet.

Everything is drawn in a fixed view box and scales with the page. Colours are CSS variables (light
and dark), never the only mark: lines carry their name, bars their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ray_pipe.report_markup import Markup, join, seconds, tag
from ray_pipe.report_scales import Point, log_ticks, spread, ticks

WIDTH = 960


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve. `points` are in data units; `faint` is drawn thin behind it."""

    name: str
    color: str
    points: Sequence[Point]
    faint: Sequence[Point] = ()
    dash: str | None = None
    mark: Point | None = None
    """A dot with a drop line: where the curve reached the target."""

    mark_text: str = ""


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


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    target: float | None = None,
    target_text: str = "",
    log_x: bool = False,
    width: float = WIDTH,
    height: float = 380,
    chart_id: str | None = None,
    label_lines: bool = True,
    y_from_zero: bool = False,
    x_seconds: bool = False,
) -> Markup:
    """Curves with a grid, names at their ends and an optional dotted target."""
    drawn = [line for line in lines if line.points]
    xs = [x for line in drawn for x, _ in line.points]
    if not xs:
        return tag("p", "No values to draw.", class_="empty")
    right = 16 + (max(8.2 * len(line.name) for line in drawn) if label_lines else 0)
    left, top, bottom = 52.0, 14.0, 42.0
    low_y, high_y = _y_range(drawn, target, from_zero=y_from_zero)
    if log_x:
        low_x = min(x for x in xs if x > 0) if any(x > 0 for x in xs) else 1e-3
        high_x = max(max(xs), low_x * 1.01)
    else:
        low_x, high_x = (0.0 if x_seconds else min(xs)), max(xs)
        high_x = high_x if high_x > low_x else low_x + 1

    def at_x(x: float) -> float:
        if log_x:
            part = math.log(max(x, low_x) / low_x) / math.log(high_x / low_x)
        else:
            part = (x - low_x) / (high_x - low_x)
        return left + part * (width - left - right)

    def at_y(y: float) -> float:
        clipped = min(max(y, low_y), high_y)
        return top + (high_y - clipped) / (high_y - low_y) * (height - top - bottom)

    marks: list[str] = []
    for y in ticks(low_y, high_y, 5):
        marks.append(tag("line", class_="grid", x1=left, x2=width - right, y1=at_y(y), y2=at_y(y)))
        marks.append(_text(_tick(y), left - 8, at_y(y) + 4, anchor="end", class_="tick"))
    x_ticks = log_ticks(low_x, high_x) if log_x else _x_ticks(low_x, high_x, in_s=x_seconds)
    for x in x_ticks:
        marks.append(
            tag(
                "line",
                class_="axis",
                x1=at_x(x),
                x2=at_x(x),
                y1=height - bottom,
                y2=height - bottom + 4,
            )
        )
        shown = _tick_seconds(x, high_x) if x_seconds else _tick(x)
        marks.append(_text(shown, at_x(x), height - bottom + 17, anchor="middle", class_="tick"))
    marks.append(
        tag(
            "line", class_="axis", x1=left, x2=width - right, y1=height - bottom, y2=height - bottom
        )
    )
    marks.append(
        _text(x_label, (left + width - right) / 2, height - 6, anchor="middle", class_="label")
    )
    marks.append(_text(y_label, left + 6, top + 8, class_="label"))
    if target is not None:
        y = at_y(target)
        marks.append(tag("line", class_="target", x1=left, x2=width - right, y1=y, y2=y))
        marks.append(_text(target_text, left + 6, y + 14, class_="tick halo"))
    for line in drawn:
        marks.append(_path(line.faint, at_x, at_y, class_="faint", color=line.color))
        marks.append(
            _path(line.points, at_x, at_y, class_="curve", color=line.color, dash=line.dash)
        )
    for line in drawn:
        if line.mark is not None:
            x, y = at_x(line.mark[0]), at_y(line.mark[1])
            style = f"stroke:var({line.color})"
            marks.append(
                tag("line", class_="drop", x1=x, x2=x, y1=y, y2=height - bottom, style=style)
            )
            marks.append(
                tag("circle", class_="reached", cx=x, cy=y, r=4.5, style=f"fill:var({line.color})")
            )
            inward = x > width - right - 60
            marks.append(
                _text(
                    line.mark_text,
                    x - 6 if inward else x + 6,
                    height - bottom - 6,
                    anchor="end" if inward else None,
                    class_="mark halo",
                    style=f"fill:var({line.color})",
                )
            )
    if label_lines:
        ends = [at_y(line.points[-1][1]) for line in drawn]
        for line, y in zip(
            drawn, spread(ends, gap=16, low=top + 4, high=height - bottom), strict=True
        ):
            x = at_x(line.points[-1][0])
            near_end = min(x + 8, width - right + 8)
            marks.append(
                _text(
                    line.name, near_end, y + 4, class_="name halo", style=f"fill:var({line.color})"
                )
            )
    if chart_id is not None:
        marks.append(
            tag(
                "line",
                class_="cross",
                x1=left,
                x2=left,
                y1=top,
                y2=height - bottom,
                visibility="hidden",
            )
        )
    return svg(
        marks,
        title=title,
        width=width,
        height=height,
        id=chart_id,
        data_left=left,
        data_right=width - right,
        data_low=repr(low_x),
        data_high=repr(high_x),
        data_log="1" if log_x else "0",
    )


def bar_chart(bars: Sequence[Bar], *, title: str, width: float = WIDTH) -> Markup:
    """Stacked horizontal bars on one scale, in groups."""
    longest = max((sum(value for _, _, value in bar.parts) for bar in bars), default=0.0)
    if longest <= 0:
        return tag("p", "Nothing to draw.", class_="empty")
    left = 16 + 7.4 * max(len(bar.name) for bar in bars)
    right = 20 + 7.0 * max(len(bar.text) for bar in bars)
    scale = (width - left - right) / longest
    marks: list[str] = []
    y, group = 0.0, ""
    for bar in bars:
        if bar.group and bar.group != group:
            y += 8 if group else 0
            marks.append(_text(bar.group, 0, y + 15, class_="group"))
            y += 24
            group = bar.group
        marks.append(_text(bar.name, left - 8, y + 15, anchor="end", class_="tick"))
        x = left
        for name, color, value in bar.parts:
            length = value * scale
            if length <= 0:
                continue
            inside = bar.inside.get(name, "")
            marks.append(
                tag(
                    "rect",
                    tag(
                        "title", f"{bar.group} {bar.name} {name}: {inside or _tick(value)}".strip()
                    ),
                    x=x,
                    y=y + 1,
                    width=max(length - 0.6, 0.4),
                    height=19,
                    style=f"fill:var({color})",
                )
            )
            if inside and length > 7.2 * len(inside):
                marks.append(
                    _text(inside, x + length / 2, y + 15, anchor="middle", class_=f"in in{color}")
                )
            x += length
        marks.append(_text(bar.text, x + 6, y + 15, class_="tick strong"))
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
    marks: Sequence[str],
    *,
    title: str,
    width: float,
    height: float,
    **attributes: str | float | None,
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


def _y_range(
    lines: Sequence[Line], target: float | None, *, from_zero: bool
) -> tuple[float, float]:
    ys = [y for line in lines for _, y in line.points]
    low, high = min(ys), max(ys)
    if target is not None:
        low = min(low, target)
    if from_zero:
        return 0.0, (high if high > 0 else 1.0) * 1.05
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - room, high + room / 2


def _path(
    points: Sequence[Point],
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
    *,
    class_: str,
    color: str,
    dash: str | None = None,
) -> Markup:
    if not points:
        return Markup("")
    if len(points) == 1:
        x, y = points[0]
        return tag(
            "circle", class_="reached", cx=at_x(x), cy=at_y(y), r=3.5, style=f"fill:var({color})"
        )
    course = "M" + "L".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
    return tag("path", d=course, class_=class_, style=f"stroke:var({color})", stroke_dasharray=dash)


def _text(
    text: str,
    x: float,
    y: float,
    *,
    anchor: str | None = None,
    class_: str | None = None,
    style: str | None = None,
) -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=class_, style=style)


def _tick(value: float) -> str:
    return f"{value:,.6g}".replace("-", "−") if abs(value) < 1e6 else f"{value:.3g}"


def _x_ticks(low: float, high: float, *, in_s: bool) -> list[float]:
    unit = _time_unit(high) if in_s else 1.0
    return [tick * unit for tick in ticks(low / unit, high / unit, 7)]


def _time_unit(highest: float) -> float:
    """Seconds in the unit of a time axis: whole minutes or hours, not round numbers of seconds."""
    return 1.0 if highest < 600 else 60.0 if highest < 36_000 else 3600.0


def _tick_seconds(value: float, highest: float) -> str:
    if highest < 1 or 0 < value < 1:
        return seconds(value)
    unit = _time_unit(highest)
    return f"{value / unit:.3g} {({1.0: 's', 60.0: 'min', 3600.0: 'h'})[unit]}"
