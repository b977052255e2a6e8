"""Strategies tried out in virtual time: costs, curves, and the computed clock of lock-step ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compressors.registry import CodecSpec
from stages.sync import trial as trials
from stages.sync.generator import GroupGenerator
from stages.sync.slowness import SlownessError
from stages.sync.strategies import SyncSpec, SyncSpecError
from stages.sync.trial import Costs, Spread, Trial, reduce_s, run_trial

RING = SyncSpec()
LOCAL = SyncSpec(name="local", local_steps=4, outer_lr=1.0, outer_momentum=0.0)
ADAM = SyncSpec(name="quantized-adam", warmup=4)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "sync",
    [RING, replace(RING, route="direct"), LOCAL, replace(LOCAL, outer_lr=0.7), ADAM],
    ids=["ring", "direct", "local", "diloco", "adam"],
)
@pytest.mark.parametrize("slow", ["", "2:4x", "random:6x@0.1"])
def test_the_computed_clock_is_the_simulated_one(
    sync: SyncSpec, slow: str, monkeypatch: Any
) -> None:
    simulated = run_trial(sync, num_replicas=6, slow=slow, seconds=40)
    monkeypatch.setattr(trials, "LETTERS", 1)
    computed = run_trial(sync, num_replicas=6, slow=slow, seconds=40)
    at = [(now, loss) for now, loss in computed.curve if now < 40]

    assert computed.is_computed
    assert not simulated.is_computed
    assert len(at) > 2
    for now, loss in at[1:]:  # the same loss at the next sample of the simulated curve
        seen = next(there for when, there in simulated.curve if when >= now + 0.01)
        assert seen == pytest.approx(loss, rel=0.05 if sync.name == "local" else 1e-5)
    assert computed.largest_gap == simulated.largest_gap


@pytest.mark.slow
def test_mutant_a_ring_without_its_latencies_is_not_the_simulated_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(trials, "reduce_s", lambda *args, **options: 0.0)
    with pytest.raises(AssertionError):
        test_the_computed_clock_is_the_simulated_one(RING, "", monkeypatch)


def test_an_all_reduce_takes_what_its_letters_take() -> None:
    costs = Costs(model_nbytes=1_000_000, bandwidth_bps=80e6, latency_s=0.02)

    letter_s = 0.1 / 16 + 8 * 88 / 80e6  # with its header
    assert reduce_s(RING, 16, costs) == pytest.approx(30 * (letter_s + 0.02))
    assert reduce_s(replace(RING, route="direct"), 16, costs) == pytest.approx(
        2 * (15 * letter_s + 0.02)
    )
    coded = replace(RING, codec=CodecSpec(name="directq", bits=4))
    assert reduce_s(coded, 16, costs) < 30 * (0.15 * 0.1 / 16 + 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["ring", "direct"])
def test_headers_of_small_letters_count_in_the_computed_clock_too(
    route: Any, monkeypatch: Any
) -> None:
    sync = replace(RING, route=route)
    small = Costs(step_s=0.2, jitter=0.0, model_nbytes=8000, bandwidth_bps=1e6, latency_s=0.0)
    simulated = run_trial(sync, num_replicas=16, seconds=30, costs=small, train=False)
    monkeypatch.setattr(trials, "LETTERS", 1)
    computed = run_trial(sync, num_replicas=16, seconds=30, costs=small)
    monkeypatch.setattr(trials, "HEADER_NBYTES", 0)
    without = run_trial(sync, num_replicas=16, seconds=30, costs=small)

    assert computed.iteration_s == pytest.approx(simulated.iteration_s, rel=0.02)
    assert computed.nbytes_per_iteration == pytest.approx(simulated.nbytes_per_iteration, rel=0.02)
    assert without.iteration_s < 0.96 * simulated.iteration_s


@pytest.mark.slow
def test_costs_alone_take_the_same_time_as_training() -> None:
    sync = SyncSpec(name="ripples", group_size=2)
    trained = run_trial(sync, num_replicas=8, slow="2:4x", seconds=40)
    priced = run_trial(sync, num_replicas=8, slow="2:4x", seconds=40, train=False)

    assert priced.curve == ()
    assert priced.final_loss is None
    assert priced.iteration_s == pytest.approx(trained.iteration_s, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "waited_s", "nbytes"),
    [
        (SyncSpec(name="hop"), 11.44920546985552, 3558452.6511627906),
        (SyncSpec(name="ad-psgd"), 1.5184994723922385, 790392.1290322581),
        (SyncSpec(name="ripples", group_size=2), 4.238594166113493, 1081924.7115384615),
        (SyncSpec(name="ripples", groups="ruler"), 10.84110236351561, 612328.8775510204),
    ],
    ids=["hop", "ad-psgd", "pairs", "ruler"],
)
def test_a_faster_simulator_has_the_same_times_to_the_bit(
    sync: SyncSpec, waited_s: float, nbytes: float
) -> None:
    trial = run_trial(sync, num_replicas=8, slow="2:4x", seconds=20)

    assert sum(trial.waited_s.values()) == waited_s
    assert trial.nbytes_per_iteration == nbytes


@pytest.mark.slow
def test_a_run_learns_and_tells_where_it_waited() -> None:
    trial = run_trial(SyncSpec(name="hop"), num_replicas=8, slow="2:4x", seconds=60)

    assert trial.curve[0] == (0.0, pytest.approx(0.69, abs=0.05))
    assert trial.curve[-1][0] == 60.0
    assert trial.final_loss is not None
    assert trial.final_loss < 0.5
    assert max(trial.waited_s, key=trial.waited_s.__getitem__) == "updates"


def test_when_a_loss_is_reached_is_read_between_points() -> None:
    trial = Trial(
        num_replicas=2, slow="", seconds=4, iteration_s=1, slowest_iteration_s=1,
        curve=((0.0, 1.0), (2.0, 0.8), (4.0, 0.4)),
    )  # fmt: skip

    assert trial.reaches(0.9) == pytest.approx(1.0)
    assert trial.reaches(0.6) == pytest.approx(3.0)
    assert trial.reaches(0.3) is None
    assert trial.reaches(1.5) == 0.0


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(SyncSpecError, match="group_size is 4, there are 3 replicas"):
        run_trial(SyncSpec(name="ripples"), num_replicas=3)
    with pytest.raises(SlownessError, match="there is no replica 7"):
        run_trial(RING, num_replicas=4, slow="7:4x")


def test_the_largest_gap_is_seen_whenever_it_is_there() -> None:
    spread = Spread(3)
    for replica, k in ((0, 1), (1, 1), (0, 2), (0, 3), (2, 1), (2, 3), (1, 3), (1, 4)):
        spread.entered(replica, k)

    assert spread.largest == 3  # 3 against 0: at no iteration that is a round number


@pytest.mark.slow
def test_the_gap_of_a_trial_is_the_bound_that_tokens_set() -> None:
    sync = SyncSpec(name="hop", graph="complete", backup_workers=1, max_gap=5)

    trial = run_trial(sync, num_replicas=4, slow="2:8x", seconds=60, train=False)

    assert trial.largest_gap == 5


LINK = Costs(slow_link="2:10x")
"""One uplink of sixteen at a tenth of the others' rate: the model takes a second on it."""


