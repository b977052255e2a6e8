"""Files for Prometheus and Grafana: made from one list, and the tree holds what is made."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_pipe.monitoring.__main__ import main
from ray_pipe.monitoring.catalogue import BY_NAME, METRICS, PREFIX, RUN_LABELS, markdown_table
from ray_pipe.monitoring.panels import ROWS, latest, rate, total_or_zero
from ray_pipe.monitoring.provisioning import COLUMNS, dashboard, make_files

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "ray_pipe/monitoring/files"
MAKE = "python -m ray_pipe.monitoring ray_pipe/monitoring/files --seen-as /etc/ray_pipe/monitoring"


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def test_the_tree_holds_what_the_generator_makes() -> None:
    shipped = {
        path.relative_to(SHIPPED).as_posix(): path.read_text(encoding="utf-8")
        for path in SHIPPED.rglob("*")
        if path.is_file()
    }

    assert shipped == make_files(), f"make them anew: {MAKE}"


def test_the_documentation_holds_the_table_of_metrics() -> None:
    text = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    match = re.search(r"<!-- metrics -->\n(.*?)<!-- end -->", text, re.DOTALL)

    assert match is not None
    assert match[1] == markdown_table(), "print it anew: python -m ray_pipe.monitoring --table"


def test_every_exported_metric_has_a_panel_and_no_other_has() -> None:
    asked = {
        name.removeprefix(PREFIX)
        for query in queries(dashboard())
        for name in re.findall(r"ray_pipe_\w+", query)
    }

    assert asked == {metric.name for metric in METRICS if not metric.planned}


def strangers(query: str) -> set[str]:
    """Labels that a query groups or filters by, but that none of its metrics has."""
    known = {
        label
        for name in re.findall(r"ray_pipe_\w+", query)
        for label in BY_NAME[name.removeprefix(PREFIX)].all_labels
    }
    used = {
        word.strip()
        for words in re.findall(r"(?:by|ignoring) \(([^)]*)\)", query)
        for word in words.split(",")
    }
    used |= set(re.findall(r"(\w+)=~", query))
    return used - known


def test_queries_use_only_labels_that_exist() -> None:
    assert {query: strangers(query) for query in queries(dashboard()) if strangers(query)} == {}
    assert strangers("sum by (run, link) (ray_pipe_loss)") == {"link"}
    assert strangers('ray_pipe_loss{stage=~"1"}') == {"stage"}


def test_lines_of_a_panel_can_be_told_apart() -> None:
    legends = {
        panel.title: [query.legend for query in panel.queries]
        for row in ROWS.values()
        for panel in row
    }

    assert [title for title, own in legends.items() if len(set(own)) < len(own)] == []
    assert legends["Groups and conflicts"] == [
        "{{run}} {{arm}} groups",
        "{{run}} {{arm}} conflicts",
    ]


def test_legends_name_the_labels_of_their_query() -> None:
    for panel in (panel for row in ROWS.values() for panel in row):
        for query in panel.queries:
            shown = re.findall(r"\{\{(\w+)\}\}", query.legend)
            grouped = re.findall(r"by \(([^)]*)\)", query.expr)[0].split(", ")
            assert shown[:2] == list(RUN_LABELS), panel.title
            assert set(shown) == set(grouped), panel.title


def test_a_name_that_is_not_in_the_list_or_of_another_kind_is_refused() -> None:
    with pytest.raises(KeyError):
        latest("pipe_stranger")
    with pytest.raises(AssertionError):
        rate("pipe_loss")
    with pytest.raises(AssertionError):
        total_or_zero("pipe_steps_total")


def test_panels_do_not_overlap_and_stay_on_the_board() -> None:
    taken: set[tuple[int, int]] = set()
    ids = []
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        ids.append(panel["id"])
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < COLUMNS
        taken |= cells

    assert len(set(ids)) == len(ids)


def test_the_command_writes_files_that_point_at_each_other(tmp_path: Path) -> None:
    out = io.StringIO()

    status = main(
        [str(tmp_path / "new"), "--ray-dir", "/scratch/ray", "--prometheus", "http://head:9090"],
        stdout=out,
    )

    folder = tmp_path / "new"
    prometheus = yaml.safe_load((folder / "prometheus/prometheus.yml").read_text())
    source = yaml.safe_load((folder / "grafana/provisioning/datasources/ray_pipe.yml").read_text())
    provider = yaml.safe_load((folder / "grafana/provisioning/dashboards/ray_pipe.yml").read_text())
    (board,) = Path(provider["providers"][0]["options"]["path"]).glob("*.json")
    assert status == 0
    assert prometheus["scrape_configs"][0]["file_sd_configs"][0]["files"] == [
        "/scratch/ray/prom_metrics_service_discovery.json"
    ]
    assert source["datasources"][0]["url"] == "http://head:9090"
    assert json.loads(board.read_text()) == dashboard()
    assert (
        f"provisioning = {folder}/grafana/provisioning"
        in (folder / "grafana/grafana.ini").read_text()
    )
    assert f"--config.file={folder}/prometheus/prometheus.yml" in out.getvalue()


def test_the_discovery_file_is_called_as_in_the_installed_ray() -> None:
    constants = pytest.importorskip("ray._private.ray_constants")

    assert constants.PROMETHEUS_SERVICE_DISCOVERY_FILE in make_files()["prometheus/prometheus.yml"]


def test_the_command_prints_the_table_and_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    out, err = io.StringIO(), io.StringIO()

    assert main(["--table"], stdout=out, stderr=err) == 0
    assert out.getvalue() == markdown_table()
    assert main([], stdout=out, stderr=err) == 2
    assert main([str(tmp_path / "file")], stdout=out, stderr=err) == 2
    assert f"error: {tmp_path / 'file'} cannot be written" in err.getvalue()
