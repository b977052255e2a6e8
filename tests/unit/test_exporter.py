"""The exporter on a real Ray: every metric is taken, and a step costs next to nothing."""

from __future__ import annotations

import time

import pytest
from synthetic_records import make_arm

from ray_pipe.metrics import ArmMeter
from ray_pipe.monitoring.catalogue import METRICS
from ray_pipe.monitoring.exporter import RayExporter
from ray_pipe.monitoring.monitor import Monitor
from ray_pipe.monitoring.readings import Reading

pytestmark = pytest.mark.ray

DEFAULT_STEP_S = 1.3
"""A step of `python -m ray_pipe.run` on two cores (README, table of speeds)."""


def test_every_metric_of_the_catalogue_can_be_exported_twice_in_a_process(cluster: None) -> None:
    readings = [
        Reading(metric.name, 1.5, tuple((label, "x") for label in metric.labels))
        for metric in METRICS
    ]

    RayExporter("once").export("fp32", readings)
    RayExporter("again").export("fp32", readings)


def test_a_label_that_is_missing_is_refused(cluster: None) -> None:
    with pytest.raises(ValueError, match="link"):
        RayExporter("odd").export("fp32", [Reading("pipe_fp32_bytes_total", 1.0)])


def test_telling_ray_of_a_step_costs_less_than_a_hundredth_of_it(cluster: None) -> None:
    steps = make_arm("acsgd", num_steps=200, num_stages=4, num_micro_batches=4)
    meter = ArmMeter("acsgd")
    rows = [(meter.add(records), records) for records in steps]
    monitor = Monitor(export=RayExporter("cost").export, show=lambda text: None)
    monitor.on_arm("acsgd", 0, 1, len(rows), 1.0)

    start = time.thread_time()
    for row, records in rows:
        monitor.on_step(row, records)
    cost_s = (time.thread_time() - start) / len(rows)

    assert cost_s < DEFAULT_STEP_S / 100
