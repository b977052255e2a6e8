"""Hands readings to Ray, whose agent on this node shows them to Prometheus.

Ray keeps counters in the driver's process and sends them every few seconds, and a last time when
the driver leaves. One reading costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.util import metrics as ray_metrics

from ray_pipe.monitoring.catalogue import BY_NAME
from ray_pipe.monitoring.readings import Reading


class RayExporter:
    """The metrics of one run. Safe to make again in the same process: Ray joins equal names."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._metrics: dict[str, Any] = {}
        self._tags: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, str]] = {}

    def export(self, arm: str, readings: Iterable[Reading]) -> None:
        """Add to counters, set gauges. Before `ray.init` this would go nowhere."""
        for name, value, labels in readings:
            key = (arm, labels)
            tags = self._tags.get(key)
            if tags is None:
                tags = self._tags[key] = {"run": self._run, "arm": arm, **dict(labels)}
            metric = self._metrics.get(name) or self._make(name)
            if BY_NAME[name].kind == "counter":
                metric.inc(value, tags)
            else:
                metric.set(value, tags)

    def _make(self, name: str) -> Any:
        spec = BY_NAME[name]
        kind = ray_metrics.Counter if spec.kind == "counter" else ray_metrics.Gauge
        metric: Any = kind(name, description=spec.help, tag_keys=spec.all_labels)
        self._metrics[name] = metric
        return metric
