"""A real cluster that asks for a token: who has none, or a wrong one, is told so within seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
TOKEN = "0123456789abcdef" * 2
START_S = 90.0


def environment(home: Path, **env: str) -> dict[str, str]:
    """Without anything that could be a token of the account the tests run under."""
    keep = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return keep | {
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        **env,
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder without a token."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    """The address of a head with `RAY_AUTH_MODE=token`, on its own port and in its own folder."""
    port, client_port, agent_port = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        log = Path(temp) / "head.log"
        words = [
            "start", "--head", "--block", f"--port={port}", f"--temp-dir={temp}", "--num-cpus=1",
            "--include-dashboard=false", "--object-store-memory=80000000",
            f"--ray-client-server-port={client_port}", "--disable-usage-stats",
            f"--dashboard-agent-listen-port={agent_port}",
        ]  # fmt: skip
        with log.open("w") as file:
            head = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *words],
                env=environment(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield wait_for_address(head, log)
        finally:
            head.send_signal(signal.SIGTERM)  # `--block` ends all that it started
            head.wait(timeout=400)


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [server.getsockname()[1] for server in servers]
    finally:
        for server in servers:
            server.close()


def wait_for_address(head: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and head.poll() is None:
        found = re.search(r"--address='([\d.]+:\d+)'", log.read_text())
        if found:
            return found[1]
        time.sleep(0.2)
    raise AssertionError(f"the head did not start:\n{log.read_text()}")


def command(home: Path, module: str, *words: str, **env: str) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=home,
        env=environment(home, **env),
        capture_output=True,
        text=True,
        timeout=400,
    )
    return result.returncode, " ".join(result.stdout.split()), " ".join(result.stderr.split())


REFUSED = [
    ({}, "the cluster asks for a token and this process sends none (RAY_AUTH_MODE is not set)"),
    (
        {"RAY_AUTH_MODE": "disabled"},
        "the cluster asks for a token and this process sends none (RAY_AUTH_MODE is disabled)",
    ),
    ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE is token, but there is no token here"),
    (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 32},
        "the cluster does not accept this machine's token",
    ),
]


@pytest.mark.parametrize(("env", "message"), REFUSED)
def test_the_doctor_names_what_is_wrong_with_the_token(
    home: Path, address: str, env: dict[str, str], message: str
) -> None:
    code, out, err = command(home, "ray_pipe.doctor", "--address", address, **env)

    assert code == 1
    assert f"fault {address}: {message}" in out
    assert "copy the head's token (`ray get-auth-token` there)" in out
    assert "1 fault." in out
    assert out.endswith(f"python -m ray_pipe.doctor --address {address}")
    assert "Traceback" not in out + err


@pytest.mark.parametrize(("env", "message"), REFUSED[2:])
def test_the_run_names_it_too(home: Path, address: str, env: dict[str, str], message: str) -> None:
    code, _, err = command(home, "ray_pipe.run", "--address", address, "--steps", "1", **env)

    assert code == 1
    assert f"error: --address {address}: {message}" in err
    assert "Traceback" not in err
    assert list(home.glob("runs/*")) == []


def test_the_right_token_opens_the_cluster(home: Path, address: str) -> None:
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}

    code, out, err = command(home, "ray_pipe.doctor", "--address", address, "--json", **env)

    assert code == 0, err
    found = json.loads(out)
    assert [node["error"] for node in found["nodes"]] == [None]
    assert "one-node" in {finding["code"] for finding in found["findings"]}


def test_a_token_file_opens_it_as_well(home: Path, address: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}

    code, _, err = command(home, "ray_pipe.doctor", "--address", address, "--quick", **env)

    assert code == 0, err
