"""The files that Prometheus and Grafana read, made from the catalogue and the panels.

The folder `files` beside this module holds what `make_files()` gives; a test compares them.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from ray_pipe.monitoring.catalogue import BY_NAME
from ray_pipe.monitoring.panels import ROWS, VARIABLES, Panel

RAY_DIR = "/tmp/ray"
SEEN_AS = "/etc/ray_pipe/monitoring"
PROMETHEUS_URL = "http://localhost:9090"
SCRAPE_S = 10

COLUMNS = 24
PANEL_HEIGHT = 8

PROMETHEUS = """\
# Prometheus for a Ray cluster. Made by `python -m ray_pipe.monitoring`.
# Ray's head node keeps the list of all nodes in the file below; run Prometheus there.
global:
  scrape_interval: {scrape_s}s
  evaluation_interval: {scrape_s}s

scrape_configs:
  - job_name: ray
    file_sd_configs:
      - files: [{discovery}]
        refresh_interval: {scrape_s}s
"""

DATASOURCE = """\
# Where Grafana finds Prometheus. Made by `python -m ray_pipe.monitoring`.
apiVersion: 1

datasources:
  - name: ray_pipe
    uid: ray_pipe
    type: prometheus
    access: proxy
    url: {prometheus}
    jsonData:
      timeInterval: {scrape_s}s
"""

PROVIDER = """\
# Which dashboards Grafana loads. Made by `python -m ray_pipe.monitoring`.
apiVersion: 1

providers:
  - name: ray_pipe
    folder: ray_pipe
    type: file
    options:
      path: {dashboards}
"""

GRAFANA = """\
; For a Grafana of one's own: grafana-server --config this-file --homepath <Grafana's folder>
; Anonymous viewers and embedding are what the Metrics tab of Ray's dashboard needs.
[paths]
provisioning = {provisioning}

[security]
allow_embedding = true

[auth.anonymous]
enabled = true
org_role = Viewer
"""


def make_files(
    *,
    seen_as: str = SEEN_AS,
    ray_dir: str = RAY_DIR,
    prometheus: str = PROMETHEUS_URL,
) -> dict[str, str]:
    """Path below the folder -> text.

    `seen_as` is where Prometheus and Grafana will find the folder, `ray_dir` is Ray's temporary
    folder on the head node, `prometheus` is the address under which Grafana reaches Prometheus.
    """
    root = PurePosixPath(seen_as)
    discovery = PurePosixPath(ray_dir) / "prom_metrics_service_discovery.json"
    return {
        "prometheus/prometheus.yml": PROMETHEUS.format(
            scrape_s=SCRAPE_S, discovery=json.dumps(str(discovery))
        ),
        "grafana/grafana.ini": GRAFANA.format(provisioning=root / "grafana/provisioning"),
        "grafana/provisioning/datasources/ray_pipe.yml": DATASOURCE.format(
            scrape_s=SCRAPE_S, prometheus=json.dumps(prometheus)
        ),
        "grafana/provisioning/dashboards/ray_pipe.yml": PROVIDER.format(
            dashboards=json.dumps(str(root / "grafana/dashboards"))
        ),
        "grafana/dashboards/ray_pipe.json": json.dumps(dashboard(), indent=1) + "\n",
    }


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write them below `folder`, over those of an earlier time."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard as JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
            }
        )
        top += 1
        left = 0
        for panel in row:
            if left + panel.width > COLUMNS:
                left, top = 0, top + PANEL_HEIGHT
            place = {"x": left, "y": top, "w": panel.width, "h": PANEL_HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place} | _panel(panel))
            left += panel.width
        top += PANEL_HEIGHT
    return {
        "uid": "ray-pipe",
        "title": "ray_pipe",
        "description": "Pipeline training over slow links. Made by python -m ray_pipe.monitoring.",
        "tags": ["ray", "ray_pipe"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": f"{SCRAPE_S}s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": [_datasource_variable(), *map(_variable, VARIABLES)]},
        "panels": panels,
    }


def label_query(label: str) -> str:
    """What a variable asks Prometheus for, as Grafana writes it."""
    return f"label_values({BY_NAME[VARIABLES[label]].exported_name}, {label})"


def _panel(panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    instant = panel.kind != "timeseries"
    made: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": source,
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": not instant,
                "instant": instant,
            }
            for place, query in enumerate(panel.queries)
        ],
    }
    if panel.kind == "timeseries":
        made["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"], "values": False}}
        if panel.kind == "bargauge":
            made["fieldConfig"]["defaults"] |= {"min": 0, "max": 1}
    return made


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }


def _variable(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": label_query(label), "refId": label},
        "definition": label_query(label),
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }
