"""What a run shows: live bars, plain lines, the table, the verdict. On string consoles."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ray_pipe.progress import LiveProgress, PlainProgress, Progress, make_progress, plain_console
from ray_pipe.results_table import show_amount, show_clock, show_results, show_seconds, verdict


def arm(name: str, **values: Any) -> dict[str, Any]:
    return {"name": name, **values}


FP32 = arm(
    "fp32",
    final_loss=1.8123,
    loss_gap=0.0,
    tokens_per_s=8123.4,
    step_s=1.234,
    predicted_step_s=1.2,
    bytes_per_step=12_582_912,
    speedup=1.0,
    time_to_target_s=61.2,
    time_to_target_speedup=1.0,
)
DIRECTQ = arm(
    "directq",
    final_loss=1.9423,
    loss_gap=0.13,
    tokens_per_s=21723.4,
    step_s=0.434,
    predicted_step_s=0.44,
    bytes_per_step=1_782_912,
    speedup=2.84,
    time_to_target_s=None,
    time_to_target_speedup=None,
)
ACSGD = arm(
    "acsgd",
    final_loss=1.8150,
    loss_gap=0.0027,
    tokens_per_s=21323.4,
    step_s=0.441,
    predicted_step_s=0.44,
    bytes_per_step=1_802_912,
    speedup=2.80,
    time_to_target_s=22.4,
    time_to_target_speedup=2.73,
)
RESULTS: dict[str, Any] = {
    "config": {"network": {"bandwidth_bps": 1e8, "topology": None}},
    "limits": {"link_to_compute": 2.13, "max_speedup": 3.1},
    "arms": [FP32, DIRECTQ, ACSGD],
}
PLAN = {
    "text": "gpt-tiny in 4 stages at 100Mbps",
    "arms": ["fp32", "acsgd"],
    "bandwidth_bps": 100e6,
    "predicted_step_s": {"fp32": 1.0, "acsgd": 0.25},
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def row(step: int, *, step_s: float = 2.0, loss: float | None = 3.0) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "step_s": step_s,
        "tokens_per_s": 8192 / step_s,
        "bytes": {"activation": 15_000_000, "gradient": 10_000_000},
        "links": {
            "0->1": {"activation": 10_000_000},
            "1->2": {"activation": 5_000_000},
            "1->0": {"gradient": 10_000_000},
        },
    }


def terminal(width: int = 120) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, color_system=None, highlight=False
    )


def text_of(console: Console) -> str:
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def plain() -> tuple[PlainProgress, Clock]:
    clock = Clock()
    return PlainProgress(plain_console(io.StringIO()), clock=clock), clock


# --- plain lines -----------------------------------------------------------------------------


def test_plain_lines_say_arm_step_loss_speed_link_and_time_left() -> None:
    progress, clock = plain()

    progress.on_start(PLAN)
    progress.on_phase("starting 4 stages")
    progress.on_arm("fp32", 0, 2, 10)
    clock.now = 2.0
    progress.on_step("fp32", row(0))

    # 9 steps of 2 s, then 10 of 0.25 s predicted, and predictions were off by 2.
    assert text_of(progress.console).splitlines() == [
        "gpt-tiny in 4 stages at 100Mbps",
        "[   0.0 s] starting 4 stages",
        "[   2.0 s] fp32 (1/2)  step 1/10  loss 3.0000  4.10k tokens/s  link 60 %  about 23 s left",
    ]


def test_plain_lines_come_every_few_seconds_and_with_the_last_step() -> None:
    progress, clock = plain()
    progress.on_arm("fp32", 0, 1, 20)

    for step in range(20):
        clock.now += 1.0
        progress.on_step("fp32", row(step, step_s=1.0))

    steps = [
        line.split("step ")[1].split("/")[0] for line in text_of(progress.console).splitlines()
    ]
    assert steps == ["1", "6", "11", "16", "20"]
    assert "done" in text_of(progress.console).splitlines()[-1]


def test_plain_output_has_no_control_codes() -> None:
    progress, _ = plain()

    with progress:
        progress.on_start(PLAN)
        progress.on_arm("fp32", 0, 2, 3)
        progress.on_step("fp32", row(0))
        progress.on_warning("[bold]brackets stay[/bold] :smile:")
        progress.on_end(RESULTS, None)

    text = text_of(progress.console)
    assert "\x1b" not in text
    assert "\r" not in text
    assert "warning: [bold]brackets stay[/bold] :smile:" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_a_loss_that_is_not_finite_and_unshaped_links_are_shown_without_numbers() -> None:
    progress, _ = plain()
    progress.on_start({**PLAN, "bandwidth_bps": float("inf")})
    progress.on_arm("fp32", 0, 1, 3)

    progress.on_step("fp32", row(0, loss=float("nan")))

    line = text_of(progress.console).splitlines()[-1]
    assert "loss" not in line
    assert "100 Mbit/s sent" in line


def test_warnings_and_results_are_shown_once() -> None:
    progress, _ = plain()

    for _ in range(2):
        progress.on_warning("mind the gap")
        progress.on_end(RESULTS, None)

    assert text_of(progress.console).count("mind the gap") == 1
    assert text_of(progress.console).count("12.6 MB") == 1


# --- estimate of the time left ---------------------------------------------------------------


def left_after(plan: dict[str, Any], *, steps: int = 10) -> float | None:
    progress, _ = plain()
    progress.on_start(plan)
    progress.on_arm("fp32", 0, 2, steps)
    progress.on_step("fp32", row(0))
    return progress.state.left_s()


def test_without_predictions_arms_to_come_are_taken_as_slow_as_this_one() -> None:
    assert left_after({"arms": ["fp32", "acsgd"]}) == 9 * 2.0 + 10 * 2.0
    assert left_after({}) == 9 * 2.0 + 10 * 2.0
    assert left_after(PLAN) == 9 * 2.0 + 10 * 0.25 * 2.0


def test_nothing_is_said_before_the_first_step() -> None:
    progress, _ = plain()
    progress.on_start(PLAN)
    progress.on_arm("fp32", 0, 2, 10)

    assert progress.state.left_s() is None


def test_an_arm_that_ended_early_leaves_only_the_others() -> None:
    progress, _ = plain()
    progress.on_start(PLAN)
    progress.on_arm("fp32", 0, 2, 10)
    progress.on_step("fp32", row(0))
    progress.on_arm_end({})

    assert progress.state.left_s() == 10 * 0.25 * 2.0


# --- live bars -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_live_bars_fit_the_terminal_and_name_every_arm(width: int) -> None:
    console = terminal(width)
    clock = Clock()
    progress = LiveProgress(console, clock=clock)
    progress.on_start(PLAN)
    progress.on_arm("fp32", 0, 2, 10)
    progress.on_step("fp32", row(4))
    clock.now = 65.0

    console.print(progress.render())

    lines = text_of(console).splitlines()
    assert max(len(line) for line in lines) <= width
    assert lines[1].split() == [
        *("fp32", lines[1].split()[1], "5/10", "loss", "3.0000", "4.10k", "tokens/s"),
        *("link", "60", "%"),
    ]
    assert lines[2].startswith("acsgd")
    assert lines[3] == "training fp32 - 1m 05s, about 15 s left for all arms"


def test_before_the_first_arm_the_phase_is_shown() -> None:
    console = terminal()
    progress = LiveProgress(console, clock=Clock())
    progress.on_phase("starting Ray")

    console.print(progress.render())

    assert text_of(console) == "starting Ray - 0 s\n"


def test_the_live_display_gives_the_cursor_back_even_when_the_run_fails() -> None:
    console = terminal()

    with pytest.raises(RuntimeError), LiveProgress(console, clock=Clock()):
        raise RuntimeError

    text = text_of(console)
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


def test_the_live_run_ends_with_the_table() -> None:
    console = terminal()

    with LiveProgress(console, clock=Clock()) as progress:
        progress.on_start(PLAN)
        progress.on_arm("fp32", 0, 1, 1)
        progress.on_step("fp32", row(0))
        progress.on_end(RESULTS, None)

    assert "2.73x sooner" in text_of(console)


def test_an_arm_that_came_later_is_said_to_be_later() -> None:
    console = terminal(140)
    late = {**ACSGD, "time_to_target_s": 122.4, "time_to_target_speedup": 0.5}

    show_results(console, with_arms(FP32, late), None)

    assert "2m 02s (2.00x later)" in text_of(console)


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    progress: Progress = make_progress(io.StringIO())

    assert isinstance(progress, PlainProgress)
    assert progress.console.width == 120


# --- the table -------------------------------------------------------------------------------


def test_a_wide_console_has_an_arm_per_row() -> None:
    console = plain_console(io.StringIO())

    show_results(console, RESULTS, None)

    cells = [line.split() for line in text_of(console).splitlines()]
    assert [
        *("fp32", "1.8123", "+0.0000", "8.12k", "1.23", "s", "12.6", "MB", "1.00x"),
        *("61.2", "s", "1.20", "s", "+2.8", "%"),
    ] in cells
    assert [
        *("directq", "1.9423", "+0.1300", "21.7k", "434", "ms", "1.78", "MB", "2.84x"),
        *("not", "reached", "440", "ms", "-1.4", "%"),
    ] in cells
    assert [
        *("acsgd", "1.8150", "+0.0027", "21.3k", "441", "ms", "1.80", "MB", "2.80x"),
        *("22.4", "s", "(2.73x", "sooner)", "440", "ms", "+0.2", "%"),
    ] in cells


@pytest.mark.parametrize("width", [80, 120, 140])
def test_what_eval_has_found_is_shown_and_nothing_is_cut_off(width: int) -> None:
    console = terminal(width)
    found = {"fp32": 2.0641, "directq": 2.2121, "acsgd": None}
    arms = [{**arm, "eval_loss": found[arm["name"]]} for arm in (FP32, DIRECTQ, ACSGD)]

    show_results(console, {**RESULTS, "arms": arms}, None)

    text = text_of(console)
    cells = [line.split() for line in text.splitlines()]
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    if width == 140:
        (row,) = (line for line in cells if line[:1] == ["directq"])
        assert row[1:4] == ["1.9423", "+0.1300", "2.2121"]
    else:
        assert ["held-out", "loss", "2.0641", "2.2121", "-"] in cells


def test_without_eval_no_column_speaks_of_it() -> None:
    console = plain_console(io.StringIO())

    show_results(console, RESULTS, None)

    assert "held-out" not in text_of(console)


def test_a_narrow_terminal_has_an_arm_per_column() -> None:
    console = terminal(80)

    show_results(console, RESULTS, None)

    lines = text_of(console).splitlines()
    assert max(len(line) for line in lines) <= 80
    cells = [line.split() for line in lines]
    assert ["fp32", "directq", "acsgd"] in cells
    assert ["final", "train", "loss", "1.8123", "1.9423", "1.8150"] in cells
    assert ["speed-up", "1.00x", "2.84x", "2.80x"] in cells


@pytest.mark.parametrize("width", [80, 120])
def test_missing_numbers_are_dashes(width: int) -> None:
    console = terminal(width)

    show_results(console, {"arms": [{"name": "fp32"}, {"name": "x", "final_loss": None}]}, None)

    assert text_of(console).count(" -") >= 18
    assert "No arm came to a final loss" in text_of(console)


@pytest.mark.parametrize("width", [80, 120])
def test_an_arm_that_was_not_predicted_says_so(width: int) -> None:
    console = terminal(width)
    arm = {"name": "fp32", "step_s": 1.0, "not_predicted": "there are several replicas"}

    show_results(console, {"arms": [arm]}, None)

    assert "not predicted" in text_of(console)


def test_results_without_arms_are_shown_too() -> None:
    console = plain_console(io.StringIO())

    show_results(console, {"arms": []}, None)

    assert "nothing to compare" in text_of(console)


def test_only_files_that_exist_are_listed(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    console = Console(file=io.StringIO(), width=300, color_system=None)

    show_results(console, RESULTS, tmp_path)

    assert str(tmp_path / "report.html") in text_of(console)
    assert "trace.json" not in text_of(console)


def test_the_table_can_be_written_where_only_ascii_is_known() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")

    show_results(plain_console(stream), RESULTS, None)
    stream.flush()

    assert b"2.73x sooner" in raw.getvalue()


# --- the verdict -----------------------------------------------------------------------------


def with_arms(*arms: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**RESULTS, "arms": list(arms), **changes}


def test_the_verdict_says_where_compression_pays_and_what_the_limit_is() -> None:
    assert verdict(RESULTS) == (
        "Compression pays at 100Mbps (fp32's link time is 2.1x its compute time; no codec can gain "
        "more than 3.1x): acsgd reaches fp32's final loss 2.73x sooner, while directq ends 0.130 "
        "above it."
    )


def test_the_verdict_says_where_compression_does_not_pay() -> None:
    slow = {**ACSGD, "speedup": 0.96, "time_to_target_speedup": 0.95}
    results = with_arms(FP32, slow, limits={"link_to_compute": 0.1})

    assert verdict(results) == (
        "Compression does not pay at 100Mbps (fp32's link time is 0.1x its compute time): acsgd's "
        "steps are 0.96x as fast as fp32's; it pays where the link takes longer than the compute."
    )


def test_faster_steps_that_miss_the_loss_are_no_gain() -> None:
    text = verdict(with_arms(FP32, DIRECTQ, limits=None))

    assert text == (
        "Compression makes steps up to 2.84x faster at 100Mbps, but no arm came to fp32's final "
        "loss sooner (directq ends 0.1300 above it): give it more bits (--fw-bits, --bw-bits) or "
        "more epochs."
    )


NO_FP32 = [
    {**arm, "loss_gap": None, "speedup": 1.0, "time_to_target_s": None,
     "time_to_target_speedup": None}
    for arm in (DIRECTQ, ACSGD)
]  # fmt: skip


def test_without_fp32_the_verdict_says_that_it_is_missing() -> None:
    assert verdict(with_arms(*NO_FP32)) == (
        "There is no fp32 arm with a final loss to compare with, so what compression gains is not "
        "known: --compare fp32,directq,acsgd adds one."
    )


@pytest.mark.parametrize("width", [80, 200])
def test_without_fp32_there_is_no_speed_up_to_show(width: int) -> None:
    console = terminal(width)

    show_results(console, with_arms(*NO_FP32), None)

    assert "1.00x" not in text_of(console)
    assert "2.80x" not in text_of(console)


def test_where_nothing_was_sent_compression_gained_nothing() -> None:
    """One stage: whoever came sooner did so by chance."""
    arms = [{**arm, "bytes_per_step": 0} for arm in (FP32, ACSGD)]

    assert verdict(with_arms(FP32, ACSGD)).startswith("Compression pays")
    assert verdict(with_arms(*arms)).startswith("Nothing was sent, so nothing could be compressed")


def test_one_arm_gives_no_verdict_but_the_way_to_one() -> None:
    assert "--compare fp32,directq,acsgd" in verdict(with_arms(ACSGD))
    assert "--compare fp32,directq,acsgd" in verdict(with_arms(FP32))


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"bandwidth_bps": "unlimited"}, "pays on unshaped links:"),
        (
            {"bandwidth_bps": "unlimited", "latency_s": 0.02},
            "pays at unlimited bandwidth and 20ms of latency:",
        ),
        ({"bandwidth_bps": 1e7, "latency_s": 0.02}, "pays at 10Mbps and 20ms of latency:"),
        ({"bandwidth_bps": 1e8, "topology": "net.yaml"}, "pays on this topology:"),
        ({}, "pays:"),
    ],
)
def test_the_verdict_names_the_network(network: dict[str, Any], words: str) -> None:
    assert words in verdict(with_arms(FP32, ACSGD, limits={}, config={"network": network}))


# --- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 ms"),
        (0.000_85, "0.85 ms"),
        (0.085, "85.0 ms"),
        (0.434, "434 ms"),
        (0.9996, "1.00 s"),
        (9.996, "10.0 s"),
        (61.2, "61.2 s"),
        (125.0, "2m 05s"),
        (3780.0, "1h 03m"),
    ],
)
def test_measured_times_have_three_digits(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1m 00s"), (3599.6, "1h 00m"), (42.0, "42 s")]
)
def test_waiting_times_have_whole_seconds(seconds: float, text: str) -> None:
    assert show_clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (999.6, "B", "1.00 kB"),
        (12_582_912, "B", "12.6 MB"),
        (1e8, "bit/s", "100 Mbit/s"),
        (8123.4, "", "8.12k"),
        (2.5e9, "", "2.50G"),
    ],
)
def test_amounts_have_three_digits_and_a_prefix(value: float, unit: str, text: str) -> None:
    assert show_amount(value, unit) == text