def slowed_by_a_link(sync: SyncSpec, num: int = 16, *, seconds: float = 80) -> float:
    """How many times longer an iteration of the median replica takes than over equal links."""
    alike = run_trial(sync, num_replicas=num, seconds=seconds, train=False)
    uneven = run_trial(sync, num_replicas=num, seconds=seconds, train=False, costs=LINK)
    return uneven.iteration_s / alike.iteration_s


@pytest.mark.slow
def test_one_slow_uplink_costs_those_who_wait_for_it() -> None:
    tolerant = SyncSpec(name="hop", backup_workers=1, skip=8, max_gap=8)

    assert slowed_by_a_link(SyncSpec(name="hop")) > 2.5  # three models a step, for everybody
    assert slowed_by_a_link(RING) > 1.25
    assert slowed_by_a_link(SyncSpec(name="ripples", group_size=2)) < 1.12
    assert slowed_by_a_link(SyncSpec(name="ad-psgd")) < 1.02
    assert slowed_by_a_link(tolerant) < 1.02


@pytest.mark.slow
def test_the_slowdown_filter_sees_a_slow_uplink(monkeypatch: Any) -> None:
    sync = SyncSpec(name="ripples", group_size=2)
    seen = slowed_by_a_link(sync, 8, seconds=200)
    right = GroupGenerator.done

    def blind(self: GroupGenerator, gid: int, replica: int, **options: Any) -> Any:
        return right(self, gid, replica, **{**options, "sent_s": 0.0})

    monkeypatch.setattr(GroupGenerator, "done", blind)

    assert seen < 1.15
    assert slowed_by_a_link(sync, 8, seconds=200) > 1.04 * seen


def test_slow_links_that_cannot_be_are_refused() -> None:
    with pytest.raises(SlownessError, match="a link is slow all the time"):
        Costs(slow_link="random:4x@0.1").topology(8)
    with pytest.raises(SlownessError, match="is computed above 64 replicas"):
        run_trial(RING, num_replicas=65, costs=LINK)
