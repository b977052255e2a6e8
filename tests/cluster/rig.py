"""Several hosts on one machine, joined by real, slow links: the kernel's, not ours.

Each host is a set of namespaces (net, mount, pid, uts, ipc) with its own address, processes, /tmp,
/dev/shm and login user; a veth pair joins it to a bridge, and `tc tbf` limits both directions.
Nothing of this touches the machine's own network, files or processes, and no name is left on it:
the namespaces belong to one process per host, and end with it. That process ends with the rig's
owner, however the owner ends. Needs root.

    with Rig(4, rate_bps=100e6) as rig:
        rig.start_ray()
        rig.hosts[0].run([rig.python, "-m", "ray_pipe.run", "--address", "auto"])

By hand: `python -m tests.cluster.rig up --hosts 4 --rate 100Mbps`, then `sh 0 COMMAND`, `down`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ray_pipe.cluster import SYSTEM_CONFIG
from tests.cluster.host import REPOSITORY, Host, RigError, do
from tests.cluster.packages import CACHE, ssh_layer
from tests.cluster.rig_remains import RIGS, START_TIMEOUT_S, destroy, sweep

NEEDED = ("ip", "tc", "unshare", "nsenter", "mount", "setpriv")
NETWORK = "10.99.0"
FIRST_ADDRESS = 10
MTU = 9000
"""A real card cuts a write into packets and puts them together again by itself. Here tbf has the
processor do it, twice for each link, on cores that all hosts share: large packets cost what a card
leaves to a processor."""

BURST = "10kb"  # more than a packet; frames below the burst pass unshaped, so it must be small
START_ATTEMPTS = 3
USER, UID = "ray", 1234
GCS_PORT = 6379
_numbers = itertools.count()
GOODPUT = (MTU - 52) / (MTU + 14)
"""What TCP carries of a rate: payload over frame."""


def why_not() -> str | None:
    """What this machine lacks for a rig; None where it has everything."""
    if os.name != "posix" or os.geteuid() != 0:
        return "a rig needs root, for namespaces and tc"
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if missing:
        return f"a rig needs {', '.join(missing)} (packages iproute2, util-linux)"
    # A container may be root and still not be allowed; only trying tells.
    trial = (
        "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt && ip link set lo up && "
        f"tc qdisc add dev lo root tbf rate 1mbit burst {BURST} latency 200ms"
    )
    words = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "sh", "-c", trial]
    tried = subprocess.run(words, capture_output=True, text=True)
    if tried.returncode:
        return f"this machine refuses namespaces or tc: {tried.stderr.strip()}"
    return None


class Rig:
    """Hosts `node0` ... on one bridge; with `laptop`, one more from which to drive them."""

    def __init__(
        self,
        num_hosts: int,
        *,
        rate_bps: float | None = None,
        laptop: bool = False,
        ssh: bool = False,
        name: str | None = None,
        keep: bool = False,
    ) -> None:
        """`rate_bps` limits each host's uplink and its downlink; None: as fast as the kernel.

        `ssh` gives hosts sshd, rsync and a key. `keep` leaves the rig up when its owner ends.
        """
        self.name = name or f"rig-{os.getpid()}-{next(_numbers)}"
        self.folder = RIGS / self.name
        self.python = sys.executable
        self.rate_bps = rate_bps
        self._keep = keep
        self._ssh = ssh or laptop
        self._bridge_pid = 0
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        names = [f"node{index}" for index in range(num_hosts)]
        self.hosts = [self._host(name, FIRST_ADDRESS + i) for i, name in enumerate(names)]
        self.laptop = self._host("laptop", FIRST_ADDRESS - 1) if laptop else None

    def _host(self, name: str, number: int) -> Host:
        folder = self.folder / name
        env = {
            "HOME": str(folder / "home"),
            "PATH": f"{Path(self.python).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(REPOSITORY),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        ip = f"{NETWORK}.{number}"
        return Host(name=name, ip=ip, folder=folder, python=self.python, env=env)

    @property
    def everyone(self) -> list[Host]:
        return [*self.hosts, *([self.laptop] if self.laptop else [])]

    # --- up and down -----------------------------------------------------------------------

    def up(self) -> None:
        """Make the hosts. What an earlier rig left behind is removed first."""
        reason = why_not()
        if reason is not None:
            raise RigError(reason)
        sweep()
        destroy(self.folder)
        self.folder.mkdir(parents=True)
        (self.folder / "owner").write_text(f"{0 if self._keep else os.getpid()}", encoding="ascii")
        layer = ssh_layer(CACHE) if self._ssh else None
        try:
            self._bridge_pid = self._spawn(
                self.folder / "bridge", ["unshare", "--net", "--fork", "--kill-child"], []
            )
            self._on_bridge("ip", "link", "add", "br0", "type", "bridge")
            self._on_bridge("ip", "link", "set", "br0", "up")
            for host in self.everyone:
                self._boot(host, layer)
        except BaseException:
            self.down()
            raise
        write_book(self)

    def down(self) -> None:
        """End every process of the rig; its namespaces, links and mounts go with them."""
        destroy(self.folder)
        for child in self._children.values():
            child.wait()
        self._children.clear()
        for host in self.everyone:
            host.pid = 0

    def __enter__(self) -> Rig:
        self.up()
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()

    def _spawn(self, folder: Path, unshare: list[str], init: list[str]) -> int:
        """A process with namespaces of its own; returns its pid as seen from here."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pid").unlink(missing_ok=True)
        tied = [] if self._keep else ["setpriv", "--pdeathsig", "KILL"]
        init = init or [sys.executable, "-S", "-c", _HOLD, str(folder)]
        with open(folder / "log", "ab") as log:
            child = subprocess.Popen(
                [*tied, *unshare, *init],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=self._keep,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (folder / "pid").exists():
            if child.poll() is not None or time.monotonic() > deadline:
                text = (folder / "log").read_text(encoding="utf-8", errors="replace")
                child.kill()
                raise RigError(f"{folder.name} did not start: {text[-2000:]}")
            time.sleep(0.02)
        pid = int((folder / "pid").read_text(encoding="ascii"))
        self._children[pid] = child
        return pid

    def _boot(self, host: Host, layer: Path | None) -> None:
        host.home.mkdir(parents=True, exist_ok=True)
        os.chown(host.home, UID, UID)
        kept = {REPOSITORY, host.folder, CACHE, Path(sys.prefix), Path(sys.base_prefix)}
        kept |= {Path(entry) for entry in sys.path if entry and Path(entry).is_dir()}
        plan = {
            "name": host.name,
            "user": USER,
            "uid": UID,
            "home": str(host.home),
            "keep": sorted(str(path.absolute()) for path in kept),
            "lower": None if layer is None else str(layer),
            "hosts": {other.name: other.ip for other in self.everyone},
        }
        (host.folder / "host.json").write_text(json.dumps(plan), encoding="utf-8")
        own = ["--net", "--mount", "--pid", "--uts", "--ipc"]
        unshare = ["unshare", *own, "--fork", "--kill-child"]
        script = Path(__file__).with_name("host_init.py")
        init = [sys.executable, "-S", str(script), str(host.folder)]
        host.pid = self._spawn(host.folder, unshare, init)
        self._join(host)

    def _join(self, host: Host) -> None:
        """A cable from the host to the bridge."""
        port, inside = f"v-{host.name}", ["nsenter", "-t", f"{host.pid}", "-n"]
        veth = ["type", "veth", "peer", "name", "eth0", "mtu", f"{MTU}", "netns", f"{host.pid}"]
        self._on_bridge("ip", "link", "add", port, "mtu", f"{MTU}", *veth)
        self._on_bridge("ip", "link", "set", port, "master", "br0", "up")
        do(*inside, "ip", "link", "set", "lo", "up")
        do(*inside, "ip", "address", "add", f"{host.ip}/24", "dev", "eth0")
        do(*inside, "ip", "link", "set", "eth0", "up")
        do(*inside, "ip", "route", "add", "default", "via", f"{NETWORK}.1")
        # Hosts may have BBR as their default. It remembers the rate of minutes ago, so a link that
        # was just made slower would drop half of what it sends; the others learn from losses.
        for name in ("cubic", "reno"):  # a namespace may not be allowed the first
            file = "/proc/sys/net/ipv4/tcp_congestion_control"
            with contextlib.suppress(RigError):
                do(*inside, "sh", "-c", f"echo {name} > {file}")
                break
        if host is not self.laptop:
            self._shape(host, self.rate_bps)

    # --- what may happen to a host ----------------------------------------------------------

    def set_rate(self, rate_bps: float | None) -> None:
        """Limit every host's uplink and downlink from now on; None: no limit."""
        self.rate_bps = rate_bps
        for host in self.hosts:
            if host.pid:
                self._shape(host, rate_bps)

    def _shape(self, host: Host, rate_bps: float | None) -> None:
        for pid, device in ((host.pid, "eth0"), (self._bridge_pid, f"v-{host.name}")):
            words = ["nsenter", "-t", f"{pid}", "-n", "tc", "qdisc"]
            if rate_bps is None:
                subprocess.run([*words, "del", "dev", device, "root"], capture_output=True)
            else:
                limit = ["tbf", "rate", f"{round(rate_bps)}bit", "burst", BURST, "latency", "200ms"]
                do(*words, "replace", "dev", device, "root", *limit)

    def kill_host(self, index: int) -> None:
        """The power goes: the cable is dead first, so nobody is told, then every process."""
        self.cut(index)
        host = self.hosts[index]
        pid, host.pid = host.pid, 0
        os.kill(pid, signal.SIGKILL)
        child = self._children.pop(pid, None)
        if child is not None:
            child.wait()
        (host.folder / "pid").unlink(missing_ok=True)
        with contextlib.suppress(RigError):  # it goes with its other end, but when is the kernel's
            self._on_bridge("ip", "link", "delete", f"v-{host.name}")

    def revive_host(self, index: int) -> None:
        """The host comes back with its name, address and home, and nothing running."""
        self._boot(self.hosts[index], ssh_layer(CACHE) if self._ssh else None)
        write_book(self)

    def cut(self, index: int) -> None:
        """Pull the cable; processes live on."""
        self._set_port(index, "down")

    def mend(self, index: int) -> None:
        """Put the cable back."""
        self._set_port(index, "up")

    def _set_port(self, index: int, state: str) -> None:
        self._on_bridge("ip", "link", "set", f"v-{self.hosts[index].name}", state)

    def _on_bridge(self, *words: str) -> None:
        do("nsenter", "-t", f"{self._bridge_pid}", "-n", *words)

    # --- Ray -----------------------------------------------------------------------------------

    def start_ray(
        self,
        indices: Sequence[int] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        head_options: Sequence[str] = ("--include-dashboard=false",),
        options: Sequence[str] = (),
    ) -> str:
        """Start Ray on the hosts, the first one as the head; returns the cluster's address.

        Later calls with other `indices` join more hosts to the head on host 0.
        """
        chosen = list(range(len(self.hosts))) if indices is None else list(indices)
        address = f"{self.hosts[0].ip}:{GCS_PORT}"
        if 0 in chosen:
            chosen.remove(0)
            config = f"--system-config={json.dumps(SYSTEM_CONFIG)}"
            words = ["--head", f"--port={GCS_PORT}", config, *head_options, *options]
            self._ray_start(self.hosts[0], words, env)
        for index in chosen:  # in turn: a raylet waits 15 s for its agents, then it dies
            self._ray_start(self.hosts[index], [f"--address={address}", *options], env)
        return address

    def _ray_start(self, host: Host, words: list[str], env: Mapping[str, str] | None) -> None:
        fixed = [f"--node-ip-address={host.ip}", "--object-store-memory=200000000"]
        ray = [self.python, "-m", "ray.scripts.scripts"]
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                host.run([*ray, "start", *fixed, *words], env=env, timeout_s=180.0)
                return
            except RigError:
                if attempt == START_ATTEMPTS:
                    raise
                # A busy machine may not have it up within the times that Ray allows.
                host.run([*ray, "stop", "--force"], env=env, check=False)


_HOLD = """
import pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
(folder / "pid.part").write_text(pathlib.Path("/proc/self/stat").read_text().split()[0])
(folder / "pid.part").rename(folder / "pid")
signal.pause()
"""


def write_book(rig: Rig) -> None:
    """Leave beside the hosts what the command line needs to find them."""
    book = {host.name: {"ip": host.ip, "env": host.env} for host in rig.everyone}
    (rig.folder / "book.json").write_text(json.dumps(book, indent=1), encoding="utf-8")


if __name__ == "__main__":
    from tests.cluster.rig_command import main

    sys.exit(main())
