"""Faults in earnest on Ray: kill -9 and SIGSTOP at every kind of action, bad links, full disks.

Every case ends in the losses and weights of the unbroken run, to the bit. `make test-chaos` runs
all of them and writes what recovery took to benchmarks/results/recovery.json; `make test` a few.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from killing import FATAL, STAGES, Ended, kinds_of, make_arm, note, points_of, same, train

from ray_pipe.cluster import StageActors
from ray_pipe.errors import StageDied, TrainingError
from ray_pipe.pipeline import Pipeline
from ray_pipe.recovery import PHASES
from stages.mishap import LinkFault, Mishap

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RESULTS = os.environ.get("RAY_PIPE_RECOVERY_RESULTS")
"""Where measured recovery times go, if anywhere."""


class Pool:
    """Actors that outlive a case, and the unbroken run of each arm."""

    def __init__(self) -> None:
        self.actors = StageActors(STAGES, spares=1)
        self._plain: dict[Any, Ended] = {}

    def right(self, **arm: Any) -> Ended:
        key = tuple(sorted(arm.items()))
        if key not in self._plain:
            self._plain[key] = train(self.actors, make_arm(**arm))
        return self._plain[key]

    def check(self, name: str, *, transport: str = "push", arm: Any = None, **faults: Any) -> Ended:
        arm = arm or {}
        self.right(**arm)
        assert self.actors.spares.wait(60.0)
        ended = train(self.actors, make_arm(**arm), transport=transport, **faults)
        if RESULTS:
            note(Path(RESULTS), name, ended)
        assert same(ended, self.right(**arm)), name
        return ended


@pytest.fixture(scope="module")
def pool(cluster: None) -> Iterator[Pool]:
    made = Pool()
    with made.actors:
        yield made


def at(point: str, *, deed: Any = "kill", step: int = FATAL, attempt: int = 0) -> Mishap:
    return Mishap(point=point, step=step, deed=deed, attempt=attempt)


@cache
def every_kind() -> list[tuple[str, int, str]]:
    return [
        (schedule, stage, point)
        for schedule in ("gpipe", "1f1b")
        for stage in range(STAGES)
        for point in kinds_of(schedule, stage)
    ]


FEW = [("gpipe", 1, "B1"), ("1f1b", 0, "committed"), ("1f1b", 2, "prepared")]
ALL = [case for case in every_kind() if case not in FEW]


def kill_and_check(pool: Pool, schedule: str, stage: int, point: str) -> None:
    name = f"kill {schedule} stage {stage} at {point}"
    ended = pool.check(name, arm={"schedule": schedule}, mishaps=[(stage, at(point))])

    (failure,) = ended.failures
    assert (failure.kind, failure.stage, failure.replaced) == ("died", stage, (stage,))
    assert failure.spares == (stage,)
    assert set(failure.phases) == {*PHASES}
    assert failure.source == "box"
    assert failure.resumed_from in (FATAL - 2, FATAL - 1, FATAL)


@pytest.mark.parametrize(("schedule", "stage", "point"), FEW)
def test_a_killed_stage_comes_back_to_the_same_bits(
    pool: Pool, schedule: str, stage: int, point: str
) -> None:
    kill_and_check(pool, schedule, stage, point)


@pytest.mark.chaos
@pytest.mark.parametrize(("schedule", "stage", "point"), ALL)
def test_a_stage_killed_at_any_kind_of_action_comes_back_to_the_same_bits(
    pool: Pool, schedule: str, stage: int, point: str
) -> None:
    kill_and_check(pool, schedule, stage, point)


SHORT = {"deadline_s": "3s", "faults.min_deadline_s": "3s"}


def stop_and_check(pool: Pool, stage: int, point: str) -> None:
    """A stage that stops is noticed by its neighbours' deadline, killed and replaced."""
    ended = pool.check(
        f"stop stage {stage} at {point}",
        arm=SHORT,
        mishaps=[(stage, at(point, deed="stop"))],
    )

    failure = ended.failures[-1]
    assert failure.replaced == (stage,)
    assert failure.kind == "hung"
    assert failure.phases["set_up"] < 4.0  # Ray would take five to end the stopped process


def test_a_stopped_stage_is_replaced(pool: Pool) -> None:
    stop_and_check(pool, 1, "F1")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("stage", "point"), [(0, "B1"), (0, "update"), (1, "prepared"), (2, "F0"), (2, "box arrays")]
)
def test_a_stage_stopped_anywhere_is_replaced(pool: Pool, stage: int, point: str) -> None:
    stop_and_check(pool, stage, point)


