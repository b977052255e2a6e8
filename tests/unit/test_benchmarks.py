"""What the benchmarks compute from what they measured, and that all of them are accounted for."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark by name, and leaves neither its path nor its settings behind."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_rows_that_are_kept_keep_what_they_were_measured_with(script: Any) -> None:
    older = {
        "paper_ratio": 4.9,
        "rates": [
            {"row": "paper", "commit": "old", "load_at_start": 1.0},
            {"row": "100Mbps", "commit": "old", "load_at_start": 1.0},
            {"row": "10Mbps", "commit": "older", "load_at_start": 9.0},
        ],
    }
    new = {"row": "100Mbps", "commit": "new", "load_at_start": 0.1}

    found = script("speed").keep(older, [new])

    assert [(e["row"], e["commit"], e["load_at_start"]) for e in found] == [
        ("paper", "old", 1.0),
        ("10Mbps", "older", 9.0),
        ("100Mbps", "new", 0.1),
    ]


def test_the_codecs_share_is_of_all_cpu_time_measured_in_the_run(script: Any) -> None:
    cpu = {"process": 2.0, "encode": 0.03, "decode": 0.01, "forward": 0.5}

    assert script("speed").codec_share({"cpu_per_step_s": cpu}) == pytest.approx(0.02)


def test_the_limit_is_what_nothing_but_compute_would_take(script: Any) -> None:
    arm = {"step_s": 3.0, "compute_step_s": 0.5, "link_to_compute": 4.94}

    assert script("bench").physics(arm) == ["4.9", "6.00x"]


def test_every_benchmark_is_run_or_left_out_for_a_reason(script: Any) -> None:
    run_all = script("run_all")
    parts = {"bench", "readme", "run_all", "quality_tables", "row_tables", "sync_tables"}
    run = {words[0].removesuffix(".py") for words in run_all.RUNS.values()} - {"-m"}
    left = {name.split(" ")[0] for name in run_all.LEFT_OUT}

    assert {path.stem for path in FOLDER.glob("*.py")} == run | parts | (left - {"compare_sync"})


def test_every_benchmark_that_the_readme_quotes_is_run(script: Any) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = set(re.findall(r"\b(\w+)\.py\b", text)) & {path.stem for path in FOLDER.glob("*.py")}

    runs = script("run_all")
    assert quoted - {"real_network"} <= runs.RUNS.keys()  # needs root
    assert "root" in runs.LEFT_OUT["real_network"]
    assert len(quoted) > 8


def test_kernels_below_the_goal_are_told_with_what_memory_allows(script: Any) -> None:
    rows = [
        {"limit": None, "ratio_to_twin": 12.0},
        {"limit": 11.0, "ratio_to_twin": 9.5},
        {"limit": 7.9, "ratio_to_twin": 7.3},
        {"limit": 5.4, "ratio_to_twin": 5.1},
    ]
    line = script("readme").kernels_line

    assert line({"rows": rows, "target_ratio": 8.0}) == (
        "encode 12.0x to 12.0x, decode 9.5x to 9.5x; 2 of 4 below the goal, 5.1x to 7.3x: "
        "nothing but their reads and writes would be 5.4x to 7.9x"
    )
    assert line({"rows": rows[:2], "target_ratio": 8.0}) == (
        "encode 12.0x to 12.0x, decode 9.5x to 9.5x"
    )
