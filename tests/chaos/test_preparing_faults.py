"""A stage is killed while the second arm is set up, measured, or about to be saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from killing import tiny_config

from ray_pipe import checkpoint, driver
from ray_pipe.trainer import Silent

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MOMENTS = {
    "set up": (driver, "make_pipeline"),
    "measured": (driver, "measure_costs"),
    "probed": (checkpoint.Saver, "_probe"),
}


def run(out: Path) -> dict[str, Any]:
    config = tiny_config(
        compare=["fp32", "acsgd"], name="run", out=str(out), **{"checkpoint.every": 5}
    )
    return driver.run(config, Silent()).results


@pytest.fixture(scope="module")
def right(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return losses(run(tmp_path_factory.mktemp("right")))


def losses(results: dict[str, Any]) -> list[list[Any]]:
    return [[loss for _, _, loss in arm["losses"]] for arm in results["arms"]]


@pytest.mark.parametrize(
    "moment",
    [
        "measured",
        pytest.param("set up", marks=pytest.mark.chaos),
        pytest.param("probed", marks=pytest.mark.chaos),
    ],
)
def test_a_stage_killed_while_the_second_arm_is_prepared_is_replaced(
    right: list[list[Any]], moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    holder, name = MOMENTS[moment]
    work = getattr(holder, name)
    calls: list[int] = []

    def strike(*args: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            os.kill(pids[1], signal.SIGKILL)
        return work(*args, **options)

    def note(self: Any, infos: list[dict[str, Any]]) -> None:
        pids[:] = [info["pid"] for info in infos]
        check(self, infos)

    check = driver.Pipeline.check_infos
    monkeypatch.setattr(driver.Pipeline, "check_infos", note)
    monkeypatch.setattr(holder, name, strike)
    results = run(tmp_path)

    assert losses(results) == right
    (failure,) = results["failures"]
    assert (failure["arm"], failure["kind"], failure["replaced"]) == ("acsgd", "died", [1])
    assert failure["resumed_from"] == -1
    assert len(calls) == 3  # once more for the new pipeline
