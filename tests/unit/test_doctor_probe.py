"""The probe's own work, without Ray: software, folders, handshakes, transfers to a fake peer."""

from __future__ import annotations

import ast
import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle

from ray_pipe import __version__, doctor_probe
from ray_pipe.doctor_probe import Probe, disk, handshakes, shm_goes_at_logout, software
from stages import digest
from stages.digest import source_digest


class Line:
    """A peer at the end of a line of `rate` bytes per second and a round trip of `call_s`."""

    def __init__(self, rate: float, call_s: float = 0.0) -> None:
        self.rate, self.call_s = rate, call_s
        self.now = 0.0
        self.pieces: list[int] = []
        self.take = self

    def remote(self, payload: bytes) -> float:
        self.pieces.append(len(payload))
        self.free = max(getattr(self, "free", 0.0), self.now) + len(payload) / self.rate
        return self.free + self.call_s

    def get(self, due: Any, timeout: float) -> None:
        self.now = max([self.now, *(due if isinstance(due, list) else [due])])


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(rate_bps: float, call_s: float = 0.0) -> Line:
        made = Line(rate_bps / 8, call_s)
        monkeypatch.setattr(ray, "get", made.get)
        monkeypatch.setattr(doctor_probe.time, "monotonic", lambda: made.now)
        return made

    return make


@pytest.mark.parametrize("rate_bps", [0.2e6, 1e6, 10e6, 100e6, 1e9])
@pytest.mark.parametrize("call_s", [0.001, 0.1])
def test_the_rate_of_a_line_is_found_whatever_it_is(
    line: Any, rate_bps: float, call_s: float
) -> None:
    peer = line(rate_bps, call_s)

    found = Probe().send(peer, call_s, 1.0, 256 << 20)

    assert found["bandwidth_bps"] == pytest.approx(rate_bps, rel=0.02)
    assert found["nbytes"] == sum(peer.pieces)
    assert peer.now < 3.0 + 12 * call_s  # about as long as was asked for


def test_never_more_than_the_limit_is_sent(line: Any) -> None:
    peer = line(100e9)

    found = Probe().send(peer, 0.0, 1.0, 5_000_000)

    assert sum(peer.pieces) == found["nbytes"] <= 5_000_000
    assert found["bandwidth_bps"] == pytest.approx(100e9, rel=0.02)


def test_a_line_that_breaks_is_an_error_with_what_was_sent(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = line(1e6)

    def broken(due: Any, timeout: float) -> None:
        raise ConnectionError

    monkeypatch.setattr(ray, "get", broken)

    assert Probe().send(peer, 0.0, 1.0, 1 << 20) == {
        "error": "the transfer broke off after 0 bytes (ConnectionError)"
    }


def test_software_is_told_as_this_process_has_it() -> None:
    found = software()

    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["versions"]["ray"] == ray.__version__
    assert found["versions"]["ray_pipe"] == __version__
    assert found["source"] == source_digest()
    assert found["core"] in ("native", "torch")
    assert (found["native"] or "") == digest.software()["native"]  # what a run compares


def test_a_node_without_our_source_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stages.digest", None)  # as if it were not there

    found = software()

    assert "source" not in found
    assert "ModuleNotFoundError" in found["source_error"]
    assert found["versions"]["python"]


def systemd(root: Path, **files: str) -> Path:
    """A machine whose logins systemd keeps; `files` by name below etc/systemd."""
    (root / "run/systemd/seats").mkdir(parents=True)
    folder = root / "etc/systemd/logind.conf.d"
    folder.mkdir(parents=True)
    for name, text in files.items():
        path = folder.parent / "logind.conf" if name == "main" else folder / f"{name}.conf"
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "goes"),
    [
        ({}, True),
        ({"main": "[Login]\n#KillUserProcesses=no\n#RemoveIPC=yes\n"}, True),
        ({"main": "[Login]\n#RemoveIPC=no\n"}, False),  # built so
        ({"main": "[Login]\nRemoveIPC=no\n"}, False),
        ({"main": "[Login]\n#RemoveIPC=yes\n", "10-ours": "[Login]\nRemoveIPC=0\n"}, False),
        ({"main": "[Login]\nRemoveIPC=no\n", "10-theirs": "[Login]\nRemoveIPC=yes\n"}, True),
    ],
)
def test_whether_shared_memory_outlives_a_login_is_read_as_systemd_does(
    tmp_path: Path, files: dict[str, str], goes: bool
) -> None:
    assert shm_goes_at_logout(systemd(tmp_path, **files), 1000) is goes


def test_shared_memory_of_a_system_account_without_systemd_or_lingering_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not shm_goes_at_logout(tmp_path, 1000)
    root = systemd(tmp_path)
    assert not shm_goes_at_logout(root, 999)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="ubuntu"))
    assert shm_goes_at_logout(root, 1000)

    (root / "var/lib/systemd/linger").mkdir(parents=True)
    (root / "var/lib/systemd/linger/ubuntu").touch()

    assert not shm_goes_at_logout(root, 1000)


