"""The doctor's rounds while a node dies under its hands; Ray is played by a fake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RaySystemError

from ray_pipe import doctor_probe, doctor_rounds
from ray_pipe.doctor_reports import Checkup
from ray_pipe.planner.placement import Node


class Quiet:
    def on_phase(self, text: str) -> None: ...
    def on_links(self, num_links: int, seconds: float) -> None: ...
    def on_link(self, link: Any) -> None: ...


class Method:
    def __init__(self, node: str, name: str) -> None:
        self._node, self._name = node, name

    def remote(self, *args: Any) -> tuple[str, str]:
        return self._node, self._name


class FakeProbe:
    def __init__(self, node: str) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Method:
        return Method(self._node, name)


class FakeRay:
    """Two nodes; `fails` says which call of which node ends how."""

    def __init__(self, fails: dict[tuple[str, str], Exception]) -> None:
        self._fails = fails

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "NodeManagerAddress": ip,
                "NodeManagerPort": 1,
                "ObjectManagerPort": 2,
                "Alive": True,
            }
            for name, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2"))
        ]

    def get(self, call: tuple[str, str], timeout: float) -> Any:
        if call in self._fails:
            raise self._fails[call]
        if call[1] == "now":
            return 0.0
        if call[1] == "describe":
            return {"software": doctor_probe.software(), "disks": [], "gpus": []}
        return {"handshake_s": 0.001, "call_s": 0.001, "ports_open": True}

    def kill(self, probe: Any) -> None: ...


def examine(
    monkeypatch: pytest.MonkeyPatch, fails: dict[tuple[str, str], Exception], **more: Any
) -> Checkup:
    @contextmanager
    def connect(address: str | None) -> Iterator[str | None]:
        yield None

    monkeypatch.setattr(doctor_rounds, "ray", FakeRay(fails))
    monkeypatch.setattr(doctor_rounds, "connect", connect)
    monkeypatch.setattr(doctor_rounds, "_start", lambda info: FakeProbe(info["NodeID"]))
    found = [Node(id="a", ip="10.0.0.1"), Node(id="b", ip="10.0.0.2"), *more.pop("late", [])]
    monkeypatch.setattr(doctor_rounds, "nodes", lambda: found)
    return doctor_rounds.examine("auto", Quiet(), bandwidth=False)


@pytest.mark.parametrize("call", ["describe", "now"])
@pytest.mark.parametrize("error", [ActorDiedError(), GetTimeoutError("too long")])
def test_a_node_that_dies_while_it_is_looked_at_is_a_finding_about_that_node(
    monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    checkup = examine(monkeypatch, {("b", call): error})

    good, bad = checkup.nodes
    assert (checkup.error, good.error) == (None, None)
    assert bad.error
    assert bad.address == "10.0.0.2"
    assert checkup.links == ()  # nobody is left to talk to


def test_a_node_that_joins_meanwhile_is_left_for_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkup = examine(monkeypatch, {}, late=[Node(id="new", ip="10.0.0.3")])

    assert [node.address for node in checkup.nodes] == ["10.0.0.1", "10.0.0.2"]
    assert len(checkup.links) == 2


def test_a_cluster_that_is_lost_altogether_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost() -> None:
        raise RaySystemError("the head is gone")

    with monkeypatch.context() as patch:
        patch.setattr(doctor_rounds, "_reach_all", lambda *args: lost())
        checkup = examine(patch, {})

    assert checkup.error is not None
    assert checkup.error.startswith("the cluster was lost while it was looked at: RaySystemError")
