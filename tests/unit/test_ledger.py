"""Bytes are counted once, by the sender, by link and kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_records import make_step

from ray_pipe.ledger import Ledger, LedgerError, LinkRow, link_table
from stages.record import KINDS, StepRecord


def record(*, stage: int, step: int = 0, sent: dict[str, dict[str, int]]) -> StepRecord:
    return StepRecord(
        stage=stage,
        step=step,
        loss=None,
        num_tokens=1,
        start_s=0.0,
        end_s=1.0,
        seconds={},
        sent=sent,
        codec={},
        grad_norm=None,
    )


def test_bytes_add_up_by_link_and_kind() -> None:
    ledger = Ledger()
    ledger.add(
        [
            record(stage=0, sent={"0->1": {"activation": 100, "control": 3}}),
            record(stage=1, sent={"1->0": {"gradient": 40}}),
        ]
    )
    ledger.add([record(stage=0, step=1, sent={"0->1": {"activation": 10}})])

    assert ledger.by_link() == {
        "0->1": {"activation": 110, "control": 3},
        "1->0": {"gradient": 40},
    }
    assert ledger.total() == {
        "activation": 110,
        "gradient": 40,
        "replica": 0,
        "embedding": 0,
        "control": 3,
    }
    assert ledger.nbytes == 153


def test_add_returns_what_this_step_sent_only() -> None:
    ledger = Ledger()
    ledger.add([record(stage=0, sent={"0->1": {"activation": 100}})])

    assert ledger.add([record(stage=0, step=1, sent={"0->1": {"activation": 7}})]) == {
        "0->1": {"activation": 7}
    }


def test_the_table_has_a_row_for_each_link_and_shares_of_the_whole() -> None:
    rows = link_table({"1->0": {"gradient": 30}, "0->1": {"activation": 60, "control": 10}})

    assert rows == [
        LinkRow(
            link="0->1",
            kinds={"activation": 60, "gradient": 0, "replica": 0, "embedding": 0, "control": 10},
            total=70,
            share=0.7,
        ),
        LinkRow(
            link="1->0",
            kinds={"activation": 0, "gradient": 30, "replica": 0, "embedding": 0, "control": 0},
            total=30,
            share=0.3,
        ),
    ]


def test_an_empty_ledger_has_all_kinds_and_no_links() -> None:
    assert Ledger().total() == dict.fromkeys(KINDS, 0)
    assert Ledger().table() == []
    assert link_table({"0->1": {}})[0].share == 0.0


def test_a_receiver_that_also_counts_a_link_is_refused() -> None:
    # The mutant: the receiving stage reports the frame that its neighbour sent.
    ledger = Ledger()

    with pytest.raises(LedgerError, match=r"link 0->1 .* stage 0 and by stage 1: only the sender"):
        ledger.add(
            [
                record(stage=0, sent={"0->1": {"activation": 100}}),
                record(stage=1, sent={"0->1": {"activation": 100}}),
            ]
        )
    assert ledger.nbytes == 0


def test_the_same_step_of_a_stage_counts_once() -> None:
    ledger = Ledger()
    step = record(stage=2, step=5, sent={"2->3": {"activation": 100}})
    ledger.add([step])

    with pytest.raises(LedgerError, match="stage 2 reported step 5 after step 5"):
        ledger.add([step])
    assert ledger.nbytes == 100


def test_steps_that_run_again_after_a_fault_count_again_because_their_bytes_were_sent() -> None:
    ledger = Ledger()
    for step in (3, 4, 5):
        ledger.add([record(stage=0, step=step, sent={"0->1": {"activation": 10}})])
    ledger.rewind(4)
    ledger.add([record(stage=0, step=4, sent={"0->1": {"activation": 10}})])

    assert ledger.nbytes == 40
    with pytest.raises(LedgerError, match="step 3 after step 4"):
        ledger.add([record(stage=0, step=3, sent={})])


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LedgerError, match=r"'activations'; one of activation, gradient, replica"):
        Ledger().add([record(stage=0, sent={"0->1": {"activations": 1}})])


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(LedgerError, match="-1 bytes of control"):
        Ledger().add([record(stage=0, sent={"0->1": {"control": -1}})])


@given(
    steps=st.integers(1, 5),
    num_stages=st.integers(1, 5),
    num_micro_batches=st.integers(1, 4),
    nbytes=st.integers(1, 10**9),
)
def test_a_pipeline_sends_each_micro_batch_once_over_each_link(
    steps: int, num_stages: int, num_micro_batches: int, nbytes: int
) -> None:
    ledger = Ledger()
    for step in range(steps):
        ledger.add(
            make_step(
                step=step,
                start_s=float(step),
                num_stages=num_stages,
                num_micro_batches=num_micro_batches,
                nbytes=nbytes,
            )
        )

    each_way = steps * (num_stages - 1) * num_micro_batches * nbytes
    assert ledger.total()["activation"] == ledger.total()["gradient"] == each_way
    assert sum(row.total for row in ledger.table()) == ledger.nbytes
