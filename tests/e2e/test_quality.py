"""Quality gates: AC-SGD trains like fp32 where DirectQ does not, and its error stays bounded.

Four stages, real codecs and frames, in virtual time (`tests/quality.py`). A GPT of width 64 is
pretrained on one part of pydoc's text and fine-tuned on another: 256 samples of 64 bytes, batch
16, 8 epochs, AdamW at a constant 6e-4. Gates judge the training loss of the last epoch, in nats,
and the error of activations between the two ends of an edge. Each rule has its mutant: the same
run with the rule broken, which must fail the same gate.

A test names its arms with `@trains`; arms of all selected tests run once, in two processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import pytest
from quality import ArmRun, ArmSpec, acsgd, arm_pool, directq, fp32, run_arm
from quality_tasks import pydoc_task

from compressors.quantize import Uniform

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 2)
T1_GAP, T2_GAP, T3_GAP = 0.01, 0.02, 0.04
Test = TypeVar("Test", bound=Callable[..., None])
Arms = Callable[[ArmSpec], ArmRun]


def trains(*specs: ArmSpec) -> Callable[[Test], Test]:
    """Say which arms a test looks at."""

    def note(test: Test) -> Test:
        test.trains = specs  # type: ignore[attr-defined]
        return test

    return note


@pytest.fixture(scope="session")
def arms(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Arms]:
    """What became of an arm. All arms of the selected tests start with the first of them."""
    task = pydoc_task(tmp_path_factory.mktemp("quality") / "weights.pt")
    with arm_pool(workers=2) as pool:
        runs: dict[ArmSpec, Future[ArmRun]] = {}
        for item in request.session.items:
            for spec in getattr(getattr(item, "function", None), "trains", ()):
                if spec not in runs:
                    runs[spec] = pool.submit(run_arm, task, spec)
        yield lambda spec: runs[spec].result()
        pool.shutdown(cancel_futures=True)


def gap(arms: Arms, spec: ArmSpec, *, exact: ArmSpec) -> float:
    """How much more the last epoch lost than its fp32 twin."""
    assert (spec.seed, spec.epochs, spec.dropout) == (exact.seed, exact.epochs, exact.dropout)
    return arms(spec).final_loss - arms(exact).final_loss


def mean_gap(arms: Arms, specs: list[ArmSpec]) -> float:
    return float(np.mean([gap(arms, spec, exact=fp32(seed=spec.seed)) for spec in specs]))


def rises(errors: list[float]) -> float:
    """The largest rise of an edge's error from epoch 2 on, as a ratio to the least before it."""
    later = errors[1:]
    return max(later[i] / min(later[:i]) for i in range(1, len(later)))


AC_FW2 = [acsgd(2, 8, seed=seed) for seed in SEEDS]
AC_FW3 = [acsgd(3, 6, seed=seed) for seed in SEEDS]
DIRECTQ_FW2 = [directq(2, 8, seed=seed) for seed in SEEDS]
DIRECTQ_FW3 = [directq(3, 6, seed=seed) for seed in SEEDS]
EXACT = [fp32(seed=seed) for seed in SEEDS]


# --- (a) AC-SGD matches fp32 --------------------------------------------------------------------


@trains(fp32(), acsgd(4, 8))
def test_t1_four_forward_bits_lose_nothing(arms: Arms) -> None:
    assert abs(gap(arms, acsgd(4, 8), exact=fp32())) <= T1_GAP


@trains(*EXACT, *AC_FW3)
def test_t2_three_forward_bits_lose_next_to_nothing(arms: Arms) -> None:
    for spec, exact in zip(AC_FW3, EXACT):
        assert abs(gap(arms, spec, exact=exact)) <= T2_GAP


@trains(*EXACT, *AC_FW2)
def test_t3_two_forward_bits_lose_little(arms: Arms) -> None:
    for spec, exact in zip(AC_FW2, EXACT):
        assert abs(gap(arms, spec, exact=exact)) <= T3_GAP


@trains(fp32())
def test_the_task_has_something_to_lose(arms: Arms) -> None:
    """Gates on a gap mean something only while fp32 learns."""
    losses = arms(fp32()).losses

    assert losses[0] - losses[-1] >= 0.3
    assert losses == sorted(losses, reverse=True)


# --- (b) DirectQ does not -----------------------------------------------------------------------


