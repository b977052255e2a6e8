"""Which coordinates are spoken of where a codec sends only a few."""

from __future__ import annotations

import torch

from compressors.registry import CodecSpec
from stages.sync.payload import VectorCoder
from stages.sync.picks import Picks, only

CODER = VectorCoder(CodecSpec(name="topk", density=0.1))


def picked(picks: Picks, vector: torch.Tensor) -> torch.Tensor:
    return CODER.encode("pick", picks.scores(vector))[1] != 0


def test_half_is_what_changed_most_since_it_was_averaged() -> None:
    picks, vector = Picks(0.1), torch.zeros(100)
    vector[[7, 8, 9, 11, 12]] = torch.tensor([5.0, -4.0, 3.0, 2.0, 1.0])

    assert set(picked(picks, vector).nonzero()[:, 0].tolist()) == {
        *(0, 20, 40, 60, 80), *(7, 8, 9, 11, 12),
    }  # fmt: skip


def test_what_was_averaged_must_change_again_to_be_picked() -> None:
    picks, vector = Picks(0.1), torch.zeros(100)
    vector[50:60] = 1.0
    found = []
    for _ in range(2):
        found.append(picked(picks, vector))
        picks.averaged(vector, found[-1])

    assert [chosen[50:60].nonzero()[:, 0].tolist() for chosen in found] == [
        [0, 1, 2, 3, 4], [5, 6, 7, 8, 9],
    ]  # fmt: skip


def test_every_coordinate_has_its_turn_whoever_changed_it() -> None:
    picks, vector = Picks(0.1), torch.zeros(1030)
    vector[:100] = torch.arange(100, 0, -1)  # nothing else changes here
    seen = torch.zeros(1030, dtype=torch.bool)
    for _ in range(20):
        seen |= picked(picks, vector)

    assert bool(seen.all())


def test_of_what_was_picked_a_codec_sends_everything_and_nothing_else() -> None:
    torch.manual_seed(0)
    mine, other = torch.randn(2, 1030)
    chosen = picked(Picks(0.1), mine)
    other[chosen.nonzero()[::3]] = 0.0  # a row of an embedding that was not used yet
    read = CODER.encode("up", only(other, chosen))[1]

    assert torch.equal(read != 0, chosen)
    assert torch.allclose(read[chosen], other[chosen], rtol=2**-8, atol=1e-29)


def test_its_state_comes_back() -> None:
    torch.manual_seed(0)
    first, second, vector = Picks(0.1), Picks(0.1), torch.randn(600)
    for _ in range(3):
        first.averaged(vector, picked(first, vector))
    second.load_state_dict(first.state_dict())

    assert torch.equal(first.scores(vector + 1), second.scores(vector + 1))
