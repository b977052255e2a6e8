"""The command that compares sync strategies: table, picture, JSON, and what it refuses."""

from __future__ import annotations

import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_pipe.compare_sync import DONE, REFUSED, STRATEGIES, main
from stages.sync.strategies import STRATEGIES as KNOWN

FEW = ["--replicas", "4", "--seconds", "20s", "--only", "ripples, pairs;hop, skip 8"]


def compared(tmp_path: Path, *words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    status = main([*words, "--out", str(tmp_path / "here")], out=out, err=err)
    return status, out.getvalue(), err.getvalue()


def test_every_strategy_is_compared() -> None:
    assert {options["name"] for options in STRATEGIES.values()} == {*KNOWN}


@pytest.mark.slow
def test_it_shows_a_table_and_leaves_a_picture_and_the_numbers(tmp_path: Path) -> None:
    status, shown, told = compared(tmp_path, *FEW)
    found = json.loads((tmp_path / "here" / "compare_sync.json").read_text())

    assert status == DONE
    assert "ripples, pairs" in shown
    assert "2x with a slow worker" in shown  # the published anchor
    assert "[6/6] hop, skip 8, 4 replicas, 2:4x:" in told
    assert (tmp_path / "here" / "compare_sync.png").read_bytes().startswith(b"\x89PNG")
    assert [row["strategy"] for row in found["rows"]] == [
        "all-reduce", "ripples, pairs", "hop, skip 8",
    ]  # fmt: skip
    fast = found["rows"][2]["speedups"]["2:4x"]
    assert fast["iteration"] > 2.5
    assert fast["sooner"] > 2


@pytest.mark.slow
def test_many_replicas_are_told_that_waiting_takes_its_time_to_spread(tmp_path: Path) -> None:
    said = "may not hold up the median one yet"
    many = ["--replicas", "80", "--seconds", "10s", "--only", "hop"]

    assert said in " ".join(compared(tmp_path, *many)[1].split())
    assert said not in " ".join(compared(tmp_path, *FEW)[1].split())


@pytest.mark.slow
def test_json_alone_goes_to_the_output(tmp_path: Path) -> None:
    _, shown, _ = compared(tmp_path, *FEW, "--json", "--codec", "directq", "--bits", "8")

    assert json.loads(shown)["slow"] == "2:4x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "3"], "give numbers from 4"),
        (["--replicas", "many"], "'many' is not understood: give numbers joined by commas"),
        (["--slow", "4x"], "slow '4x' is not understood: expected '2:4x'"),
        (["--slow", "40:4x"], "there is no replica 40, with 16 replicas they are 0 to 15"),
        (["--only", "riples"], "did you mean 'ripples'?"),
        (["--bandwidth", "80"], "bandwidth '80'"),
        (["--seconds", "5s"], "less than ten steps of 1s: nothing would be seen; give 10s"),
        (["--codec", "zip"], "zip"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    tmp_path: Path, words: list[str], message: str
) -> None:
    status, shown, told = compared(tmp_path, *words)

    assert status == REFUSED
    assert shown == ""
    assert told.startswith("error: ")
    assert message in told
    assert not (tmp_path / "here").exists()


def test_the_hyphen_is_understood_too(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["compare-sync", "--replicas", "3"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("ray_pipe.compare-sync", run_name="__main__")

    assert end.value.code == REFUSED
    assert "give numbers from 4" in capsys.readouterr().err


@pytest.mark.slow
def test_trials_that_are_done_are_not_run_again(tmp_path: Path) -> None:
    few = ["--replicas", "4", "--seconds", "10s", "--only", "ripples, pairs", "--json"]
    _, first, _ = compared(tmp_path, *few)
    kept = (tmp_path / "here" / "trials.jsonl").read_text()
    assert len(kept.splitlines()) == 4  # all-reduce comes with them
    marked = kept.replace('"largest_gap": 1,', '"largest_gap": 7777,')
    (tmp_path / "here" / "trials.jsonl").write_text(marked)

    _, again, _ = compared(tmp_path, *few, "--resume")
    _, other, _ = compared(tmp_path, *few, "--resume", "--seed", "1")
    _, anew, _ = compared(tmp_path, *few)

    assert "7777" in again
    assert "7777" not in other
    assert anew == first


@pytest.mark.slow
def test_a_slow_link_is_a_straggler_too(tmp_path: Path) -> None:
    status, shown, told = compared(tmp_path, *FEW, "--slow-link", "2:10x")

    assert status == DONE
    assert "link 2:10x" in shown
    assert "[6/6] hop, skip 8, 4 replicas, link 2:10x:" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slow-link", "9:4x"], "there is no replica 9"),
        (["--slow-link", "2:10x", "--replicas", "128"], "give --replicas 64 or fewer"),
        (["--slow-link", "2:10x", "--real"], "ray_pipe.run --topology"),
    ],
)
def test_a_slow_link_that_cannot_be_is_refused(
    tmp_path: Path, words: list[str], message: str
) -> None:
    status, _, told = compared(tmp_path, *FEW, *words)

    assert status == REFUSED
    assert message in told
