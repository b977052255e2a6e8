"""The probe's own work, without Ray: software, folders, handshakes, transfers to a fake peer."""

from __future__ import annotations

import ast
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_pipe import __version__, doctor_probe
from ray_pipe.doctor_probe import Probe, disk, handshakes, software
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


def test_a_node_without_our_source_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stages.digest", None)  # as if it were not there

    found = software()

    assert "source" not in found
    assert "ModuleNotFoundError" in found["source_error"]
    assert found["versions"]["python"]


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
    assert all(0 < seconds < 1 for seconds in took)


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
    assert abs(Probe().now() - time.time()) < 5


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
