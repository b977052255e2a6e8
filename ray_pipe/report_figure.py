"""loss_vs_time.png: the page's first figure for places that show no HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_pipe.arms import REFERENCE
from ray_pipe.metrics import finite
from ray_pipe.report_curves import loss_lines
from ray_pipe.report_markup import loss, seconds
from ray_pipe.report_page import ARM_COLORS, OTHER_ARM_COLORS
from ray_pipe.report_scales import spread

_STYLES = {REFERENCE: (0, (6, 3)), "directq": (0, (1.5, 2))}


def write_loss_figure(
    path: Path | str, arms: Sequence[Mapping[str, Any]], *, title: str = ""
) -> None:
    """Loss against wall-clock time of all arms, named at their ends; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    arms = finite(list(arms))
    base = next((arm for arm in arms if arm["name"] == REFERENCE), None)
    target = base.get("final_loss") if base else None
    figure = Figure(figsize=(8.4, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = loss_lines(arms, target)
    ends: list[tuple[float, float, str, str]] = []
    for arm, line in zip(arms, lines, strict=True):
        if not line.points:
            continue
        name = str(arm["name"])
        color = ARM_COLORS.get(name) or OTHER_ARM_COLORS[int(line.color[-1]) % 6]
        if len(line.faint) > 1:
            axes.plot(*zip(*line.faint, strict=True), color=color, alpha=0.22, linewidth=0.8)
        axes.plot(
            *zip(*line.points, strict=True),
            color=color,
            linewidth=2.2,
            linestyle=_STYLES.get(name, "-"),
            marker="o" if len(line.points) == 1 else None,
        )
        ends.append((*line.points[-1], line.name, color))
        if line.mark is not None:
            axes.plot(*line.mark, "o", color=color, markersize=7, markeredgecolor="white", zorder=5)
            axes.annotate(
                seconds(line.mark[0]),
                line.mark,
                textcoords="offset points",
                xytext=(0, -15),
                ha="center",
                color=color,
                fontsize=9,
                fontweight="bold",
            )
    if target is not None:
        axes.axhline(target, color="#646f7d", linewidth=1, linestyle=(0, (1, 3)))
        axes.text(
            0.995,
            target,
            f"fp32’s final loss, {loss(target)}",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=8.5,
            color="#5b6675",
        )
    low, high = axes.get_ylim()
    places = spread([end[1] for end in ends], gap=(high - low) * 0.055, low=low, high=high)
    for (x, _, name, color), y in zip(ends, places, strict=True):
        axes.annotate(
            name,
            (x, y),
            textcoords="offset points",
            xytext=(7, 0),
            va="center",
            color=color,
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_xlim(left=0)
    axes.set_xlabel("wall-clock time of training (s)")
    axes.set_ylabel("training loss")
    axes.grid(axis="y", color="#e1e5ea")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    figure.savefig(Path(path), facecolor="white")
