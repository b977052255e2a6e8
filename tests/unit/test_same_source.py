"""Stages that run other code than the driver are refused by stage, node and digest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_pipe import same_source
from ray_pipe.errors import ClusterError
from ray_pipe.planner.placement import Node
from ray_pipe.same_source import other_hardware, refuse_other_source
from stages.digest import hardware, software, source_digest


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node(id="aaaa", ip="10.0.0.10"), Node(id="bbbb", ip="10.0.0.11")]
    monkeypatch.setattr(same_source, "nodes", lambda: nodes)


def info(node: str, **other: str) -> dict[str, Any]:
    return {"node": node, **software(), **other}


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


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("torch", "1.0.0", r"\(torch 1\.0\.0\) run another torch .*pip install torch=="),
        ("numpy", "1.0.0", r"\(numpy 1\.0\.0\) run another numpy .*pip install numpy=="),
        (
            "native",
            "0af3",
            r"\(built from 0af3\) run a native core of other C\+\+ source .*build it",
        ),
    ],
)
def test_what_else_the_bits_depend_on_is_compared(name: str, value: str, words: str) -> None:
    with pytest.raises(ClusterError, match=r"^stage 1 on node 10\.0\.0\.11 " + words):
        refuse_other_source([info("aaaa"), info("bbbb", **{name: value})])


def test_a_core_that_was_built_before_cores_told_their_source_is_none_of_ours() -> None:
    if not software()["native"]:
        pytest.skip("the core in use does not tell its source")

    with pytest.raises(ClusterError, match=r"built from an unknown one"):
        refuse_other_source([info("aaaa", native="")])


def test_a_mixture_of_processors_is_told_by_stage_and_kind() -> None:
    wide, narrow = (
        {"hardware": hardware("cpu") | {"capability": kind}} for kind in ("AVX512", "AVX2")
    )

    assert other_hardware([wide, wide]) == ""
    assert "(cpu AVX512: stage 0, 2; cpu AVX2: stage 1): a stage that has to move" in (
        other_hardware([wide, narrow, wide])
    )


def test_all_that_a_stage_tells_of_its_software_is_compared() -> None:
    assert software().keys() == same_source.CHECKS.keys()


def test_builds_of_one_torch_for_other_gpus_are_the_same_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.0+cu126")

    assert software()["torch"] == "2.9.0"
