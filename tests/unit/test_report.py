"""The report: whole, offline, escaped, and equal to results.json."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from dashboard_rig import find_chromium
from hypothesis import given
from hypothesis import strategies as st
from synthetic_records import make_arm, make_step

from ray_pipe.arms import compare, summarize
from ray_pipe.metrics import ArmMeter
from ray_pipe.report import best_arm, headline, render_report, write_report
from ray_pipe.report_figure import write_loss_figure
from ray_pipe.report_lines import Line, LineChart, line_chart
from ray_pipe.report_markup import (
    Markup,
    data,
    loss,
    percent,
    ratio,
    seconds,
    size,
    table,
    tag,
    three,
)
from ray_pipe.report_scales import log_ticks, place_labels, spread, stack, thin, ticks
from ray_pipe.report_sections import gantt_section
from ray_pipe.step_row import StepRow
from stages.record import StepRecord

VOID = {"meta", "br", "input", "hr", "link", "img"}


class Page(HTMLParser):
    """Checks that every element is closed in order; collects what tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.values: list[float] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[name] = self.count.get(name, 0) + 1
        self.attributes += attrs
        self.ids += [value for key, value in attrs if key == "id" and value]
        if name == "data":
            self.values.append(float(dict(attrs)["value"] or "nan"))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open, f"</{name}> closes nothing"
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(text)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


Run = tuple[dict[str, Any], dict[str, list[StepRow]], dict[str, list[StepRecord]]]


def make_run(
    names: Sequence[str] = ("fp32", "directq", "acsgd"),
    *,
    num_steps: int = 60,
    num_stages: int = 4,
) -> Run:
    meters, steps = [], {}
    for name in names:
        meter = ArmMeter(name)
        recorded = make_arm(name, num_steps=num_steps, num_stages=num_stages)
        for records in recorded:
            meter.add(records)
        meters.append(meter)
        steps[name] = recorded[-1]
    arms = compare([summarize(m, final_window=10, predicted_step_s=0.5) for m in meters])
    results = {
        "schema": 1,
        "name": "demo",
        "native": True,
        "config": {"network": {"bandwidth_bps": 40e6}, "pipeline": {"stages": num_stages}},
        "environment": {"torch": "2.13.0", "cores": 2},
        "command": ["python", "-m", "ray_pipe.run", "--set", "a b=1"],
        "arms": [arm.as_dict() for arm in arms],
    }
    return results, {meter.name: meter.rows for meter in meters}, steps


def render(run: Run) -> tuple[str, Page]:
    results, rows, steps = run
    text = render_report(results, rows=rows, steps=steps)
    return text, Page(text)


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run()


@pytest.fixture(scope="module")
def rendered(run: Run) -> tuple[str, Page]:
    return render(run)


# --- the page -----------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_has_all_sections(rendered: tuple[str, Page]) -> None:
    text, page = rendered

    assert text.startswith("<!doctype html>\n<html lang=")
    assert page.count["h1"] == 1
    for title in (
        "The arms",
        "Loss against time",
        "Where the time went",
        "The pipeline in one step",
        "Bytes on the wire",
        "Inside the codecs",
        "Prediction against measurement",
        "The run",
    ):
        assert title in page.text
    assert len(page.ids) == len(set(page.ids))


def test_the_check_of_balance_sees_an_element_that_is_not_closed(
    rendered: tuple[str, Page],
) -> None:
    text, _ = rendered

    with pytest.raises(AssertionError):
        Page(text.replace("</section>", "", 1))


def test_the_page_needs_no_network(rendered: tuple[str, Page]) -> None:
    text, page = rendered

    assert "http:" not in text
    assert "https:" not in text
    assert "//" not in re.sub(r"/\*.*?\*/", "", text)
    assert "@import" not in text
    assert "url(" not in text
    assert not {"link", "img", "iframe", "object"} & page.count.keys()
    assert not [value for key, value in page.attributes if key in ("src", "href")]


