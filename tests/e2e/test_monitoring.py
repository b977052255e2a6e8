"""A submitted job on a real cluster, seen by Prometheus, by Grafana's queries, in a browser."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dashboard_rig as rig
import pytest

from ray_pipe.monitoring.catalogue import METRICS
from ray_pipe.monitoring.panels import ROWS, VARIABLES
from ray_pipe.monitoring.provisioning import label_query

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ARMS = ["fp32", "acsgd"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rig.Watched]:
    """One job serves all tests of this file."""
    try:
        with rig.watched_job(tmp_path_factory.mktemp("monitoring")) as watched:
            yield watched
    except rig.CannotWatch as missing:
        pytest.skip(f"monitoring is not tried: {missing}")


def exported(
    seen: rig.Watched, name: str, *labels: str, run: str = rig.RUN
) -> dict[tuple[str, ...], float]:
    """The last value of each series, also of those whose driver is gone. The bare metric: unlike
    the dashboard's queries it is nowhere 0 before something has happened."""
    expr = f'last_over_time(ray_{name}{{run="{run}"}}[{rig.WINDOW}])'
    return seen.prometheus.numbers(expr, "arm", *labels)


def test_scraped_numbers_are_those_of_results_json(seen: rig.Watched) -> None:
    arms = {arm["name"]: arm for arm in seen.results["arms"]}
    nbytes = exported(seen, "pipe_link_bytes_total", "link", "kind")

    assert list(arms) == ARMS
    for name, arm in arms.items():
        links = {
            (name, link, kind): count
            for link, kinds in arm["links"].items()
            for kind, count in kinds.items()
        }
        own = {key: value for key, value in nbytes.items() if key[0] == name}
        by_kind = {
            kind: sum(value for key, value in own.items() if key[2] == kind)
            for kind in arm["bytes_total"]
        }
        key = (name,)
        assert own == links
        assert by_kind == arm["bytes_total"]
        assert exported(seen, "pipe_steps_total")[key] == arm["steps"] == rig.STEPS
        assert exported(seen, "pipe_step")[key] == rig.STEPS
        assert exported(seen, "pipe_planned_steps")[key] == rig.STEPS
        assert exported(seen, "pipe_tokens_total")[key] == arm["num_tokens"]
        assert exported(seen, "pipe_final_loss")[key] == arm["final_loss"]
        assert exported(seen, "pipe_loss")[key] == arm["losses"][arm["steps"] - 1][2]
        assert exported(seen, "pipe_eval_loss")[key] == arm["eval_losses"][-1][2]
        assert exported(seen, "pipe_predicted_step_seconds")[key] == arm["predicted_step_s"]
        assert exported(seen, "pipe_prediction_error_ratio")[key] == arm["prediction_error"]
        seconds = exported(seen, "pipe_step_seconds_total")[key]
        assert seconds == pytest.approx(arm["wall_s"], rel=1e-9)


def test_the_killed_stage_shows_up_as_a_failure_and_a_recovery(seen: rig.Watched) -> None:
    failures = seen.results["failures"]
    counts = Counter((failure["arm"],) for failure in failures)
    seconds = sum(failure["recovery_s"] for failure in failures)

    assert ("died", 1) in [(failure["kind"], failure["stage"]) for failure in failures]
    assert exported(seen, "pipe_failures_total") == counts
    assert exported(seen, "pipe_recoveries_total") == counts
    spent = exported(seen, "pipe_recovery_seconds_total")
    assert sum(spent.values()) == pytest.approx(seconds, rel=1e-12)


def rows_of(seen: rig.Watched, run: str, arm: str) -> list[dict[str, Any]]:
    lines = (seen.folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["arm"] == arm]


def test_a_lost_frame_shows_up_as_a_resend_and_an_event(seen: rig.Watched) -> None:
    rows = rows_of(seen, "bumpy", "acsgd")
    resent = sum(link.get("resent", 0) for row in rows for link in row["codec"].values())
    events = sum(len(row["events"]) for row in rows)

    assert resent >= 1
    assert events >= 1
    again = exported(seen, "pipe_frames_resent_total", "link", run="bumpy")
    assert sum(again.values()) == resent
    assert exported(seen, "pipe_events_total", run="bumpy") == {("acsgd",): events}


