"""The doctor's command without a cluster: flags, exit status, files, JSON."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doctor_patients import healthy, with_node

from netsim.topology import Topology
from ray_pipe.doctor import main
from ray_pipe.doctor_reports import Checkup

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def run(*words: str, checkup: Checkup | None = None) -> tuple[int, str, str, dict[str, Any]]:
    out, err = io.StringIO(), io.StringIO()
    asked: dict[str, Any] = {}

    def examine(address: str | None, watcher: Any, **options: Any) -> Checkup:
        asked.update(options, address=address)
        return checkup or healthy(3, address)

    code = main(words, examine=examine, stdout=out, stderr=err)
    return code, out.getvalue(), err.getvalue(), asked


def test_help_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from ray_pipe.doctor import main; status = main(['--help']); "
        "loaded = {'torch', 'ray', 'numpy'} & set(sys.modules); "
        "sys.exit(f'{status} {loaded}' if status or loaded else 0)"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )

    assert result.returncode == 0, result.stderr
    assert "--topology-out FILE.yaml" in result.stdout


def test_all_well_is_status_0_and_a_fault_status_1() -> None:
    assert run("--address", "h:1")[0] == 0
    assert run("--address", "h:1", checkup=with_node(healthy(), 0, load=99.0))[0] == 0
    assert run("--address", "h:1", checkup=with_node(healthy(), 1, error="gone"))[0] == 1


def test_flags_reach_the_rounds() -> None:
    words = ["--address", "h:1", "--seconds", "2", "--max-transfer", "20MB", "--folder", "/spill"]

    *_, asked = run(*words, "--neighbours", "--out", "there")

    assert asked == {
        "address": "h:1",
        "out": "there",
        "folders": ["/spill"],
        "bandwidth": True,
        "neighbours_only": True,
        "seconds": 2.0,
        "limit_nbytes": 20_000_000,
    }
    assert run("--quick")[3]["bandwidth"] is False


def test_the_environments_cluster_is_looked_at_without_a_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.10:6379")

    assert run()[3]["address"] == "10.0.0.10:6379"
    assert run("--address", "h:1")[3]["address"] == "h:1"


def test_json_is_alone_on_standard_output() -> None:
    code, out, err, _ = run("--address", "h:1", "--json")

    found = json.loads(out)
    assert code == 0
    assert (found["schema"], found["verdict"], found["findings"]) == (1, "ok", [])
    assert found["links"][0]["latency_s"] == 0.02
    assert found["nodes"][2]["software"]["versions"]["ray"] == "2.60.0"
    assert found["next_commands"] == [
        "python -m ray_pipe.run --address h:1 --stages 3 --bandwidth unlimited"
    ]
    assert "loading Ray" in err


def test_the_measured_links_are_written_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "links.yaml"

    code, out, _, _ = run("--address", "h:1", "--topology-out", str(path))

    assert code == 0
    assert Topology.load(path, 3).rate_bps(0, 1) == 94.8e6
    assert f"--topology {path}" in out


def test_with_faults_no_links_are_written(tmp_path: Path) -> None:
    path = tmp_path / "links.yaml"
    sick = with_node(healthy(), 1, error="gone")

    code, out, _, _ = run("--address", "h:1", "--topology-out", str(path), checkup=sick)

    assert code == 1
    assert not path.exists()
    assert "the measured links were not written" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quik"], "there is no flag --quik; did you mean '--quick'? See --help for all."),
        (["h:1"], "there is no flag h:1. See --help for all."),
        (["--seconds", "0"], "--seconds 0: must be from 0.1 to 60."),
        (["--seconds", "x"], "--seconds: needs a number, got 'x'."),
        (["--seconds", "nan"], "--seconds nan: must be from 0.1 to 60."),
        (["--max-transfer", "5"], "--max-transfer: size '5' is not understood"),
        (["--max-transfer", "5kB"], "--max-transfer: less than 1MiB tells nothing about a link."),
        (["--topology-out", "x.yaml"], "--topology-out: one machine has no links; give --address."),
        (
            ["--topology-out", "x.yaml", "--quick", "--address", "h:1"],
            "--topology-out needs every link: leave out --quick and --neighbours.",
        ),
        (
            ["--topology-out", "/no/such/x.yaml", "--address", "h:1"],
            "--topology-out /no/such/x.yaml: there is no such folder.",
        ),
        (
            ["--topology-out", "/tmp", "--address", "h:1"],
            "--topology-out /tmp: is a folder; name a file in it.",
        ),
    ],
)
def test_a_bad_flag_is_refused_before_anything_is_looked_at(words: list[str], message: str) -> None:
    code, out, err, asked = run(*words)

    assert (code, out, asked) == (2, "", {})
    assert message in err
    assert err.count("\n") == 1


def test_ctrl_c_is_quiet() -> None:
    def examine(*args: Any, **options: Any) -> Checkup:
        raise KeyboardInterrupt

    out, err = io.StringIO(), io.StringIO()

    assert main([], examine=examine, stdout=out, stderr=err) == 130
    assert err.getvalue() == "stopped\n"


def test_a_disk_that_takes_no_topology_file_is_told_without_a_traceback(tmp_path: Path) -> None:
    def examine(*args: Any, **options: Any) -> Checkup:
        raise OSError(28, "No space left on device")

    out, err = io.StringIO(), io.StringIO()

    assert main([], examine=examine, stdout=out, stderr=err) == 1
    assert err.getvalue().splitlines()[-1] == "error: [Errno 28] No space left on device"
