"""Vectors in few bits for somebody who has nearly the same one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors.base import CodecError, Packet
from compressors.registry import CodecSpec
from stages.sync import near
from stages.sync.fleet import Fleet
from stages.sync.near import NUM_SEEN, Near, decode
from stages.sync.strategies import SyncSpec
from tests.properties import examples
from tests.unit.fleets import disagreement, mean_of, quadratics, run_fleet


def seen(apart: float, bits: int = 4) -> Near:
    found = Near(bits)
    for _ in range(NUM_SEEN):
        found.saw(torch.zeros(1), torch.tensor([apart]))
    return found


def coded(vector: torch.Tensor, apart: float, *, bits: int = 4, num: int = 1) -> Any:
    found = seen(apart, bits).encode(vector, num)
    assert found is not None
    return found


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(2, 8), st.integers(1, 40), st.sampled_from([1e-6, 0.01, 1.0]),
    st.sampled_from([0.0, 3.0, -700.0]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_whoever_is_not_much_further_than_what_was_seen_reads_what_was_meant(
    bits: int, size: int, apart: float, where: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vector = where + torch.randn(size, generator=generator)
    packet, meant = coded(vector, apart, bits=bits)
    own = vector + 1.4 * apart * (2 * torch.rand(size, generator=generator) - 1)

    read = decode(packet, own)

    assert read is not None
    assert torch.equal(read, meant)
    coarsest = max(3 * apart / (2 ** max(bits, 3) - 1), 2**-20 * float(vector.abs().max()))
    assert float((read - vector).abs().max()) <= 0.6 * coarsest


def test_whoever_is_too_far_knows_it() -> None:
    vector = torch.randn(100)
    packet, _ = coded(vector, 0.1)

    assert decode(packet, vector + 0.5) is None
    assert decode(packet, vector + 1e30) is None
    assert decode(packet, vector * torch.nan) is None


def test_a_value_takes_as_many_bits_as_it_says_and_a_mean_for_several_more() -> None:
    vector = torch.randn(4096)

    assert coded(vector, 0.1)[0].nbytes == 4096 * 4 // 8
    assert coded(vector, 0.1, bits=2)[0].nbytes == 4096 * 3 // 8
    assert coded(vector, 0.1, num=4)[0].nbytes == 4096 * 6 // 8
    assert coded(vector, 0.1, bits=8, num=4)[0].nbytes == 4096


def test_what_is_lost_for_many_at_once_is_no_more_than_what_one_loses() -> None:
    vector = torch.randn(4096)
    alone = (coded(vector, 0.1)[1] - vector).abs().max()
    for_four = 4 * (coded(vector, 0.1, num=4)[1] - vector).abs().max()

    assert for_four <= alone


@pytest.mark.parametrize(
    "found",
    [
        Near(4).encode(torch.ones(3)),  # nothing is known of the others yet
        seen(0.1).encode(torch.tensor([1.0, torch.inf])),
        seen(torch.nan).encode(torch.ones(3)),
        seen(0.1).encode(torch.ones(3), 1000),  # the owner would keep 8 times what they are apart
        seen(0.1).encode(torch.ones(0)),
        seen(0.1).encode(torch.ones(3, dtype=torch.bfloat16)),
    ],
    ids=["unknown", "infinite", "not a number", "too many", "nothing", "halves"],
)
def test_where_it_would_not_do_it_says_nothing(found: Any) -> None:
    assert found is None


def test_vectors_that_agree_to_the_last_bit_stay_so() -> None:
    vector = torch.randn(100)
    packet, meant = coded(vector, 0.0)

    assert torch.equal(decode(packet, vector.clone()), meant)  # type: ignore[arg-type]
    assert coded(torch.zeros(3), 0.0)[1].abs().max() == 0


def test_its_state_is_what_it_saw() -> None:
    first, second = seen(0.25), Near(4)
    second.load_state_dict(first.state_dict())

    assert first.state_dict() == {"apart": [0.25] * NUM_SEEN}
    assert second.encode(torch.ones(3))[0] == first.encode(torch.ones(3))[0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 9}, "has bits 9, not 1 to 8"),
        ({"step": 0.0}, "has step 0.0, not a number above 0"),
        ({"dtype": "float64"}, "all replicas must train the same model"),
        ({"bits": 5}, "has 2 bytes of 5 bits"),
    ],
)
def test_a_packet_that_nobody_made_is_refused(change: dict[str, Any], message: str) -> None:
    packet, _ = coded(torch.randn(4), 0.1)
    bad = Packet(
        codec=packet.codec, shape=packet.shape, meta={**packet.meta, **change}, parts=packet.parts
    )

    with pytest.raises(CodecError, match=message):
        decode(bad, torch.randn(4))


# --- among replicas ------------------------------------------------------------------------------

FOUR_BITS = CodecSpec(name="directq", bits=4)
RIPPLES = SyncSpec(name="ripples", group_size=2, codec=FOUR_BITS)
NAMES = ["ripples", "ad-psgd"]


def settled(fleet: Fleet, trainers: list[Any]) -> torch.Tensor:
    """The mean with what was agreed on and not taken in yet."""
    rest = [replica.exchanges[0].swap._pending for replica in fleet.replicas.values()]
    return mean_of(trainers) + sum(x for x in rest if x is not None) / len(trainers)


def after_a_jump(name: str) -> tuple[float, float, int]:
    """How far the mean moves, what is left of the spread and how often a letter was asked for in
    full, when replicas agreed and then one of them is far away at once."""
    trainers = quadratics(4, lr=0.0, offset=1.0)
    means: list[torch.Tensor] = []

    def during(fleet: Fleet) -> None:
        def jump() -> None:
            trainers[1].shards[0].x = trainers[1].x + 100.0
            means.append(settled(fleet, trainers))

        asyncio.get_running_loop().call_later(20.5, jump)

    fleet = run_fleet(trainers, replace(RIPPLES, name=name), 60, during=during)
    asked = sum(r.exchanges[0].inbox.num_asked_in_full for r in fleet.replicas.values())
    moved = float((settled(fleet, trainers) - means[0]).abs().max())
    return moved, disagreement(trainers), asked


@pytest.mark.parametrize("name", NAMES)
def test_whoever_is_far_away_at_once_is_heard_in_full_and_the_mean_stays(name: str) -> None:
    moved, left, asked = after_a_jump(name)

    assert moved < 1e-10
    assert left < 0.01  # of 43
    assert 0 < asked < 20


@pytest.mark.parametrize("name", NAMES)
def test_mutant_reading_without_the_checksum_moves_the_mean(name: str, monkeypatch: Any) -> None:
    right = near.crc32
    sums: dict[str, int] = {}

    def equal(data: Any, start: int = 0) -> int:
        return sums.setdefault("any", right(data, start))

    monkeypatch.setattr(near, "crc32", equal)
    moved, _, asked = after_a_jump(name)

    assert asked == 0
    assert moved > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_training_seldom_asks_for_anything_in_full(name: str) -> None:
    trainers = quadratics(4, spread=0.5, noise=0.3, dim=600, dtype=torch.float32, lr=0.05)
    fleet = run_fleet(trainers, replace(RIPPLES, name=name), 200)
    asked = sum(r.exchanges[0].inbox.num_asked_in_full for r in fleet.replicas.values())
    letters = sum(link.messages.get("replica", 0) for link in fleet.links.values())

    assert letters > 700
    assert asked < 0.05 * letters


def resumed_bits(*, forgets: bool) -> bool:
    """Whether a run in static groups that is saved after 12 steps ends as one that is not."""
    sync = replace(RIPPLES, groups="ruler")
    whole, first, second = (quadratics(4, spread=0.3, noise=0.1) for _ in range(3))
    run_fleet(whole, sync, 24)
    saved = [replica.state_dict() for replica in run_fleet(first, sync, 12).replicas.values()]

    def load(fleet: Fleet) -> None:
        for index, replica in fleet.replicas.items():
            if forgets:
                del saved[index]["exchanges"][0]["near"]
            replica.load_state_dict(saved[index])
            second[index].shards[0].x = first[index].x.clone()

    run_fleet(second, sync, 24, during=load)
    return all(torch.equal(a.x, b.x) for a, b in zip(whole, second, strict=True))


def test_a_run_that_is_resumed_ends_with_the_same_bits() -> None:
    assert resumed_bits(forgets=False)


def test_mutant_forgetting_how_far_the_others_were_gives_other_bits() -> None:
    assert not resumed_bits(forgets=True)


def test_a_newcomer_is_told_how_far_the_others_are() -> None:
    donor, newcomer = (run_fleet(quadratics(4, noise=0.1), RIPPLES, n).replicas[1] for n in (12, 0))

    newcomer.take_over(donor)

    told = newcomer.exchanges[0].state_dict()["near"]
    assert len(told["apart"]) == NUM_SEEN
    assert told == donor.exchanges[0].state_dict()["near"]
