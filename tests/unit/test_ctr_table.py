"""A click run's results for the eye: table, verdict, progress line, report, metrics."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ray_pipe.ctr_table import COLUMNS, compare_arms, progress_text, verdict
from ray_pipe.monitoring.catalogue import BY_NAME
from ray_pipe.monitoring.readings import of_step
from ray_pipe.report import render_report
from ray_pipe.results_table import NONE, show_results
from ray_pipe.step_row import StepRow


def arm(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "auc": 0.7648,
        "best_auc": 0.8449,
        "log_loss": 0.5696,
        "samples_per_s": 2_670.0,
        "step_s": 0.382,
        "bytes_per_sample": 699.0,
        "rows": 17_500,
        "row_bytes": 3_010_000,
        "resident_bytes": 617_000_000,
        "tau": 0,
        "staleness_max": 0,
        "staleness_histogram": {"0": 352},
        "lost_pushes": 0,
        "wall_s": 40.0,
        "steps": 176,
        "evaluations": [(20.0, 87, 0.7513, 0.5785), (40.0, 175, 0.7648, 0.5696)],
        **changes,
    }


def results(*arms: dict[str, Any]) -> dict[str, Any]:
    compare_arms(arms)
    return {"arms": list(arms), "clicks": {"text": "100,000 made-up clicks"}, "config": {}}


HYBRID = {
    "auc": 0.7631,
    "samples_per_s": 8_544.0,
    "bytes_per_sample": 349.5,
    "tau": 3,
    "staleness_histogram": {"0": 14, "2": 66, "3": 272},
    "staleness_max": 3,
}


def test_rows_that_had_no_room_are_told_beside_the_verdict() -> None:
    dropped = results(arm("hybrid", evicted_rows=1200))
    spilled = results(arm("hybrid", rows=9000, spilled_rows=7000, recalled_rows=41_000))

    assert verdict(dropped).endswith(
        "hybrid: 1,200 rows were dropped for want of memory and began anew when they were seen "
        "again; raise --capacity, or keep them with --spill."
    )
    assert verdict(spilled).endswith(
        "hybrid: 7,000 of 9,000 rows are in the spill folder, 41,000 came back from it."
    )


def test_the_verdict_tells_speed_bytes_and_what_quality_it_cost() -> None:
    found = results(arm("fp32"), arm("hybrid", **HYBRID))

    assert verdict(found) == (
        "Hybrid training sees 3.20x the samples per second of synchronous fp32 and sends 2.00x "
        "fewer bytes a sample, at the same AUC (-0.17 points, of at most 0.8449 that these clicks "
        "allow)."
    )


def test_an_auc_that_fell_by_more_than_three_tenths_of_a_point_is_not_called_the_same() -> None:
    found = results(arm("fp32"), arm("hybrid", **HYBRID | {"auc": 0.7610}))

    assert "at another AUC (-0.38 points" in verdict(found)


def test_one_arm_alone_is_told_without_comparison() -> None:
    assert verdict(results(arm("hybrid", **HYBRID))) == (
        "AUC 0.7631, of at most 0.8449 that these clicks allow, at 8.54k samples/s."
    )


def test_the_table_fits_a_plain_terminal_with_every_column() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=False, no_color=True)

    show_results(console, results(arm("fp32"), arm("hybrid", **HYBRID)), None)

    text = out.getvalue()
    assert "…" not in text
    for cell in (
        "hybrid",
        "0.7631",
        "0.8449",
        "8.54k",
        "3.20x",
        "350 B",
        "17.5k",
        "617 MB",
        "3:77%",
    ):
        assert cell in text


def test_of_many_ages_the_frequent_ones_and_the_largest_are_shown() -> None:
    column = dict(COLUMNS)["staleness"]
    many = {str(age): 100 - age for age in range(40)} | {"63": 1}

    assert column(arm("x", staleness_histogram={"0": 63, "1": 30, "2": 7})) == "0:63% 1:30%\n2:7%"
    assert column(arm("x", staleness_histogram=many)) == "0:3% 1:3%\n2:3% 3:3%\nmax 63"
    assert column(arm("x", staleness_histogram={"0": 999, "1": 1})) == "0:100% 1:<1%"
    assert column(arm("x", staleness_histogram={})) == NONE


def test_the_progress_line_tells_bytes_rows_memory_staleness_and_the_last_auc() -> None:
    line = {
        "num_tokens": 1000,
        "bytes": {"activation": 250_000, "embedding": 111_000},
        "embedding": {
            "rows": 17_500, "row_bytes": 3_010_000, "tau": 2, "staleness": {"1": 1, "2": 3},
            "auc": 0.7497, "log_loss": 0.5763,
        },
    }  # fmt: skip

    assert (
        progress_text(line)
        == "361 B/sample  17.5k rows (3.01 MB)  stale 1:25% 2:75% of 2  AUC 0.7497  log-loss 0.5763"
    )
    line["embedding"]["staleness"] = {"2": 4}
    assert "  stale 2 of 2  " in progress_text(line)
    assert progress_text({"num_tokens": 5}) == ""


def test_the_report_shows_quality_speed_memory_and_the_histogram() -> None:
    page = render_report(results(arm("fp32"), arm("hybrid", **HYBRID)))

    assert "Hybrid training sees 3.20x" in page
    assert "How old rows were" in page
    assert "272 (77.3 %)" in page
    assert "AUC, 0.8449 is the best reachable" in page
    assert ">17,500<" in page
    assert "hybrid, step 88" in page


def test_every_number_of_a_click_step_becomes_a_metric_of_the_catalogue() -> None:
    row = StepRow(
        arm="hybrid", step=3, loss=0.5, grad_norm=None, wall_s=1.0, step_s=0.1, num_tokens=1024,
        sent={"e0->0": {"embedding": 10}}, codec={},
        embedding={
            "tau": 2, "staleness": {"0": 1, "2": 3}, "rows": 5, "row_bytes": 400,
            "resident_bytes": 9000, "new_lost_pushes": 1,
        },
    )  # fmt: skip

    found = {(r.name, r.labels): r.value for r in of_step(row, [])}

    assert found["pipe_staleness_bound", ()] == 2
    assert found["pipe_embedding_rows", ()] == 5
    assert found["pipe_embedding_bytes", (("what", "process"),)] == 9000
    assert found["pipe_embedding_pushes_total", (("staleness", "2"),)] == 3
    assert found["pipe_embedding_lost_pushes_total", ()] == 1
    assert all(name in BY_NAME for name, _ in found)
