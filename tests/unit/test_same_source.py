"""Stages that run other code than the driver are refused by stage, node and digest."""

from __future__ import annotations

from typing import Any

import pytest

from compressors import kernels
from ray_pipe import same_source
from ray_pipe.errors import ClusterError
from ray_pipe.planner.placement import Node
from ray_pipe.same_source import refuse_other_source
from stages.digest import source_digest


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node(id="aaaa", ip="10.0.0.10"), Node(id="bbbb", ip="10.0.0.11")]
    monkeypatch.setattr(same_source, "nodes", lambda: nodes)


def info(node: str, *, source: str | None = None, core: str | None = None) -> dict[str, Any]:
    return {"node": node, "source": source or source_digest(), "core": core or kernels.core()}


def test_the_same_source_everywhere_passes() -> None:
    refuse_other_source([info("aaaa"), info("bbbb")])


def test_every_stage_with_other_source_is_named_with_its_node_and_digest() -> None:
    infos = [info("aaaa"), info("bbbb", source="0123"), info("cccc", source="4567")]

    with pytest.raises(ClusterError) as refused:
        refuse_other_source(infos)

    text = str(refused.value)
    assert "stage 1 on node 10.0.0.11 (digest 0123), stage 2 on node cccc (digest 4567)" in text
    assert f"(digest {source_digest()} here)" in text
    assert "stage 0" not in text
    assert "install the same version of ray_pipe on every node" in text


def test_another_core_is_named_with_its_node() -> None:
    with pytest.raises(ClusterError, match=r"stage 1 on node 10.0.0.11 \(slow\) run another core"):
        refuse_other_source([info("aaaa"), info("bbbb", core="slow")])
