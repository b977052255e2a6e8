"""What the Python entry point tells its user, without a cluster: the driver is a fake."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_pipe import CodecConfig, PipelineConfig, PipelineTrainer, RunConfig, trainer
from ray_pipe.driver import Outcome
from ray_pipe.errors import DataError
from ray_pipe.progress import Observer
from ray_pipe.trainer import Silent

ITEMS = [(torch.ones(4), torch.ones(4))] * 8


class Listener(Silent):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


class Stopped(Exception):
    """What the fake driver raises: nothing is trained here."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Observer], None]], None]:
    """Replaces the driver by a function of its observer, which then stops."""

    def install(act: Callable[[Observer], None]) -> None:
        def run(config: Any, observer: Observer, workload: Any, *, want_states: bool) -> Outcome:
            act(observer)
            raise Stopped

        monkeypatch.setattr(trainer, "run", run)

    return install


def warnings_of(blocks: Any, tmp_path: Path, **config: Any) -> list[str]:
    listener = Listener()
    settings = {"codec": CodecConfig(name="acsgd"), "compare": (), **config}
    run = RunConfig(
        out=str(tmp_path),
        pipeline=PipelineConfig(stages=2, micro_batches=2, micro_batch_size=2),
        **settings,
    )
    fit = PipelineTrainer(
        blocks, loss=nn.functional.mse_loss, dataset=ITEMS, config=run, progress=listener
    ).fit
    with pytest.raises(Stopped):
        fit()
    return listener.warnings


def with_dropout() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))]


@pytest.mark.parametrize("blocks", [with_dropout(), with_dropout], ids=["modules", "function"])
def test_fresh_dropout_masks_are_warned_of_however_the_model_is_given(
    driver: Any, tmp_path: Path, blocks: Any
) -> None:
    driver(lambda observer: None)

    (text,) = warnings_of(blocks, tmp_path)

    assert "blocks 1.1 draw a fresh dropout mask on each visit, which acsgd must send" in text
    assert "ray_pipe.SampleDropout, whose mask belongs" in text


def test_the_warning_comes_with_a_comparison_that_has_memory_in_any_arm(
    driver: Any, tmp_path: Path
) -> None:
    driver(lambda observer: None)
    arms = {"compare": ("fp32", "acsgd+zstd"), "codec": CodecConfig()}

    (text,) = warnings_of(with_dropout, tmp_path, **arms)

    assert "which acsgd+zstd must send" in text


def test_without_memory_or_without_dropout_nothing_is_said(driver: Any, tmp_path: Path) -> None:
    driver(lambda observer: None)

    assert warnings_of(with_dropout, tmp_path, codec=CodecConfig(name="directq")) == []
    assert warnings_of(lambda: [nn.Linear(4, 4), nn.Dropout(0.0)], tmp_path) == []


@dataclasses.dataclass
class FailureConfig:
    """As in Ray Train, which makes one itself where none was given."""

    max_failures: int = 0


@dataclasses.dataclass
class TrainRunConfig:
    """As in Ray Train."""

    failure_config: Any = dataclasses.field(default_factory=FailureConfig)


@pytest.mark.parametrize(("asked", "got"), [(0, 3), (1, 1), (-1, -1), (None, 3)])
def test_ray_trains_failure_config_is_heard_unless_it_is_ray_trains_own_default(
    asked: int | None, got: int
) -> None:
    run_config = TrainRunConfig(None if asked is None else FailureConfig(asked))

    config = PipelineTrainer(config=RunConfig(), run_config=run_config).config

    assert config.faults.max_failures == got


def test_a_failure_config_of_one_s_own_kind_is_heard_whatever_it_says() -> None:
    run_config = TrainRunConfig(SimpleNamespace(max_failures=0))

    assert (
        PipelineTrainer(config=RunConfig(), run_config=run_config).config.faults.max_failures == 0
    )


def test_stages_by_scaling_config_leave_a_made_up_name_made_up(tmp_path: Path) -> None:
    trainer = PipelineTrainer(
        config=RunConfig(out=str(tmp_path)), scaling_config=SimpleNamespace(num_workers=2)
    )

    first, second = trainer.config.make_folder(), trainer.config.make_folder()

    assert trainer.config.pipeline.stages == 2
    assert second.name == f"{first.name}-2"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_bars_move_while_it_trains_and_the_cursor_comes_back(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    during: list[str] = []

    def act(observer: Observer) -> None:
        observer.on_phase("starting Ray")
        during.append(stream.getvalue())

    driver(act)
    run = RunConfig(compare=(), out=str(tmp_path), pipeline=PipelineConfig(stages=2))
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    fit = PipelineTrainer(blocks, loss=nn.functional.mse_loss, dataset=ITEMS, config=run).fit
    with pytest.raises(Stopped):
        fit()

    assert "\x1b[?25l" in during[0]  # the live display had begun: it hides the cursor
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")


class Stream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that knows its length, as torch allows."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(ITEMS)


def test_a_stream_with_a_length_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(DataError, match="Stream has no length or index; AC-SGD needs a map-style"):
        PipelineTrainer(with_dropout(), loss=nn.functional.mse_loss, dataset=Stream())
