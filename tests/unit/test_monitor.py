"""The monitor: what the driver tells becomes readings and one line of status."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from synthetic_records import make_step

from ray_pipe.arms import summarize
from ray_pipe.metrics import ArmMeter
from ray_pipe.monitoring.monitor import Monitor
from ray_pipe.monitoring.readings import Reading
from ray_pipe.recovery import Failure


class Told:
    """A monitor whose listeners remember."""

    def __init__(self) -> None:
        self.readings: list[tuple[str, str, float]] = []
        self.lines: list[str] = []
        self.failures: list[Failure] = []
        self.monitor = Monitor(export=self.export, show=self.lines.append, failures=self.failures)

    def export(self, arm: str, readings: Iterable[Reading]) -> None:
        self.readings += [(arm, name, value) for name, value, _ in readings]


def test_a_run_is_told_from_its_beginning_to_its_end() -> None:
    told = Told()
    meter = ArmMeter("acsgd")
    died = Failure(kind="died", stage=1, step=7, cause="killed", arm="acsgd")
    told.monitor.on_arm("acsgd", 1, 3, 40, 0.5)
    records = make_step(step=6, start_s=0.0, loss=3.25)
    row = replace(meter.add(records), step_s=0.128)
    told.monitor.on_step(row, records)
    told.monitor.on_eval(3.0)
    told.failures.append(replace(died, resumed_from=6, source="box", recovery_s=1.5))
    told.monitor.on_failures()
    told.monitor.on_replay(row.sent, records)
    told.failures.append(died)
    told.monitor.on_failures()
    told.monitor.on_failures()
    told.monitor.on_arm_end(summarize(meter, final_window=1))

    assert told.lines == [
        "acsgd begins, arm 2 of 3",
        "acsgd 7/40, loss 3.2500, 8.00k tokens/s, arm 2 of 3",
        "acsgd: stage 1 died in step 7: killed; the run went on from step 6 after 1.5 s",
        "acsgd: stage 1 died in step 7: killed",
        "acsgd done, final loss 3.2500, arm 2 of 3",
    ]
    names = [name for _, name, _ in told.readings]
    assert {arm for arm, _, _ in told.readings} == {"acsgd"}
    assert names[:2] == ["pipe_planned_steps", "pipe_predicted_step_seconds"]
    assert ("acsgd", "pipe_loss", 3.25) in told.readings
    start = told.readings.index(("acsgd", "pipe_eval_loss", 3.0))
    again = [value for _, name, value in told.readings[start:] if name == "pipe_link_bytes_total"]
    assert sum(again) == row.nbytes
    assert [one for one in told.readings[start:] if one[1] != "pipe_link_bytes_total"] == [
        ("acsgd", "pipe_eval_loss", 3.0),
        ("acsgd", "pipe_failures_total", 1),
        ("acsgd", "pipe_recoveries_total", 1),
        ("acsgd", "pipe_recovery_seconds_total", 1.5),
        ("acsgd", "pipe_failures_total", 1),
        ("acsgd", "pipe_final_loss", 3.25),
    ]


def test_the_rate_of_a_click_model_is_in_samples() -> None:
    told = Told()
    records = make_step(step=6, start_s=0.0, loss=0.5)
    clicks = {"tau": 2, "staleness": {}}
    row = replace(ArmMeter("hybrid").add(records), step_s=0.128, embedding=clicks)
    told.monitor.on_arm("hybrid", 1, 2, 40, None)

    told.monitor.on_step(row, records)

    assert told.lines[-1] == "hybrid 7/40, loss 0.5000, 8.00k samples/s, arm 2 of 2"


def test_failures_from_before_a_resume_are_not_counted_once_more() -> None:
    exported: list[str] = []
    failures = [Failure(kind="died", stage=1, step=3, cause="killed", arm="fp32", recovery_s=2.0)]
    monitor = Monitor(
        export=lambda arm, readings: exported.extend(reading.name for reading in readings),
        failures=failures,
    )
    monitor.on_failures()
    assert exported == []

    failures.append(Failure(kind="driver", stage=-1, step=7, cause="killed", arm="fp32"))
    monitor.on_failures()

    assert exported == ["pipe_failures_total"]


def test_a_step_without_a_loss_is_told_without_one() -> None:
    told = Told()
    records = [replace(record, loss=None) for record in make_step(step=0, start_s=0.0)]
    told.monitor.on_arm("fp32", 0, 1, 4, None)
    told.monitor.on_step(replace(ArmMeter("fp32").add(records), step_s=0.0), records)
    told.monitor.on_eval(None)
    told.monitor.on_eval(float("nan"))

    assert told.lines[-1] == "fp32 1/4, arm 1 of 1"
    assert "pipe_eval_loss" not in {name for _, name, _ in told.readings}


def test_without_listeners_nothing_is_told() -> None:
    records = make_step(step=0, start_s=0.0)

    Monitor().on_step(ArmMeter("fp32").add(records), records)