@trains(*EXACT, *AC_FW2, *DIRECTQ_FW2)
def test_t6_directq_at_two_bits_loses_a_tenth_and_five_times_more(arms: Arms) -> None:
    direct, ours = mean_gap(arms, DIRECTQ_FW2), mean_gap(arms, AC_FW2)

    assert direct >= 0.1
    assert direct >= 5 * ours


@trains(*EXACT, *AC_FW3, *DIRECTQ_FW3)
def test_t7_directq_at_three_bits_loses_three_times_more(arms: Arms) -> None:
    direct, ours = mean_gap(arms, DIRECTQ_FW3), mean_gap(arms, AC_FW3)

    assert direct >= T2_GAP
    assert direct >= 3 * ours


@trains(*DIRECTQ_FW2)
def test_directqs_error_does_not_shrink(arms: Arms) -> None:
    """What AC-SGD's memory is for: the same bits buy the same error in every epoch."""
    for spec in DIRECTQ_FW2:
        for errors in arms(spec).errors.values():
            assert errors[-1] >= 0.95 * errors[1]


# --- (c) bounded error --------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
@trains(*AC_FW2, *AC_FW3, acsgd(4, 8))
def test_t8_the_error_of_each_edge_does_not_rise_and_each_visit_contracts(
    bits: int, arms: Arms
) -> None:
    for spec in {2: AC_FW2, 3: AC_FW3, 4: [acsgd(4, 8)]}[bits]:
        run = arms(spec)
        assert list(run.errors) == ["0->1", "1->2", "2->3"]
        for errors in run.errors.values():
            assert rises(errors) <= 1.1
        warm = [visit for visit in run.visits if visit.cold == 0]
        assert len(warm) == 3 * 7 * 16  # edges, epochs but the first, steps
        for visit in warm:
            assert visit.measured <= 1.1 * Uniform(bits).contraction * visit.delta_ratio


@trains(acsgd(2, 8), acsgd(2, 8, mutation="store-h", epochs=5))
def test_mutant_a_sender_that_stores_h_fails_t8(arms: Arms) -> None:
    sound = arms(acsgd(2, 8))
    mutant = arms(acsgd(2, 8, mutation="store-h", epochs=5))

    for edge, errors in mutant.errors.items():
        assert rises(errors) >= 1.3
        assert errors[4] >= 1.5 * sound.errors[edge][4]
    limit = 1.1 * Uniform(2).contraction
    last = [visit for visit in mutant.visits if visit.epoch == 5]
    assert all(visit.measured > limit * visit.delta_ratio for visit in last)


@trains(acsgd(2, 8))
def test_the_record_tells_the_error_that_the_two_ends_have(arms: Arms) -> None:
    for visit in arms(acsgd(2, 8)).visits:
        assert visit.error == pytest.approx(visit.measured, rel=1e-5)


STILL = {"lr": 0.0, "num_samples": 64, "dropout": 0.1}
"""Nothing is learned, and dropout's masks belong to the sample: h repeats exactly."""

COARSE = {"first_visit_bits": 2}  # so that there is an error to bring down


@trains(acsgd(2, 8, codec=COARSE, **STILL), acsgd(2, 8, codec={**COARSE, "rows": "fp32"}, **STILL))
def test_t9_at_rest_the_error_falls_by_c_a_visit_to_the_floor_of_the_rows(arms: Arms) -> None:
    bf16 = arms(acsgd(2, 8, codec=COARSE, **STILL)).errors["0->1"]
    exact = arms(acsgd(2, 8, codec={**COARSE, "rows": "fp32"}, **STILL)).errors["0->1"]

    assert bf16[0] == pytest.approx(0.35, abs=0.05)
    ratios = [after / before for before, after in itertools.pairwise(exact)]
    assert all(0.25 <= ratio <= Uniform(2).contraction for ratio in ratios)
    assert exact[7] <= 0.0002
    assert bf16[:5] == pytest.approx(exact[:5], rel=0.05)
    assert 0.0005 <= bf16[7] <= 0.0014


@trains(acsgd(2, 8, codec=COARSE, mutation="store-h", **STILL))
def test_mutant_a_sender_that_stores_h_never_comes_to_rest(arms: Arms) -> None:
    errors = arms(acsgd(2, 8, codec=COARSE, mutation="store-h", **STILL)).errors["0->1"]

    assert errors[7] >= 0.99 * errors[0]


