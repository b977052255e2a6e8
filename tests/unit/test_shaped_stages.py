"""Stages on shaped links, in virtual time: what arrives, arrives when the rate lets it, (d)19."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from local_pipeline import FP32, Bench, Run, acsgd

from compressors.registry import CodecSpec
from netsim import link

RATE_BPS, LATENCY_S = 1e6, 0.05


def run_of(activation: CodecSpec = FP32) -> Run:
    """Computing and encoding take no time here: only the links do."""
    bench = Bench(activation=activation, bandwidth_bps=RATE_BPS, latency_s=LATENCY_S)
    return bench.run(3)


def check_arrivals(run: Run) -> None:
    """The receiver gets each frame when its last bit has come, by the receiver's own clock."""
    for sender, receiver in run.records[1:]:
        sent_at = next(s.start_s for s in sender.spans if (s.lane, s.name) == ("encode", "F0"))
        arrived = [s.start_s for s in receiver.spans if (s.lane, s.name) == ("decode", "F")]
        frame_s = 8 * sender.sent["0->1"]["activation"] / len(arrived) / RATE_BPS
        first_s = arrived[0] - sent_at
        assert len(arrived) == 3
        # The norm of the step before may be on its way still: a control frame, less than 1 ms.
        assert frame_s + LATENCY_S <= first_s < frame_s + LATENCY_S + 0.001
        for before, after in pairwise(arrived):
            assert after - before == pytest.approx(frame_s)


@pytest.mark.parametrize("activation", [FP32, acsgd()], ids=["fp32", "acsgd"])
def test_frames_arrive_when_the_rate_and_the_latency_let_them(activation: CodecSpec) -> None:
    check_arrivals(run_of(activation))


def test_a_step_takes_its_frames_both_ways_and_the_messages_of_the_norm() -> None:
    run = run_of()

    ends = [step[0].end_s for step in run.records]
    sent = run.records[-1][0].sent["0->1"]["activation"]
    assert run.records[-1][1].sent["1->0"]["gradient"] == sent
    # There and back: all frames of one way, then all of the other, and each way's latency.
    least_s = 2 * 8 * sent / RATE_BPS + 2 * LATENCY_S
    assert least_s <= ends[-1] - ends[-2] < least_s + 0.002


def test_mutant_a_link_that_books_its_time_and_never_waits_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add(
        self: Any, loop: asyncio.AbstractEventLoop, queued: Any, depart: float, arrive: float
    ) -> float:
        loop.call_soon(self._deliver, queued.frame)
        return arrive  # the spans say what they should

    monkeypatch.setattr(link._Flight, "add", add)
    run = run_of()

    wire = [s for s in run.records[-1][0].spans if s.name == "0->1 activation"]
    nbytes = run.records[-1][0].sent["0->1"]["activation"]
    assert sum(s.end_s - s.start_s for s in wire) == pytest.approx(8 * nbytes / RATE_BPS)
    with pytest.raises(AssertionError):
        check_arrivals(run)
