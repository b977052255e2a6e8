"""The comparison on Ray: what its records say, its pace, and one trial on real actors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ray_pipe.compare_sync import Plan, _parser
from ray_pipe.compare_sync_real import run_real, settings_of, trial_of
from ray_pipe.config import RunConfig
from ray_pipe.errors import ConfigError
from ray_pipe.replica_actors import ReplicaActors
from ray_pipe.replica_plans import sync_spec
from stages.record import StepRecord
from stages.sync.strategies import SyncSpec, options_of
from stages.sync.trial import Costs


def record(replica: int, step: int, start_s: float, end_s: float, loss: float | None) -> StepRecord:
    return StepRecord(
        stage=replica, replica=replica, step=step, loss=loss, num_tokens=8, start_s=start_s,
        end_s=end_s, seconds={}, sent={"0->1": {"replica": 100}}, codec={}, grad_norm=None,
    )  # fmt: skip


BOOK: dict[str, Any] = {
    "members": [{}, {}], "largest_gap": 3, "skipped": 1, "waited_s": {"gate": 4.0},
    "generator": {},
}  # fmt: skip


def test_times_are_those_of_the_median_replica_after_the_first_row() -> None:
    rows = [
        [record(0, 0, 0.0, 50.0, 9.0), record(1, 0, 0.0, 50.0, 9.0)],
        [record(0, 1, 100.0, 101.0, 4.0), record(1, 1, 100.0, 102.0, 2.0)],
        [record(0, 2, 101.0, 102.0, 3.0), record(1, 2, 102.0, 104.0, None)],  # skipped
    ]
    trial = trial_of(rows, BOOK, slow="1:4x")

    assert trial.iteration_s == pytest.approx((1.0 + 2.0) / 2)
    assert trial.curve == ((2.0, 3.0), (4.0, 3.0))
    assert trial.nbytes_per_iteration == pytest.approx(400 / 3)
    assert (trial.largest_gap, trial.num_skipped, trial.waited_s) == (3, 1, {"gate": 2.0})


def test_a_record_of_two_steps_of_a_fast_replica_counts_as_two() -> None:
    rows = [
        [record(0, 0, 0.0, 9.0, 9.0), record(1, 0, 0.0, 9.0, 9.0)],
        [replace(record(0, 1, 10.0, 12.0, 4.0), num_tokens=16)],
        [record(0, 2, 12.0, 13.0, 4.0), record(1, 2, 10.0, 14.0, 4.0)],
    ]
    trial = trial_of(rows, BOOK, slow="1:4x")

    assert trial.iteration_s == pytest.approx((1.0 + 4.0) / 2)
    assert trial.nbytes_per_iteration == pytest.approx(300 / 4)


@pytest.mark.parametrize("words", [[], ["--codec", "directq", "--bits", "8"]])
def test_on_ray_a_strategy_has_the_settings_of_its_name(words: list[str]) -> None:
    plan = Plan.of(_parser().parse_args(["--replicas", "4", *words]))

    for name, sync in plan.strategies.items():
        settings = settings_of(sync, slow="2:4x", steps=24, costs=Costs(), seed=0)
        config = RunConfig.from_dict(settings)
        config.validate()
        found = sync_spec(config, "fp32", num_steps=24)

        options = [*options_of(sync.name, sync.groups), "name"]
        assert {o: getattr(found, o) for o in options} == {o: getattr(sync, o) for o in options}
        assert found.payload.name == sync.payload.name, name
        assert found.payload.bits == sync.payload.bits, name
    assert "directq" in plan.strategies["quantized-adam"].payload.name


@pytest.mark.parametrize("flag", ["--step", "--model-size"])
def test_what_ray_cannot_do_is_refused(flag: str) -> None:
    value = {"--step": "2s", "--model-size": "2MB"}[flag]
    with pytest.raises(ConfigError, match="run the two apart"):
        Plan.of(_parser().parse_args(["--real", flag, value]))


@pytest.fixture(scope="module")
def four(cluster: None) -> Iterator[ReplicaActors]:
    with ReplicaActors(4, 1, label="compare") as actors:
        yield actors


@pytest.mark.ray
@pytest.mark.slow
def test_a_trial_on_ray(four: ReplicaActors) -> None:
    skip = SyncSpec(name="hop", backup_workers=1, skip=8, max_gap=8)
    trial = run_real(four, skip, slow="2:4x", steps=10, costs=Costs(latency_s=0.001))

    assert trial.num_replicas == 4
    assert trial.num_skipped > 0
    assert 0 < trial.iteration_s < trial.slowest_iteration_s
    assert trial.final_loss is not None
    assert trial.final_loss < trial.curve[0][1]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ripples", "hop"])
def test_a_trial_goes_on_until_the_time_is_over(four: ReplicaActors, name: str) -> None:
    costs = Costs(latency_s=0.001)
    sync = SyncSpec(name=name, group_size=2)
    trial = run_real(four, sync, slow="", steps=3, costs=costs, seconds=2.0)

    assert 2.0 <= trial.seconds < 2.0 + 10 * trial.iteration_s
    assert len(trial.curve) > 3
