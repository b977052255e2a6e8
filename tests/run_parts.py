"""`make test`: the parts of the suite, three at a time, until none is left.

Every part is a pytest of its own. The first one is shown as it runs, the others behind it; the
closing line of each is repeated at the end. Exit status 0 only if every part ended with 0.
`pytest --last-failed` afterwards knows what failed in any of them.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(".pytest_cache")
FAILED = Path("v/cache/lastfailed")
WORKERS = 3
"""Of two cores, because most parts wait half of their time: for processes, links and deadlines."""

NOTHING_RUN = 5
"""pytest's status where a selection leaves nothing of a part: no fault of that part."""


@dataclass(frozen=True, slots=True)
class Ended:
    part: str
    status: int
    took_s: float
    log: Path


def cache_of(part: str) -> Path:
    return CACHE / "parts" / part


def run_part(part: str, words: list[str], log: Path, *, show: bool) -> Ended:
    """One pytest. Parts write their failures side by side, not over each other."""
    command = [
        *(sys.executable, "-m", "pytest", "--part", part, "-o", f"cache_dir={cache_of(part)}"),
        *words,
    ]
    begun = time.monotonic()
    with (
        log.open("wb") as kept,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
    ):
        assert process.stdout is not None
        while some := os.read(process.stdout.fileno(), 1 << 16):
            kept.write(some)
            if show:
                sys.stdout.buffer.write(some)
                sys.stdout.buffer.flush()
    return Ended(part, process.returncode, time.monotonic() - begun, log)


def run_all(parts: list[str], words: list[str], folder: Path, workers: int) -> list[Ended]:
    """Each worker takes the next part as soon as it is free: nobody idles while one is left."""
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for part in parts:
        left.put(part)
    ended: list[Ended] = []

    def work() -> None:
        while True:
            try:
                part = left.get_nowait()
            except queue.Empty:
                return
            log = folder / f"{part}.log"
            ended.append(run_part(part, words, log, show=part == parts[0]))

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def join_failures(parts: list[str]) -> None:
    """For `pytest --last-failed`, which reads one file."""
    failed: dict[str, bool] = {}
    for part in parts:
        path = cache_of(part) / FAILED
        if path.exists():
            failed |= json.loads(path.read_text())
    joined = CACHE / FAILED
    joined.parent.mkdir(parents=True, exist_ok=True)
    joined.write_text(json.dumps(failed, indent=2))


def closing_line(log: Path) -> str:
    lines = log.read_text(errors="replace").rstrip().splitlines()
    return lines[-1].strip("= ") if lines else "it said nothing"


def main(parts: list[str], words: list[str], workers: int) -> int:
    folder = Path("build")
    folder.mkdir(exist_ok=True)
    say(f"parts of the suite, {workers} at a time: {', '.join(parts)}; {parts[0]} is shown now")
    ended = run_all(parts, words, folder, workers)
    join_failures(parts)
    for one in ended:
        if one.part != parts[0]:
            say(f"\n--- {one.part} ---\n{one.log.read_text(errors='replace').rstrip()}")
    for one in ended:
        closing = closing_line(one.log)
        say(f"=== {one.part}: status {one.status}, {one.took_s:.0f} s: {closing} ===")
    for part in sorted(set(parts) - {one.part for one in ended}):
        say(f"=== {part}: it could not be run, see above ===")
    statuses = [one.status for one in ended]
    is_whole = len(ended) == len(parts)
    return 0 if is_whole and set(statuses) <= {0, NOTHING_RUN} and 0 in statuses else 1


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    from suite_parts import PARTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("words", nargs="*", help="for pytest; after --")
    own = parser.parse_args()
    sys.exit(main(list(PARTS), own.words, own.workers))