def test_numbers_on_the_page_are_those_of_results_json(run: Run, rendered: Any) -> None:
    results, _, _ = run
    _, page = rendered
    shown = set(page.values)

    for arm in results["arms"]:
        for key in (
            "final_loss",
            "loss_gap",
            "tokens_per_s",
            "step_s",
            "predicted_step_s",
            "prediction_error",
            "bytes_per_step",
            "bytes_per_step_last",
            "speedup",
            "time_to_target_s",
            "time_to_target_speedup",
            "wall_s",
            "steps",
        ):
            assert arm[key] is None or arm[key] in shown, (arm["name"], key)
        for kind in ("activation", "gradient", "control"):
            assert arm["bytes_total"][kind] in shown
        assert sum(arm["bytes_total"].values()) in shown


def test_an_arm_without_a_prediction_says_why(run: Run) -> None:
    results, rows, steps = run
    gone = {"predicted_step_s": None, "prediction_error": None, "not_predicted": "for a reason"}
    arms = [{**arm, **gone} for arm in results["arms"]]

    page = Page(render_report({**results, "arms": arms}, rows=rows, steps=steps))

    assert "not predicted, for a reason." in " ".join(page.words)


def test_a_number_that_is_not_in_results_json_would_be_seen(run: Run) -> None:
    results, rows, steps = run
    arms = [{**arm, "final_loss": (arm["final_loss"] or 0) + 1} for arm in results["arms"]]
    page = Page(render_report({**results, "arms": arms}, rows=rows, steps=steps))

    assert results["arms"][0]["final_loss"] not in set(page.values)


def test_every_picture_has_words_for_those_who_cannot_see_it(rendered: Any) -> None:
    text, page = rendered

    assert page.count["svg"] == len(re.findall(r'<svg[^>]* role="img" aria-label="[^"]{8,}"', text))
    assert page.count["table"] >= 6


def test_the_page_follows_light_and_dark_and_prints(rendered: Any) -> None:
    text, _ = rendered

    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    light = set(re.findall(r"(--[\w-]+):", text.split("@media")[0]))
    assert used <= light


def test_the_pipeline_shows_every_micro_batch_of_every_stage(run: Run, rendered: Any) -> None:
    text, _ = rendered
    _, _, steps = run

    for stage in range(4):
        assert f">stage {stage}</text>" in text
    forward = text.count("<title>compute F0: ")
    assert forward == 2 * 3 * 4  # two scales, three arms, four stages
    assert "wire 0-&gt;1 F3" in text
    assert f"fp32: step {steps['fp32'][0].step}, " in text


def test_the_pipeline_shows_a_whole_step_where_the_last_one_is_short() -> None:
    whole, short = (
        make_step(step=step, start_s=float(step), num_micro_batches=count)
        for step, count in ((6, 4), (7, 2))
    )

    text = gantt_section([{"name": "fp32"}], {"fp32": [*whole, *short]})

    assert "fp32: step 6, " in text
    assert "fp32: step 7, " in gantt_section([{"name": "fp32"}], {"fp32": short})


def test_the_exact_command_and_the_native_core_are_shown(rendered: Any) -> None:
    _, page = rendered

    assert "python -m ray_pipe.run --set 'a b=1'" in page.text
    assert "native core yes" in page.text
    assert "40.0 Mbit/s links" in page.text


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"bandwidth_bps": 40e6, "latency_s": 0.02}, "40.0 Mbit/s links with 20.0 ms of latency ·"),
        ({"bandwidth_bps": "unlimited", "latency_s": 0.02}, "demo · links with 20.0 ms of latency"),
        ({"bandwidth_bps": "unlimited", "latency_s": 0.0}, "demo · 4 stages"),
    ],
)
def test_the_links_are_named_by_rate_and_latency(
    run: Run, network: Mapping[str, Any], words: str
) -> None:
    config = {**run[0]["config"], "network": network}

    assert words in Page(render_report({**run[0], "config": config})).text


def test_the_slow_twin_is_named_when_the_native_core_was_missing(run: Run) -> None:
    page = Page(render_report({**run[0], "native": False}))

    assert "no: the slow twin was used" in page.text


