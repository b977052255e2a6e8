"""The curves of report.html: loss against time, and what codecs with memory saw over the steps."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_pipe.arms import REFERENCE, running_mean
from ray_pipe.report_charts import legend
from ray_pipe.report_lines import Line, LineChart, line_chart
from ray_pipe.report_markup import Markup, data, loss, seconds, size, table, tag, three
from ray_pipe.report_page import ARM_COLORS, arm_color, numbers, section, views
from ray_pipe.report_scales import Point, thin
from ray_pipe.step_row import StepRow

Arm = Mapping[str, Any]

LABELS = {"acsgd": "AC-SGD", "directq": "DirectQ"}
_DASHES = {REFERENCE: "7 4", "directq": "2 4"}
_CODEC_CURVES = (
    ("hit_rate", "Rows already known (hit rate)"),
    ("delta_ratio", "Size of the change, ‖Δ‖ / ‖h‖"),
    ("error", "Relative reconstruction error"),
)
_CODEC_COUNTS = ("cold", "nacks", "nonfinite")


def label(arm: Arm) -> str:
    """An arm's name as its paper writes it."""
    name = str(arm["name"])
    return LABELS.get(name, name)


def colors(arms: Sequence[Arm]) -> dict[str, str]:
    """The CSS variable of each arm."""
    others = [str(arm["name"]) for arm in arms if arm["name"] not in ARM_COLORS]
    return {
        str(arm["name"]): arm_color(
            str(arm["name"]), others.index(str(arm["name"])) if arm["name"] in others else 0
        )
        for arm in arms
    }


def loss_section(arms: Sequence[Arm]) -> Markup:
    """Training loss against wall-clock time, on a linear and on a logarithmic time axis."""
    base = next((arm for arm in arms if arm["name"] == REFERENCE), None)
    target = base.get("final_loss") if base and len(arms) > 1 else None
    lines = loss_lines(arms, target)
    if not any(line.points for line in lines):
        return Markup("")
    words = "; ".join(_loss_words(arms))
    charts = [
        line_chart(
            lines,
            LineChart(
                title=f"Training loss against wall-clock time: {words}",
                x_label="wall-clock time of training",
                y_label="training loss",
                target=target,
                target_text=f"fp32’s final loss, {loss(target)}" if target is not None else "",
                log_x=log_x,
                in_seconds=True,
                hover=True,
            ),
        )
        for log_x in (False, True)
    ]
    window = max((_window(arm) for arm in arms), default=1)
    rows = [
        (
            label(arm),
            *_at_fractions(arm),
            data(arm.get("final_loss"), loss(arm.get("final_loss"))),
        )
        for arm in arms
    ]
    return section(
        "Loss against time",
        views("time-axis", ("linear time", charts[0]), ("log time", charts[1])),
        numbers(
            table(
                ("arm", "¼ of its steps", "½", "¾", "final loss"),
                rows,
                caption=f"Mean loss of the last {window} steps at each quarter of the arm",
            )
        ),
        explain=f"Bold: mean of the last {window} steps; faint: single steps.",
    )


def codec_section(arms: Sequence[Arm], rows: Mapping[str, Sequence[StepRow]]) -> Markup:
    """What codecs with memory saw: hit rate, size of the change, error, by edge."""
    panels: list[str] = []
    for arm in arms:
        seen = CodecsSeen(rows.get(str(arm["name"]), ()))
        charts: list[str] = []
        for key, title in _CODEC_CURVES:
            curves = [
                Line(
                    name=edge,
                    color=f"--edge-{index % 6}",
                    points=thin(seen.points(edge, key), limit=200),
                )
                for index, edge in enumerate(seen.edges)
            ]
            if any(curve.points for curve in curves):
                chart = LineChart(
                    title=f"{label(arm)}: {title} over steps, by edge",
                    x_label="step",
                    width=330,
                    height=200,
                    names=False,
                    from_zero=True,
                )
                charts.append(tag("div", tag("h4", title), line_chart(curves, chart)))
        if not charts:
            continue
        panels.append(tag("h3", label(arm)))
        panels.append(tag("div", *charts, class_="grid3"))
        panels.append(
            legend([(e.replace("->", " → "), f"--edge-{i % 6}") for i, e in enumerate(seen.edges)])
        )
        panels.append(numbers(_codec_numbers(seen)))
    if not panels:
        return Markup("")
    return section(
        "Inside the codecs",
        *panels,
        explain="First visits are cold: sent whole. From the second visit on only the change of a "
        "sample’s activations is sent, and it shrinks as training settles.",
    )


