"""Line charts as hand-made SVG, with names at the ends of the curves.

Colours are CSS variables, never the only mark: curves carry their name and, where known, a dash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ray_pipe.report_charts import WIDTH, svg, text, tick_text
from ray_pipe.report_markup import Markup, seconds, tag
from ray_pipe.report_scales import Point, log_ticks, place_labels, stack, ticks


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
class LineChart:
    """What a chart says about itself."""

    title: str
    x_label: str
    y_label: str = ""
    target: float | None = None
    target_text: str = ""
    log_x: bool = False
    in_seconds: bool = False
    """x is a time that starts at 0; ticks in seconds, minutes or hours."""

    from_zero: bool = False
    names: bool = True
    """Names at the ends of the curves; without, the caller draws a legend."""

    hover: bool = False
    width: float = WIDTH
    height: float = 380


class _Frame:
    """From data to the view box."""

    def __init__(self, chart: LineChart, lines: Sequence[Line]) -> None:
        self.left, self.top = 52.0, 14.0
        label_room = max(8.2 * len(line.name) for line in lines) if chart.names else 0.0
        self.right = chart.width - 16 - label_room
        self.bottom = chart.height - 42
        self.log_x = chart.log_x
        xs = [x for line in lines for x, _ in line.points]
        if chart.log_x:
            self.low_x = min((x for x in xs if x > 0), default=1e-3)
            self.high_x = max(*xs, self.low_x * 1.01)
        else:
            self.low_x = 0.0 if chart.in_seconds else min(xs)
            self.high_x = max(xs) if max(xs) > self.low_x else self.low_x + 1
        self.low_y, self.high_y = _y_range(chart, lines)

    def x(self, value: float) -> float:
        if self.log_x:
            part = math.log(max(value, self.low_x) / self.low_x)
            part /= math.log(self.high_x / self.low_x)
        else:
            part = (value - self.low_x) / (self.high_x - self.low_x)
        return self.left + min(max(part, 0.0), 1.0) * (self.right - self.left)

    def y(self, value: float) -> float:
        clipped = min(max(value, self.low_y), self.high_y)
        part = (self.high_y - clipped) / (self.high_y - self.low_y)
        return self.top + part * (self.bottom - self.top)


def line_chart(lines: Sequence[Line], chart: LineChart) -> Markup:
    """Curves over a grid, with an optional dotted target and the times at which it was reached."""
    lines = [line for line in lines if line.points]
    if not lines:
        return tag("p", "No values to draw.", class_="empty")
    frame = _Frame(chart, lines)
    marks = [*_axes(chart, frame)]
    for line in lines:
        # The first steps' high losses would press everything else against the floor.
        visible = [(x, y) for x, y in line.faint if x >= frame.low_x and y <= frame.high_y]
        marks.append(_path(visible, frame, line, class_="faint"))
    marks += [_path(line.points, frame, line, class_="curve") for line in lines]
    marks += _reached(lines, frame)
    if chart.names:
        marks += _names(lines, frame)
    if chart.hover:
        ends = {"x1": frame.left, "x2": frame.left, "y1": frame.top, "y2": frame.bottom}
        marks.append(tag("line", class_="cross", visibility="hidden", **ends))
    return svg(
        marks,
        title=chart.title,
        width=chart.width,
        height=chart.height,
        data_left=frame.left,
        data_right=frame.right,
        data_low=repr(frame.low_x),
        data_high=repr(frame.high_x),
        data_log="1" if chart.log_x else "0",
    )


def _axes(chart: LineChart, frame: _Frame) -> list[Markup]:
    marks = []
    for value in ticks(frame.low_y, frame.high_y, 5):
        y = frame.y(value)
        marks.append(tag("line", class_="grid", x1=frame.left, x2=frame.right, y1=y, y2=y))
        marks.append(text(tick_text(value), frame.left - 8, y + 4, anchor="end", class_="tick"))
    unit, unit_name = _time_unit(frame.high_x) if chart.in_seconds else (1.0, "")
    if chart.log_x:
        values = log_ticks(frame.low_x, frame.high_x)
    else:
        values = [v * unit for v in ticks(frame.low_x / unit, frame.high_x / unit, 7)]
    for value in values:
        x = frame.x(value)
        marks.append(tag("line", class_="axis", x1=x, x2=x, y1=frame.bottom, y2=frame.bottom + 4))
        shown = tick_text(value)
        if chart.in_seconds:
            whole = f"{value / unit:.3g} {unit_name}".strip()
            shown = seconds(value) if 0 < value < unit or unit_name == "ms" else whole
        marks.append(text(shown, x, frame.bottom + 17, anchor="middle", class_="tick"))
    y = frame.bottom
    marks.append(tag("line", class_="axis", x1=frame.left, x2=frame.right, y1=y, y2=y))
    middle = (frame.left + frame.right) / 2
    marks.append(text(chart.x_label, middle, chart.height - 6, anchor="middle", class_="label"))
    marks.append(text(chart.y_label, frame.left + 6, frame.top + 8, class_="label"))
    if chart.target is not None:
        y = frame.y(chart.target)
        marks.append(tag("line", class_="target", x1=frame.left, x2=frame.right, y1=y, y2=y))
        marks.append(
            text(chart.target_text, frame.right - 8, y + 15, anchor="end", class_="tick halo")
        )
    return marks


def _reached(lines: Sequence[Line], frame: _Frame) -> list[Markup]:
    """Dots on the target, and times above the axis, one above the other where they are close."""
    known = sorted(
        ((frame.x(line.mark[0]), frame.y(line.mark[1]), line) for line in lines if line.mark),
        key=lambda item: item[0],
    )
    rows = stack([x for x, _, _ in known], reach=64)
    marks = []
    for (x, y, line), row in zip(known, rows, strict=True):
        fill = f"fill:var({line.color})"
        stroke = f"stroke:var({line.color})"
        marks.append(tag("line", class_="drop", x1=x, x2=x, y1=y, y2=frame.bottom, style=stroke))
        marks.append(tag("circle", class_="reached", cx=x, cy=y, r=4.5, style=fill))
        # Left of the drop line, since the curve's name is to the right.
        inward = x > frame.left + 60
        marks.append(
            text(
                line.mark_text,
                x - 6 if inward else x + 6,
                frame.bottom - 6 - 14 * row,
                anchor="end" if inward else None,
                class_="mark halo",
                style=fill,
            )
        )
    return marks


def _names(lines: Sequence[Line], frame: _Frame) -> list[Markup]:
    ends = [(frame.x(line.points[-1][0]), frame.y(line.points[-1][1])) for line in lines]
    placed = place_labels(ends, reach=90, gap=16, low=frame.top + 4, high=frame.bottom - 4)
    return [
        text(line.name, x + 8, y + 4, class_="name halo", style=f"fill:var({line.color})")
        for line, (x, y) in zip(lines, placed, strict=True)
    ]


def _path(points: Sequence[Point], frame: _Frame, line: Line, *, class_: str) -> Markup:
    if not points:
        return Markup("")
    if len(points) == 1:
        x, y = frame.x(points[0][0]), frame.y(points[0][1])
        return tag("circle", class_="reached", cx=x, cy=y, r=3.5, style=f"fill:var({line.color})")
    return tag(
        "path",
        d="M" + "L".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points),
        class_=class_,
        style=f"stroke:var({line.color})",
        stroke_dasharray=line.dash if class_ == "curve" else None,
    )


def _y_range(chart: LineChart, lines: Sequence[Line]) -> tuple[float, float]:
    ys = [y for line in lines for _, y in line.points]
    high = max(ys)
    if chart.from_zero:
        return 0.0, (high if high > 0 else 1.0) * 1.05
    low = min([*ys, *(y for line in lines for _, y in line.faint)])
    if chart.target is not None:
        low = min(low, chart.target)
    room = (high - low) or abs(high) or 1.0
    # Below the target there is room for its name and for the times at which it was reached.
    return low - room * (0.06 if chart.target is None else 0.13), high + room * 0.03


def _time_unit(highest: float) -> tuple[float, str]:
    """The unit of a time axis: ticks at whole minutes or hours, not at round numbers of seconds."""
    if highest < 1:
        return 1.0, "ms"
    if highest < 600:
        return 1.0, "s"
    return (60.0, "min") if highest < 36_000 else (3600.0, "h")