def test_no_table_is_wider_than_the_page(tmp_path: Path) -> None:
    """With all its numbers (--eval has one more), in a browser as wide as a laptop or a tablet."""
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no chromium on the path")
    results, rows, steps = make_run()
    more = {"eval_loss": 2.4321, "link_compute_ratio": 12.3, "speedup_limit": 12.34}
    more |= {"wall_s": 4321.0, "time_to_target_s": 3456.0}
    arms = [{**arm, **more} for arm in results["arms"]]
    text = render_report({**results, "arms": arms}, rows=rows, steps=steps)
    look = (
        "<script>document.title='wide: '+[...document.querySelectorAll('main,section,.scroll')]"
        ".filter(e=>e.scrollWidth>e.clientWidth).map(e=>e.tagName+e.scrollWidth).join()"
        "+' at '+innerWidth</script>"
    )
    (tmp_path / "report.html").write_text(text.replace("</body>", f"{look}</body>"))

    for width in (1200, 800):
        seen = subprocess.run(
            [
                chromium,
                *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--disable-dev-shm-usage"),
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={width},2000",
                "--dump-dom",
                f"file://{tmp_path / 'report.html'}",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert f"<title>wide:  at {width}</title>" in seen.stdout


# --- any run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "num_steps", "num_stages"),
    [
        (("acsgd",), 5, 4),
        (("fp32",), 1, 1),
        (("fp32", "acsgd"), 1, 2),
        (("fp32", "fp16", "directq", "topk", "acsgd", "acsgd+zstd"), 30, 3),
    ],
)
def test_any_number_of_arms_steps_and_stages_makes_a_page(
    names: tuple[str, ...], num_steps: int, num_stages: int
) -> None:
    run = make_run(names, num_steps=num_steps, num_stages=num_stages)
    _, page = render(run)

    for arm in run[0]["arms"]:
        assert (arm["final_loss"] in page.values) == (arm["final_loss"] is not None)
    assert ("Bytes on the wire" in page.text) == (num_stages > 1)


def test_what_is_missing_is_left_out() -> None:
    page = Page(render_report({"arms": [{"name": "fp32", "final_loss": None}]}))

    assert "Loss against time" not in page.text
    assert "fp32 trained 0 steps in – to a loss of –." in page.text
    assert "ended before its first step" in Page(render_report({})).text


def test_nan_in_results_becomes_a_dash_not_a_number() -> None:
    arm = {"name": "directq", "final_loss": float("nan"), "losses": [[1.0, 0, float("inf")]]}
    text = render_report({"arms": [arm]})

    assert "nan" not in Page(text).text
    assert "Infinity" not in text


@pytest.mark.slow
def test_a_long_run_is_thinned_to_a_page_of_modest_size() -> None:
    run = make_run(("fp32", "acsgd"), num_steps=1500, num_stages=2)
    text, page = render(run)

    assert len(text) < 400_000
    assert run[0]["arms"][1]["final_loss"] in page.values


def test_user_strings_are_escaped_everywhere(run: Run) -> None:
    results, rows, steps = run
    evil = '</script><script>alert("x")</script>&<b>'
    arms = [{**results["arms"][0], "name": evil, "links": {evil: {"activation": 5}}}]
    text = render_report(
        {
            **results,
            "name": evil,
            "arms": arms,
            "command": evil,
            "config": {evil: {evil: evil}},
            "environment": {evil: evil},
        },
        rows={evil: [_with_events(rows["acsgd"][-1], evil)]},
        steps={evil: steps["fp32"]},
    )
    page = Page(text)

    assert "<script>alert" not in text
    assert page.count["script"] == 2
    assert evil in page.text


def test_events_for_the_operator_are_listed(run: Run) -> None:
    results, rows, _ = run
    noisy = [_with_events(rows["acsgd"][0], "stage 1 resent 3 packets cold")] * 60
    page = Page(render_report(results, rows={"acsgd": noisy}))

    assert "AC-SGD, step 0 stage 1 resent 3 packets cold" in page.text
    assert "… and 10 more in metrics.jsonl." in page.text


def _with_events(row: StepRow, *events: str) -> StepRow:
    return replace(row, events=events, codec={events[0]: {"hit_rate": 1.0}})


# --- the headline -------------------------------------------------------------------------------


def arm(name: str, **fields: Any) -> Mapping[str, Any]:
    return {"name": name, "steps": 1200, **fields}


FP32 = arm("fp32", final_loss=2.25, time_to_target_s=90.0, speedup=1.0, bytes_per_step=8000)


@pytest.mark.parametrize(
    ("arms", "sentence"),
    [
        (
            [
                FP32,
                arm(
                    "acsgd",
                    time_to_target_s=20.0,
                    time_to_target_speedup=4.5,
                    bytes_per_step=1000,
                ),
            ],
            "AC-SGD reached fp32’s final loss of 2.2500 in 20.0 s, 4.50× sooner than fp32, "
            "sending 8.00× fewer bytes.",
        ),
        (
            [FP32, arm("directq", speedup=3.0, loss_gap=0.125, time_to_target_speedup=None)],
            "DirectQ ran 3.00× faster steps than fp32 and ended at +0.1250 from its final loss, "
            "which it did not reach in 1,200 steps.",
        ),
        (
            [FP32, arm("acsgd", time_to_target_s=100.0, time_to_target_speedup=0.9)],
            "Compression did not pay here: AC-SGD, the best arm, took 100.0 s to fp32’s final "
            "loss, fp32 itself 90.0 s.",
        ),
        (
            [FP32, arm("acsgd", speedup=0.8)],
            "Compression did not pay here: AC-SGD, the fastest arm, ran at 0.80× the speed of "
            "fp32.",
        ),
        (
            [arm("acsgd", wall_s=61.0, final_loss=2.5)],
            "AC-SGD trained 1,200 steps in 61.0 s to a loss of 2.5000.",
        ),
    ],
)
def test_the_headline_says_what_happened(arms: list[Mapping[str, Any]], sentence: str) -> None:
    assert headline(arms) == sentence


def test_the_best_arm_is_not_the_fast_one_with_the_bad_loss() -> None:
    close = arm("acsgd", speedup=3.0, loss_gap=0.01)
    far = arm("directq", speedup=3.3, loss_gap=0.16)

    assert best_arm([FP32, far, close]) == close
    assert best_arm([FP32]) is None
    assert best_arm([{**FP32, "bytes_per_step": 0}, {**close, "bytes_per_step": 0}]) is None
    assert best_arm([close, far]) is None


# --- files --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_and_figure_are_written(run: Run, tmp_path: Path) -> None:
    results, rows, steps = run
    write_report(tmp_path / "report.html", results, rows=rows, steps=steps)
    write_loss_figure(tmp_path / "loss.png", results["arms"], title="demo")
    write_loss_figure(tmp_path / "none.png", [])

    assert (tmp_path / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
    for name in ("loss.png", "none.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_no_matplotlib() -> None:
    code = "import sys, ray_pipe.report; sys.exit('matplotlib' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the parts ----------------------------------------------------------------------------------


def test_numbers_read_as_people_write_them() -> None:
    assert [seconds(s) for s in (0, 5e-5, 0.0123, 0.732, 1.234, 37.0, 125, 7500)] == [
        "0 s",
        "50 µs",
        "12.3 ms",
        "732 ms",
        "1.23 s",
        "37.0 s",
        "2 min 05 s",
        "2 h 05 min",
    ]
    assert [size(n) for n in (0, 812, 999, 1000, 3_150_000, 1.01e9)] == [
        "0 B",
        "812 B",
        "999 B",
        "1.00 kB",
        "3.15 MB",
        "1.01 GB",
    ]
    assert [three(x) for x in (0, 0.01234, 1.5, 12.34, 4581.4, -2.5)] == [
        "0",
        "0.0123",
        "1.50",
        "12.3",
        "4,581",
        "-2.50",
    ]
    assert (ratio(4.312), ratio(12.34), percent(-0.123, sign=True)) == ("4.31×", "12.3×", "−12.3 %")
    assert loss(-0.004, sign=True) == "−0.0040"
    assert {f(None) for f in (seconds, size, three, ratio, percent, loss)} == {"–"}
    assert {f(float("nan")) for f in (seconds, size, three, ratio, percent, loss)} == {"–"}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_can_be_shown(value: float) -> None:
    for form in (seconds, size, three, ratio, percent, loss):
        assert form(value)
    assert f'value="{value!r}"' in data(value, "shown")


@given(st.text())
def test_text_in_markup_comes_back_as_it_was(text: str) -> None:
    clean = re.sub(r"[\r\x00]", "", text)
    page = Page(tag("p", clean, title=clean))

    assert "".join(page.words) == clean
    assert page.attributes == [("title", clean)]


def test_markup_is_not_escaped_twice_and_missing_attributes_are_left_out() -> None:
    assert tag("p", tag("b", "a<b"), Markup("<i>"), class_=None, id="x") == (
        '<p id="x"><b>a&lt;b</b><i></p>'
    )
    assert "<thead>" not in table((), [("a", "b")], caption="")


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(1.93, 4.4, 5) == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert ticks(2.0, 2.0, 5) == [2.0]
    assert log_ticks(0.15, 12) == [0.2, 0.5, 1.0, 2.0, 5.0, 10.0]


def test_labels_are_moved_apart_only_where_they_would_touch() -> None:
    assert spread([10.0, 12.0], gap=16, low=0, high=100) == [10.0, 26.0]
    assert spread([99.0, 98.0], gap=16, low=0, high=100) == [100.0, 84.0]
    near, far = place_labels([(10, 50), (500, 50)], reach=90, gap=16, low=0, high=100)
    assert (near, far) == ((10, 50), (500, 50))
    assert stack([0.0, 10.0, 70.0, 75.0], reach=64) == [0, 1, 0, 1]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e3, 1e3)), max_size=60))