class CodecsSeen:
    """What the rows say of the codecs, read once from front to back."""

    def __init__(self, rows: Iterable[StepRow]) -> None:
        self._curves: dict[tuple[str, str], tuple[array[float], array[float]]] = {}
        self._numbers: dict[tuple[str, str], float] = {}
        """The last, or the sum."""

        edges: set[str] = set()
        keys: set[str] = set()
        for row in rows:
            for edge, values in row.codec.items():
                edges.add(edge)
                keys.update(values)
                for key, value in values.items():
                    if _is_number(value):
                        self._add(row.step, edge, key, value)
        self.edges, self.keys = sorted(edges), sorted(keys)

    def _add(self, step: int, edge: str, key: str, value: float) -> None:
        before = self._numbers.get((edge, key), 0) if key in _CODEC_COUNTS else 0
        self._numbers[edge, key] = before + value
        if key in dict(_CODEC_CURVES):
            steps, points = self._curves.setdefault((edge, key), (array("d"), array("d")))
            steps.append(step)
            points.append(value)

    def points(self, edge: str, key: str) -> list[Point]:
        """The curve of a number, by step."""
        return list(zip(*self._curves.get((edge, key), ((), ())), strict=True))

    def number(self, edge: str, key: str) -> float | None:
        """Of the last step that had it; counts are of all steps."""
        return self._numbers.get((edge, key))


def hover_curves(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """The bold curves as data, for the crosshair."""
    return [
        {"name": line.name, "points": [[round(x, 4), round(y, 5)] for x, y in line.points]}
        for line in loss_lines(arms, None)
    ]


def loss_lines(arms: Sequence[Arm], target: float | None) -> list[Line]:
    color = colors(arms)
    lines = []
    for arm in arms:
        single = _points(arm, [entry[2] for entry in arm.get("losses") or []])
        reached = arm.get("time_to_target_s")
        lines.append(
            Line(
                name=label(arm),
                color=color[str(arm["name"])],
                points=thin(_smooth(arm)),
                faint=thin(single),
                dash=_DASHES.get(str(arm["name"])),
                mark=(reached, target) if reached is not None and target is not None else None,
                mark_text=seconds(reached),
            )
        )
    return lines


def _smooth(arm: Arm) -> list[Point]:
    values = [entry[2] for entry in arm.get("losses") or []]
    return _points(arm, running_mean(values, window=_window(arm)))


def _window(arm: Arm) -> int:
    """Steps in the bold curve's mean; all of them where the arm is shorter than the window."""
    return max(min(int(arm.get("final_window") or 1), len(arm.get("losses") or [])), 1)


def _points(arm: Arm, values: Sequence[float | None]) -> list[Point]:
    return [
        (float(entry[0]), float(value))
        for entry, value in zip(arm.get("losses") or [], values, strict=True)
        if entry[0] is not None and value is not None
    ]


def _at_fractions(arm: Arm) -> list[Markup]:
    smooth = _smooth(arm)
    found = [smooth[(len(smooth) - 1) * quarter // 4] if smooth else None for quarter in (1, 2, 3)]
    return [
        data(point[1], f"{loss(point[1])} at {seconds(point[0])}") if point else data(None, "")
        for point in found
    ]


def _loss_words(arms: Sequence[Arm]) -> list[str]:
    return [
        f"{label(arm)} ends at {loss(arm.get('final_loss'))} after {seconds(arm.get('wall_s'))}"
        for arm in arms
    ]


def _codec_numbers(seen: CodecsSeen) -> Markup:
    lines = []
    for edge in seen.edges:
        cells = []
        for key in seen.keys:
            value = seen.number(edge, key)
            cells.append(data(value, size(value) if key.endswith("bytes") else three(value)))
        lines.append((edge.replace("->", " → "), *cells))
    return table(
        ("edge", *(key.replace("_", " ") for key in seen.keys)),
        lines,
        caption=f"In the last step; {', '.join(_CODEC_COUNTS)}: over all steps",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and value == value and abs(value) != float("inf")
