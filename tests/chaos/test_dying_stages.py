"""Kill any stage at any action: the run ends in the bits of one that never failed.

In virtual time, no Ray. Each case trains a tiny model for four steps; one stage (or several) dies
in the third and comes back from its black box.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from dying import Survived, points_of, survive, unbroken
from local_pipeline import DIRECTQ, WORK, Bench, Run, acsgd, same_bits

from compressors.registry import CodecSpec
from netsim.faults import FaultyLink
from ray_pipe.models.gpt import GPTShape
from stages.keeper import Keeper
from stages.mishap import Mishap
from stages.rehearsal import StageCosts

STEPS, FATAL = 4, 2
TINY = Bench(
    num_stages=3,
    shape=GPTShape(layers=3, width=16, heads=1, context=4, vocab=128),
    schedule="1f1b",
    activation=acsgd(),
    gradient=replace(DIRECTQ, rounding="stochastic"),
    micro_batches=3,
    num_samples=6,
    costs=WORK,
    latency_s=0.03,
    bandwidth_bps=2e6,
)
BENCHES = {
    "1f1b": TINY,
    "gpipe": replace(TINY, schedule="gpipe"),
    "eager-1f1b": replace(TINY, schedule="eager-1f1b"),
    "evicting": replace(TINY, activation=acsgd(cap_bytes=4 * 4 * 16 * 2), num_samples=8),
    "fp32": replace(TINY, activation=CodecSpec(name="fp32"), gradient=CodecSpec(name="fp32")),
    "directq+ef": replace(
        TINY,
        activation=CodecSpec(name="directq", bits=4),
        gradient=CodecSpec(name="directq+ef", bits=2),
    ),
    "acsgd+zstd": replace(TINY, activation=acsgd(name="acsgd+zstd")),
}


@cache
def plain(name: str) -> Run:
    return unbroken(BENCHES[name], STEPS)


def check(found: Survived, name: str) -> None:
    right = plain(name)
    assert found.losses == right.losses
    assert same_bits(found.weights, right.weights)
    assert found.replay_differs == []
    assert all(sender == receiver for sender, receiver in found.rows)
    assert [len(found.records[step]) for step in range(STEPS)] == [3] * STEPS


def at(point: str, *, step: int = FATAL, attempt: int = 0) -> Mishap:
    return Mishap(point=point, step=step, attempt=attempt)


CASES = [
    (name, stage, point)
    for name in ("gpipe", "1f1b")
    for stage in range(3)
    for point in points_of(BENCHES[name], stage)
]


def test_there_are_more_than_a_hundred_places_to_die() -> None:
    assert len(CASES) > 100
    kinds = {point.rstrip("0123456789") for _, _, point in CASES}
    assert kinds == {
        *("recv F", "F", "send F", "recv B", "B", "send B", "norm", "prepared", "update"),
        *("commit", "committed", "box rows", "box arrays", "box mark"),
    }


@pytest.mark.parametrize(
    ("name", "stage", "point"),
    [case for case in CASES if case[2] in ("B1", "prepared", "box mark")],
)
def test_a_stage_killed_comes_back_to_the_same_bits(
    name: str, stage: int, point: str, tmp_path: Path
) -> None:
    check(survive(BENCHES[name], tmp_path, [(stage, at(point))], steps=STEPS), name)


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("stage", range(3))
def test_a_stage_killed_at_any_action_comes_back_to_the_same_bits(
    name: str, stage: int, tmp_path: Path
) -> None:
    seen = set()
    for case, point in enumerate(points_of(BENCHES[name], stage)):
        found = survive(BENCHES[name], tmp_path / str(case), [(stage, at(point))], steps=STEPS)
        assert len(found.decisions) == 1, point
        seen.add(found.decisions[0].step)
        check(found, name)
    assert seen == {FATAL - 2, FATAL - 1}  # the box is behind, or not


@pytest.mark.parametrize("name", ["evicting", "fp32", "directq+ef", "acsgd+zstd"])
def test_every_codec_comes_back(name: str, tmp_path: Path) -> None:
    source = random.Random(name)
    for case in range(3):
        stage = source.randrange(3)
        point = source.choice(points_of(BENCHES[name], stage))
        check(survive(BENCHES[name], tmp_path / str(case), [(stage, at(point))], steps=STEPS), name)


def bad_links(link: FaultyLink) -> None:
    """A tenth of all frames is lost, damaged, doubled or late."""
    for kind in ("activation", "gradient", "control"):
        link.drop(kind, share=0.03).corrupt(kind, share=0.03).duplicate(kind, share=0.03)
        link.delay(kind, by_s=0.4, share=0.03)


@pytest.mark.parametrize("name", ["1f1b", "evicting", "acsgd+zstd", "directq+ef"])
def test_a_stage_killed_while_frames_go_wrong_comes_back_to_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    source, num_injected = random.Random(name), 0
    for case in range(4):
        bench = replace(BENCHES[name], faults=bad_links, deadline_s=20.0)
        stage = source.randrange(3)
        point = source.choice(points_of(bench, stage))
        found = survive(bench, tmp_path / str(case), [(stage, at(point))], steps=STEPS)
        assert found.decisions, point
        num_injected += found.num_injected
        check(found, name)
    assert num_injected >= 8


def _all_of(points: list[str], folder: Path) -> None:
    for case, point in enumerate(points):
        found = survive(TINY, folder / str(case), [(1, at(point))], steps=STEPS)
        # No more is lost than a step: going back to the beginning would give the bits as well.
        assert found.decisions[0].step >= FATAL - 2, point
        check(found, "1f1b")


def slow_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that take longer to write than a step takes to run."""
    monkeypatch.setattr("dying.BOX_COSTS", StageCosts(phases={"sync": 5.0}))


