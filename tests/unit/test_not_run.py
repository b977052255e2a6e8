"""What CI leaves out is said aloud, with the command that runs it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"NOT RUN: [^:]+: \S.*")


def lines(path: str) -> list[str]:
    done = subprocess.run(
        ["/bin/bash", ROOT / ".ci" / "not_run"],
        capture_output=True, text=True, check=True, env={"PATH": path},
    )  # fmt: skip
    return done.stdout.splitlines()


def test_each_suite_that_ci_leaves_out_has_its_line(tmp_path: Path) -> None:
    said = lines(str(tmp_path))

    assert all(LINE.fullmatch(line) for line in said), said
    commands = [line.split(": ", 2)[2] for line in said]
    assert commands[:3] == ["make test-cluster RIG='cluster and quiet'", "make test-chaos",
                            "make soak"]  # fmt: skip
    assert "tests/e2e/test_monitoring.py" in commands[3]


def test_with_a_browser_the_dashboards_pages_are_run(tmp_path: Path) -> None:
    browser = tmp_path / "chromium"
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)

    assert not any("chromium" in line for line in lines(str(tmp_path)))


def test_ci_says_so_at_its_end() -> None:
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith(".ci/not_run >&2")


def test_the_marks_that_ci_leaves_out_are_among_those_lines(tmp_path: Path) -> None:
    """A new mark that is left out by default needs its line, too."""
    left_out = re.findall(r"not (\w+)", (ROOT / ".ci" / "run").read_text())
    said = "\n".join(lines(str(tmp_path)))

    assert left_out == ["quiet"]
    assert "marker quiet" in said