def test_thinning_keeps_ends_and_extremes(points: list[tuple[float, float]]) -> None:
    points.sort()
    kept = thin(points, limit=8)

    assert len(kept) <= 8
    assert set(kept) <= set(points)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert min(y for _, y in kept) == min(y for _, y in points)
        assert max(y for _, y in kept) == max(y for _, y in points)


def test_a_spike_of_one_step_in_thousands_is_still_drawn() -> None:
    points = [(float(step), 2.0) for step in range(5000)]
    points[1234], points[3210] = (1234.0, 9.0), (3210.0, 0.5)
    kept = thin(points, limit=100)

    assert {(1234.0, 9.0), (3210.0, 0.5)} <= set(kept)
    assert kept == sorted(kept)
    assert len(kept) <= 100


def test_a_chart_of_nothing_says_so() -> None:
    chart = LineChart(title="t", x_label="x")

    assert "No values" in line_chart([], chart)
    assert "No values" in line_chart([Line(name="a", color="--x", points=[])], chart)
    assert "<circle" in line_chart([Line(name="a", color="--x", points=[(0.0, 1.0)])], chart)


def test_failures_have_a_section_and_a_run_without_any_has_none() -> None:
    failure = {
        "kind": "died", "stage": 1, "step": 7, "arm": "acsgd", "cause": "killed <by> a test",
        "replaced": [1], "resumed_from": 6, "source": "box", "recovery_s": 2.5, "at_s": 1.0,
        "replayed_steps": 0,
    }  # fmt: skip
    ended = failure | {"resumed_from": None, "recovery_s": None, "kind": "hung"}

    text = render_report({"arms": [], "failures": [failure, ended]})

    assert "Failures" in text
    assert "acsgd, step 7" in text
    assert "stage 1: process died" in text
    assert "killed &lt;by&gt; a test" in text
    assert "step 6 (black box)" in text
    assert "2.5" in text
    assert "the run ended" in text
    assert "Failures" not in render_report({"arms": [], "failures": []})


def test_without_an_fp32_arm_no_comparison_is_shown() -> None:
    arms = [{"name": name, "final_loss": 1.0, "speedup": 1.0} for name in ("directq", "acsgd")]

    assert "speed-up" not in render_report({"arms": arms})
    assert "step speed-up" in render_report({"arms": [*arms, {"name": "fp32", "speedup": 1.0}]})