def test_no_more_than_a_step_is_lost_however_slow_the_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_boxes(monkeypatch)
    _all_of(["B0", "norm", "committed", "F0"], tmp_path)


def test_a_stage_may_die_in_its_first_and_in_its_last_step(tmp_path: Path) -> None:
    for case, (step, point) in enumerate(
        [(0, "F0"), (0, "prepared"), (0, "committed"), (STEPS - 1, "B2"), (STEPS - 1, "update")]
    ):
        mishaps = [(1, at(point, step=step))]
        check(survive(TINY, tmp_path / str(case), mishaps, steps=STEPS), "1f1b")


@pytest.mark.chaos
def test_stages_that_die_together_or_in_a_replay_come_back(tmp_path: Path) -> None:
    """Seeded: two or three deaths, some of them in the attempt that heals another."""
    for seed in range(24):
        source = random.Random(seed)
        name = source.choice(["gpipe", "1f1b"])
        mishaps = []
        for attempt in range(source.choice([2, 3])):
            stage = source.randrange(3)
            point = source.choice(points_of(BENCHES[name], stage))
            step = source.choice([FATAL, FATAL + attempt % 2])
            mishaps.append((stage, at(point, step=step, attempt=source.choice([0, attempt]))))
        found = survive(BENCHES[name], tmp_path / str(seed), mishaps, steps=STEPS)
        check(found, name)


def test_mutant_a_stage_that_does_not_wait_for_its_box_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms sent before the box holds the step before: the newest common step may not exist."""

    async def at_once(self: Keeper) -> None:
        if self._writing is not None and self._writing.done():
            self._writing = None

    def keep(self: Keeper, record: object) -> None:
        if self._writing is None:
            self._begin(self._changes())

    monkeypatch.setattr(Keeper, "settled", at_once)
    monkeypatch.setattr(Keeper, "keep", keep)
    slow_boxes(monkeypatch)
    with pytest.raises(AssertionError):
        _all_of(["B0", "norm", "committed", "F0"], tmp_path)


def test_mutant_a_box_that_forgets_the_random_numbers_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.keeper.state_without_rows", lambda codec: {
        key: 0 if key == "num_draws" else value for key, value in codec.state_dict().items()
    })  # fmt: skip
    with pytest.raises(AssertionError):
        check(survive(TINY, tmp_path, [(1, at("B0"))], steps=STEPS), "1f1b")