# --- (d) implementer errors ---------------------------------------------------------------------


@trains(*AC_FW2)
def test_different_shuffles_make_no_difference_to_the_error(arms: Arms) -> None:
    last = [arms(spec).mean_error(-1) for spec in AC_FW2]

    assert max(last) <= 1.15 * min(last)
    assert max(last) <= 0.1


@trains(fp32(), directq(2, 8), acsgd(2, 8, mutation="id-is-position"))
def test_mutant_rows_kept_by_batch_position_fail_t3_and_are_worse_than_directq(arms: Arms) -> None:
    mutant = acsgd(2, 8, mutation="id-is-position")

    lost = gap(arms, mutant, exact=fp32())
    assert lost >= 5 * T3_GAP
    assert lost >= gap(arms, directq(2, 8), exact=fp32())
    assert arms(mutant).mean_error(-1) >= 0.3


LOST = acsgd(2, 8, mutation="lose-rows")
ZEROED = acsgd(2, 8, mutation="zero-rows", epochs=6)
ZEROED_CHECKED = acsgd(2, 8, mutation="zero-rows", epochs=6, codec={"checksum": True})


@trains(fp32(), LOST)
def test_receivers_that_lose_their_rows_are_sent_them_cold_and_training_goes_on(arms: Arms) -> None:
    run = arms(LOST)

    assert sum("cold resend needed" in event for event in run.events) == 3 * 16 * 2
    by_epoch = {
        epoch: [visit for visit in run.visits if visit.epoch == epoch] for epoch in range(1, 9)
    }
    nacks = {epoch: sum(visit.nacks for visit in visits) for epoch, visits in by_epoch.items()}
    assert nacks == {1: 0, 2: 0, 3: 0, 4: 0, 5: 96, 6: 0, 7: 0, 8: 0}
    assert all(visit.cold == 0 for visit in by_epoch[6])
    assert run.losses[5] <= 1.1 * run.losses[3]  # epoch 6 against epoch 4
    assert run.losses == sorted(run.losses, reverse=True)
    assert abs(gap(arms, LOST, exact=fp32())) <= T3_GAP


@trains(ZEROED, ZEROED_CHECKED)
def test_rows_that_change_unnoticed_ruin_the_run_and_a_checksum_notices(arms: Arms) -> None:
    ruined, healed = arms(ZEROED), arms(ZEROED_CHECKED)

    assert ruined.losses[5] > 1.1 * ruined.losses[3]
    assert sum("checksum of the new rows" in event for event in healed.events) == 96
    assert healed.losses[5] <= 1.1 * healed.losses[3]


MASKS = {"dropout": 0.1, "epochs": 6}
FRESH = {**MASKS, "mutation": "fresh-masks"}


@trains(fp32(**MASKS), acsgd(2, 8, **MASKS))
def test_dropout_with_masks_of_the_sample_costs_ac_sgd_nothing(arms: Arms) -> None:
    assert abs(gap(arms, acsgd(2, 8, **MASKS), exact=fp32(**MASKS))) <= T3_GAP
    for errors in arms(acsgd(2, 8, **MASKS)).errors.values():
        assert rises(errors) <= 1.1


@trains(acsgd(2, 8, **MASKS), acsgd(2, 8, **FRESH))
def test_mutant_a_fresh_mask_on_every_visit_leaves_a_floor_under_the_error(arms: Arms) -> None:
    sound, mutant = arms(acsgd(2, 8, **MASKS)), arms(acsgd(2, 8, **FRESH))

    assert mutant.errors["0->1"][5] >= 0.2
    for edge, errors in mutant.errors.items():
        assert errors[5] >= 2 * sound.errors[edge][5]


@trains(fp32(epochs=3, **STILL), fp32(epochs=3, mutation="fresh-masks", **STILL))
def test_at_rest_dropout_with_masks_of_the_sample_repeats_every_loss(arms: Arms) -> None:
    first, second, third = arms(fp32(epochs=3, **STILL)).losses
    fresh = arms(fp32(epochs=3, mutation="fresh-masks", **STILL)).losses

    assert second == pytest.approx(first, abs=1e-6)
    assert third == pytest.approx(first, abs=1e-6)
    assert max(fresh) - min(fresh) >= 1e-4