LINKS = [
    (source, LinkFault(target=target, action=action, kind=kind, by_s=0.05 * (action == "delay"),
                       **how))
    for action in ("drop", "duplicate", "delay", "corrupt")
    for source, target, kind, how in [
        (0, 1, "activation", {"nth": 2}),
        (1, 2, "activation", {"share": 0.1}),
        (2, 1, "gradient", {"nth": 4}),
        (1, 0, "gradient", {"share": 0.1}),
        (1, 0, "control", {"nth": 2}),
        (0, 2, "control", {"nth": 1}),
    ]
]  # fmt: skip
PATIENT = {"deadline_s": "8s", "faults.min_deadline_s": "8s", "codec": "fp32"}


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("source", "fault"), LINKS, ids=[f"{f.action}-{s}{f.target}-{f.kind}" for s, f in LINKS]
)
def test_frames_lost_repeated_late_or_damaged_change_nothing(
    pool: Pool, source: int, fault: LinkFault
) -> None:
    """Uncompressed, so that a cold resend gives the same bits."""
    pool.check(f"{fault.action} {fault.kind} {source}->{fault.target}", arm=PATIENT,
               link_faults=[(source, fault)])  # fmt: skip


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(10))
def test_several_deaths_in_one_run_end_in_the_same_bits(pool: Pool, seed: int) -> None:
    source = random.Random(seed)
    mishaps = []
    for attempt in range(2):
        stage = source.randrange(STAGES)
        point = source.choice(points_of("1f1b", stage))
        mishaps.append((stage, at(point, attempt=attempt * source.randrange(2))))
    pool.check(f"several {seed}", arm={"schedule": "1f1b"}, mishaps=mishaps)


@pytest.mark.chaos
@pytest.mark.parametrize("codec", ["fp32", "directq+ef", "acsgd+zstd"])
def test_every_codec_comes_back(pool: Pool, codec: str) -> None:
    pool.check(f"kill with {codec}", arm={"codec": codec}, mishaps=[(1, at("B0"))])


def test_the_refs_transport_comes_back_too(pool: Pool) -> None:
    ended = pool.check("kill with refs", transport="refs", mishaps=[(1, at("update"))])

    assert [failure.stage for failure in ended.failures] == [1]


def test_without_a_black_box_the_run_begins_anew(pool: Pool) -> None:
    ended = pool.check(
        "kill without a box", arm={"faults.black_box": "off"}, mishaps=[(2, at("B0"))]
    )

    (failure,) = ended.failures
    assert (failure.resumed_from, failure.source) == (-1, "fresh")


def test_a_stage_that_dies_in_every_attempt_ends_the_run_by_name(pool: Pool) -> None:
    mishaps = [(1, at("F0", attempt=attempt)) for attempt in range(4)]

    with pytest.raises(StageDied, match=r"stage 1 died in step 2: .*; step 2 failed 3 times in a"):
        train(pool.actors, make_arm(), mishaps=mishaps)
    pool.actors.replace([1])  # the last one was not replaced any more
    pool.actors.introduce()


def test_a_stage_that_dies_after_the_last_step_still_tells_its_weights(pool: Pool) -> None:
    right = pool.right()
    pipeline = Pipeline(pool.actors, make_arm(), epoch_s=0.0)
    losses = [records[-1].loss for records in pipeline.train()]
    os.kill(pipeline.infos[2]["pid"], signal.SIGKILL)
    weights = [state["module"] for state in pipeline.state_dicts()]

    assert same(Ended(losses=losses, weights=weights), right)
    assert [failure.replaced for failure in pipeline.failures] == [(2,)]


def test_an_error_in_a_stages_own_code_is_not_tried_again(pool: Pool) -> None:
    with pytest.raises(TrainingError, match=r"stage 1 failed in step 2: Mischief: a test said so"):
        train(pool.actors, make_arm(), mishaps=[(1, at("B0", deed="raise"))])


def test_no_box_is_left_when_the_actors_have_ended(cluster: None, tmp_path: Path) -> None:
    with StageActors(STAGES) as actors:
        train(actors, make_arm(**{"faults.black_box": str(tmp_path)}), mishaps=[(0, at("B0"))])
        assert list(tmp_path.rglob("slot-0"))

    assert not list(tmp_path.rglob("slot-0"))
