"""The comparison of sync strategies for the eye and for programs: a table, a picture, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from ray_pipe.compare_sync import BASE, EQUAL, Plan, Row
from ray_pipe.metrics import to_json

if TYPE_CHECKING:
    from stages.sync.trial import Trial

COLORS = (
    "#5b6675", "#9aa5b1", "#2e8b57", "#d4ac0d", "#8c6d31", "#7fb3d5", "#1f77b4",
    "#0b3d91", "#8e44ad", "#f1948a", "#e67e22", "#c0392b", "#641e16",
)  # fmt: skip
FEW = 64
"""With so many replicas everybody has waited for a straggler before a comparison is over."""

PUBLISHED = (
    "Published (Ripples, arXiv 1909.08029, other hardware): 1.1x over all-reduce among equals, "
    "2x with a slow worker."
)


def speedups(row: Row, base: Row) -> dict[str, dict[str, float | None]]:
    """By case: steps as fast as all-reduce's, and sooner at all-reduce's final loss."""
    found: dict[str, dict[str, float | None]] = {}
    for case, trial in row.cases.items():
        there = base.cases[case]
        target = there.final_loss
        own_s = None if target is None else trial.reaches(target)
        base_s = None if target is None else there.reaches(target)
        found[case] = {
            "iteration": there.iteration_s / trial.iteration_s,
            "sooner": base_s / own_s if own_s and base_s else None,
        }
    return found


def bases(rows: Sequence[Row]) -> dict[tuple[int, bool], Row]:
    """The all-reduce that each row is compared with."""
    return {(row.num_replicas, row.is_real): row for row in rows if row.strategy == BASE}


def show_table(rows: Sequence[Row], *, straggler: str, out: TextIO) -> None:
    """Times are those of the median replica."""
    console = Console(file=out, width=None if out.isatty() else 150, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("replicas", justify="right")
    table.add_column("strategy", no_wrap=True)
    for case in (EQUAL, straggler):
        table.add_column(f"{case}\niteration", justify="right")
        table.add_column("over\nall-reduce", justify="right")
        table.add_column("loss at\nthe end", justify="right")
        table.add_column("sooner at its\nfinal loss", justify="right")
    table.add_column("gap", justify="right")
    table.add_column("MB an\niteration", justify="right")
    base = bases(rows)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        gains = speedups(row, base[row.num_replicas, row.is_real])
        cells: list[str] = []
        for case, trial in row.cases.items():
            gain = gains[case]
            cells += [
                f"{trial.iteration_s:.2f} s",
                _times(gain["iteration"]),
                "-" if trial.final_loss is None else f"{trial.final_loss:.3f}",
                _times(gain["sooner"]),
            ]
        slow = row.cases[straggler]
        mark = "" if not slow.is_computed else "*"
        table.add_row(
            f"{row.num_replicas}" + (" real" if row.is_real else ""),
            row.strategy + mark,
            *cells,
            str(slow.largest_gap),
            f"{slow.nbytes_per_iteration / 1e6:.2f}",
            end_section=after is not None and after.num_replicas != row.num_replicas,
        )
    console.print(table)
    if any(trial.is_computed for row in rows for trial in row.cases.values()):
        console.print("* its clock is computed, not simulated: n² letters a step are too many.")
    console.print(
        "Gap (iterations between the fastest and the slowest replica) and MB: with the straggler."
    )
    if any(row.num_replicas > FEW and not row.is_real for row in rows):
        console.print(
            f"Of more than {FEW} replicas a straggler may not hold up the median one yet: waiting "
            "spreads from neighbour to neighbour (hop), from block to block (ruler). A longer "
            "--seconds shows it."
        )
    console.print(PUBLISHED)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def as_json(rows: Sequence[Row], plan: Plan) -> str:
    """Everything that was found, curves included."""
    base = bases(rows)
    body: dict[str, Any] = {
        **plan.as_dict(),
        "published": PUBLISHED,
        "rows": [
            {
                "strategy": row.strategy,
                "replicas": row.num_replicas,
                "real": row.is_real,
                "speedups": speedups(row, base[row.num_replicas, row.is_real]),
                "cases": {case: _as_dict(trial) for case, trial in row.cases.items()},
            }
            for row in rows
        ],
    }
    return to_json(body)


def _as_dict(trial: Trial) -> dict[str, Any]:
    curve = [[round(at_s, 3), round(loss, 5)] for at_s, loss in trial.curve]
    return {**asdict(trial), "curve": curve, "final_loss": trial.final_loss}


def write_figure(path: Path | str, rows: Sequence[Row], *, straggler: str) -> None:
    """Loss against time: a row of panels for each number of replicas, a column for each case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys((row.num_replicas, row.is_real) for row in rows))
    figure = Figure(figsize=(11, 0.6 + 3.6 * len(sizes)), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(sizes), 2, squeeze=False, sharey="row")
    names = list(dict.fromkeys(row.strategy for row in rows))
    color = dict(zip(names, COLORS))
    handles: Mapping[str, Any] = {}
    for line, (num, is_real) in enumerate(sizes):
        for axes, case in zip(grid[line], (EQUAL, straggler)):
            handles = {
                **handles,
                **_draw(axes, [r for r in rows if (r.num_replicas, r.is_real) == (num, is_real)],
                        case, color),
            }  # fmt: skip
            where = "real time" if is_real else "virtual time"
            title = f"{num} replicas, " + ("all alike" if case == EQUAL else f"slow {case}")
            axes.set_title(f"{title} ({where})", loc="left", fontsize=10, fontweight="bold")
            axes.set_xlabel("seconds")
        grid[line][0].set_ylabel("loss of the mean model")
    figure.legend(
        handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=8.5
    )
    figure.savefig(Path(path), facecolor="white")


def _draw(axes: Any, rows: Sequence[Row], case: str, color: Mapping[str, str]) -> dict[str, Any]:
    handles = {}
    for row in rows:
        trial: Trial = row.cases[case]
        if not trial.curve:
            continue
        is_base = row.strategy == BASE
        (handles[row.strategy],) = axes.plot(
            *zip(*trial.curve, strict=True),
            color=color[row.strategy],
            linewidth=2.6 if is_base else 1.5,
            linestyle=(0, (5, 2)) if is_base else "-",
            zorder=4 if is_base else 3,
        )
    axes.set_xlim(0, max((t.seconds for r in rows for t in r.cases.values()), default=1.0))
    axes.grid(axis="y", color="#e1e5ea")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return handles
