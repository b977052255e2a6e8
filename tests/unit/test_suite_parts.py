"""Every test is in one part of the suite, and `make test` fails if any part does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_parts
from suite_parts import PARTS, SECOND, spread

TESTS = Path(__file__).resolve().parents[1]
FILES = {
    "conftest.py": """
import pytest
from suite_parts import PARTS, check_marks, keep_few_cases_quick, may_hold, parts_of

def pytest_addoption(parser):
    parser.addoption("--part", choices=PARTS)

def pytest_ignore_collect(collection_path, config):
    part = config.getoption("--part")
    if part and collection_path.match("test_*.py") and not may_hold(collection_path, part):
        return True

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    keep_few_cases_quick(items)
    check_marks(items)
    part = config.getoption("--part")
    parts = parts_of(items)
    items[:] = [item for item in items if part in (None, parts[item])]

@pytest.fixture
def cluster():
    pass
""",
    "test_shared.py": """
import pytest
pytestmark = pytest.mark.ray

def test_with_the_cluster(cluster): pass
def test_beside_it(): pass
""",
    "test_own.py": """
import pytest

@pytest.mark.ray
def test_a_command(): assert COMMAND
def test_no_ray(): assert PLAIN
""",
    "test_many.py": """
import pytest

@pytest.mark.quick(3)
@pytest.mark.parametrize("case", range(9))
def test_cases(case): pass
""",
    "e2e/test_quality.py": "def test_trains(): pass\n",
    "test_replicas.py": """
import pytest

@pytest.mark.ray
def test_of_the_second_half(cluster): pass
def test_of_the_first_half_of_the_rest(): pass
""",
    "test_monitoring.py": """
import pytest

@pytest.mark.ray
def test_watches(): pass
""",
    "test_row_stress.py": "def test_rows(): pass\n",
    "pytest.ini": "[pytest]\nmarkers =\n  ray: r\n  slow: s\n  quick(n): q\n",
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small suite with a test in each part."""
    (tmp_path / "e2e").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("COMMAND", "True").replace("PLAIN", "True"))
    return tmp_path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": "-p no:hypothesispytest"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True
    )


def names(folder: Path, *words: str) -> list[str]:
    done = python(folder, "-m", "pytest", "--collect-only", "-q", *words)
    return [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]


def break_test(suite: Path, which: str) -> None:
    text = FILES["test_own.py"].replace(which, "False")
    (suite / "test_own.py").write_text(text.replace("COMMAND", "True").replace("PLAIN", "True"))


@pytest.mark.slow
def test_every_test_is_in_exactly_one_part(suite: Path) -> None:
    found = {part: names(suite, "--part", part) for part in PARTS}

    assert found["cluster"] == ["test_with_the_cluster", "test_beside_it"]
    assert found["cluster-2"] == ["test_of_the_second_half"]
    assert found["commands"] == ["test_a_command"]
    assert found["commands-2"] == ["test_watches"]
    assert found["rest-2"] == ["test_rows"]
    assert found["training"] == ["test_trains"]
    assert sorted(name for part in found.values() for name in part) == sorted(names(suite))


def test_a_test_that_a_part_would_overlook_is_refused(suite: Path) -> None:
    """Parts with Ray read only the files that have its mark in them."""
    (suite / "test_hidden.py").write_text(
        "import pytest\npytestmark = getattr(pytest.mark, 'ray')\ndef test_hidden(): pass\n"
    )

    done = python(suite, "-m", "pytest", "--collect-only", "-q", "--part", "rest")

    assert done.returncode != 0
    assert "test_hidden is for Ray, but its file has no mark.ray" in done.stdout + done.stderr


def test_the_second_halves_are_files_that_are_there() -> None:
    known = {path.stem for path in TESTS.rglob("test_*.py")}

    assert {name for names in SECOND.values() for name in names} <= known
    assert {*SECOND} == {part.removesuffix("-2") for part in PARTS if part.endswith("-2")}


def test_of_many_cases_a_few_are_quick_and_none_is_lost(suite: Path) -> None:
    quick = names(suite, "-m", "not slow", "test_many.py")

    assert quick == ["test_cases[0]", "test_cases[4]", "test_cases[8]"]
    assert len(names(suite, "test_many.py")) == 9


@pytest.mark.parametrize(
    ("cases", "quick", "kept"),
    [(5, 1, [0]), (5, 2, [0, 4]), (30, 4, [0, 9, 19, 29]), (3, 7, [0, 1, 2])],
)
def test_quick_cases_are_spread_over_all(cases: int, quick: int, kept: list[int]) -> None:
    assert list(spread(cases, quick)) == kept


@pytest.mark.slow
def test_all_parts_that_pass_are_a_suite_that_passes(suite: Path) -> None:
    done = python(suite, str(TESTS / "run_parts.py"))

    assert done.returncode == 0, done.stdout + done.stderr
    closing = done.stdout.rstrip().splitlines()[-len(PARTS) :]
    assert {line.split()[1].rstrip(":") for line in closing} == {*PARTS}
    assert all(line.startswith("=== ") and " passed in " in line for line in closing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "part", "name"),
    [("COMMAND", "commands", "test_a_command"), ("PLAIN", "rest", "test_no_ray")],
)
def test_a_part_that_fails_fails_the_suite_and_is_remembered(
    suite: Path, which: str, part: str, name: str
) -> None:
    break_test(suite, which)

    done = python(suite, str(TESTS / "run_parts.py"))

    assert done.returncode == 1
    assert f"=== {part}: status 1" in done.stdout
    assert json.loads((suite / ".pytest_cache/v/cache/lastfailed").read_text()) == {
        f"test_own.py::{name}": True
    }
    assert names(suite, "--last-failed") == [name]


@pytest.mark.slow
def test_a_suite_of_which_nothing_was_run_does_not_pass(suite: Path) -> None:
    done = python(suite, str(TESTS / "run_parts.py"), "--", "-k", "nobody")

    assert done.returncode == 1
    assert done.stdout.count("status 5") == len(PARTS)


def test_a_part_that_could_not_be_started_fails_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_parts.Ended("one", 0, 1.0, tmp_path / "one.log")
    done.log.write_text("= 1 passed =")
    monkeypatch.setattr(run_parts, "run_all", lambda *_: [done])

    assert run_parts.main(["one"], [], 1) == 0
    assert run_parts.main(["one", "other"], [], 1) == 1
