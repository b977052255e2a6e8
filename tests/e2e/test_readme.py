"""The README is true: its code runs, its links exist, its numbers are the benchmarks' own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    env |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=400
    )


def test_every_table_of_the_readme_is_what_the_benchmarks_wrote() -> None:
    result = run("benchmarks/readme.py", "--check", cwd=ROOT)

    assert result.returncode == 0, result.stdout + result.stderr


def test_every_file_the_readme_links_to_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for script in re.findall(r"python (benchmarks/\w+\.py)", text):
        assert (ROOT / script).exists(), script


@pytest.mark.ray
@pytest.mark.slow
def test_the_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)

    result = run(str(script), cwd=tmp_path)

    assert result.returncode == 0, result.stderr
    assert list(tmp_path.glob("runs/*/report.html"))


@pytest.mark.ray
@pytest.mark.slow
def test_the_shipped_example_runs(tmp_path: Path) -> None:
    result = run(str(ROOT / "examples" / "own_model.py"), cwd=tmp_path)

    assert result.returncode == 0, result.stderr
    assert re.search(r"loss [01]\.\d+, report in runs/", result.stdout)


def test_the_shipped_topology_is_valid() -> None:
    from netsim.topology import Topology

    topology = Topology.load(ROOT / "examples" / "links.yaml", 4)

    assert topology.rate_bps(1, 2) == 50e6
    assert topology.link(2, 1).latency_s == 0.04
    assert topology.rate_bps(0, 1) == 1e9
