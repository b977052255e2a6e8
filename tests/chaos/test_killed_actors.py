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
import ray
from killing import FATAL, STAGES, Ended, kinds_of, make_arm, note, points_of, same, train

from ray_pipe.errors import StageDied, TrainingError
from ray_pipe.pipeline import Pipeline
from ray_pipe.recovery import PHASES
from ray_pipe.stage_actors import StageActors
from stages.mishap import INJECTED, LinkFault, Mishap

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


def test_the_only_stage_is_replaced_when_it_stops(cluster: None) -> None:
    """Nobody waits for it, so no deadline runs out: the driver looks after it. The deadline is a
    minute, the patience twenty of them."""
    alone = {"pipeline.stages": 1}
    with StageActors(1) as actors:
        right = train(actors, make_arm(**alone))
        ended = train(actors, make_arm(**alone), mishaps=[(0, at("F1", deed="stop"))])

    assert same(ended, right)
    (failure,) = ended.failures
    assert (failure.kind, failure.replaced) == ("hung", (0,))
    assert failure.at_s < 45.0


@pytest.mark.chaos
def test_stages_that_stop_all_at_once_are_replaced(pool: Pool) -> None:
    """The deadline is a minute, but nobody is left who would wait for it."""
    points = ["F0"] + ["recv F0"] * (STAGES - 1)  # each gets there without the others
    mishaps = [(stage, at(point, deed="stop")) for stage, point in enumerate(points)]
    ended = pool.check("stop all", mishaps=mishaps)

    (failure,) = ended.failures
    assert (failure.kind, failure.replaced) == ("hung", tuple(range(STAGES)))
    assert failure.at_s < 45.0


@pytest.mark.parametrize("deed", ["kill", "stop"])
def test_while_a_checkpoint_is_due_only_the_lost_stage_is_replaced(
    pool: Pool, deed: str, tmp_path: Path
) -> None:
    """The others wait for it for a minute, and with them what they shall save after the step:
    whether they are there is asked, and answered, all the same."""
    ended = pool.check(f"{deed} while saving", mishaps=[(1, at("F1", deed=deed))], folder=tmp_path)

    (failure,) = ended.failures
    assert failure.replaced == (1,)
    assert [type(one).__name__ for one in ended.saved or []] == ["FileNote"] * STAGES


def test_a_stage_stopped_before_it_is_set_up_ends_the_run_by_name(cluster: None) -> None:
    with StageActors(2) as actors:
        pid = ray.get(actors.handles[1].ping.remote())
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(
                TrainingError, match=r"stage 1 failed being set up: .*no sign of life for \d+ s"
            ):
                train(actors, make_arm(**{"pipeline.stages": 2, "model.layers": 4}))
        finally:
            os.kill(pid, signal.SIGKILL)


# Twelve samples, six a step: from the third step on, frame 7, every sample has its row. Frame 8 has
# one behind it that shows the gap; frame 9 is the last of its step, so only asking again helps.
FRAMES = [
    (0, 1, "activation", 8),
    (1, 2, "activation", 9),
    (2, 1, "gradient", 8),
    (1, 0, "gradient", 9),
    (1, 0, "control", 3),
    (0, 2, "control", 3),
]
LATE_S = 2.4
PATIENT = {"deadline_s": "8s", "faults.min_deadline_s": "8s"}  # asks after 2 s, control after 1 s
LINKS = [
    (codec, source, LinkFault(target=target, action=action, kind=kind, nth=nth,
                              by_s=LATE_S * (action == "delay")))
    for codec in ("fp32", "acsgd", "acsgd+zstd")
    for action in ("drop", "duplicate", "delay", "corrupt")
    for source, target, kind, nth in (FRAMES[1:3] if codec == "acsgd+zstd" else FRAMES)
]  # fmt: skip


def healed(fault: LinkFault, ended: Ended) -> int:
    """How often the run told that it did what this fault takes. A second copy of a message is not
    even noticed, and a late frame comes when the run is over: it was sent again long since."""
    if fault.kind == "control":
        return 1 if fault.action == "duplicate" else ended.told("was told to stage")
    if fault.action == "duplicate":
        return ended.told("arrived twice")
    return ended.told("was sent again")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("codec", "source", "fault"),
    LINKS,
    ids=[f"{c}-{f.action}-{s}{f.target}-{f.kind}" for c, s, f in LINKS],
)
def test_frames_lost_repeated_late_or_damaged_change_nothing(
    pool: Pool, codec: str, source: int, fault: LinkFault
) -> None:
    name = f"{codec}: {fault.action} {fault.kind} {fault.nth} {source}->{fault.target}"
    ended = pool.check(name, arm={**PATIENT, "codec": codec}, link_faults=[(source, fault)])

    what = f"{fault.action} of {fault.kind} {fault.nth} on {source}->{fault.target}"
    assert ended.injected == [f"{INJECTED}: {what}"]
    assert healed(fault, ended) >= 1, ended.events
    assert ended.failures == []
    assert not ended.told("cold")