@pytest.mark.parametrize("arm", ARMS)
def test_hits_ratios_and_waits_are_those_that_the_run_wrote_down(
    seen: rig.Watched, arm: str
) -> None:
    # Beyond its own steps an arm may train on until it has reached fp32's loss: told, not exported.
    rows = [row for row in rows_of(seen, rig.RUN, arm) if row["step"] < rig.STEPS]
    result = next(one for one in seen.results["arms"] if one["name"] == arm)
    links = sorted({link for row in rows for link in row["codec"]})
    for metric, key in (("pipe_buffer_hits_total", "hits"), ("pipe_buffer_misses_total", "cold")):
        own = {
            (arm, link): sum(row["codec"].get(link, {}).get(key, 0) for row in rows)
            for link in links
        }
        found = {k: v for k, v in exported(seen, metric, "link").items() if k[0] == arm}
        assert found == {key: count for key, count in own.items() if count}, metric

    # Steps that ran again count again, in fp32 as on the link; the ratio is that of the rows.
    full = sum(link["fp32_bytes"] for row in rows for link in row["codec"].values())
    tensors = sum(row["bytes"]["activation"] + row["bytes"]["gradient"] for row in rows)
    counted = exported(seen, "pipe_fp32_bytes_total", "link")
    sent = exported(seen, "pipe_link_bytes_total", "link", "kind")
    ratio = sum(value for key, value in counted.items() if key[0] == arm) / sum(
        value for key, value in sent.items() if key[0] == arm and key[2] != "control"
    )
    assert ratio == pytest.approx(full / tensors, rel=0.02)

    shares = exported(seen, "pipe_stage_seconds_total", "stage", "share")
    waits = exported(seen, "pipe_wait_seconds_total", "stage", "direction")
    for stage in range(2):
        spent: Counter[str] = Counter()
        for row in rows:
            spent.update(row["stages"][stage] if len(row["stages"]) == 2 else {})
        for share, seconds in spent.items():
            found_s = shares.get((arm, str(stage), share), 0.0)
            assert found_s == pytest.approx(seconds, rel=1e-6, abs=1e-9), share
        waited = sum(value for key, value in waits.items() if key[:2] == (arm, str(stage)))
        idle = sum(seconds for share, seconds in spent.items() if share != "compute")
        assert 0.0 < waited < 1.1 * idle
    if all(len(row["stages"]) == 2 for row in rows):
        for one in result["stages"]:
            for share, seconds in one["seconds"].items():
                found_s = shares.get((arm, str(one["stage"]), share), 0.0)
                assert found_s == pytest.approx(seconds, rel=1e-6, abs=1e-9), share


def test_acsgd_compresses_and_fp32_does_not(seen: rig.Watched) -> None:
    ratios: dict[str, float] = {}
    full, sent = (
        exported(seen, "pipe_fp32_bytes_total", "link"),
        exported(seen, "pipe_link_bytes_total", "link", "kind"),
    )
    for arm in ARMS:
        tensors = sum(value for key, value in sent.items() if key[0] == arm and key[2] != "control")
        ratios[arm] = sum(value for key, value in full.items() if key[0] == arm) / tensors

    assert 0.9 < ratios["fp32"] < 1.0  # headers
    assert ratios["acsgd"] > 4.0


RUN_OF = {"Replicas": "copies", "Embeddings": "clicks"}
RUN_OF_PANEL = {"Groups and conflicts": "groups"}  # only Ripples has them
PANELS = [
    (RUN_OF_PANEL.get(panel.title, RUN_OF.get(name, rig.RUN)), panel.title)
    for name, row in ROWS.items()
    for panel in row
]


@pytest.mark.parametrize(("run", "title"), PANELS)
def test_every_query_of_the_grafana_dashboard_gives_data(
    seen: rig.Watched, run: str, title: str
) -> None:
    (panel,) = [panel for row in ROWS.values() for panel in row if panel.title == title]

    for query in panel.queries:
        series = seen.ask(query.expr, instant=panel.kind != "timeseries", run=run)
        labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        assert series, query.expr
        for own, values in series:
            assert set(own) == labels, query.expr
            assert own["run"] == run
            assert own["arm"] in (*ARMS, "hybrid")
            assert any(math.isfinite(value) for value in values), query.expr


def test_a_wrong_query_gives_no_data(seen: rig.Watched) -> None:
    assert seen.ask('ray_pipe_loss{run=~"$run-of-somebody-else"}') == []
    assert seen.ask("ray_pipe_lost") == []
    with pytest.raises(ValueError, match="refuses"):
        seen.ask("sum by (run (ray_pipe_loss)")


def test_the_dashboards_variables_offer_the_run_and_its_arms(seen: rig.Watched) -> None:
    offered = {}
    for label in VARIABLES:
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", label_query(label))
        assert match is not None
        offered[match[2]] = seen.prometheus.label_values(match[2], match[1])

    assert offered == {"run": sorted([rig.RUN, *rig.OTHERS]), "arm": sorted([*ARMS, "hybrid"])}


def test_every_metric_that_is_not_rare_or_planned_was_exported(seen: rig.Watched) -> None:
    usual = {
        metric.name for metric in METRICS if not (metric.rare or metric.planned or metric.task)
    }

    assert {name for name in usual if not exported(seen, name)} == set()


def page_of(seen: rig.Watched, name: str) -> str:
    if name not in seen.pages:
        pytest.skip("the dashboard is not looked at: no chromium on the path")
    return seen.pages[name]


def test_the_jobs_page_tells_the_runs_name_and_where_it_is(seen: rig.Watched) -> None:
    page = page_of(seen, "jobs")

    assert f">{rig.RUN}<" in page  # the Name column
    assert f"--name {rig.RUN}" in page  # the command
    assert rig.STATUS.search(page), "no status message in the page"


def test_the_status_message_moves_on_and_ray_has_the_last_word(seen: rig.Watched) -> None:
    first, later, last = seen.messages

    assert rig.STATUS.fullmatch(first)
    assert later != first
    assert "finished successfully" in last


def test_the_actors_page_shows_every_stage_by_name(seen: rig.Watched) -> None:
    page = page_of(seen, "actors")

    for stage in range(2):
        assert re.search(rf"ray_pipe/{rig.RUN}-\w+/stage-{stage}", page)
        assert f"PipelineStage(stage={stage})" in page
    assert ">PipelineStage<" in page  # the Class column


def test_the_pictures_in_the_documentation_are_small() -> None:
    docs = Path(rig.ROOT) / "docs"

    for name in ("dashboard-jobs.png", "dashboard-actors.png"):
        assert (docs / name).read_bytes().startswith(b"\x89PNG")
        assert (docs / name).stat().st_size < 200_000
