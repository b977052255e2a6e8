"""Ray's TLS on hosts of their own, with the certificates of `tools/make_certificates.sh`.

The run and the doctor work, strangers are refused by name within seconds, and nothing that is sent
can be read on the wire.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.command import Run
from tests.cluster.host import REPOSITORY, Host
from tests.cluster.rig import GCS_PORT, Rig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_HOSTS = 2
SOON_S = 30.0
"""For a command that is refused: half of it is Python loading Ray, on a busy machine."""

MARK = b"activations of somebody "


def certificates(folder: Path, *addresses: str) -> Path:
    script = REPOSITORY / "tools" / "make_certificates.sh"
    subprocess.run([script, folder, *addresses], check=True, capture_output=True)
    return folder


def give(host: Host, tls: Path, name: str = "tls") -> dict[str, str]:
    """The files that a node needs; the environment that docs/cluster.md asks for."""
    own = host.home / name
    own.mkdir()
    for file in ("ca.crt", "node.crt", "node.key"):
        shutil.copy(tls / file, own / file)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(own / "ca.crt"),
        "RAY_TLS_SERVER_CERT": str(own / "node.crt"),
        "RAY_TLS_SERVER_KEY": str(own / "node.key"),
    }


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here, so no certificates")
    with Rig(NUM_HOSTS) as rig:
        tls = certificates(tmp_path_factory.mktemp("tls"), *(host.ip for host in rig.hosts))
        for host in rig.hosts:
            host.env |= give(host, tls)
        rig.start_ray()
        yield rig


def without_tls(host: Host) -> dict[str, str]:
    """The environment of somebody who has no certificate."""
    return {"RAY_USE_TLS": "0"} | {name: "" for name in host.env if name.startswith("RAY_TLS")}


def test_a_run_trains_over_tls_as_it_does_in_the_clear(rig: Rig) -> None:
    run = Run(rig, "tls", steps=4, host=1)  # a driver need not be on the head
    said = run.end()

    assert run.process.returncode == 0, said
    assert f"the stages are on {NUM_HOSTS} nodes" in " ".join(said.split())
    assert run.losses[-1] < run.losses[0]


def test_the_doctor_reaches_and_measures_every_node(rig: Rig) -> None:
    words = [rig.python, "-m", "ray_pipe.doctor", "--address", "auto", "--json", "--seconds", "0.5"]
    done = rig.hosts[0].run(words, check=False, timeout_s=300)
    found = json.loads(done.stdout)

    assert done.returncode == 0, found["findings"]
    assert len(found["nodes"]) == NUM_HOSTS
    assert all(link["bandwidth_bps"] > 1e6 for link in found["links"])


@pytest.mark.parametrize("module", ["ray_pipe.run", "ray_pipe.doctor"])
@pytest.mark.parametrize("who", ["without a certificate", "with one of another authority"])
def test_strangers_are_refused_by_name_within_seconds(
    rig: Rig, tmp_path: Path, module: str, who: str
) -> None:
    host, address = rig.hosts[1], f"{rig.hosts[0].ip}:{GCS_PORT}"
    if who == "without a certificate":
        env = without_tls(host)
        why = "what answers there speaks TLS, and this process does not (RAY_USE_TLS is off)"
    else:
        env = give(host, certificates(tmp_path, host.ip), name=module)
        why = "both ends speak TLS, but do not accept each other"

    start = time.monotonic()
    done = host.run([rig.python, "-m", module, "--address", address], env=env, check=False)
    took_s = time.monotonic() - start

    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1, said
    assert why in said
    assert "Traceback" not in said
    assert took_s < SOON_S


SEND = """
import ray
ray.init("auto", log_to_driver=False)
there = [node for node in ray.nodes() if node["NodeManagerAddress"] == "{ip}"]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At
home = At(there[0]["NodeID"], soft=False)
@ray.remote(num_cpus=0, scheduling_strategy=home)
def take(parcel):
    return parcel
for count in (2_000, 1_000_000):  # with the call, and through the object stores
    assert len(ray.get(take.remote({mark!r} * count))) == len({mark!r}) * count
"""
LISTEN = """
import select, socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.bind((sys.argv[1], 0))
wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
print("listening", flush=True)
mark, nbytes, seen = bytes.fromhex(sys.argv[2]), 0, 0
while True:
    ready, _, _ = select.select([wire, sys.stdin], [], [])
    if wire in ready:
        frame = wire.recv(1 << 17)
        nbytes, seen = nbytes + len(frame), seen + (mark in frame)
    elif sys.stdin in ready:
        break
print(nbytes, seen, flush=True)
"""


@contextmanager
def listening(rig: Rig, host: Host) -> Iterator[list[int]]:
    """Between a host and the switch; afterwards bytes that passed, and frames with the mark."""
    enter = ["nsenter", "-t", str(rig._bridge_pid), "-n", rig.python, "-S", "-c", LISTEN]
    found: list[int] = []
    process = subprocess.Popen(
        [*enter, f"v-{host.name}", MARK.hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    yield found
    found += map(int, process.communicate("over\n", timeout=60)[0].split())


def test_nothing_that_is_sent_can_be_read_on_the_wire(rig: Rig) -> None:
    sender, taker = rig.hosts
    with listening(rig, taker) as heard:
        sender.run([rig.python, "-c", SEND.format(ip=taker.ip, mark=MARK)])
    nbytes, seen = heard
    assert nbytes > 24_000_000  # both parcels passed by
    assert seen == 0

    with listening(rig, taker) as heard:  # the ear is a good one
        words = f"import socket; socket.socket(2, 2).sendto({MARK!r} * 50, ('{taker.ip}', 9))"
        sender.run([rig.python, "-c", words])
    assert heard[1] >= 1
