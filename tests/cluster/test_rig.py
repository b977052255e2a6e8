"""The rig itself: separate hosts, the kernel's rates, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.host import REPOSITORY, RigError
from tests.cluster.rig import GOODPUT, Rig
from tests.cluster.rig_remains import RIGS, sweep

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LEFT = f"left-{os.getpid()}"
SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 9000))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1 << 16):
            pass
        connection.sendall(b".")
"""
CLIENT = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9000), timeout=30)
start = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(1) == b"."
print(time.monotonic() - start)
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(2, rate_bps=100e6) as rig:
        server = rig.hosts[1].popen([rig.python, "-c", SERVER], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield rig


def seconds(rig: Rig, nbytes: int) -> float:
    words = [rig.python, "-c", CLIENT, rig.hosts[1].ip, str(nbytes)]
    return float(rig.hosts[0].run(words).stdout)


def test_hosts_have_their_own_names_processes_and_scratch_folders(rig: Rig) -> None:
    rig.hosts[0].run(["sh", "-c", "echo 0 > /tmp/mine; echo 0 > /dev/shm/mine"])

    names = [host.run(["hostname"]).stdout.strip() for host in rig.hosts]
    seen = rig.hosts[1].run(["ls", "/tmp", "/dev/shm"]).stdout
    processes = rig.hosts[0].run(["ps", "-e", "-o", "args="]).stdout.splitlines()

    assert names == ["node0", "node1"]
    assert "mine" not in seen
    assert not Path("/tmp/mine").exists()
    assert len(processes) <= 3


@pytest.mark.parametrize(("rate_bps", "nbytes"), [(100e6, 10_000_000), (10e6, 1_000_000)])
def test_the_kernel_carries_the_rate_less_the_headers(
    rig: Rig, rate_bps: float, nbytes: int
) -> None:
    rig.set_rate(rate_bps)

    measured_bps = 8 * nbytes / min(seconds(rig, nbytes) for _ in range(3))

    # Above it nothing can be; below, TCP's start and a loaded machine take a little.
    assert 0.90 < measured_bps / (GOODPUT * rate_bps) < 1.02


def test_even_a_small_message_is_slowed_down(rig: Rig) -> None:
    """A bucket as large as the message would let it pass at once."""
    rig.set_rate(10e6)

    assert seconds(rig, 60_000) > 0.030


def test_without_a_rate_it_is_fast(rig: Rig) -> None:
    rig.set_rate(None)

    assert 8 * 10_000_000 / seconds(rig, 10_000_000) > 300e6


def test_a_cut_cable_is_silent_and_a_mended_one_works(rig: Rig) -> None:
    rig.set_rate(None)
    rig.cut(1)
    with pytest.raises(RigError):
        rig.hosts[0].run(
            ["timeout", "2", rig.python, "-c", CLIENT, rig.hosts[1].ip, "1"], timeout_s=20
        )

    rig.mend(1)

    assert seconds(rig, 1) < 5.0


def test_a_killed_host_is_gone_and_comes_back_empty() -> None:
    with Rig(2) as rig:
        rig.hosts[1].run(["sh", "-c", "echo 1 > $HOME/kept; echo 1 > /tmp/lost"])
        rig.kill_host(1)
        with pytest.raises(RigError, match="node1 is down"):
            rig.hosts[1].run(["true"])

        rig.revive_host(1)

        left = rig.hosts[1].run(["sh", "-c", "ls /tmp $HOME"]).stdout.split()
        assert "kept" in left
        assert "lost" not in left


def inits() -> list[str]:
    listed = subprocess.run(["ps", "-e", "-o", "args="], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if f"ray_pipe_rig/{LEFT}" in line]


def test_a_rig_ends_with_its_owner_even_if_that_is_killed() -> None:
    script = f"""
        import os, signal
        from tests.cluster.rig import Rig
        rig = Rig(2, name="{LEFT}")
        rig.up()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    owner = subprocess.run(words, cwd=REPOSITORY, capture_output=True)

    assert owner.returncode == -9
    deadline = time.monotonic() + 10
    while inits() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert inits() == []
    sweep()
    assert not (RIGS / LEFT).exists()
