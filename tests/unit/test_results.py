"""What a run leaves in its folder when the folder will not take it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_pipe.errors import TrainingError
from ray_pipe.results import write_all
from ray_pipe.trainer import Silent


class Told(Silent):
    """Remembers warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(self: Path, *args: Any, **kwargs: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)


def test_results_are_there_as_a_whole(tmp_path: Path) -> None:
    write_all(tmp_path, {"name": "x"}, [], Silent())

    assert json.loads((tmp_path / "results.json").read_text()) == {"name": "x"}
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_full_disk_ends_a_good_run_by_name(tmp_path: Path, full: None) -> None:
    with pytest.raises(TrainingError, match=r"results.json could not be written: no space left"):
        write_all(tmp_path, {"name": "x"}, [], Told())

    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_hide_why_the_run_failed(tmp_path: Path, full: None) -> None:
    observer = Told()

    def run() -> None:
        try:
            raise TrainingError("stage 1 died")
        finally:
            write_all(tmp_path, {"name": "x"}, [], observer)

    with pytest.raises(TrainingError, match="stage 1 died"):
        run()

    (text,) = observer.warnings
    assert "results.json could not be written: no space left on device; free space" in text
