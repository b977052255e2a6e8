"""The row store under threads: three of them, yields at protocol points, every rule broken in turn.

Compiles native/rows/stress.cpp, whose histories are checked against a replay in stamp order. The
numbers are those of the specification's list, section 9.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).resolve().parents[2] / "native" / "rows" / "stress.cpp"
OK, VIOLATED, ENDLESS = 0, 1, 3


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler: the stress program cannot be built (set CXX)")
    program = tmp_path_factory.mktemp("stress") / "stress"
    subprocess.run(
        [
            *(compiler, "-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Wextra"),
            *("-DRAY_PIPE_ROWS_TESTING", str(SOURCE), "-o", str(program)),
        ],
        check=True,
    )
    return program


def run(program: Path, test: str, mutant: str = "none", seconds: float = 1.0) -> tuple[int, str]:
    limit = 120.0 if mutant == "none" else 10.0  # some mutants hang: that is how they are seen
    done = subprocess.run(
        [
            *(str(program), "--seconds", str(seconds), "--limit", str(limit)),
            *("--mutant", mutant, test),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "test",
    [
        "history_sequential",  # 1, 3-6, 10, 11, on each path of reading
        "history_step",
        "history_group",
        "history_mixed",
        "history_crowded",  # slots are fought for and reused
        "lost_update",  # 1, 6
        "hot_keys",  # 16
        "torn_snapshot",  # 2, 7, 8
        "overflow",  # 9
        "full",  # 12
        "reused_slot",
        "equal_tags",
        "slow_insert",  # 1, 5
        "churn",  # 13
        "growth",  # 14
        "bad_alloc",  # 17
        "training",  # recency, pruning and slabs beside training
        "full_and_held",  # a full LRU table, and snapshots that pin what it evicts
        "evicted_in_vain",
        "same_beginning",  # 19: rows depend on (seed, table, key) only
        "cells",  # 19 (embeddings 25): alive + free = total, over a million rows
    ],
)
def test_the_store_keeps_its_promises_under_threads(stress: Path, test: str) -> None:
    code, said = run(stress, test)

    assert code == OK, said


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        ("head_recorded", "history_step"),
        ("stamp_after_validation", "history_sequential"),
        ("unordered_publication", "torn_snapshot"),
        ("lane_deregisters", "history_step"),
        ("no_read_validation", "history_group"),
        ("no_first_committer", "lost_update"),
        ("only_last_committer", "lost_update"),
        ("plain_unlock", "full"),
        ("insert_keeps_header", "history_step"),
        ("locked_header_counts", "slow_insert"),
        ("late_registration", "history_sequential"),
        ("no_reservation", "full"),
        ("no_probe_bound", "full"),
        ("reused_slot_unchecked", "reused_slot"),
        ("failed_unpublished", "history_group"),
        ("first_candidate_only", "equal_tags"),
        ("lane_local_init", "same_beginning"),
        ("cell_freed_twice", "cells"),
        ("cell_forgotten", "cells"),
        ("snapshot_before_rows", "full_and_held"),
        ("popped_before_commit", "evicted_in_vain"),
    ],
)
def test_mutant_a_broken_rule_of_the_protocol_is_seen(stress: Path, mutant: str, test: str) -> None:
    for _ in range(5):  # threads decide; once is enough
        code, _said = run(stress, test, mutant, seconds=4.0)
        if code != OK:
            break

    assert code != OK, f"{mutant} survived {test}"


def test_without_read_validation_first_committer_still_prevents_lost_updates(stress: Path) -> None:
    code, said = run(stress, "lost_update", "no_read_validation")

    assert code == OK, said


def assembly_of(program: str, folder: Path) -> str:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler (set CXX)")
    source, made = folder / "asks.cpp", folder / "asks.s"
    source.write_text(program)
    command = [compiler, "-std=c++20", "-O2", "-S", f"-I{SOURCE.parent}", str(source), "-o"]
    subprocess.run([*command, str(made)], check=True)
    return made.read_text()


ASKS = """
#include "base.hpp"
void ask(const void* const* rows, size_t n) {
  const auto one = [&](size_t i) { if (rows[i]) ray_pipe::rows::prefetch_lines(rows[i], 160); };
  for (size_t i = 0; i < 4; ++i) one(i);
  for (size_t i = 4; i < n; ++i) one(i);
}
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads its assembly")
def test_the_compiler_keeps_a_prefetch_that_it_does_not_inline_at_once(tmp_path: Path) -> None:
    made = assembly_of(ASKS, tmp_path)

    assert "prefetcht0" in made  # without the empty statement g++ 12 leaves none