def test_a_folder_that_does_not_exist_yet_has_the_room_of_the_one_above(tmp_path: Path) -> None:
    found = disk(str(tmp_path / "a" / "b"))

    assert found["path"] == str(tmp_path / "a" / "b")
    assert 0 < found["free_nbytes"] <= found["total_nbytes"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_where_nothing_can_be_written_says_why() -> None:
    found = disk("/proc/self")

    assert set(found) == {"path", "error"}
    assert "(/proc/self)" in found["error"]


def test_handshakes_take_a_round_trip_each_and_are_several() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        took = handshakes("127.0.0.1", server.getsockname()[1])

    assert 5 <= len(took) <= 21
    assert all(0 < seconds < 30 for seconds in took)


def test_closed_ports_are_reported_without_a_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    found = Probe().reach(None, "127.0.0.1", [port])

    assert found == {
        "ports_open": False,
        "error": f"port {port} of 127.0.0.1: Connection refused",
    }


def test_a_description_has_what_the_report_needs() -> None:
    found = Probe().describe(["/tmp"])

    assert found["num_cores"] == len(os.sched_getaffinity(0))
    assert found["free_memory_nbytes"] > 0
    assert [disk["path"] for disk in found["disks"]] == ["/tmp/ray", "/tmp"]
    assert abs(Probe().now() - time.time()) < 60


def test_the_probe_needs_nothing_but_the_standard_library_to_be_loaded() -> None:
    """It is shipped to nodes that may have neither our source nor the right one."""
    tree = ast.parse(Path(doctor_probe.__file__).read_text(encoding="utf-8"))
    tops = [
        name.split(".")[0]
        for node in tree.body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]

    assert set(tops) <= set(sys.stdlib_module_names)


# --- rules, and mutants that break them -----------------------------------------------------------


def measured_with_stalls(
    line: Any, monkeypatch: pytest.MonkeyPatch, stalls: tuple[int, ...]
) -> float:
    """The rate found on a line of 10 Mbps by a machine that stalls in these transfers."""
    peer = line(10e6)
    get, transfers = peer.get, iter(range(1000))

    def get_with_stall(due: Any, timeout: float) -> None:
        get(due, timeout)
        peer.now += 0.3 if next(transfers) in stalls else 0.0

    monkeypatch.setattr(ray, "get", get_with_stall)
    rate: float = Probe().send(peer, 0.0, 2.0, 256 << 20)["bandwidth_bps"]
    return rate


PAIRS = list(itertools.combinations(range(8), 2))


def test_a_machine_that_stalls_twice_does_not_make_the_line_look_slow(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [measured_with_stalls(line, monkeypatch, pair) for pair in PAIRS]

    assert rates == pytest.approx([10e6] * len(PAIRS), rel=0.02)


def test_mutant_a_single_measurement_is_fooled_by_a_stall(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_probe, "REPEATS", 1)

    rates = [measured_with_stalls(line, monkeypatch, pair) for pair in PAIRS]

    assert min(rates) < 0.9 * 10e6


def test_mutant_a_round_trip_that_is_not_taken_off_makes_a_distant_line_look_slow(
    line: Any,
) -> None:
    found = Probe().send(line(100e6, 0.1), 0.0, 2.0, 256 << 20)  # told of no round trip

    assert found["bandwidth_bps"] < 0.9 * 100e6


SHIPPED = """
import importlib.abc, pickle, sys
import ray

class Bare(importlib.abc.MetaPathFinder):  # a node that has none of our packages
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("ray_pipe", "stages", "compressors", "netsim"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Bare())
probe = pickle.load(sys.stdin.buffer)()
found = probe.describe([])
print(found["software"]["source_error"], found["num_cores"])
"""


def arrive(pickled: bytes) -> subprocess.CompletedProcess[bytes]:
    """The probe on a node that has Ray and not us."""
    return subprocess.run(
        [sys.executable, "-c", SHIPPED], input=pickled, capture_output=True, timeout=300
    )


@pytest.mark.slow
def test_the_probe_works_on_a_node_that_has_none_of_our_source() -> None:
    cloudpickle.register_pickle_by_value(doctor_probe)
    try:
        result = arrive(cloudpickle.dumps(Probe))
    finally:
        cloudpickle.unregister_pickle_by_value(doctor_probe)

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(b"ModuleNotFoundError: No module named ")


@pytest.mark.slow
def test_mutant_a_probe_shipped_by_name_does_not_arrive_there() -> None:
    result = arrive(cloudpickle.dumps(Probe))

    assert result.returncode != 0
    assert b"No module named 'ray_pipe'" in result.stderr