def test_a_death_while_frames_are_lost_replays_the_same_losses(pool: Pool) -> None:
    """A replay whose loss differs would end the run: what was sent again must be what it was."""
    faults = [
        (source, LinkFault(target=target, action=action, kind=kind, nth=nth))
        for source, target, kind, nth, action in [
            (0, 1, "activation", 8, "drop"),
            (1, 2, "activation", 11, "corrupt"),
            (2, 1, "gradient", 8, "drop"),
        ]
    ]
    arm = {**PATIENT, "codec": "acsgd+zstd"}
    ended = pool.check(
        "kill while frames are lost",
        arm=arm,
        mishaps=[(1, at("committed", step=FATAL + 1))],
        link_faults=faults,
    )

    assert [failure.stage for failure in ended.failures] == [1]
    assert len(ended.injected) >= 1
    assert ended.told("was sent again") >= 1


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(10))
def test_several_deaths_in_one_run_end_in_the_same_bits(pool: Pool, seed: int) -> None:
    """Even seeds: one after the other. Odd ones: in the same step, so that the second may come
    before, with or after the first."""
    source = random.Random(seed)
    later = seed % 2 == 0
    stages = [source.randrange(STAGES) for _ in range(2)]
    mishaps = [
        (stage, at(source.choice(points_of("1f1b", stage)), step=FATAL + later * number,
                   attempt=later * number))
        for number, stage in enumerate(stages)
    ]  # fmt: skip
    ended = pool.check(f"several {seed}", arm={"schedule": "1f1b"}, mishaps=mishaps)

    assert all(failure.kind == "died" for failure in ended.failures)
    lost = [stage for failure in ended.failures for stage in failure.replaced]
    if later:
        assert lost == stages
    else:
        assert lost
        assert set(lost) <= {*stages}


@pytest.mark.chaos
@pytest.mark.parametrize("codec", ["fp32", "directq+ef", "acsgd+zstd"])
def test_every_codec_comes_back(pool: Pool, codec: str) -> None:
    ended = pool.check(f"kill with {codec}", arm={"codec": codec}, mishaps=[(1, at("B0"))])

    (failure,) = ended.failures
    assert (failure.kind, failure.replaced, failure.source) == ("died", (1,), "box")


@pytest.mark.chaos
@pytest.mark.parametrize("stage", range(STAGES))
def test_without_a_spare_a_new_process_takes_the_place(cluster: None, stage: int) -> None:
    """What a recovery takes when nothing is warm, for the record."""
    with StageActors(STAGES, spares=0) as actors:
        ended = train(actors, make_arm(), mishaps=[(stage, at("B1"))])
        right = train(actors, make_arm())
    if RESULTS:
        note(Path(RESULTS), f"kill stage {stage} without a spare", ended)

    assert same(ended, right)
    (failure,) = ended.failures
    assert (failure.replaced, failure.spares) == ((stage,), ())


@pytest.mark.parametrize("point", ["update", "committed", "box kept"])
def test_the_refs_transport_comes_back_too(pool: Pool, point: str) -> None:
    """At `box kept` the step is done and kept, and the driver has not heard of it."""
    ended = pool.check(f"kill with refs at {point}", transport="refs", mishaps=[(1, at(point))])

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


def test_a_stage_keeps_nothing_of_the_neighbours_it_has_lost(pool: Pool) -> None:
    """Ray keeps the class of every handle that a process was given: one for each would add up."""

    def num_classes(stage: Any) -> int:
        import ray.actor

        return len(ray.actor._ActorClassMethodMetadata._cache)

    known = []
    for stage in (1, 2, 1):
        pool.actors.replace([stage])
        pool.actors.introduce()
        known.append(ray.get(pool.actors.handles[0].__ray_call__.remote(num_classes)))

    assert known == known[:1] * 3
