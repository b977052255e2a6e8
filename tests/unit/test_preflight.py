"""Who answers at an address: real sockets, and a head that speaks Ray's protocol and can lie."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from ray.core.generated import gcs_pb2, gcs_service_pb2

from ray_pipe import preflight
from ray_pipe.cluster import connect
from ray_pipe.errors import ClusterError
from ray_pipe.preflight import Head, check_address, explain, refuse_other_version, refuse_outsider

PATIENCE_S = 60.0
OWN_ID = "ab" * 28


class FakeHead:
    """A head as far as the question goes."""

    def __init__(self, ray_version: str, python_version: str, code: str | None) -> None:
        self.metadata = {"ray_version": ray_version, "python_version": python_version}
        self.code = code

    def InternalKVGet(self, request: Any, context: Any) -> Any:
        assert (request.key, request.namespace) == (b"CLUSTER_METADATA", b"cluster")
        if self.code is not None:
            context.abort(grpc.StatusCode[self.code], "as the test wants it")
        value = json.dumps(self.metadata).encode()
        return gcs_service_pb2.InternalKVGetReply(value=value)

    def GetAllNodeInfo(self, request: Any, context: Any) -> Any:
        nodes = [
            gcs_pb2.GcsNodeInfo(node_id=bytes.fromhex(OWN_ID), state=0),
            gcs_pb2.GcsNodeInfo(node_id=b"\x01" * 28, state=1),  # dead
        ]
        return gcs_service_pb2.GetAllNodeInfoReply(node_info_list=nodes)


@contextmanager
def head(
    ray_version: str = ray.__version__,
    python: str | None = None,
    code: str | None = None,
    *,
    host: str = "127.0.0.1",
    tls: Path | None = None,
) -> Iterator[str]:
    """The address of a fake head, which speaks TLS with the certificate in a folder."""
    fake = FakeHead(ray_version, python or preflight.platform.python_version(), code)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    for service, name in (
        ("InternalKVGcsService", "InternalKVGet"),
        ("NodeInfoGcsService", "GetAllNodeInfo"),
    ):
        method = grpc.unary_unary_rpc_method_handler(
            getattr(fake, name),
            request_deserializer=getattr(gcs_service_pb2, f"{name}Request").FromString,
            response_serializer=getattr(gcs_service_pb2, f"{name}Reply").SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(f"ray.rpc.{service}", {name: method})
        server.add_generic_rpc_handlers((handler,))
    if tls is None:
        port = server.add_insecure_port(f"{host}:0")
    else:
        pair = ((tls / "node.key").read_bytes(), (tls / "node.crt").read_bytes())
        credentials = grpc.ssl_server_credentials(
            [pair], root_certificates=(tls / "ca.crt").read_bytes(), require_client_auth=True
        )
        port = server.add_secure_port(f"{host}:0", credentials)
    server.start()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop(0)


def refusal(address: str) -> str:
    """The message, which must come soon."""
    start = time.monotonic()
    with pytest.raises(ClusterError) as refused:
        check_address(address)
    assert time.monotonic() - start < PATIENCE_S
    return str(refused.value)


@pytest.fixture
def on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_local_node_ids", lambda: {OWN_ID})


@pytest.mark.usefixtures("on_a_node")
def test_a_head_of_our_version_is_let_through() -> None:
    with head() as address:
        found = check_address(address)

    assert found is not None
    assert (found.address, found.ray_version) == (address, ray.__version__)
    assert found.node_ids == (OWN_ID,)


@pytest.mark.usefixtures("on_a_node")
def test_a_ray_of_another_version_is_refused_with_both_versions() -> None:
    with head("2.51.1") as address:
        text = refusal(address)

    assert text == (
        f"--address {address}: the cluster runs Ray 2.51.1, this environment has Ray "
        f"{ray.__version__}; they must be equal: `pip install ray==2.51.1` here, or install "
        f"ray=={ray.__version__} on every node and start them again"
    )


def test_a_machine_outside_the_cluster_is_told_where_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "_local_node_ids", lambda: {"01" * 28})  # a dead one of it

    with head() as address:
        text = refusal(address)

    assert "the cluster answers (1 nodes), but this machine is none of its nodes" in text
    assert f"`ray start --address={address}`" in text


@pytest.mark.parametrize(
    ("code", "auth", "message"),
    [
        ("UNAUTHENTICATED", "disabled", r"sends none \(RAY_AUTH_MODE is disabled\); copy the head"),
        ("UNAUTHENTICATED", "token", "does not accept this machine's token; copy the head's token"),
        ("UNIMPLEMENTED", "disabled", "not the head of a Ray cluster.*Ray Client's, 10001"),
        ("UNAVAILABLE", "disabled", r"does not speak Ray's protocol.*mostly 6379"),
        ("DEADLINE_EXCEEDED", "disabled", "no Ray answered within 4 s"),
        ("INTERNAL", "disabled", "answered with INTERNAL; `ray status` on its head"),
    ],
)
def test_every_refusal_of_the_head_is_explained(code: str, auth: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        raise ClusterError(explain("--address h:6379", code, auth=auth))


@pytest.mark.usefixtures("on_a_node")
def test_a_head_that_wants_a_token_is_named_as_such() -> None:
    with head(code="UNAUTHENTICATED") as address:
        text = refusal(address)

    assert "the cluster asks for a token and this process sends none" in text
    assert "RAY_AUTH_MODE=token" in text


def test_token_mode_without_a_token_is_refused_before_ray_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "_auth_mode", lambda: "token")
    monkeypatch.setattr(preflight, "_has_token", lambda: False)

    with head() as address:
        text = refusal(address)

    assert "RAY_AUTH_MODE is token, but there is no token here" in text


def test_a_web_server_is_not_ray() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = refusal(f"127.0.0.1:{server.server_port}")
        server.shutdown()

    assert "something answers there, but it does not speak Ray's protocol" in text
    assert "8265 is its dashboard" in text


def test_a_port_that_says_nothing_is_given_up_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = preflight.ask_head
    monkeypatch.setattr(
        preflight, "ask_head", lambda label, place: ask(label, place, timeout_s=0.3)
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        text = refusal(f"127.0.0.1:{silent.getsockname()[1]}")

    assert "the port is open, but no Ray answered" in text


def test_a_port_where_nobody_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    assert "nobody answers there (Connection refused); is the cluster up" in refusal(
        f"127.0.0.1:{port}"
    )


def test_a_host_that_does_not_exist_is_named() -> None:
    text = refusal("no-such-host.invalid:6379")

    assert "there is no host named no-such-host.invalid" in text


@pytest.mark.parametrize(
    "address", ["10.0.0.10", "10.0.0.10:", ":6379", "h:port", "h:0", "h:70000"]
)
def test_what_is_no_address_is_refused_with_an_example(address: str) -> None:
    assert "expected HOST:PORT or auto, as 10.0.0.10:6379" in refusal(address)


def test_ray_client_is_refused_with_what_to_use_instead() -> None:
    text = refusal("ray://127.0.0.1:10001")

    assert "a pipeline cannot be driven over Ray Client" in text
    assert "`ray job submit`" in text


def test_the_dashboards_address_is_not_the_clusters() -> None:
    assert "this is the dashboard's address, for `ray job submit`" in refusal("http://h:8265")


def test_an_address_of_the_environment_is_blamed_on_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://h:8265")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    assert refusal("auto").startswith("--address auto (RAY_ADDRESS=http://h:8265): this is the")
    with pytest.raises(ClusterError, match=r"^RAY_ADDRESS=http://h:8265: this is the dashb"):
        connect(None).__enter__()


@pytest.mark.parametrize(
    ("python", "level", "refused"),
    [
        ("3.11.7", None, False),
        ("3.11.9", None, True),
        ("3.11.9", "minor", False),
        ("3.12.7", "minor", True),
    ],
)
def test_python_must_match_as_far_as_ray_asks(
    monkeypatch: pytest.MonkeyPatch, python: str, level: str | None, refused: bool
) -> None:
    monkeypatch.delenv("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", level)
    found = Head(
        label="--address h:1", address="h:1", ray_version="2", python_version=python, node_ids=()
    )

    if not refused:
        refuse_other_version(found, ray_version="2", python="3.11.7")
        return
    with pytest.raises(ClusterError, match=f"runs Python {python}, this is Python 3.11.7"):
        refuse_other_version(found, ray_version="2", python="3.11.7")


def test_a_head_that_lists_no_nodes_is_left_to_ray() -> None:
    found = Head(label="x", address="h:1", ray_version="", python_version="", node_ids=())

    refuse_outsider(found, set())
    refuse_other_version(found, ray_version="2", python="3")


@pytest.mark.usefixtures("on_a_node")
def test_a_ray_whose_protocol_moved_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(label: str, place: str) -> Head:
        raise ImportError("no module named gcs_service_pb2")

    monkeypatch.setattr(preflight, "ask_head", moved)

    with head("9.9") as address:
        assert check_address(address) is None


# --- TLS ------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "make_certificates.sh"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")


def certificates(folder: Path, *addresses: str) -> Path:
    subprocess.run([SCRIPT, folder, *addresses], check=True, capture_output=True)
    return folder


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """This process speaks TLS with the certificate in a folder."""
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(folder / "node.crt"))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(folder / "node.key"))
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(folder / "ca.crt"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"), "10.0.0.10", "node1.example")


@needs_openssl
def test_the_certificate_names_all_nodes_and_its_key_is_nobody_elses(ours: Path) -> None:
    words = ["openssl", "x509", "-in", ours / "node.crt", "-noout", "-ext", "subjectAltName"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout

    for name in ("IP Address:127.0.0.1", "IP Address:10.0.0.10", "DNS:node1.example"):
        assert name in said
    assert (ours / "node.key").stat().st_mode & 0o077 == 0


@needs_openssl
def test_made_again_for_other_nodes_the_authority_stays(tmp_path: Path) -> None:
    before = (certificates(tmp_path, "10.0.0.10") / "ca.crt").read_bytes()
    old = (tmp_path / "node.crt").read_bytes()

    certificates(tmp_path, "10.0.0.10", "10.0.0.11")

    assert (tmp_path / "ca.crt").read_bytes() == before
    assert (tmp_path / "node.crt").read_bytes() != old
    verify = ["openssl", "verify", "-CAfile", tmp_path / "ca.crt", tmp_path / "node.crt"]
    subprocess.run(verify, check=True, capture_output=True)


@needs_openssl
@pytest.mark.usefixtures("on_a_node")
def test_a_head_that_speaks_tls_lets_its_own_certificate_in(
    monkeypatch: pytest.MonkeyPatch, ours: Path
) -> None:
    use(monkeypatch, ours)

    with head(tls=ours) as address:
        found = check_address(address)

    assert found is not None
    assert found.ray_version == ray.__version__


@needs_openssl
def test_without_tls_here_a_head_that_speaks_it_is_named_with_the_way_in(ours: Path) -> None:
    with head(tls=ours) as address:
        text = refusal(address)

    assert "what answers there speaks TLS, and this process does not (RAY_USE_TLS is off)" in text
    assert "RAY_TLS_CA_CERT" in text


@needs_openssl
def test_with_tls_here_only_the_other_end_is_named(
    monkeypatch: pytest.MonkeyPatch, ours: Path
) -> None:
    use(monkeypatch, ours)

    with head() as address:
        text = refusal(address)

    assert "this process speaks TLS (RAY_USE_TLS is on), and what answers there does not" in text


@needs_openssl
def test_a_certificate_of_another_authority_is_not_accepted(
    monkeypatch: pytest.MonkeyPatch, ours: Path, tmp_path: Path
) -> None:
    use(monkeypatch, certificates(tmp_path, "10.0.0.10"))

    with head(tls=ours) as address:
        text = refusal(address)

    assert "both ends speak TLS, but do not accept each other" in text


@needs_openssl
def test_an_address_that_the_certificate_does_not_name_is_said(
    monkeypatch: pytest.MonkeyPatch, ours: Path
) -> None:
    use(monkeypatch, ours)

    with head(tls=ours, host="127.0.0.2") as address:
        text = refusal(address)

    assert "do not accept each other" in text
    assert f"{address}: " in text.partition("(")[2], "gRPC's own words are missing"


def test_tls_without_its_files_is_refused_by_their_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, tmp_path)
    with head() as address:
        unreadable = refusal(address)
        monkeypatch.delenv("RAY_TLS_CA_CERT")
        unset = refusal(address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    assert f"RAY_TLS_SERVER_CERT={tmp_path}/node.crt cannot be read: no such file" in unreadable
    assert "RAY_USE_TLS is on, but RAY_TLS_CA_CERT is not set" in unset
    with pytest.raises(ClusterError, match="Ray on this machine: RAY_USE_TLS is on, but RAY_TLS"):
        connect(None).__enter__()
