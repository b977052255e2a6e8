"""The command line, with the driver replaced by a function: exit codes, streams, refusals."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from ray_pipe.config import RunConfig
from ray_pipe.errors import ConfigError, StageDied, Terminated, TrainingError
from ray_pipe.flags import GROUPS, make_parser
from ray_pipe.progress import Observer, PlainProgress, plain_console
from ray_pipe.run import AGAIN_S, main, stop_on_signals

ROOT = Path(__file__).parents[2]
RESULTS: dict[str, Any] = {
    "schema": 1,
    "arms": [{"name": "fp32", "final_loss": 2.5, "loss_gap": 0.0, "speedup": float("nan")}],
}


@dataclass
class Result:
    results: dict[str, Any]
    path: str | None = None


@dataclass
class Command:
    """Runs `main` with a fake driver and keeps what came out."""

    error: BaseException | None = None
    seen: list[RunConfig] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    out: str = ""
    err: str = ""

    def driver(self, config: RunConfig, observer: Observer) -> Result:
        self.seen.append(config)
        observer.on_start({"text": "a small run"})
        print("noise from a library")  # noqa: T201
        observer.on_arm("fp32", 0, 1, 2)
        observer.on_step("fp32", {"step": 0, "loss": 3.0, "step_s": 0.5, "bytes": 10})
        if self.error is not None:
            raise self.error
        observer.on_arm_end(RESULTS["arms"][0])
        return Result({**RESULTS, **self.more})

    def __call__(self, *argv: str) -> int:
        out, err = io.StringIO(), io.StringIO()
        code = main(list(argv), driver=self.driver, stdout=out, stderr=err)
        self.out, self.err = out.getvalue(), err.getvalue()
        return code

    @property
    def config(self) -> RunConfig:
        return self.seen[-1]


@pytest.fixture
def command() -> Command:
    return Command()


# --- flags -----------------------------------------------------------------------------------


def test_flags_become_options(command: Command) -> None:
    code = command(
        *("--bandwidth", "10Mbps", "--latency", "20ms", "--jitter=2ms", "--loss-rate", "1%"),
        *("--codec", "acsgd", "--fw-bits", "2", "--bw-bits", "6"),
        *("--stages", "2", "--micro-batches", "6", "--micro-batch-size", "12"),
        *("--schedule", "1f1b", "--transport", "refs", "--recompute", "--precision", "bf16"),
        *("--steps", "9", "--model", "gpt-small", "--seed", "3", "--lr", "3e-4", "--eval"),
        *("--address", "auto", "--name", "mine"),
    )

    config = command.config
    assert code == 0
    assert config == RunConfig.from_dict(
        {
            "network": {
                "bandwidth_bps": 10e6,
                "latency_s": 0.02,
                "jitter_s": 0.002,
                "loss_rate": 0.01,
            },
            "codec": {"name": "acsgd", "fw_bits": 2, "bw_bits": 6},
            "pipeline": {
                "stages": 2,
                "micro_batches": 6,
                "micro_batch_size": 12,
                "schedule": "1f1b",
                "transport": "refs",
                "recompute": True,
                "precision": "bf16",
            },
            "steps": 9,
            "model": "gpt-small",
            "seed": 3,
            "optim": {"lr": 3e-4},
            "eval": True,
            "address": "auto",
            "name": "mine",
        }
    )
    assert [arm.name for arm in config.arms] == ["acsgd"]


def test_set_beats_flags_beats_the_file_beats_defaults(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("codec: {fw_bits: 2, bw_bits: 2, group: 16}\nepochs: 3\n")

    command("--config", str(file), "--fw-bits", "3", "--bw-bits", "3", "--set", "codec.fw_bits=5")

    codec = command.config.codec
    assert (codec.fw_bits, codec.bw_bits, codec.group, codec.rows) == (5, 3, 16, "bf16")
    assert command.config.epochs == 3


def test_the_default_compares_and_a_codec_alone_does_not(command: Command) -> None:
    command()
    assert command.config.compare == ("fp32", "directq", "acsgd")
    command("--codec", "fp16")
    assert command.config.compare == ()
    command("--compare", "fp32,acsgd+zstd")
    assert command.config.compare == ("fp32", "acsgd+zstd")
    command("--compare", "fp32,topk", "--set", "codec=topk")
    assert command.config.compare == ("fp32", "topk")


def test_every_flag_of_the_issue_is_there_with_help() -> None:
    help_text = make_parser().format_help()
    wanted = [
        *("--bandwidth", "--latency", "--jitter", "--loss-rate", "--topology"),
        *("--codec", "--fw-bits", "--bw-bits", "--compare"),
        *("--stages", "--micro-batches", "--micro-batch-size", "--schedule", "--transport"),
        *("--epochs", "--steps", "--data", "--model", "--seed", "--out", "--address"),
        *("--config", "--set", "--json", "--show-config", "--debug"),
    ]

    assert [flag for flag in wanted if f"  {flag}" not in help_text] == []
    for action in make_parser()._actions:
        assert len(action.help or "") > 9, action.option_strings
    assert "(default: 100Mbps)" in " ".join(help_text.split())
    assert "(default: fp32,directq,acsgd)" in " ".join(help_text.split())
    assert "examples:" in help_text


def test_the_help_of_a_flag_names_every_choice() -> None:
    helps = {flag: a.help or "" for a in make_parser()._actions for flag in a.option_strings}
    choices = {
        "--precision": ("fp32", "bf16"),
        "--schedule": ("gpipe", "1f1b", "eager-1f1b"),
        "--transport": ("push", "refs"),
        "--task": ("text", "ctr"),
    }

    missing = [(f, word) for f, words in choices.items() for word in words if word not in helps[f]]

    assert missing == []


DEFAULTS = {
    "--model": "gpt-tiny",
    "--data": "pydoc",
    "--epochs": "8",
    "--lr": "1e-3",
    "--seed": "0",
    "--compare": "fp32,directq,acsgd",
    "--fw-bits": "4",
    "--bw-bits": "4",
    "--bandwidth": "100Mbps",
    "--latency": "0ms",
    "--jitter": "0",
    "--loss-rate": "0%",
    "--stages": "4",
    "--micro-batches": "4",
    "--micro-batch-size": "16",
    "--batch-size": "64",
    "--schedule": "gpipe",
    "--transport": "push",
    "--precision": "fp32",
    "--out": "runs",
    "--max-failures": "3",
    "--spares": "1",
    "--task": "text",
    "--staleness": "auto",
    "--shards": "2",
    "--wire": "fp16-rowscale",
    "--prune": "0",
    "--capacity": "2GiB",
    "--replicas": "1",
    "--sync-bits": "4",
}


@pytest.mark.parametrize("flag", DEFAULTS)
def test_a_flag_that_gives_the_default_changes_nothing(command: Command, flag: str) -> None:
    assert command("--name", "x", flag, DEFAULTS[flag]) == 0

    assert command.config == RunConfig(name="x")


def test_every_flag_with_a_default_is_in_that_list() -> None:
    flags = {flag for group in GROUPS.values() for flag in group}
    without = {
        *("--steps", "--eval", "--codec", "--topology", "--recompute"),
        *("--name", "--address", "--dashboard"),
        *("--checkpoint-every", "--keep-checkpoints", "--checkpoint-dir", "--resume"),
        *("--spill", "--columns"),
        *("--sync", "--sync-codec", "--slow"),
    }

    assert flags == {*DEFAULTS, *without}


HOP = ["--replicas", "4", "--sync", "hop", "--set"]
RIPPLES = ["--replicas", "4", "--sync", "ripples", "--set"]
LOCAL = ["--replicas", "4", "--sync", "local", "--steps", "10", "--set"]
ADAM = ["--replicas", "4", "--sync", "quantized-adam", "--steps", "10", "--set"]

# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--bandwith", "1Mbps"], ["there is no flag --bandwith", "did you mean '--bandwidth'?"]),
        (["--stage=2"], ["there is no flag --stage", "did you mean '--stages'?"]),
        (["--qqq"], ["there is no flag --qqq", "--help"]),
        (["train"], ["'train' is no flag", "--help"]),
        (["--stages"], ["--stages: needs a value, --stages N."]),
        (["--stages", "0"], ["error: --stages: pipeline.stages is 0", "at least 1"]),
        (["--set", "pipeline.stages=0"], ["error: pipeline.stages is 0", "at least 1"]),
        (["--bandwidth", "-5Mbps"], ["--bandwidth: bandwidth '-5Mbps'", "more than zero"]),
        (["--bandwidth=0"], ["--bandwidth: bandwidth '0'", "more than zero", "'unlimited'?"]),
        (["--spares", "99"], ["--spares: faults.spares is 99", "at most 16"]),
        (["--resume", "none"], ["--resume none: there is no such folder", "--checkpoint-every"]),
        (["--resume", __file__], ["--resume ", "is a file", "the folder of a run"]),
        (["--resume", "nosuch://x"], ["error: --resume: nosuch://x:", "not known", "fsspec"]),
        (["--stages", "9"], ["--stages 9", "4 blocks", "--stages 4", "model.layers=9"]),
        (["--stages", "x"], ["--stages:", "a whole number", "'x'"]),
        (["--bandwidth", "100"], ["--bandwidth:", "'100'", "'100Mbps'"]),
        (["--bandwidth", "fast"], ["--bandwidth:", "'fast'", "'unlimited'"]),
        (["--latency", "20"], ["--latency:", "'20ms'"]),
        (["--codec", "acsdg"], ["'acsdg'", "did you mean 'acsgd'?"]),
        (["--fw-bits", "16"], ["codec.fw_bits is 16", "at most 8"]),
        (["--epochs", "2", "--steps", "5"], ["--steps", "steps=5 and epochs=2", "keep one"]),
        (["--batch-size", "30"], ["30 samples", "4 micro-batches", "28 or 32"]),
        (["--set", "codec.fwbits=2"], ["did you mean 'fw_bits'?"]),
        (["--set", "x"], ["expected key=value"]),
        (["--config", "none.yaml"], ["--config none.yaml", "No such file"]),
        (["--data", "none.txt"], ["--data none.txt", "no such file", "pydoc"]),
        (["--codec", "acsgd", "--epochs", "1"], ["gains nothing", "--codec directq"]),
        (["--shards", "3"], ["embedding.shards", "the task is text", "--task ctr"]),
        (["--task", "clicks"], ["task is 'clicks'", "'ctr'"]),
        (["--task", "ctr", "--staleness", "-1"], ["'-1'", "0 (synchronous)", "or auto"]),
        (["--task", "ctr", "--wire", "fp8"], ["embedding.wire is 'fp8'", "'int8'"]),
        (["--task", "ctr", "--prune", "1.5"], ["1.5"]),
        (["--task", "ctr", "--prune", "0.5", "--set", "embedding.dim=6"], ["four chunks", "is 6"]),
        (["--task", "ctr", "--shards", "0"], ["embedding.shards is 0", "at least 1"]),
        (["--task", "ctr", "--capacity", "6"], ["--capacity:", "'6GiB'"]),
        (["--task", "ctr", "--capacity", "1KiB"], ["embedding.capacity", "at least"]),
        (["--codec", "acsgd", "--compare", "fp32,directq"], ["codec.name is 'acsgd' but compare"]),
        (["--codec", "directq", "--compare", "fp32,acsgd"], ["codec.name is 'directq' but"]),
        (["--codec", "topk", "--set", "compare=fp32"], ["codec.name is 'topk' but compare lists"]),
        (["--task", "ctr", "--compare", "fp32"], ["compare lists fp32", "--codec", "--wire"]),
        (["--task", "ctr", "--data", "none.tsv"], ["no such file", "Criteo", "synthetic"]),
        (["--task", "ctr", "--data", "pydoc"], ["pydoc is text", "--data synthetic"]),
        (["--task", "ctr", "--columns", "label=x; ids=y"], ["--columns", "--data FILE"]),
        (["--task", "ctr", "--transport", "refs"], ["--transport push"]),
        (["--task", "ctr", "--model", "gpt2"], ["--model gpt2", "DLRM", "embedding.dim"]),
        (["--task", "ctr", "--recompute"], ["--recompute", "leave it out"]),
        (["--sync", "hop"], ["--sync hop", "one replica", "--replicas 2 or more"]),
        (["--replicas", "4", "--sync", "rippels"], ["'rippels'", "did you mean 'ripples'?"]),
        ([*HOP, "sync.max_gap=0"], ["sync.max_gap is 0", "set 1 or more"]),
        ([*HOP, "sync.backup_workers=3"], ["only 3 neighbours", "at most 2", "denser graph"]),
        ([*HOP, "sync.graph=rings"], ["'rings'", "did you mean 'ring'?"]),
        ([*HOP, "sync.graph=APART"], ["not connected", "replica 3", "sync.graph=ring"]),
        ([*RIPPLES, "sync.group_size=5"], ["sync.group_size is 5", "4 replicas", "2 to 4"]),
        ([*LOCAL, "sync.outer_lr=0"], ["sync.outer_lr is 0", "above 0"]),
        ([*LOCAL, "sync.outer_momentum=1"], ["sync.outer_momentum 1", "not including, 1"]),
        ([*LOCAL, "sync.local_steps=11"], ["sync.local_steps=11", "10 steps", "never agree"]),
        ([*ADAM, "sync.warmup=10"], ["sync.warmup=10", "10 steps", "a tenth"]),
        (
            ["--replicas", "4", "--sync", "local", "--steps", "5"],
            ["sync.local_steps=8 (the default)", "5 steps", "never agree"],
        ),
        (
            ["--replicas", "4", "--sync", "quantized-adam", "--steps", "4"],
            ["sync.warmup=4 (the default)", "4 steps", "all of them"],
        ),
        (["--replicas", "2", "--sync-bits", "2"], ["sync.bits=2", "send fp32", "directq"]),
        (["--set", "sync.rejoin=true"], ["sync.rejoin=True", "one replica", "--replicas 2"]),
        (["--sync-codec", "directq"], ["sync.codec=directq", "one replica"]),
        (["--set", "sync.group_size=3"], ["sync.group_size=3", "one replica"]),
        ([*ADAM, "optim.name=sgd"], ["optim.name=sgd", "Adam of its own"]),
        ([*HOP, "sync.local_steps=8"], ["sync.local_steps=8", "ripples or ad-psgd or local"]),
        (["--replicas", "4", "--set", "sync.skip=8"], ["sync.skip=8: allreduce", "--sync hop"]),
        ([*RIPPLES, "sync.groups=ruler", "--set", "sync.group_size=2"], ["groups=ruler", "smart"]),
        (["--replicas", "4", "--slow", "2:4"], ["--slow", "'2:4'", "'2:4x'"]),
        (["--replicas", "4", "--slow", "4:2x"], ["no replica 4", "0 to 3"]),
        (["--replicas", "2", "--sync-codec", "int3"], ["no codec 'int3'"]),
        (["--replicas", "2", "--sync-bits", "9"], ["sync.bits is 9", "at most 8"]),
        (["--replicas", "2", "--transport", "refs"], ["--transport push"]),
        (["--task", "ctr", "--replicas", "2"], ["--task ctr", "--replicas"]),
    ],
)
def test_a_refusal_is_one_paragraph_on_stderr_and_exit_2(
    command: Command, argv: list[str], parts: list[str], tmp_path: Path
) -> None:
    apart = tmp_path / "apart.txt"
    apart.write_text("0<->1\n1<->2\n", encoding="utf-8")  # replica 3 has no edge

    code = command(*(word.replace("APART", str(apart)) for word in argv))

    assert code == 2
    assert command.out == ""
    assert command.seen == []
    assert command.err.startswith("error: ")
    assert command.err.count("\n") == 1
    for part in parts:
        assert part in command.err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (TrainingError("loss is NaN in step 3"), 1, "error: loss is NaN in step 3\n"),
        (
            StageDied(2, 7, "killed", "see --debug"),
            1,
            "error: stage 2 died in step 7: killed; see --debug\n",
        ),
        (ConfigError("corpus\n too small"), 2, "error: corpus too small\n"),
        (KeyError("x"), 1, "error: KeyError: 'x' (--debug shows where)\n"),
        (RuntimeError(), 1, "error: RuntimeError: no message (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_each_failure_has_its_exit_code_and_no_traceback(
    command: Command, error: BaseException, code: int, text: str
) -> None:
    command.error = error

    assert command() == code
    assert command.err == text
    assert "Traceback" not in command.out + command.err


def test_debug_shows_the_traceback(command: Command) -> None:
    command.error = TrainingError("no")

    assert command("--debug") == 1
    assert "Traceback" in command.err
    assert command.err.endswith("error: no\n")


def test_what_a_stage_raised_is_shown_instead_of_rays_wrapping(command: Command) -> None:
    wrapped = RuntimeError("ray::Stage.step()\nTraceback ...\nValueError: shapes differ")
    wrapped.cause = ValueError("shapes differ")  # type: ignore[attr-defined]
    command.error = wrapped

    command()

    assert command.err == "error: ValueError: shapes differ (--debug shows where)\n"


def test_warnings_are_shown_and_the_run_goes_on(command: Command) -> None:
    assert command("--epochs", "1") == 0
    assert "warning: epochs is 1" in command.out


# --- output ----------------------------------------------------------------------------------


def test_the_last_line_with_json_is_the_results_and_stdout_has_no_other(command: Command) -> None:
    assert command("--json") == 0

    (line,) = command.out.splitlines()
    assert json.loads(line) == {
        "schema": 1,
        "arms": [{"name": "fp32", "final_loss": 2.5, "loss_gap": 0.0, "speedup": None}],
    }
    assert "noise from a library" in command.err
    assert "final" in command.err


def test_a_run_whose_last_state_is_not_saved_shows_its_results_and_fails(command: Command) -> None:
    command.more = {"lost_checkpoints": {"acsgd": "the disk is full"}}

    assert command("--json") == 1
    assert json.loads(command.out)["arms"][0]["final_loss"] == 2.5
    assert command.err.splitlines()[-1] == (
        "error: training ended and its results are written, but the state after the last step "
        "could not be saved (acsgd: the disk is full); mend that, and --resume repeats the steps "
        "since the last checkpoint"
    )


def test_without_json_the_table_is_on_stdout(command: Command) -> None:
    assert command() == 0

    assert "a small run" in command.out
    assert "2.5000" in command.out
    assert "\x1b" not in command.out
    assert command.err == ""


def test_show_config_prints_settings_that_give_the_same_run(command: Command) -> None:
    assert command("--show-config", "--fw-bits", "2", "--bandwidth", "unlimited", "--name=x") == 0

    assert command.seen == []
    shown = RunConfig.from_dict(yaml.safe_load(command.out))
    assert shown == RunConfig(name="x").with_overrides(
        ["codec.fw_bits=2", "network.bandwidth=unlimited"]
    )
    assert "# Bits per gradient value." in command.out


def test_show_config_with_json_is_json(command: Command) -> None:
    command("--show-config", "--json", "--bandwidth", "unlimited")

    assert json.loads(command.out)["network"]["bandwidth_bps"] == "unlimited"


def test_version_and_help_leave_with_0(command: Command) -> None:
    assert command("--version") == 0
    assert command.out == "ray_pipe 0.1.0\n"
    assert command("--help") == 0
    assert command.out.startswith("usage: python -m ray_pipe.run [flags]")


# --- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import ray_pipe",
        "import ray_pipe; ray_pipe.RunConfig().validate()",
        "from ray_pipe.run import main; main(['--help'])",
        "from ray_pipe.run import main; main(['--stages', '99'])",
    ],
)
def test_neither_torch_nor_ray_is_loaded_for_help_and_refusals(code: str) -> None:
    script = f"{code}\nimport sys\nprint(sorted({{'torch', 'ray', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_that_check_would_see_a_module_that_is_loaded() -> None:
    script = "import numpy, sys\nprint(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )

    assert done.stdout == "['numpy']\n"


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ray_pipe.run", "--stages", "99"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --stages 99: gpt-tiny has 4 blocks")


# --- Ctrl-C ----------------------------------------------------------------------------------


class Left(BaseException):
    """Stands for the end of the process."""


def leave(code: int) -> NoReturn:
    raise Left(code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_cleanly_and_the_second_at_once(number: signal.Signals) -> None:
    shown, err = io.StringIO(), io.StringIO()
    progress = PlainProgress(plain_console(shown), clock=lambda: 0.0)
    before = signal.getsignal(number)

    def run() -> None:
        with stop_on_signals(progress, err, leave=leave):
            with pytest.raises(KeyboardInterrupt) as stopped:
                os.kill(os.getpid(), number)
            assert isinstance(stopped.value, Terminated) == (number == signal.SIGTERM)
            assert "stopping ..." in shown.getvalue()
            assert err.getvalue() == ""
            os.kill(os.getpid(), number)  # during the clean-up

    with pytest.raises(Left) as left:
        run()

    assert left.value.args == (130,)
    assert err.getvalue() == "stopped at once\n"
    assert signal.getsignal(number) is before


class Pipe(io.StringIO):
    """Whoever reads it may be gone, as `tee` is after the same Ctrl-C."""

    is_broken = False

    def write(self, text: str) -> int:
        if self.is_broken:
            raise BrokenPipeError
        return super().write(text)


def test_a_reader_that_ends_at_the_same_ctrl_c_costs_nothing() -> None:
    done = []
    pipe, err = Pipe(), io.StringIO()

    def driver(config: RunConfig, observer: Observer) -> Result:
        pipe.is_broken = True
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            observer.on_note("what was done until then is in runs/x")
            observer.on_warning("something else")
            done.append("report")
        return Result(RESULTS)

    code = main([], driver=driver, stdout=pipe, stderr=err)

    assert (code, done) == (130, ["report"])
    assert err.getvalue() == "stopped\n"


def test_a_reader_that_goes_ends_the_run_and_loses_no_report() -> None:
    """As `head` does: the first line that cannot be shown ends it, the others do not matter."""
    done = []
    pipe, err = Pipe(), io.StringIO()

    def driver(config: RunConfig, observer: Observer) -> Result:
        pipe.is_broken = True
        try:
            observer.on_phase("starting Ray")
            done.append("trained")
        finally:
            observer.on_note("what was done until then is in runs/x")
            done.append("report")
        return Result(RESULTS)

    code = main([], driver=driver, stdout=pipe, stderr=err)

    assert (code, done, err.getvalue()) == (1, ["report"], "")


class StruckWhileCollected:
    """A signal arrives while Python runs its `__del__`, which drops what is raised there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_python_drops_comes_again(number: int) -> None:
    """Seen in earnest: Ctrl-C struck the callback of a WeakSet, and the run went on."""
    shown, err = io.StringIO(), io.StringIO()
    progress = PlainProgress(plain_console(shown), clock=lambda: 0.0)
    hook = sys.unraisablehook

    def run() -> BaseException:
        with stop_on_signals(progress, err, leave=leave):
            StruckWhileCollected(number)
            StruckWhileCollected(number)  # a stop that is repeated is no second one
            with pytest.raises(KeyboardInterrupt) as stopped:
                threading.Event().wait(60)
            threading.Event().wait(4 * AGAIN_S)  # the clean-up is not disturbed
            return stopped.value

    stopped = run()

    assert isinstance(stopped, Terminated) == (number == signal.SIGTERM)
    assert shown.getvalue().count("stopping ...") == 1
    assert err.getvalue() == ""
    assert sys.unraisablehook is hook


def test_the_driver_gets_the_interrupt_and_can_clean_up(command: Command) -> None:
    cleaned = []

    def driver(config: RunConfig, observer: Observer) -> Result:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            cleaned.append(True)
        return Result(RESULTS)

    out, err = io.StringIO(), io.StringIO()
    code = main([], driver=driver, stdout=out, stderr=err)

    assert (code, cleaned) == (130, [True])
    assert "stopping ..." in out.getvalue()
    assert err.getvalue() == "stopped\n"
