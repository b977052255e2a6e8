"""What every sync strategy promises, with every codec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compressors.registry import CODECS, CodecSpec
from stages.sync import collective, strategies, swap, updates
from stages.sync.fleet import Fleet
from stages.sync.near import Near
from stages.sync.rules import ParameterMove
from stages.sync.strategies import RULES, STRATEGIES, SyncSpec
from tests.unit.fleets import disagreement, mean_of, quadratics, run_fleet


def spec(name: str, codec: str = "fp32") -> SyncSpec:
    return SyncSpec(
        name=name, codec=CodecSpec(name=codec, bits=4, density=0.3), group_size=2, warmup=2,
        outer_lr=1.0, outer_momentum=0.0, graph="ring",
    )  # fmt: skip


def test_every_strategy_has_a_rule() -> None:
    assert [*RULES] == [*STRATEGIES]


@pytest.mark.quick(11)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("codec", [*CODECS, "directq+ef", "directq+zstd", "topk+ef"])
def test_every_strategy_learns_with_every_codec(name: str, codec: str) -> None:
    trainers = quadratics(3, spread=0.2, dim=600, dtype=torch.float32, lr=0.2)
    before = float((mean_of(trainers) - 1).norm())
    run_fleet(trainers, spec(name, codec), 10)

    assert float((mean_of(trainers) - 1).norm()) < 0.75 * before
    alone = quadratics(3, spread=0.2, dim=600, dtype=torch.float32, lr=0.2)
    run_fleet(alone, replace(spec("local"), local_steps=100), 10)  # they never agree
    assert disagreement(trainers) < 0.75 * disagreement(alone)


def test_mutant_an_exchange_that_does_nothing_is_no_agreement(monkeypatch: Any) -> None:
    monkeypatch.setattr(ParameterMove, "incoming", lambda *args: None)
    for name in ("ripples", "hop", "ad-psgd"):
        with pytest.raises(AssertionError):
            test_every_strategy_learns_with_every_codec(name, "directq")


PARAMETERS = ("ripples", "hop", "ad-psgd")
"""Strategies that send parameters, and keep what the codec loses."""


def after_agreeing(
    name: str, codec: str, *, graph: str = "ring", bits: int = 2
) -> tuple[float, float]:
    """What four replicas without learning are still apart, of what they were, and how far their
    mean has moved; in top-k's default density, for as long as a mistake takes to show."""
    trainers = quadratics(4, offset=1.0, dim=300, dtype=torch.float32, lr=0.0)
    before, mean = disagreement(trainers), mean_of(trainers)
    sync = replace(spec(name), codec=CodecSpec(name=codec, bits=bits), graph=graph)
    run_fleet(trainers, sync, 60)

    return disagreement(trainers) / before, float((mean_of(trainers) - mean).abs().max())


def assert_they_agree(name: str, codec: str, graph: str = "ring") -> None:
    left, moved = after_agreeing(name, codec, graph=graph)

    assert left < 0.5, f"{left:.2g} of what they were apart is left"
    assert name == "ad-psgd" or moved < 1e-5  # of ad-psgd halves wait for the next flush


@pytest.mark.parametrize("codec", ["topk", "topk+ef", "directq+ef"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_replicas_agree_in_the_end_however_little_is_sent(name: str, codec: str) -> None:
    assert_they_agree(name, codec)


@pytest.mark.parametrize(("bits", "most"), [(2, 0.02), (4, 1e-4)])
@pytest.mark.parametrize("name", PARAMETERS)
def test_few_bits_leave_next_to_nothing_of_what_replicas_were_apart(
    name: str, bits: int, most: float
) -> None:
    left, _ = after_agreeing(name, "directq", bits=bits)

    assert left < most


@pytest.mark.parametrize("name", ["ripples", "ad-psgd"])
def test_mutant_coding_the_way_from_the_start_leaves_some_of_it(
    name: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Near, "encode", lambda *args: None)

    assert after_agreeing(name, "directq", bits=4)[0] > 0.01
    assert after_agreeing(name, "directq", bits=2)[0] > 0.1


def test_neighbours_of_everybody_agree_too() -> None:
    assert_they_agree("hop", "topk", "complete")


def test_mutant_going_all_the_way_to_what_is_old_parts_them(monkeypatch: Any) -> None:
    monkeypatch.setattr(updates, "PULL", 1e9)

    assert after_agreeing("hop", "topk")[0] > 10


@pytest.mark.parametrize("name", ["ripples", "ad-psgd"])
def test_mutant_each_names_coordinates_of_its_own(name: str, monkeypatch: Any) -> None:
    for module in (collective, swap):
        monkeypatch.setattr(module, "only", lambda vector, picked: vector)

    with pytest.raises(AssertionError, match="they were apart is left"):
        assert_they_agree(name, "topk")


@pytest.mark.parametrize(("name", "codec"), [("hop", "topk+ef"), ("ripples", "directq+ef")])
def test_mutant_what_was_lost_is_added_once_more(name: str, codec: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(strategies, "KEEPS_LOSS", ())

    with pytest.raises(AssertionError, match="they were apart is left"):
        assert_they_agree(name, codec)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_saved_loads_and_the_run_goes_on(name: str) -> None:
    first = quadratics(4, spread=0.2)
    fleet = run_fleet(first, spec(name, "directq"), 5)
    saved = [replica.state_dict() for replica in fleet.replicas.values()]
    second = quadratics(4, spread=0.2)

    def load(fleet: Fleet) -> None:
        for index, replica in fleet.replicas.items():
            replica.load_state_dict(saved[index])
            second[index].shards[0].x = first[index].x.clone()
            assert same(replica.strategy.state_dict(), saved[index]["strategy"])
            assert same([r.state_dict() for r in replica.rules], saved[index]["rules"])

    resumed = run_fleet(second, spec(name, "directq"), 9, during=load)

    assert all(replica.k == 9 and replica.num_run == 4 for replica in resumed.replicas.values())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_replica_alone_simply_trains(name: str) -> None:
    trainers = quadratics(1, spread=0.2)
    run_fleet(trainers, spec(name), 60)

    assert float((trainers[0].x - trainers[0]._optimum).norm()) < 0.5
