"""What a click run counts, over the lives of its first stage."""

from __future__ import annotations

from typing import Any

from ray_pipe.ctr_run import Clicked
from ray_pipe.metrics import ArmMeter
from ray_pipe.shard_totals import ShardTotals


def clicked() -> Clicked:
    workload = type("Workload", (), {"num_held_out": 10})()
    arm: Any = type("ClickArm", (), {"workload": workload})()
    return Clicked(arm=arm, prediction=None, meter=ArmMeter("hybrid"))


def losses(one: Clicked) -> dict[str, int]:
    wanted = ("lost_pushes", "lost_versions", "refused_pushes", "unsent_pushes")
    return {key: value for key, value in one.numbers().items() if key in wanted}


def test_losses_are_kept_when_stage_0_is_replaced() -> None:
    one = clicked()
    one.note_client({"session": 7, "lost_pushes": 1, "lost_versions": 4, "refused": 0})
    one.note_client({"session": 7, "lost_pushes": 2, "lost_versions": 4, "refused": 1})
    one.note_client({"session": 900, "lost_pushes": 0, "lost_versions": 0, "refused": 0})
    one.note_client({"session": 900, "lost_pushes": 1, "lost_versions": 0, "refused": 0})
    one.totals = ShardTotals(lost_pushes=3, unsent_pushes=2)

    assert losses(one) == {
        "lost_pushes": 3,
        "unsent_pushes": 2,
        "lost_versions": 4,
        "refused_pushes": 1,
    }


def test_pushes_that_only_the_shards_know_to_be_lost_count() -> None:
    one = clicked()
    one.note_client({"session": 7, "lost_pushes": 1})  # it died before it told of the others
    one.totals = ShardTotals(lost_pushes=3)

    assert losses(one)["lost_pushes"] == 3


def test_an_arm_that_was_done_or_begun_before_a_resume_keeps_its_prunes_and_dropped_gradients() -> (
    None
):
    """Shards take them over from their checkpoint; those of an arm that was done tell nothing."""
    before = clicked()
    before.totals = ShardTotals(prunes=8, dropped_rows=5, evictions=3)
    done, gone_on = clicked(), clicked()
    for one in (done, gone_on):
        one.restore_extra({"numbers": before.numbers()})
    gone_on.totals = ShardTotals(prunes=12, dropped_rows=7, evictions=4)

    keys = ("prunes", "dropped_gradients", "evicted_rows")
    assert [done.numbers()[key] for key in keys] == [8, 5, 3]
    assert [gone_on.numbers()[key] for key in keys] == [12, 7, 4]
