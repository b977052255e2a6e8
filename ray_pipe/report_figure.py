"""loss_vs_time.png: the page's first figure for places that show no HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_pipe.arms import REFERENCE
from ray_pipe.report_curves import loss_lines
from ray_pipe.report_markup import loss, seconds
from ray_pipe.report_page import ARM_COLORS, OTHER_ARM_COLORS
from ray_pipe.report_scales import place_labels
from ray_pipe.step_row import finite

_STYLES = {REFERENCE: (0, (6, 3)), "directq": (0, (1.5, 2))}


def write_loss_figure(
    path: Path | str, arms: Sequence[Mapping[str, Any]], *, title: str = ""
) -> None:
    """Loss against wall-clock time of all arms, named at their ends; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    arms = finite(list(arms))
    base = next((arm for arm in arms if arm["name"] == REFERENCE), None)
    target = base.get("final_loss") if base and len(arms) > 1 else None
    figure = Figure(figsize=(8.4, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = loss_lines(arms, target)
    # As on the page: the first steps' high losses would press everything else to the floor.
    top = max((y for line in lines for _, y in line.points), default=1.0)
    halo = [withStroke(linewidth=3, foreground="white")]
    soonest = min((line.mark for line in lines if line.mark), default=None)
    ends: list[tuple[float, float, str, str]] = []
    for arm, line in zip(arms, lines, strict=True):
        if not line.points:
            continue
        name = str(arm["name"])
        color = ARM_COLORS.get(name) or OTHER_ARM_COLORS[int(line.color[-1]) % 6]
        if len(line.faint) > 1:
            axes.plot(
                *zip(*(point for point in line.faint if point[1] <= top), strict=True),
                color=color,
                alpha=0.35,
                linewidth=0.8,
            )
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
        # Only the first and the reference's: times of six arms would hide each other.
        if line.mark is not None and (line.mark == soonest or name == REFERENCE):
            axes.annotate(
                seconds(line.mark[0]),
                line.mark,
                textcoords="offset points",
                xytext=(-4 if line.mark == soonest else 4, -17),
                ha="right" if line.mark == soonest else "left",
                color=color,
                fontsize=9,
                fontweight="bold",
                path_effects=halo,
            )
    if target is not None:
        axes.axhline(target, color="#646f7d", linewidth=1, linestyle=(0, (1, 3)))
        axes.text(
            0.985,
            target,
            f"fp32’s final loss, {loss(target)}",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="top",
            path_effects=halo,
            fontsize=8.5,
            color="#5b6675",
        )
    low, high = axes.get_ylim()
    low -= (high - low) * 0.05
    axes.set_ylim(low, high)
    longest = max((end[0] for end in ends), default=1.0)
    places = place_labels(
        [end[:2] for end in ends],
        reach=longest * 0.12,
        gap=(high - low) * 0.055,
        low=low,
        high=high,
    )
    for (x, y), (_, _, name, color) in zip(places, ends, strict=True):
        axes.annotate(
            name,
            (x, y),
            textcoords="offset points",
            xytext=(7, 0),
            va="center",
            color=color,
            fontweight="bold",
            annotation_clip=False,
            path_effects=halo,
        )
    axes.set_xlim(0, longest * 1.02)
    axes.set_xlabel("wall-clock time of training (s)")
    axes.set_ylabel("training loss")
    axes.grid(axis="y", color="#e1e5ea")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    figure.savefig(Path(path), facecolor="white")
