"""A real cluster with its dashboard, watched by Prometheus and a browser while a job trains on it.

Used by tests/e2e/test_monitoring.py. By hand, `python tests/dashboard_rig.py docs` makes the
pictures in docs/ anew. Nothing is installed; whatever is started is ended by its process id.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RUN = "first-look"
STEPS = 32
STATUS = re.compile(
    rf"(fp32|acsgd) \d+/{STEPS}, loss \d\.\d{{4}}, [\d.]+k? tokens/s, arm [12] of 2"
)
SETTINGS = {
    "model.name": "gpt-nano",
    "data.num_samples": "24",
    "pipeline.stages": "2",
    "pipeline.micro_batches": "4",
    "pipeline.micro_batch_size": "2",
    "network.bandwidth": "50Mbps",
    "network.latency": "60ms",  # steps that last a while and need little work
    "faults.spare_after": "0s",  # so that the page of actors shows a spare
    "faults.min_deadline": "60s",  # however busy the machine is, one failure is enough
    "steps": str(STEPS),
    "eval": "true",
    "compare": "fp32,acsgd",
}
OTHERS = {
    "copies": {
        "model.name": "gpt-nano",
        "data.num_samples": "32",
        "pipeline.stages": "1",
        "pipeline.micro_batches": "2",
        "pipeline.micro_batch_size": "2",
        "sync.replicas": "2",
        "sync.name": "hop",
        "compare": "fp32",
        "steps": "6",
    },
    "groups": {
        "model.name": "gpt-nano",
        "data.num_samples": "32",
        "pipeline.stages": "1",
        "pipeline.micro_batches": "2",
        "pipeline.micro_batch_size": "2",
        "sync.replicas": "2",
        "sync.name": "ripples",
        "compare": "fp32",
        "steps": "6",
    },
    "clicks": {"task": "ctr", "steps": "20"},
    "bumpy": {
        "model.name": "gpt-nano",
        "data.num_samples": "24",
        "pipeline.stages": "2",
        "pipeline.micro_batches": "4",
        "pipeline.micro_batch_size": "2",
        "compare": "acsgd",
        "steps": "8",
    },
}
"""Short runs of the other kinds, one after the other: their panels need them."""

MODULES = {"bumpy": "tests.e2e.bumpy_run"}
"""Instead of `ray_pipe.run`: what is rare must happen once."""

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
PATIENCE_S = 180.0
START_TRIES = 3
WINDOW = "10m"
CHROMIUM = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1500,780"),
    "--virtual-time-budget=12000",
)
T = TypeVar("T")


class CannotWatch(Exception):
    """Something that this needs is not on this machine."""


def wait_for(what: str, look: Callable[[], T | None], *, timeout_s: float = PATIENCE_S) -> T:
    """Look again and again until there is something to see."""
    end = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: nothing within {timeout_s:.0f} s")
        time.sleep(0.3)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, above those that Ray gives to its workers."""
    with ExitStack() as stack:
        ports: list[int] = []
        for port in range(20_000 + os.getpid() % 5_000, 32_000):
            own = stack.enter_context(socket.socket())
            try:
                own.bind(("0.0.0.0", port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise CannotWatch(f"{count} free ports")


def get_json(url: str) -> Any:
    """None while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except (OSError, HTTPException):
        return None


@contextmanager
def process(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[Any]:
    """A process and all its children, for as long as the block lasts."""
    import ray  # noqa: F401  brings psutil with it
    import psutil  # isort: skip

    with log.open("w") as out:
        own = psutil.Popen(
            list(command), stdout=out, stderr=subprocess.STDOUT, env=dict(env), cwd=log.parent
        )
        try:
            yield own
        finally:
            family: list[Any] = []
            with suppress(psutil.NoSuchProcess):  # it ended by itself, and its words are the error
                family = [own, *own.children(recursive=True)]
                own.terminate()
            _, alive = psutil.wait_procs(family, timeout=15)
            for one in alive:
                one.kill()
            psutil.wait_procs(alive, timeout=5)


@dataclass
class Head:
    """The head node of a cluster of one."""

    url: str
    ray_dir: Path


class NotStarted(RuntimeError):
    """Ray gives its own start so many seconds, which a busy machine may not keep."""


@contextmanager
def head_node(folder: Path, ports: Sequence[int]) -> Iterator[Head]:
    """`ray start --head` in a temporary folder of its own, with four ports of its own; tried again
    where it took too long."""
    with ExitStack() as stack:
        for left in reversed(range(START_TRIES)):
            try:
                head = stack.enter_context(_head_node(folder, ports))
                break
            except NotStarted:
                if not left:
                    raise
        yield head


@contextmanager
def _head_node(folder: Path, ports: Sequence[int]) -> Iterator[Head]:
    gcs, dashboard, agent, client = ports
    # Unix sockets live in it, so its path must be short.
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp", ignore_cleanup_errors=True) as short:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--num-cpus=4", "--object-store-memory=100000000", f"--temp-dir={short}"),
            *(f"--port={gcs}", f"--dashboard-port={dashboard}"),
            *(f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"),
            *("--include-dashboard=true", "--disable-usage-stats"),
        ]
        env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        env |= {**ENVIRONMENT, "RAY_metrics_report_interval_ms": "1000"}  # as above: no waiting
        log = folder / "ray.log"
        with process(command, log, env) as ray_start:
            url = f"http://127.0.0.1:{dashboard}"

            def is_up() -> Any:
                if ray_start.poll() is not None:
                    raise NotStarted(f"ray start ended: {log.read_text()[-2000:]}")
                return "until terminated" in log.read_text() and get_json(f"{url}/api/version")

            wait_for("Ray's dashboard", is_up)
            yield Head(url=url, ray_dir=Path(short))


def find_prometheus(folder: Path) -> str:
    """Prometheus from the path, or Debian's package unpacked into `folder`."""
    found = shutil.which("prometheus")
    if found:
        return found
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise CannotWatch("no prometheus on the path, and no apt-get to fetch it with")
    asked = subprocess.run(
        ["apt-get", "-q", "download", "prometheus"], cwd=folder, capture_output=True, text=True
    )
    packages = list(folder.glob("prometheus_*.deb"))
    if asked.returncode or not packages:
        raise CannotWatch(f"no prometheus on the path, and apt-get says: {asked.stderr.strip()}")
    subprocess.run(["dpkg", "-x", packages[0], folder / "prometheus"], check=True)
    return str(folder / "prometheus/usr/bin/prometheus")


@dataclass
class Prometheus:
    """A running Prometheus, to be asked."""

    url: str

    def ask(self, expr: str, *, since: float | None = None) -> list[dict[str, Any]]:
        """The series that a query gives now, or second by second since then."""
        asked = {"query": expr}
        if since is not None:
            asked |= {"start": f"{since:.3f}", "end": f"{time.time():.3f}", "step": "1"}
        verb = "query" if since is None else "query_range"
        answer = get_json(f"{self.url}/api/v1/{verb}?{urllib.parse.urlencode(asked)}")
        if answer is None:
            raise ValueError(f"Prometheus refuses {expr}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def numbers(self, expr: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Values by labels."""
        return {
            tuple(series["metric"].get(label, "") for label in labels): float(series["value"][1])
            for series in self.ask(expr)
        }

    def label_values(self, label: str, metric: str) -> list[str]:
        """What Grafana's `label_values(metric, label)` offers."""
        wanted = urllib.parse.urlencode({"match[]": metric})
        values: list[str] = get_json(f"{self.url}/api/v1/label/{label}/values?{wanted}")["data"]
        return values


@contextmanager
def prometheus(binary: str, config: Path, folder: Path, port: int) -> Iterator[Prometheus]:
    """Prometheus on a configuration, with its data in `folder`."""
    command = [
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with process(command, folder / "prometheus.log", os.environ):
        url = f"http://127.0.0.1:{port}"
        wait_for("Prometheus", lambda: get_json(f"{url}/api/v1/status/config"))
        yield Prometheus(url=url)


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


def browse(binary: str, url: str, *, picture: Path, profile: Path) -> subprocess.Popen[str]:
    """Load a page in a headless Chromium; its document comes on standard output."""
    command = [binary, *CHROMIUM, f"--user-data-dir={profile}", f"--screenshot={picture}"]
    return subprocess.Popen(
        [*command, "--dump-dom", url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


@dataclass
class Watched:
    """What was seen of one job."""

    prometheus: Prometheus
    since: float
    """When the job was submitted."""

    results: dict[str, Any] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    """Status messages while the job ran, and its last one."""

    pages: dict[str, str] = field(default_factory=dict)
    """Documents of the dashboard's pages while the job ran; none without a browser."""

    folder: Path = field(default_factory=Path)
    """Where the runs are."""

    def ask(
        self, expr: str, *, instant: bool = True, run: str = RUN
    ) -> list[tuple[dict[str, str], list[float]]]:
        """What a query of the Grafana dashboard gives, its variables filled in: labels, values."""
        filled = expr.replace("$__rate_interval", "20s").replace("$__range", WINDOW)
        filled = filled.replace("$run", run).replace("$arm", ".*")
        assert "$" not in filled, filled
        found = self.prometheus.ask(filled, since=None if instant else self.since)
        return [
            (one["metric"], [float(value) for _, value in one.get("values") or [one["value"]]])
            for one in found
        ]


@contextmanager
def watched_job(folder: Path, *, pictures: Path | None = None) -> Iterator[Watched]:
    """Train two arms on a cluster, look at the dashboard meanwhile, and scrape to the end.

    When the pages have been seen, one stage is killed: the job must go on, and count that.
    """
    binary, chromium = find_prometheus(folder), find_chromium() or ""
    pictures = pictures or folder
    with ExitStack() as stack:
        port, *ports = free_ports(5)  # all at once: Ray binds some of its own rather late
        head = stack.enter_context(head_node(folder, ports))
        config = folder / "monitoring/prometheus/prometheus.yml"
        subprocess.run(
            [
                *(sys.executable, "-m", "ray_pipe.monitoring", folder / "monitoring"),
                *("--ray-dir", head.ray_dir),
            ],
            check=True,
            capture_output=True,
            env=os.environ | ENVIRONMENT,
        )
        config.write_text(config.read_text().replace("10s", "1s"))  # as shipped, but no waiting
        scraper = stack.enter_context(prometheus(binary, config, folder, port))
        seen = Watched(prometheus=scraper, since=time.time(), folder=folder / "runs")
        job = f"{head.url}/api/jobs/{submit(head, folder)}"

        def message() -> str | None:
            info = get_json(job)
            if info["status"] not in ("PENDING", "RUNNING"):
                raise RuntimeError(f"the job ended early: {info['message']}")
            return info["message"] if STATUS.search(info["message"] or "") else None

        seen.messages.append(wait_for("a status message", message))
        if chromium:
            wait_for("a warm spare", lambda: pids_of(head, "/spare-1"))
        browsers = {
            page: browse(
                chromium,
                f"{head.url}/#/{page}",
                picture=pictures / f"dashboard-{page}.png",
                profile=folder / f"profile-{page}",
            )
            for page in (("jobs", "actors") if chromium else ())
        }
        for page, browser in browsers.items():
            seen.pages[page] = browser.communicate(timeout=PATIENCE_S)[0]
        (first,) = seen.messages

        def moved_on() -> str | None:
            now = message()
            return now if now != first else None

        seen.messages.append(wait_for("another status message", moved_on))
        os.kill(stage_pid(head, 1), signal.SIGKILL)

        def ended() -> dict[str, Any] | None:
            info = get_json(job)
            return info if info["status"] not in ("PENDING", "RUNNING") else None

        end = wait_for("the job's end", ended)
        assert end["status"] == "SUCCEEDED", end["message"]
        seen.messages.append(end["message"])
        seen.results = json.loads((folder / "runs" / RUN / "results.json").read_text())
        last = f'last_over_time(ray_pipe_final_loss{{run="{RUN}"}}[{WINDOW}])'
        wait_for("the last scrape", lambda: len(scraper.ask(last)) == 2, timeout_s=30)
        for run, settings in OTHERS.items():
            job = f"{head.url}/api/jobs/{submit(head, folder, run=run, settings=settings)}"
            end = wait_for(f"the end of {run}", ended)
            assert end["status"] == "SUCCEEDED", end["message"]
        time.sleep(2.5)  # two more scrapes
        yield seen


def stage_pid(head: Head, stage: int) -> int:
    """The process of a stage, as the dashboard tells it."""
    (pid,) = pids_of(head, f"/stage-{stage}")
    return pid


def pids_of(head: Head, ending: str) -> list[int]:
    """The processes of actors whose names end so, and that are alive."""
    actors = get_json(f"{head.url}/logical/actors")["data"]["actors"].values()
    return [
        int(actor["pid"])
        for actor in actors
        if actor["name"].endswith(ending) and actor["state"] == "ALIVE"
    ]


def submit(
    head: Head, folder: Path, *, run: str = RUN, settings: Mapping[str, str] = SETTINGS
) -> str:
    """Submit the job as `ray job submit` does; its id."""
    words = [word for item in settings.items() for word in ("--set", "=".join(item))]
    command = [
        *("python", "-m", MODULES.get(run, "ray_pipe.run"), "--address", "auto", "--name", run),
        *("--out", str(folder / "runs"), *words),
    ]
    request: dict[str, Any] = {
        "entrypoint": " ".join(command),
        "submission_id": f"job-{run}",
        "runtime_env": {"env_vars": ENVIRONMENT},
    }

    def ask() -> str | None:
        call = urllib.request.Request(
            f"{head.url}/api/jobs/",
            data=json.dumps(request).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(call, timeout=60) as answer:
                return str(json.load(answer)["submission_id"])
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            if "already exists" in text:  # accepted, though we had not heard of it
                return str(request["submission_id"])
            if "agent" in text:  # the node's agent is not up yet
                return None
            raise RuntimeError(f"the job was refused: {text}") from error
        except (OSError, HTTPException):  # too slow
            return None

    return wait_for("submitting the job", ask)


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    with (
        tempfile.TemporaryDirectory() as scratch,
        watched_job(Path(scratch), pictures=where) as found,
    ):
        sys.stdout.write("\n".join(found.messages) + "\n")
